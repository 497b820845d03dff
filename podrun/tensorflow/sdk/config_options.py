"""The tree of `IPUConfig`: categories and typed options, with the SDK's messages."""

from __future__ import annotations

import copy
import difflib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class AttributeMetadata:
    """What an option is: its name, the types that it takes, its default, and whether it is deprecated."""

    name: str
    type: Any
    default: Any
    deprecated: bool = False
    deprecated_msg: str = ""

    def warn_if_deprecated(self) -> None:
        """A warning for a deprecated option."""
        if self.deprecated:
            warnings.warn(f"{self.name} is deprecated. {self.deprecated_msg}", stacklevel=4)

    def check_type(self, value: Any) -> None:
        """TypeError unless ``value`` has exactly one of the types."""
        types = self.type if isinstance(self.type, tuple) else (self.type,)
        if type(value) not in types:
            names = " or ".join(str(kind) for kind in types)
            raise TypeError(
                f"Trying to set {self.name} to {value} of type {type(value)}, but it must be of type {names}"
            )


class OptionCategory:
    """A category of options, which may hold other categories."""

    def __init__(self, name: str, tree: Mapping[str, Any]) -> None:
        values: dict[str, Any] = {}
        metadata: dict[str, AttributeMetadata] = {}
        for key, entry in tree.items():
            full = f"{name}.{key}" if name else key
            if isinstance(entry, Mapping):
                values[key] = OptionCategory(full, entry)
            else:
                kinds, default = entry[:2]
                metadata[key] = AttributeMetadata(full, kinds, default, len(entry) > 2, *entry[2:])
                values[key] = copy.deepcopy(default)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_metadata", metadata)

    def _check(self, name: str) -> None:
        if name in self._values:
            return
        close = difflib.get_close_matches(name, self._values, n=1)
        raise ValueError(
            f"{name} is not a valid attribute of this config."
            + (f" Did you mean {close[0]}?" if close else "")
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_values" not in self.__dict__:
            raise AttributeError(name)
        self._check(name)
        if name in self._metadata:
            self._metadata[name].warn_if_deprecated()
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._check(name)
        if isinstance(self._values[name], OptionCategory):
            raise Exception(f"{name} is a category and cannot be assigned to.")  # noqa: TRY002 - the SDK's class
        metadata = self._metadata[name]
        metadata.warn_if_deprecated()
        if isinstance(value, bool) and metadata.type is not bool and _is_rounding(metadata):
            value = metadata.type.from_bool(value)  # A program of SDK 2.4 or earlier.
        metadata.check_type(value)
        self._values[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self).__new__(type(self))
        for key in ("_name", "_values", "_metadata"):
            object.__setattr__(new, key, copy.deepcopy(self.__dict__[key], memo))
        return new

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"

    def get_attribute_metadata(self, attr: str) -> AttributeMetadata:
        """What the option of that dotted name is. ValueError for a category or an unknown one."""
        first, _, rest = attr.partition(".")
        self._check(first)
        if rest:
            result: AttributeMetadata = self._values[first].get_attribute_metadata(rest)
            return result
        if first not in self._metadata:
            raise ValueError(f"{attr} is a category, which has no metadata.")
        own: AttributeMetadata = self._metadata[first]
        return own

    def to_dict(self) -> dict[str, Any]:
        """All options by dotted name."""
        flat: dict[str, Any] = {}
        for key, value in self._values.items():
            if isinstance(value, OptionCategory):
                flat |= value.to_dict()
            else:
                flat[self._metadata[key].name] = value
        return flat

    def from_dict(self, dct: Mapping[str, Any]) -> None:
        """Set options by dotted name."""
        for key, value in dct.items():
            *path, last = key.split(".")
            category: Any = self
            for part in path:
                category = getattr(category, part)
            setattr(category, last, value)

    def to_json(self) -> str:
        """`to_dict` as JSON; enumerations are their names."""
        return json.dumps({k: v.name if isinstance(v, Enum) else v for k, v in self.to_dict().items()})

    def from_json(self, json_cfg: str) -> None:
        """Set options from JSON."""
        values = json.loads(json_cfg)
        for key, value in values.items():
            kind = self.get_attribute_metadata(key).type
            if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
                values[key] = kind[value]
        self.from_dict(values)


def _is_rounding(metadata: AttributeMetadata) -> bool:
    return hasattr(metadata.type, "from_bool")
