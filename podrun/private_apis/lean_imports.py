"""Imports a package without modules that it names but that few callers need: they are imported when somebody asks.

import_lean("grpc", "asyncio", "grpc.aio")

gRPC imports its interface for coroutines, and asyncio for it, which takes as long as the rest of it. While the package
is imported, a stand-in takes the place of each such module. Afterwards none is left where programs look: neither in
``sys.modules`` nor as an attribute, so that ``import grpc.aio`` or ``grpc.aio.Server`` import the module as ever. What
the package itself keeps of a stand-in hands on to the module.

Beyond public API: which modules a package asks nothing of while it is imported. Without this, or if a package asks one
for something, the module is imported at once, which costs time and nothing else.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

_REPLACING = threading.Lock()


def import_grpc() -> None:
    """Import gRPC without its interface for coroutines, for clients that wait in threads."""
    import_lean("grpc", "asyncio", "grpc.aio")


def import_lean(package: str, *later: str) -> None:
    """Import ``package`` without ``later``: modules of it or of others. Those that are there already stay, and nothing
    is done if the package is there. Raises ImportError as importing the package does.
    """
    if package in sys.modules:
        return
    placed = [_Later(name) for name in later if name not in sys.modules]
    for module in placed:
        sys.modules.setdefault(module.__name__, module)
    try:
        importlib.import_module(package)
    finally:
        for module in placed:
            _take_away(module)
    for module in placed:
        parent, _, last = module.__name__.rpartition(".")
        if parent:
            _let_find(sys.modules[parent], last, module)


class _Later(ModuleType):
    """In place of a module that is not imported yet; names that it is asked for are that module's."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            _take_away(self)
        return getattr(importlib.import_module(self.__name__), name)


def _take_away(module: _Later) -> None:
    with _REPLACING:  # Two threads may ask at a time.
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]


def _let_find(parent: ModuleType, last: str, stand_in: _Later) -> None:
    """Let ``parent.last`` be the module itself, imported when it is asked for, if it is the stand-in."""
    names = vars(parent)
    if last in names and names[last] is not stand_in:
        return
    names.pop(last, None)
    before = names.get("__getattr__")

    def find(name: str) -> Any:
        if name == last:
            return importlib.import_module(stand_in.__name__)
        if before is not None:
            return before(name)
        raise AttributeError(f"module {parent.__name__!r} has no attribute {name!r}")

    names["__getattr__"] = find
