"""What `Options` and its parts share: values with a type, freezing, copies; where tensors are kept; options from text.

A line of text is a call, ``Training.gradientAccumulation(4)``. Nothing of it is evaluated.
"""

from __future__ import annotations

import ast
import copy
from typing import Any, ClassVar, TypeVar

from podrun.poptorch import enums

G = TypeVar("G", bound="OptionGroup")

FROZEN = "Can't modify frozen Options"


class OptionGroup:
    """Named values, each of the type that its default has.

    Reading or assigning ``group.name`` works for every value. AttributeError for a name that is unknown when it is
    read, or when anything is changed after `freeze`; AssertionError for an unknown name or another type when it is
    set.
    """

    _defaults: ClassVar[dict[str, Any]] = {}
    _types: ClassVar[dict[str, tuple[type, ...]]] = {}

    def __init__(self) -> None:
        self.__dict__["_values"] = copy.deepcopy(self._defaults)
        self.__dict__["_is_frozen"] = False
        self.__dict__["_parts"] = {}

    def add_part(self, name: str, part: OptionGroup) -> None:
        """Give the group a part of its own (``Options.Training``), frozen and copied with it."""
        self._parts[name] = part

    def checkIsFrozen(self, option: str | None = None) -> None:
        """AttributeError if the options can no longer be changed."""
        if self._is_frozen:
            raise AttributeError(f"{FROZEN}" + (f" (option {option})" if option else ""))

    def set(self, **values: Any) -> None:
        """Set values by name."""
        for name, value in values.items():
            self._set_checked(name, value)

    def _set_checked(self, name: str, value: Any) -> None:
        self.checkIsFrozen(name)
        assert name in self._values, f"Unknown option {name}"
        kinds = self._types.get(name)
        default = self._defaults.get(name)
        if kinds is None and default is not None:
            kinds = (type(default),)
        if kinds is not None and isinstance(value, int) and not isinstance(value, bool) and float in kinds:
            value = float(value)
        assert kinds is None or (isinstance(value, kinds) and not _bool_for_int(value, kinds)), (
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
        made = object.__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = copy.deepcopy(value, memo)
        made.unfreeze()
        return made

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

    def __setattr__(self, name: str, value: Any) -> None:
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


def _bool_for_int(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, bool) and bool not in kinds and int in kinds


def apply_line(options: Any, text: str) -> None:
    """Make the call that a line describes on ``options``. SyntaxError for a line that is no call with plain values."""
    tree = ast.parse(text.removeprefix("options.").removeprefix("opts."), mode="eval").body
    if not isinstance(tree, ast.Call):
        raise SyntaxError("a call of an option was expected")
    arguments = [_value(each) for each in tree.args]
    keywords = {each.arg: _value(each.value) for each in tree.keywords if each.arg is not None}
    _target(options, tree.func)(*arguments, **keywords)


def _target(options: Any, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _option(options, node.id)
    if isinstance(node, ast.Attribute):
        return _option(_target(options, node.value), node.attr)
    raise SyntaxError("the name of an option was expected")


def _option(owner: Any, name: str) -> Any:
    if name.startswith("__") or not hasattr(owner, name):
        raise SyntaxError(f"there is no option {name}")
    return getattr(owner, name)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Attribute):
        return _named(ast.unparse(node))
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_value(k): _value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise SyntaxError(f"{ast.unparse(node)} is no plain value") from error


def _named(text: str) -> Any:
    parts = text.removeprefix("poptorch.").split(".")
    if parts[0] == "torch" and len(parts) == 2:
        import torch

        found = getattr(torch, parts[1], None)
        if isinstance(found, torch.dtype):
            return found
    kind = getattr(enums, parts[0], None)
    if kind is not None and len(parts) == 2 and parts[1] in getattr(kind, "__members__", {}):
        return kind[parts[1]]
    raise SyntaxError(f"{text} is no value that options have")


class TensorLocationSettings:
    """Where one kind of tensor is kept and how it gets there. Every setter returns the settings themselves.

    AssertionError for a value of another type.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def _set(self, key: str, value: Any, kind: type) -> TensorLocationSettings:
        assert isinstance(value, kind), f"{key} takes {kind.__name__}, not {value!r}"
        self._values[key] = value
        return self

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Keep smaller tensors on the chip."""
        return self._set("minElementsForOffChip", min_elements, int)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not shard smaller tensors."""
        return self._set("minElementsForReplicatedTensorSharding", min_elements, int)

    def useOnChipStorage(self, use: bool | None = True) -> TensorLocationSettings:
        """Keep tensors on the tiles (True) or in streaming memory (False); None: as PopART decides."""
        if use is None:
            self._values.pop("onChip", None)
            return self
        return self._set("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Give every replica a part of each tensor."""
        return self._set("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load through I/O tiles."""
        return self._set("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store through I/O tiles."""
        return self._set("useIOTilesToStore", use, bool)

    def toDict(self) -> dict[str, Any]:
        """All settings that were made."""
        return dict(self._values)

    def __repr__(self) -> str:
        return f"TensorLocationSettings({self._values})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLocationSettings) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]
