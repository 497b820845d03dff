"""Imports a package without modules that it names but that few callers need: they are imported when somebody asks.

import_lean("grpc", "asyncio", "grpc.aio")

gRPC imports its interface for coroutines, and asyncio for it, which takes as long as the rest of it. While the package
is imported, a stand-in takes the place of each such module. Afterwards none is left where programs look: neither in
``sys.modules`` nor as an attribute, so that ``import grpc.aio`` or ``grpc.aio.Server`` import the module as ever. What
the package itself keeps of a stand-in hands on to the module.

Beyond public API: which modules a package asks nothing of while it is imported. Without this, or if a package asks one
for something, the module is imported at once, which costs time and nothing else. A package that first imports a module
within one of these would have two copies of that.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_REPLACING = threading.Lock()

_WITH_ONNX = (
    *("onnx.compose", "onnx.gen_proto", "onnx.helper", "onnx.numpy_helper", "onnx.parser", "onnx.printer"),
    *("onnx.utils", "onnx.version_converter", "google.protobuf.json_format", "google.protobuf.text_format"),
)
"""Names that no function of the package ``onnx`` itself reads: those would miss them."""


def import_grpc() -> None:
    """Import gRPC without its interface for coroutines, and protobuf without messages in pure Python, which it does not
    use beside its C library.
    """
    import_lean("grpc", "asyncio", "grpc.aio")
    import_lean("google.protobuf.internal.builder", "google.protobuf.internal.python_message")


def import_onnx(version: str) -> None:
    """Import ONNX without what converts, joins, prints and parses models, and without its helpers. ``version``: that of
    the distribution ``onnx``, for which it would read the metadata of packages; empty: it reads it.
    """

    def version_of(package: str) -> Any:
        if package == "onnx":
            return version
        _take_away(metadata)
        return importlib.import_module(metadata.__name__).version(package)

    metadata = _Later("importlib.metadata")
    vars(metadata)["version"] = version_of
    import_lean("onnx", *_WITH_ONNX, *([metadata] if version else []))


def import_lean(package: str, *later: str | _Later) -> None:
    """Import ``package`` without ``later``: modules of it or of others. Those that are there already stay, and nothing
    is done if the package is there. Raises ImportError as importing the package does.
    """
    if package in sys.modules:
        return
    stand_ins = [_Later(module) if isinstance(module, str) else module for module in later]
    placed = [module for module in stand_ins if sys.modules.setdefault(module.__name__, module) is module]
    for module in placed:
        parent, _, last = module.__name__.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).setdefault(last, module)
    try:
        importlib.import_module(package)
    finally:
        for module in placed:
            _take_away(module)
        for parent in {module.__name__.rpartition(".")[0] for module in placed} & sys.modules.keys():
            _let_find(sys.modules[parent], placed)


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


def _let_find(parent: ModuleType, stand_ins: Sequence[_Later]) -> None:
    """Let attributes of ``parent`` that are stand-ins be the modules themselves, imported when they are asked for."""
    names = vars(parent)
    later = set[str]()
    for module in stand_ins:
        of, _, last = module.__name__.rpartition(".")
        if of == parent.__name__ and names.get(last, module) is module:
            names.pop(last, None)
            later.add(last)
    before = names.get("__getattr__")

    def find(name: str) -> Any:
        if name in later:
            return importlib.import_module(f"{parent.__name__}.{name}")
        if before is not None:
            return before(name)
        raise AttributeError(f"module {parent.__name__!r} has no attribute {name!r}")

    if later:
        names["__getattr__"] = find
        names["__dir__"] = lambda: sorted({*names, *later})
