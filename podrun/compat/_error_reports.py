"""How errors of a program written for the SDK are reported.

A program that ends with an error shows its own frames, what happened and what to do next; so does a thread that
ends with one. Frames inside podrun, JAX and Python's module runner are left out, because they do not help the author of
the program, and so are causes that have no other frames. Frames of Python's and other libraries are left out where
podrun calls them, and shown where the program calls them. ``PODRUN_TRACEBACK=full`` shows everything. A usage error of
podrun ends with exit code 2, as in podrun's commands.
"""

from __future__ import annotations

import builtins
import contextlib
import difflib
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from podrun.compat._numpy_1 import hint_of_numpy
from podrun.core.environment import PODRUN_TRACEBACK, environment
from podrun.core.errors import Fault, PodrunError
from podrun.core.shadowing import shadowing_file

_PACKAGE = str(Path(__file__).resolve().parents[1])
_FRONT_ENDS = tuple(os.path.join(_PACKAGE, name, "") for name in ("popart", "poptorch", "popdist"))
_HIDDEN = (_PACKAGE + os.sep, contextlib.__file__, runpy.__file__, "<frozen ")


def _packages(*names: str) -> tuple[str, ...]:
    return tuple(f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in names)


_LIBRARIES = _packages("jax", "jaxlib", "ray", "grpc")
_CALLED_BY_PODRUN = _packages("google", "numpy", "onnx", "torch")
"""Libraries that programs call as well."""
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_BELOW = "(It was raised inside podrun or a library that podrun uses: PODRUN_TRACEBACK=full shows where.)\n"


def install() -> None:
    """Set each hook for errors unless the program has set one."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = report
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = report_of_thread
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = report_unraisable
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((PodrunError,), report_in_cell)


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the program's own frames, the error and its hint, and exit with the error's exit code."""
    _keep_one_guess(error)
    if _wants_all(error):
        sys.__excepthook__(kind, error, trace)
        sys.stderr.write(_hints(error))
    else:
        sys.stderr.write("".join(lines(error, trace)))
    sys.stderr.flush()
    if isinstance(error, PodrunError) and error.exit_code != 1:
        # Python takes a SystemExit from its exception hook as the exit code of the process.
        raise SystemExit(error.exit_code)


def report_in_cell(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    tb_offset: int | None = None,
) -> None:
    """Let IPython show an error of podrun's that ended a cell, with the program's own frames, and print its hint."""
    if not _wants_all(error) and (own := _own_trace(trace)):
        error.__cause__, error.__suppress_context__ = None, True
        trace, tb_offset = own, 0
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
    sys.stderr.write(_hints(error))
    sys.stderr.flush()


