"""The command lines of tools that answer about a program."""

from __future__ import annotations

import argparse
from typing import NoReturn

from podrun.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse that raises UsageError, as podrun does, and says where all options are listed."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help lists all options.")
