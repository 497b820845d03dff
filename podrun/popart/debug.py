"""DebugContext, DebugInfo and SourceLocation: where things come from, and the file that Poplar's tools read it from."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

_PACKAGE = os.path.dirname(__file__)
"""Frames in files below this are not the program's."""


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
    """A name and a place, passed where a debugContext is asked for: ``DebugContext("layer0")``.

    ``DebugContext(info, "layer0")`` is below another part of the program. The place is where it is made, unless it is
    given.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
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
                raise TypeError(f"__init__(): incompatible function arguments. DebugContext got {value!r}.")
        self.location = location or _place_of(sys._getframe(1))

    def __str__(self) -> str:
        return self.name


class _Collected:
    """The DebugInfos since `initializePoplarDebugInfo`, which are numbered from there."""

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
        """Keep a fact. False if there is one of that name."""
        if name in self.values:
            return False
        self.values[name] = value
        return True

    def getId(self) -> int:
        """A number of its own."""
        return self._id


def note(context: DebugContext | str, api: str, outputs: Sequence[str]) -> None:
    """Collect what a builder call has made, under the name that the program gave it, at the program's own line."""
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