def _own_trace(trace: TracebackType | None) -> TracebackType | None:
    """The program's own part of a traceback of IPython's; None if it has none."""
    kept = []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not _is_hidden(file) and f"{os.sep}IPython{os.sep}" not in file:
            kept.append(trace)
        trace = trace.tb_next
    own = None
    for one in reversed(kept):
        own = TracebackType(own, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return own


def report_of_thread(ended: threading.ExceptHookArgs) -> None:
    """Print the error that ended a thread. The process goes on."""
    error = ended.exc_value
    if error is None or isinstance(error, SystemExit):
        return
    if _wants_all(error):
        threading.__excepthook__(ended)
        sys.stderr.write(_hints(error))
        return
    name = "" if ended.thread is None else f" {ended.thread.name}"
    sys.stderr.write(f"Exception in thread{name}:\n" + "".join(lines(error, ended.exc_traceback)))
    sys.stderr.flush()


def report_unraisable(ignored: sys.UnraisableHookArgs) -> None:
    """Print an error that Python cannot raise: of a finalizer, or of a function that runs at exit."""
    error = ignored.exc_value
    if error is None or _wants_all(error):
        sys.__unraisablehook__(ignored)
        return
    text = "".join(lines(error, ignored.exc_traceback))
    sys.stderr.write(f"{ignored.err_msg or 'Exception ignored in'}: {ignored.object!r}\n{text}")
    sys.stderr.flush()


def _wants_all(error: BaseException) -> bool:
    inside = isinstance(error, PodrunError) and error.fault is Fault.INTERNAL
    return inside or environment().get(PODRUN_TRACEBACK) == "full"


def lines(error: BaseException, trace: TracebackType | None) -> list[str]:
    """The traceback of an error with the program's own frames alone, and its hints; each line with its end."""
    shown = traceback.TracebackException(type(error), error, trace, compact=True)
    last = shown.stack[-1] if shown.stack else None
    alone = isinstance(error, (PodrunError, KeyboardInterrupt))
    meant = (
        alone
        or last is None
        or isinstance(error, SyntaxError)
        or _is_meant(last)
        or _is_said(error, last)
        or _names_a_file(error)
    )
    _strip(shown, chained=not alone)
    text = list(shown.format())
    if text and (guess := _guess(error, trace)):
        text[-1] = f"{text[-1].rstrip()}. Did you mean: {guess!r}?\n"
    if not shown.stack and text and text[0].startswith("Traceback"):
        del text[0]
    if not meant and last not in shown.stack:
        text.append(_BELOW)
    return [*text, _hints(error)]


def _is_meant(last: traceback.FrameSummary) -> bool:
    """True if the message says all: podrun raises it on purpose, or Python cannot start the program."""
    return (last.line or "").startswith("raise ") or last.filename == runpy.__file__


def _is_said(error: BaseException, last: traceback.FrameSummary) -> bool:
    """True for what a front end asserts with a message, as the SDK's own do for options."""
    return isinstance(error, AssertionError) and bool(error.args) and last.filename.startswith(_FRONT_ENDS)


def _keep_one_guess(error: BaseException) -> None:
    """Keep Python from adding a second "Did you mean" to podrun's own."""
    if isinstance(error, (AttributeError, NameError)) and "Did you mean" in str(error):
        error.name = None


def _guess(error: BaseException, trace: TracebackType | None) -> str:
    """The name that the program may have meant, where Python does not say it: before 3.12 only its own hook does."""
    if sys.version_info >= (3, 12) or not isinstance(error, (AttributeError, NameError)):
        return ""
    if not isinstance(error.name, str) or "Did you mean" in str(error):
        return ""
    if isinstance(error, AttributeError):
        known = set(dir(error.obj))
    elif trace is None:
        return ""
    else:
        while trace.tb_next is not None:
            trace = trace.tb_next
        known = {*trace.tb_frame.f_locals, *trace.tb_frame.f_globals, *dir(builtins)}
    near = difflib.get_close_matches(error.name, [word for word in known if isinstance(word, str)], 1, 0.75)
    return near[0] if near else ""


def _names_a_file(error: BaseException) -> bool:
    """True for an error of the host about a file, which podrun opens for the program."""
    return isinstance(error, OSError) and error.filename is not None


def _strip(shown: traceback.TracebackException, *, chained: bool) -> None:
    """Remove hidden frames, and causes that have no frames left."""
    shown.stack = traceback.StackSummary.from_list(_own(shown.stack))
    for inner in getattr(shown, "exceptions", None) or ():
        _strip(inner, chained=chained)
    for name in ("__cause__", "__context__"):
        other = getattr(shown, name)
        if other is not None:
            _strip(other, chained=chained)
            if not chained or not other.stack:
                setattr(shown, name, None)


def _own(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The program's own frames, and those of libraries that it calls itself."""
    kept, inside = [], True
    for frame in stack:
        if _is_hidden(frame.filename):
            inside = True
        elif not (inside and _is_library(frame.filename)):
            kept.append(frame)
            inside = False
    return kept


def _is_hidden(filename: str) -> bool:
    return filename.startswith(_HIDDEN) or any(library in filename for library in _LIBRARIES)


def _is_library(filename: str) -> bool:
    if f"{os.sep}site-packages{os.sep}" in filename:
        return any(library in filename for library in _CALLED_BY_PODRUN)
    return filename.startswith(_STANDARD_LIBRARY)


def _hints(error: BaseException) -> str:
    """The hints of an error, its causes and the errors it groups, each once on a line of its own."""
    hints = dict.fromkeys(
        hint for hint in (*_hints_of(error, set()), hint_of_numpy(error), _of_modules(error)) if hint
    )
    return "".join(f"hint: {hint}\n" for hint in hints)


def _hints_of(error: BaseException | None, seen: set[int]) -> Iterator[str | None]:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    if isinstance(error, PodrunError):
        yield error.hint
        return
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _hints_of(inner, seen)
    context = None if error.__suppress_context__ else error.__context__
    yield from _hints_of(error.__cause__ or context, seen)


_BUILDER_INSTEAD = "make the model with popart.Builder(), which podrun has"
_ABSENT = {
    "popxl": _BUILDER_INSTEAD,
    "popxl_addons": _BUILDER_INSTEAD,
    "popart.ir": _BUILDER_INSTEAD,
    "popart._internal": _BUILDER_INSTEAD,
    "poprt": "podrun has the command poprt (poprt --help), and podrun.serving.compiler",
    "poplar": "it is C++'s; popart, poptorch and popdist are what podrun has",
    "tensorflow": "pip install 'podrun[tensorflow]', which has the real TensorFlow",
}
"""Modules of the SDK that podrun does not have, and what to use."""


def _of_modules(error: BaseException) -> str:
    """The hint for a module of the SDK that podrun does not have, or that a file of the program's hides; empty for all
    other errors.
    """
    hiding = shadowing_file(error, Path(sys.path[0])) if sys.path else None
    if hiding is not None:
        renamed = hiding.with_name(f"my_{hiding.name}")
        return f"{hiding.name} beside the program is read for the module {hiding.stem}. mv {hiding} {renamed}"
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    for name, instead in _ABSENT.items():
        if (error.name == name or error.name.startswith(f"{name}.")) and name not in sys.modules:
            return f"podrun does not have the SDK's {name}: {instead}"
    return ""
