"""`dataclass` of the standard library, whose methods are generated when they are first used.

The standard library's decorator compiles the text of up to seven methods for each class, when its module is imported:
half a millisecond of a core, of which a program on podrun has hundreds, and it makes few of these values. Here a class
gets its fields, slots and the checks of frozen values at once. ``__init__``, ``__repr__``, ``__eq__`` and ``__hash__``
are attributes that have the standard library generate the method, and put it in their own place, when somebody reads
them. To every reader the class is that of the standard library, but for what stands in its ``__dict__`` until then.

Type checkers see the standard library's decorator. Classes that inherit fields, that are ordered, abstract, have an
``__init__`` of their own or ``InitVar``, or have no docstring (which would tell the signature) are left to it.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
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
    own = vars(plain)
    types: Mapping[str, object] = own.get("__annotations__", {})
    return (
        not plain.__doc__
        or "__init__" in own
        or bool(getattr(plain, "__abstractmethods__", ()))
        or any(hasattr(base, "__dataclass_fields__") for base in plain.__bases__)
        or (frozen and not _SETTERS.isdisjoint(own))
        or any("InitVar" in str(kind) for kind in types.values())
        or any(name == "self" or name.startswith(_AROUND_METHODS) for name in types)
    )


_SETTERS = frozenset(("__setattr__", "__delattr__"))
_AROUND_METHODS = ("_set", "_FACTORY", "_default_", "_factory_")
"""Names that generated methods read, which a field may not have."""


def _with_methods_on_first_use(plain: type, *, frozen: bool, slots: bool, eq: bool) -> Any:
    own = vars(plain)
    methods = ["__init__"] + ([] if "__repr__" in own else ["__repr__"])
    no_hash = False
    if eq:
        hashed = own.get("__hash__", _MISSING)
        unsaid = hashed is _MISSING or (hashed is None and "__eq__" in own)
        methods += [] if "__eq__" in own else ["__eq__"]
        methods += ["__hash__"] if unsaid and frozen else []
        no_hash = unsaid and not frozen
    finished: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(plain)
    _check_defaults(finished)
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


def _check_defaults(finished: type) -> None:
    """Raise the standard library's TypeError where a field without a default follows one that has one."""
    optional = False
    for item in dataclasses.fields(finished):
        if item.init and not item.kw_only:
            if optional and not _has_default(item):
                raise TypeError(f"non-default argument {item.name!r} follows default argument")
            optional = _has_default(item)


def _has_default(item: dataclasses.Field[Any]) -> bool:
    return item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING


class _OnFirstUse:
    """A method of a class in its ``__dict__`` that is generated when it is read.

    It leaves its place to the method, unless somebody has put another there since.
    """

    __slots__ = ("_frozen", "_method", "_name", "_owner")

    def __init__(self, owner: type, name: str, *, frozen: bool) -> None:
        self._owner, self._name, self._frozen = owner, name, frozen
        self._method: Callable[..., Any] | None = None

    def __get__(self, instance: object, _: type | None = None) -> Any:
        method = self._method
        if method is None:
            method = self._method = _generated(self._owner, self._name, frozen=self._frozen)
            if vars(self._owner).get(self._name) is self:
                setattr(self._owner, self._name, method)
        return method if instance is None else method.__get__(instance, self._owner)


def _generated(owner: type, name: str, *, frozen: bool) -> Callable[..., Any]:
    """The method as the standard library generates it."""
    fields = dataclasses.fields(owner)
    if name == "__init__":
        return _initializer(owner, frozen=frozen)
    if name == "__eq__":
        mine, others = (_values(one, [f.name for f in fields if f.compare]) for one in ("self", "other"))
        body = f"return {mine} == {others} if other.__class__ is self.__class__ else NotImplemented"
        return _compiled(owner, name, "self, other", [body], {})
    if name == "__hash__":
        hashed = [f.name for f in fields if (f.compare if f.hash is None else f.hash)]
        return _compiled(owner, name, "self", [f"return _hash({_values('self', hashed)})"], {"_hash": hash})
    shown: dict[str, Any] = {f.name: copy.copy(f) for f in fields}
    types = {name: item.type for name, item in shown.items()}
    content: dict[str, object] = {"__module__": owner.__module__, "__qualname__": owner.__qualname__}
    content |= {"__doc__": owner.__doc__, "__annotations__": types, **shown}
    alike: type = dataclasses.dataclass(init=False, eq=False)(type(owner.__name__, (), content))
    method: Callable[..., Any] = vars(alike)[name]
    return method


def _values(of: str, names: Sequence[str]) -> str:
    """The text of a tuple of fields."""
    return f"({''.join(f'{of}.{name}, ' for name in names)})"


def _compiled(
    owner: type, name: str, arguments: str, lines: Sequence[str], around: Mapping[str, object]
) -> Callable[..., Any]:
    """A method of these lines, which see the names ``around`` it and those of the class's module."""
    text = "\n  ".join([f"def around({', '.join(around)}):\n def {name}({arguments}):", *(lines or ["pass"])])
    names: dict[str, Any] = {}
    module = getattr(sys.modules.get(owner.__module__), "__dict__", {})
    exec(f"{text}\n return {name}", module, names)  # noqa: S102 - names of fields
    method: Callable[..., Any] = names["around"](**around)
    method.__qualname__ = f"{owner.__qualname__}.{name}"
    return method


class _Factory:
    """The default of a parameter whose field has a ``default_factory``, as `inspect.signature` shows it."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _initializer(owner: type, *, frozen: bool) -> Callable[..., Any]:
    """``__init__``, which nearly every class that is used needs: written here, since the standard library's would come
    with a class and, if it is frozen, two more methods. Defaults and factories are names around it.
    """
    fields, slots = dataclasses.fields(owner), "__slots__" in vars(owner)
    around: dict[str, object] = {"_set": object.__setattr__, "_FACTORY": _FACTORY}
    arguments, only_named, lines = ["self"], list[str](), list[str]()
    for item in fields:
        name, default, factory = item.name, f"_default_{item.name}", f"_factory_{item.name}"
        from_factory = item.default_factory is not dataclasses.MISSING
        has_default = item.default is not dataclasses.MISSING
        around |= {factory: item.default_factory} if from_factory else {}
        around |= {default: item.default} if has_default else {}
        value = name
        if item.init:
            unsaid = "=_FACTORY" if from_factory else f"={default}" if has_default else ""
            (only_named if item.kw_only else arguments).append(name + unsaid)
            if from_factory:
                value = f"{factory}() if {name} is _FACTORY else {name}"
        elif from_factory:
            value = f"{factory}()"
        elif has_default and slots:
            value = default
        else:
            continue
        lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(owner, "__post_init__"):
        lines.append("self.__post_init__()")
    header = ", ".join([*arguments, *(["*", *only_named] if only_named else [])])
    method = _compiled(owner, "__init__", header, lines, around)
    ordered = sorted((item for item in fields if item.init), key=lambda item: bool(item.kw_only))
    method.__annotations__ = {item.name: item.type for item in ordered} | {"return": None}
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
