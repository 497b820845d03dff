"""Help for debugging a program: where objects come from, PopART's loggers, and the version of PopART that this front
end follows.

`DebugContext`, `DebugInfo` and `SourceLocation` fill the file that Poplar's tools read. ``popart.getLogger`` gives
PopART's logger objects over Python's own logging. PopART's log is its own: it goes to standard error (or where
POPART_LOG_DEST says) from WARN on unless told otherwise, whatever the program does with Python's logging.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, TextIO

from podrun import __version__
from podrun.core.quick_dataclass import dataclass
from podrun.popart.values.exceptions import incompatible
from podrun.runtime.environment import ours

LOG_LEVEL, LOG_DESTINATION = "POPART_LOG_LEVEL", "POPART_LOG_DEST"
"""Variables with the level and the destination of log lines."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
"""Frames in files below this directory do not belong to the program."""


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A place in a program's source."""

    functionName: str = ""
    fileName: str = ""
    lineNumber: int = 0


def _place_of(frame: FrameType | None) -> SourceLocation:
    if frame is None:
        return SourceLocation()
    return SourceLocation(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)


class DebugContext:
    """A name and a place, passed as debugContext: ``DebugContext("layer0")``.

    ``DebugContext(info, "layer0")`` lies below another part of the program. The place is where the object is made,
    unless one is given.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.name, self.info = "", None
        location = None
        for value in (*args, *kwargs.values()):
            if isinstance(value, str):
                self.name = value
            elif isinstance(value, SourceLocation):
                location = value
            elif isinstance(value, DebugInfo):
                self.info = value
            else:
                raise incompatible("__init__", f"DebugContext got {value!r}.")
        self.location = location or _place_of(sys._getframe(1))

    def __str__(self) -> str:
        return self.name


class _Collected:
    """The DebugInfos since `initializePoplarDebugInfo`; their numbers start there."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.infos: list[DebugInfo] = []
        self.count = 0

    def add(self, info: DebugInfo) -> int:
        self.count += 1
        if self.path is not None:
            self.infos.append(info)
        return self.count


_collected = _Collected()


class DebugInfo:
    """Facts about one part of a program, written out by `closePoplarDebugInfo`."""

    def __init__(self, debugContext: DebugContext | str, layer: str) -> None:
        if isinstance(debugContext, str):
            debugContext = DebugContext(debugContext, _place_of(sys._getframe(1)))
        self.context = debugContext
        self.layer = layer
        self.values: dict[str, str] = {}
        self._id = _collected.add(self)

    def setValue(self, name: str, value: str) -> bool:
        """Keep a fact. False if one of that name exists."""
        if name in self.values:
            return False
        self.values[name] = value
        return True

    def getId(self) -> int:
        """The number of this object, counted from `initializePoplarDebugInfo`."""
        return self._id


def note(context: DebugContext | str, api: str, outputs: Sequence[str]) -> None:
    """Record what a builder call has made, under the name that the program gave it, at the program's own line."""
    if _collected.path is None:
        return
    if isinstance(context, str):
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        context = DebugContext(context, _place_of(frame))
    info = DebugInfo(context, "popartbuilder")
    info.setValue("api", api)
    info.setValue("outputs", ", ".join(outputs))


def initializePoplarDebugInfo(filename: str, format: str = "json") -> None:
    """Collect DebugInfos from here on, to be written to ``filename`` as JSON."""
    if format.lower() != "json":
        raise ValueError(f"Debug information is written as json, not {format!r}.")
    _collected.path, _collected.infos, _collected.count = filename, [], 0


def closePoplarDebugInfo() -> None:
    """Write what was collected: ``contexts``, the innermost and last first, and the ``stringTable`` of their names.

    (Source of the layout: graphcore/popart, tests/integration/debug_info_test.py.)
    """
    if _collected.path is None:
        return
    strings: dict[str, int] = {}
    contexts = [_written(info, strings) for info in reversed(_collected.infos)]
    with open(_collected.path, "w", encoding="utf-8") as file:
        json.dump({"contexts": contexts, "stringTable": list(strings)}, file, indent=1)
    _collected.path, _collected.infos = None, []


def _written(info: DebugInfo, strings: dict[str, int]) -> dict[str, Any]:
    def index(text: str) -> int:
        return strings.setdefault(text, len(strings))

    context = info.context
    parent = {} if context.info is None else {"parentId": context.info.getId()}
    return {
        **info.values,
        "id": info.getId(),
        **parent,
        "layer": info.layer,
        "name": index(context.name),
        "location": {
            "fileName": index(context.location.fileName),
            "functionName": index(context.location.functionName),
            "lineNumber": context.location.lineNumber,
        },
    }


