"""What scripts that PopRT publishes take their command lines apart with."""

import argparse
from argparse import ArgumentDefaultsHelpFormatter as PopHelpFormatter

__all__ = ["PopHelpFormatter", "argparse"]
