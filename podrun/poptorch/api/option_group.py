"""What ``poptorch.Options`` and its parts share: values with a type, freezing, copies."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, TypeVar

from podrun.poptorch.errors import ArgumentError

G = TypeVar("G", bound="OptionGroup")


FROZEN = "Can't modify frozen Options"


class OptionGroup:
    """Named values, each of the type that its default has.

    Reading or assigning ``group.name`` works for every value. AttributeError for a name that is unknown when it is
    read, or when anything is changed after `freeze`; AssertionError for an unknown name or another type when it is set.
    """

    _defaults: ClassVar[dict[str, Any]] = {}
    _types: ClassVar[dict[str, tuple[type, ...]]] = {}

    def __init__(self) -> None:
        self.__dict__["_values"] = copy.deepcopy(self._defaults)
        self.__dict__["_is_frozen"] = False
        self.__dict__["_parts"] = {}

    def add_part(self, name: str, part: OptionGroup) -> None:
        """Give the group a part (``Options.Training``), which is frozen and copied with it."""
        self._parts[name] = part

    def checkIsFrozen(self, option: str | None = None) -> None:
        """AttributeError if the options can no longer be changed."""
        if self._is_frozen:
            raise AttributeError(f"{FROZEN}" + (f" (option {option})" if option else ""))

    def set(self: G, **values: object) -> G:
        """Set values by name. Returns the group itself, as setters do."""
        for name, value in values.items():
            self._set_checked(name, value)
        return self

    def _set_checked(self, name: str, value: object) -> None:
        self.checkIsFrozen(name)
        if name not in self._values:
            raise ArgumentError(f"Unknown option {name}")
        kinds = self._types.get(name)
        default = self._defaults.get(name)
        if kinds is None and default is not None:
            kinds = (type(default),)
        if kinds is not None and isinstance(value, int) and not isinstance(value, bool) and float in kinds:
            value = float(value)
        if kinds is not None and (not isinstance(value, kinds) or _bool_for_int(value, kinds)):
            raise ArgumentError(
                f"Unexpected type {type(value).__name__} for option {name}: expected "
                f"{' or '.join(kind.__name__ for kind in kinds)}"
            )
        self._values[name] = value

    def exists(self, name: str) -> bool:
        """Whether there is a value of that name."""
        return name in self._values

    def freeze(self) -> None:
        """Refuse changes from now on, to the parts as well."""
        self.__dict__["_is_frozen"] = True
        for part in self._parts.values():
            part.freeze()

    def unfreeze(self) -> None:
        """Allow changes again."""
        self.__dict__["_is_frozen"] = False
        for part in self._parts.values():
            part.unfreeze()

    def clone(self: G) -> G:
        """A copy that can be changed."""
        return copy.deepcopy(self)

    def __deepcopy__(self: G, memo: dict[int, Any]) -> G:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        copied.unfreeze()
        return copied

    def toDict(self) -> dict[str, Any]:
        """The values of the group itself."""
        return dict(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_values" not in self.__dict__:
            raise AttributeError(name)
        if name in self._parts:
            return self._parts[name]
        if name in self._values:
            return self._values[name]
        raise AttributeError(f"{type(self).__name__} has no option {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__.get("_values", {}):
            self._set_checked(name, value)
        else:
            self.checkIsFrozen(name)
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        parts = "".join(f",\n  {name}={part!r}" for name, part in self._parts.items())
        return f"{type(self).__name__.lstrip('_')}({values}{parts})"


def _bool_for_int(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, bool) and bool not in kinds and int in kinds


def check_flag(setter: str, value: object) -> None:
    """ArgumentError unless the value that a setter was given is True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{setter} takes True or False")
