"""`dataclass` of the standard library, whose methods are generated when they are first used.

The standard library's decorator compiles the text of up to seven methods for each class, when its module is imported:
half a millisecond of a core, of which a program on podrun has hundreds, and it makes few of these values. Here a class
gets its fields, slots and the checks of frozen values at once. ``__init__``, ``__repr__``, ``__eq__`` and ``__hash__``
are attributes that have the standard library generate the method, and put it in their own place, when somebody reads
them. To every reader the class is that of the standard library, but for what stands in its ``__dict__`` until then.

Type checkers see the standard library's decorator. Classes that inherit fields, that are ordered or that have no
docstring (which would tell the signature) are left to it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None, *, frozen: bool = False, slots: bool = False, eq: bool = True, **more: bool
    ) -> Any:
        """See `dataclasses.dataclass`, of which it takes all parameters."""

        def decorated(plain: type) -> type:
            if more or _needs_standard(plain, frozen=frozen):
                return dataclasses.dataclass(frozen=frozen, slots=slots, eq=eq, **more)(plain)
            return _with_methods_on_first_use(plain, frozen=frozen, slots=slots, eq=eq)

        return decorated if cls is None else decorated(cls)


def _needs_standard(plain: type, *, frozen: bool) -> bool:
    """Whether a class has something that only the standard library's decorator looks at."""
    return (
        not plain.__doc__
        or any(hasattr(base, "__dataclass_fields__") for base in plain.__bases__)
        or (frozen and not _SETTERS.isdisjoint(vars(plain)))
    )


_SETTERS = frozenset(("__setattr__", "__delattr__"))


def _with_methods_on_first_use(plain: type, *, frozen: bool, slots: bool, eq: bool) -> Any:
    own = vars(plain)
    methods = [name for name in ("__init__", "__repr__") if name == "__init__" or name not in own]
    no_hash = False
    if eq:
        hashed = own.get("__hash__", _MISSING)
        unsaid = hashed is _MISSING or (hashed is None and "__eq__" in own)
        methods += [] if "__eq__" in own else ["__eq__"]
        methods += ["__hash__"] if unsaid and frozen else []
        no_hash = unsaid and not frozen
    finished: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(plain)
    for name in methods:
        setattr(finished, name, _OnFirstUse(finished, name, frozen=frozen))
    if no_hash:
        finished.__hash__ = None
    parameters = finished.__dataclass_params__
    parameters.init = parameters.repr = True
    parameters.eq, parameters.frozen = eq, frozen
    if frozen:
        _freeze(finished, slots=slots)
    return finished


_MISSING = object()


class _OnFirstUse:
    """A method of a class in its ``__dict__`` that is generated when it is read."""

    __slots__ = ("_frozen", "_name", "_owner")

    def __init__(self, owner: type, name: str, *, frozen: bool) -> None:
        self._owner, self._name, self._frozen = owner, name, frozen

    def __get__(self, instance: object, _: type | None = None) -> Any:
        method = _generated(self._owner, self._name, frozen=self._frozen)
        setattr(self._owner, self._name, method)
        return method if instance is None else method.__get__(instance, self._owner)


_WANTED: Mapping[str, Mapping[str, bool]] = {
    "__init__": {"init": True},
    "__repr__": {"repr": True},
    "__eq__": {"eq": True},
    "__hash__": {"unsafe_hash": True},
}
_NOTHING = {"init": False, "repr": False, "eq": False}


def _generated(owner: type, name: str, *, frozen: bool) -> Callable[..., Any]:
    """The method as the standard library generates it, for a class of the same name and fields."""
    fields = {item.name: copy.copy(item) for item in dataclasses.fields(owner)}
    content: dict[str, object] = {
        "__module__": owner.__module__,
        "__qualname__": owner.__qualname__,
        "__doc__": owner.__doc__,
        "__annotations__": {name: item.type for name, item in fields.items()},
        **fields,
    }
    if hasattr(owner, "__post_init__"):
        content["__post_init__"] = None  # That there is one counts: the method asks the instance for it.
    options = {**_NOTHING, **_WANTED[name]}
    if (
        name == "__init__"
    ):  # It sets fields in another way in frozen classes, and more of them in those with slots.
        options |= {"frozen": frozen, "slots": "__slots__" in vars(owner)}
    alike: type = dataclasses.dataclass(**options)(type(owner.__name__, (), content))
    method: Callable[..., Any] = vars(alike)[name]
    return method


def _freeze(owner: type[Any], *, slots: bool) -> None:
    """Let nobody change an instance; with slots, say how it is copied and pickled, for which it would be changed."""
    names = frozenset(item.name for item in dataclasses.fields(owner))

    def __setattr__(self: object, name: str, value: object) -> None:
        if type(self) is owner or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(owner, self).__setattr__(name, value)

    def __delattr__(self: object, name: str) -> None:
        if type(self) is owner or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(owner, self).__delattr__(name)

    def __getstate__(self: object) -> list[Any]:
        return [getattr(self, name) for name in _field_names(self)]

    def __setstate__(self: object, state: list[Any]) -> None:
        for name, value in zip(_field_names(self), state, strict=True):
            object.__setattr__(self, name, value)

    methods = [__setattr__, __delattr__]
    if slots:
        methods += [m for m in (__getstate__, __setstate__) if m.__name__ not in vars(owner)]
    for method in methods:
        method.__qualname__ = f"{owner.__qualname__}.{method.__name__}"
        setattr(owner, method.__name__, method)


def _field_names(value: object) -> list[str]:
    """Those of its own class, which may have more than the one that it inherits from."""
    return [item.name for item in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
