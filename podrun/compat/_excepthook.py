"""The last lines of a script that ends in an error of ours: where in the script, what, and what to do next.

Frames inside podrun say nothing to who wrote the script, so they are left out, as is the chain of causes
below; ``PODRUN_TRACEBACK=full`` shows all. A mistake of the user's ends with exit code 2, as all of
podrun's commands do. Errors that are not ours are left to Python.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType

from podrun.errors import Fault, PodrunError

_PACKAGE = str(Path(__file__).resolve().parents[1])
_HIDDEN = (_PACKAGE + os.sep, contextlib.__file__, runpy.__file__, "<frozen runpy>")


def install() -> None:
    """Set the hook, unless the script has one of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = report


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the script's own frames, the error and its hint, and leave with the error's exit code."""
    if not isinstance(error, PodrunError):
        sys.__excepthook__(kind, error, trace)
        return
    if error.fault is Fault.INTERNAL or os.environ.get("PODRUN_TRACEBACK") == "full":
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write("".join(_lines(error, trace)))
    if error.hint:
        sys.stderr.write(f"hint: {error.hint}\n")
    sys.stderr.flush()
    if error.exit_code != 1:
        # Python takes a SystemExit from its exception hook as the way the process ends.
        raise SystemExit(error.exit_code)


def _lines(error: PodrunError, trace: TracebackType | None) -> list[str]:
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_HIDDEN)]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return [*head, *traceback.format_exception_only(error)]
