"""The last lines of a script that ends in an error of ours: traceback, then the hint; and the exit code it
stands for.

A mistake of the user's ends with exit code 2, as all of podrun's commands do; everything else is left to
Python.
"""

from __future__ import annotations

import sys
from types import TracebackType

from podrun.errors import PodrunError


def install() -> None:
    """Set the hook, unless the script has one of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = report


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print as Python does, add the hint, and leave with the error's exit code."""
    sys.__excepthook__(kind, error, trace)
    if not isinstance(error, PodrunError):
        return
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr, flush=True)
    if error.exit_code != 1:
        # Python takes a SystemExit from its exception hook as the way the process ends.
        raise SystemExit(error.exit_code)
