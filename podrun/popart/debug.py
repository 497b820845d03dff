"""DebugContext, DebugInfo and SourceLocation: where things come from. Names are used, the rest is kept for
the asker.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A place in a program's source."""

    functionName: str = ""
    fileName: str = ""
    lineNumber: int = 0


class DebugContext:
    """A name and a place, passed where a debugContext is asked for: ``DebugContext("layer0")``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.name, self.location, self.info = "", SourceLocation(), None
        for value in (*args, *kwargs.values()):
            if isinstance(value, str):
                self.name = value
            elif isinstance(value, SourceLocation):
                self.location = value
            elif isinstance(value, DebugInfo):
                self.info = value
            else:
                raise TypeError(f"__init__(): incompatible function arguments. DebugContext got {value!r}.")

    def __str__(self) -> str:
        return self.name


_ids = itertools.count(1)
_log: list[dict[str, Any]] | None = None
_path = ""


class DebugInfo:
    """Facts about one part of a program, written out by `closePoplarDebugInfo`."""

    def __init__(self, debugContext: DebugContext | str, layer: str) -> None:
        self.context = debugContext if isinstance(debugContext, DebugContext) else DebugContext(debugContext)
        self.layer = layer
        self.values: dict[str, str] = {}
        self._id = next(_ids)
        if _log is not None:
            _log.append({"id": self._id, "layer": layer, "name": self.context.name, "values": self.values})

    def setValue(self, name: str, value: str) -> bool:
        """Keep a fact. False if there is one of that name."""
        if name in self.values:
            return False
        self.values[name] = value
        return True

    def getId(self) -> int:
        """A number of its own."""
        return self._id


def initializePoplarDebugInfo(filename: str, format: str = "json") -> None:
    """Collect DebugInfos from here on, to be written to ``filename`` as JSON."""
    global _log, _path
    if format.lower() != "json":
        raise ValueError(f"Debug information is written as json, not {format!r}.")
    _log, _path = [], filename


def closePoplarDebugInfo() -> None:
    """Write what was collected."""
    global _log
    if _log is None:
        return
    with open(_path, "w", encoding="utf-8") as file:
        json.dump({"contexts": _log}, file, indent=1)
    _log = None
