"""Context managers of a Builder: what holds for the operators that are added inside them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podrun.popart.builder import Builder


class Pushed:
    """A context manager that keeps ``item`` on top of ``stack``."""

    def __init__(self, stack: list[Any], item: object) -> None:
        self._stack, self._item = stack, item

    def __enter__(self) -> None:
        self._stack.append(self._item)

    def __exit__(self, *_: object) -> None:
        self._stack.pop()


class _Manager:
    """Base of the context managers that the builder returns; it wraps another one."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner

    def __enter__(self) -> Any:
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._inner.__exit__(kind, error, trace)


class NameContextManager(_Manager):
    """Prefixes the names of tensors that are added inside with ``name/``."""

    def __init__(self, builder: Builder, name: str) -> None:
        super().__init__(builder.nameScope(name))


class AttributeContextManager(_Manager):
    """Gives nodes that are added inside the attribute ``attribute``."""

    def __init__(self, builder: Builder, attribute: str, value: object) -> None:
        super().__init__(builder._attribute_scope(attribute, value))


class KeyValueContextManager(_Manager):
    """Gives nodes that are added inside the outline attribute ``key`` with ``value``."""

    def __init__(self, builder: Builder, key: str, value: str) -> None:
        super().__init__(builder.outlineAttributes({key: value}))