TRACE = 5
"""Below DEBUG: every operator that a builder adds."""

_LEVELS = {
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "OFF": logging.CRITICAL + 10,
}
_ALIASES = {"WARNING": "WARN", "ERROR": "ERR"}
_ROOT = "podrun.popart"
_PARTS = {
    "podrun.runtime": "session",
    "podrun.runtime.engine": "devicex",
    "podrun.compiler.cache": "devicex",
    "podrun.onnx_models": "ops",
}
"""Loggers of lower rooms, which know no front end -> the part of PopART whose log has their lines."""
_LINES = {
    "Loading the serialized executable %s": "Loading serialized PopART executable %s",
    "Loading the serialized executable from the cache %s": "Loading serialized PopART executable from the cache %s",
}
"""Lines of lower rooms that PopART's documentation has in other words."""
_FORMAT = "%(asctime)s %(process)d %(name)s [%(levelname).1s] %(message)s"

logging.addLevelName(TRACE, "TRACE")


class Logger:
    """A logger of one of PopART's parts: ``popart.getLogger("session").setLevel("INFO")``."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(_ROOT if name in ("all", "popart") else f"{_ROOT}.{name}")

    def setLevel(self, level: str) -> None:
        """TRACE, DEBUG, INFO, WARN, ERR, CRITICAL or OFF. ValueError for anything else."""
        name = str(level).upper()
        name = _ALIASES.get(name, name)
        if name not in _LEVELS:
            raise ValueError(f"Unknown log level {level!r}; it is one of {', '.join(_LEVELS)}.")
        self._logger.setLevel(_LEVELS[name])
        _set_lower_levels()

    def debug(self, message: str) -> None:
        """Log at DEBUG."""
        self._logger.debug("%s", message)

    def info(self, message: str) -> None:
        """Log at INFO."""
        self._logger.info("%s", message)

    def warn(self, message: str) -> None:
        """Log at WARN."""
        self._logger.warning("%s", message)

    def error(self, message: str) -> None:
        """Log at ERR."""
        self._logger.error("%s", message)

    def critical(self, message: str) -> None:
        """Log at CRITICAL."""
        self._logger.critical("%s", message)


class _Standard(logging.StreamHandler[TextIO]):
    """Writes to the ``sys.stderr`` or ``sys.stdout`` of the moment, because a program may replace them."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._stream_name = name

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Where the next line goes."""
        stream: TextIO = getattr(sys, self._stream_name)
        return stream


class _AsPopart(logging.Filter):
    """Hands lines of a lower room to the logger of a part of PopART, under its name; the room's own drops them."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._logger = logging.getLogger(f"{_ROOT}.{part}")

    def filter(self, record: logging.LogRecord) -> bool:
        """Log the record as PopART's if its level is one that the part logs. False: that is all."""
        if self._logger.isEnabledFor(record.levelno):
            line = _LINES.get(record.msg, record.msg)
            self._logger.handle(
                logging.makeLogRecord({**vars(record), "name": self._logger.name, "msg": line})
            )
        return False


def getLogger(name: str = "all") -> Logger:
    """The logger of a part of PopART (``session``, ``devicex`` ...), or of all of it."""
    return Logger(name)


def configure(environ: Mapping[str, str] | None = None) -> None:
    """Set up the log as POPART_LOG_DEST and POPART_LOG_LEVEL say; once, when ``popart`` is imported."""
    variables, root = ours(environ), logging.getLogger(_ROOT)
    destination = variables.get(LOG_DESTINATION) or "stderr"
    handler = (
        _Standard(destination)
        if destination in ("stderr", "stdout")
        else logging.FileHandler(destination, delay=True)
    )
    handler.setFormatter(logging.Formatter(_FORMAT))
    root.handlers = [handler]
    root.propagate = False
    level = variables.get(LOG_LEVEL, "").upper()
    root.setLevel(_LEVELS.get(_ALIASES.get(level, level), logging.WARNING))
    for name, part in _PARTS.items():
        logging.getLogger(name).filters = [_AsPopart(part)]
    _set_lower_levels()


def _set_lower_levels() -> None:
    """Lower rooms log what their parts of PopART do."""
    for name, part in _PARTS.items():
        logging.getLogger(name).setLevel(logging.getLogger(f"{_ROOT}.{part}").getEffectiveLevel())


POPART_VERSION = "3.4.0"
"""The release whose API this is (SDK 3.4)."""


def versionString() -> str:
    """PopART's version with podrun's behind it."""
    return f"{POPART_VERSION}+podrun.{__version__}"


def versionNumber() -> str:
    """PopART's version number."""
    return POPART_VERSION


def packageHash() -> str:
    """A value in place of the SDK's package hash."""
    return f"podrun-{__version__}"
