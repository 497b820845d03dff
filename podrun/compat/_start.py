"""The surroundings of a program written for the SDK: how its errors are reported, and functions that NumPy 2 took from
it.

**Errors.** A program that ends with one shows its own frames, what happened and what to do next. Frames inside podrun,
JAX and Python's module runner are left out, because they do not help the author of the program, and so are causes that
have no other frames. ``PODRUN_TRACEBACK=full`` shows everything. A usage error of podrun ends with exit code 2, as in
podrun's commands.

**NumPy.** `give_back` restores, with a warning, what NumPy 2 took from programs written for NumPy 1.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from podrun.core.environment import environment
from podrun.core.errors import Fault, PodrunError

_PACKAGE = str(Path(__file__).resolve().parents[1])
_HIDDEN = (_PACKAGE + os.sep, contextlib.__file__, runpy.__file__, "<frozen ")
_LIBRARIES = tuple(
    f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in ("jax", "jaxlib", "ray", "grpc")
)
_BELOW = "(It was raised inside podrun or a library that podrun uses: PODRUN_TRACEBACK=full shows where.)\n"


def install() -> None:
    """Set the exception hook unless the program has set one."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = report


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the program's own frames, the error and its hint, and exit with the error's exit code."""
    inside = isinstance(error, PodrunError) and error.fault is Fault.INTERNAL
    if inside or environment().get("PODRUN_TRACEBACK") == "full":
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write("".join(lines(error, trace)))
    if isinstance(error, PodrunError):
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        sys.stderr.flush()
        if error.exit_code != 1:
            # Python takes a SystemExit from its exception hook as the exit code of the process.
            raise SystemExit(error.exit_code)


def lines(error: BaseException, trace: TracebackType | None) -> list[str]:
    """The traceback of an error with the program's own frames alone, each line with its end."""
    shown = traceback.TracebackException(type(error), error, trace, compact=True)
    below = bool(shown.stack) and _is_hidden(shown.stack[-1].filename)
    alone = isinstance(error, (PodrunError, KeyboardInterrupt))
    _strip(shown, chained=not alone)
    text = list(shown.format())
    if not shown.stack and text and text[0].startswith("Traceback"):
        del text[0]
    return text if alone or not below else [*text, _BELOW]


def _strip(shown: traceback.TracebackException, *, chained: bool) -> None:
    """Remove hidden frames, and causes that have no frames left."""
    kept = [frame for frame in shown.stack if not _is_hidden(frame.filename)]
    shown.stack = traceback.StackSummary.from_list(kept)
    for name in ("__cause__", "__context__"):
        other = getattr(shown, name)
        if other is not None:
            _strip(other, chained=chained)
            if not chained or not other.stack:
                setattr(shown, name, None)


def _is_hidden(filename: str) -> bool:
    return filename.startswith(_HIDDEN) or any(library in filename for library in _LIBRARIES)


def give_back() -> None:
    """Let ``numpy.fromstring(data, dtype)`` read binary data again, as published programs call it."""
    import numpy as np

    original = np.fromstring
    if getattr(original, "_podrun", False):
        return

    @functools.wraps(original)
    def fromstring(string: Any, dtype: Any = float, count: int = -1, *, sep: str = "", **other: Any) -> Any:
        if sep != "":
            return original(string, dtype, count, sep=sep, **other)
        warnings.warn(
            "numpy.fromstring of binary data is no part of NumPy 2; podrun reads it. Use numpy.frombuffer.",
            DeprecationWarning,
            stacklevel=2,
        )
        data = string.encode("latin-1") if isinstance(string, str) else string
        return np.frombuffer(data, dtype, count).copy()

    fromstring._podrun = True  # type: ignore[attr-defined]
    np.fromstring = fromstring  # type: ignore[assignment]
