"""Imports a package without modules that it names but that few callers need: they are imported when somebody asks.

import_lean("grpc", "asyncio", "grpc.aio")

gRPC imports its interface for coroutines, and asyncio for it, which takes as long as the rest of it. While the package
is imported, a stand-in takes the place of each such module. Afterwards none is left where programs look: neither in
``sys.modules`` nor as an attribute, so that ``import grpc.aio`` or ``grpc.aio.Server`` import the module as ever. What
the package itself keeps of a stand-in hands on to the module.

Beyond public API: which modules a package asks nothing of while it is imported. Without this, if a package asks one
for something, if its functions read one, or if the process has other threads, which would see the stand-ins, the
module is imported at once. That costs time and nothing else. A package that first imports a module within one of these
would have two copies of that.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence, Set
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

_WITH_PROTOBUF = ("google.protobuf.internal.builder", "google.protobuf.internal.python_message")
_WITH_ONNX = (
    *("onnx.compose", "onnx.gen_proto", "onnx.helper", "onnx.numpy_helper", "onnx.parser", "onnx.printer"),
    *("onnx.utils", "onnx.version_converter", "google.protobuf.json_format", "google.protobuf.text_format"),
)


def import_grpc() -> None:
    """Import gRPC without its interface for coroutines, and protobuf without messages in pure Python, which it does not
    use beside its C library.
    """
    import_lean("grpc", "asyncio", "grpc.aio")
    import_lean(*_WITH_PROTOBUF)


def import_onnx(version: str) -> None:
    """Import ONNX without what converts, joins, prints and parses models, and without its helpers; protobuf as
    `import_grpc` does. ``version``: that of the distribution ``onnx``, for which it would read the metadata of all
    packages; empty: it reads it.
    """

    def version_of(package: str) -> Any:
        if package == "onnx":
            return version
        _take_away(metadata)
        return importlib.import_module(metadata.__name__).version(package)

    metadata = _Later("importlib.metadata")
    vars(metadata)["version"] = version_of
    import_lean(*_WITH_PROTOBUF)
    import_lean("onnx", *_WITH_ONNX, *([metadata] if version else []))


def import_lean(package: str, *later: str | _Later, beside_threads: bool = False) -> None:
    """Import ``package`` without ``later``: modules of it or of others. Those that are there already stay, and nothing
    is done if the package is there. While the process has other threads, the package is imported with all it names,
    unless these import none of ``later`` (``beside_threads``). Raises ImportError as importing the package does.
    """
    if package in sys.modules:
        return
    stand_ins = [_Later(module) if isinstance(module, str) else module for module in later]
    if threading.active_count() > 1 and not beside_threads:
        stand_ins = []
    placed = [module for module in stand_ins if sys.modules.setdefault(module.__name__, module) is module]
    try:
        importlib.import_module(package)
    finally:
        for module in placed:
            _take_away(module)
        for parent in {module.__name__.rpartition(".")[0] for module in placed} & sys.modules.keys():
            _let_find(sys.modules[parent], placed)


class _Later(ModuleType):
    """A stand-in for a module that is not imported yet. Reading an attribute imports the module and gives its."""

    @property
    def __spec__(self) -> ModuleSpec | None:  # type: ignore[override]
        """Every import statement reads this. So the package that holds the module is imported here, and has it as an
        attribute.
        """
        if sys.modules.get(self.__name__) is not self:
            return importlib.import_module(self.__name__).__spec__
        parent, _, last = self.__name__.rpartition(".")
        if parent:
            vars(importlib.import_module(parent)).setdefault(last, self)
        return ModuleSpec(self.__name__, None)

    def __getattr__(self, name: str) -> Any:
        _take_away(self)
        return getattr(importlib.import_module(self.__name__), name)


def _take_away(module: _Later) -> None:
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]


def _let_find(parent: ModuleType, stand_ins: Sequence[_Later]) -> None:
    """Remove stand-ins from the attributes of the package ``parent``, which then imports the module itself when a
    program asks for that attribute.
    """
    names = vars(parent)
    later = set[str]()
    for module in stand_ins:
        of, _, last = module.__name__.rpartition(".")
        if of == parent.__name__ and names.get(last) is module:
            del names[last]
            later.add(last)
    if not later:
        return
    before, shown = names.get("__getattr__"), names.get("__dir__", names.keys)

    def find(name: str) -> Any:
        if name in later:
            return _attribute(parent, name)
        if before is not None:
            return before(name)
        raise AttributeError(f"module {parent.__name__!r} has no attribute {name!r}", name=name, obj=parent)

    names["__getattr__"] = find
    names["__dir__"] = lambda: sorted({*shown(), *later})
    for name in _read_by_functions(parent, later):
        getattr(parent, name, None)


def _attribute(parent: ModuleType, name: str) -> ModuleType:
    """The module ``name`` in ``parent``, imported. AttributeError if there is none: a package may do without it."""
    path = f"{parent.__name__}.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise AttributeError(str(error), name=name, obj=parent) from None


def _read_by_functions(module: ModuleType, names: Set[str]) -> Set[str]:
    """Those of ``names`` that functions of ``module`` read, which `__getattr__` does not serve. It takes 1 ms to look
    into the module's code, where attributes have names too; without code, all.
    """
    get_code = getattr(getattr(module.__spec__, "loader", None), "get_code", None)
    code = get_code(module.__name__) if get_code is not None else None
    if code is None:
        return names
    read, outer = set[str](), [code]
    while outer:
        inner = [part for part in outer.pop().co_consts if isinstance(part, CodeType)]
        read.update(*(part.co_names for part in inner))
        outer += inner
    return names & read
