"""What podrun uses of jaxlib's MLIR objects, as types.

jaxlib's own stubs say that a value has a type and an operation attributes, not that the type of a tensor has a shape
or that an attribute of numbers can be read as numbers: the bindings find that out when a program runs. These protocols
say what operations of StableHLO have. Attributes stay `Any`: each operation has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class MlirAttributes(Protocol):
    """The attributes of an operation, by name."""

    def __contains__(self, name: str, /) -> bool: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __getitem__(self, name: str, /) -> Any: ...

    def get(self, name: str, default: Any, /) -> Any: ...

    def __setitem__(self, name: str, value: Any, /) -> None: ...

    def __delitem__(self, name: str, /) -> None: ...


class MlirType(Protocol):
    """The type of a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def element_type(self) -> Any: ...

    def is_dynamic_dim(self, axis: int, /) -> bool: ...


class MlirValue(Protocol):
    """A result of an operation, or an argument of a block. ``owner``: the operation, or for an argument the block."""

    @property
    def type(self) -> MlirType: ...

    @property
    def owner(self) -> Any: ...

    @property
    def uses(self) -> Iterator[Any]: ...

    def set_type(self, type: MlirType, /) -> None: ...

    def replace_all_uses_with(self, value: MlirValue, /) -> None: ...


class MlirOperands(Protocol):
    """The operands of an operation, which may be replaced."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> MlirValue: ...

    def __setitem__(self, place: int, value: MlirValue, /) -> None: ...

    def __iter__(self) -> Iterator[MlirValue]: ...


class MlirBlock(Protocol):
    """Operations in order."""

    @property
    def arguments(self) -> Sequence[MlirValue]: ...

    @property
    def operations(self) -> Sequence[MlirOperation]: ...

    def __iter__(self) -> Iterator[MlirOperation]: ...


class MlirRegion(Protocol):
    """The blocks of an operation that has others inside."""

    @property
    def blocks(self) -> Sequence[MlirBlock]: ...

    def __iter__(self) -> Iterator[MlirBlock]: ...


class MlirOperation(Protocol):
    """An operation of StableHLO. ``operation``: itself, of a view of one."""

    @property
    def name(self) -> str: ...

    @property
    def attributes(self) -> MlirAttributes: ...

    @property
    def operands(self) -> MlirOperands: ...

    @property
    def results(self) -> Sequence[MlirValue]: ...

    @property
    def regions(self) -> Sequence[MlirRegion]: ...

    @property
    def operation(self) -> MlirOperation: ...

    def clone(self, ip: Any = None) -> MlirOperation: ...

    def move_before(self, other: MlirOperation, /) -> None: ...

    def erase(self) -> None: ...


class MlirModule(Protocol):
    """A module: functions, of which ``main`` is the piece."""

    @property
    def body(self) -> MlirBlock: ...

    @property
    def operation(self) -> MlirOperation: ...

    @property
    def context(self) -> AbstractContextManager[Any]: ...
