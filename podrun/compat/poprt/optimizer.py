"""Passes by name over a model."""

from podrun.serving.convert.tools import Optimizer

__all__ = ["Optimizer"]
