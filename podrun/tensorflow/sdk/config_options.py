"""The tree of `IPUConfig`: categories and typed options, with the SDK's messages."""

from __future__ import annotations

import copy
import difflib
import importlib
import json
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.sdk.config_descriptions import DESCRIPTIONS

NO_DESCRIPTION = "No description provided."


@dataclass(frozen=True)
class AttributeMetadata:
    """What an option or a category is: its name, the types that an option takes (a list or tuple has whole numbers),
    its default, whether it is deprecated, and what it is for, which is its ``__doc__`` too.
    """

    name: str
    kinds: tuple[Any, ...] = ()
    default: Any = None
    deprecated_msg: str | None = None
    description: str = NO_DESCRIPTION

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.description)

    @property
    def _depth(self) -> int:
        """How deep in the tree it is: 1 for the outermost."""
        return self.name.count(".") + 1

    @property
    def deprecated(self) -> bool:
        """Whether the option is deprecated."""
        return self.deprecated_msg is not None

    @property
    def type(self) -> str | None:
        """The types as text, as the SDK writes them; None for a category."""
        names = [_TYPE_NAMES.get(kind, kind.__name__) for kind in self.kinds]
        if len(names) > 1:
            return f"typing.Union[{', '.join(names)}]"
        return self.kinds[0].__name__ if self.kinds else None

    def warn_if_deprecated(self) -> None:
        """A warning for a deprecated option."""
        if self.deprecated:
            tf_logging = importlib.import_module("tensorflow.python.platform.tf_logging")
            tf_logging.warn(f"{self.name} has been deprecated: {self.deprecated_msg}")

    def check_type(self, value: object) -> None:
        """TypeError unless ``value`` has exactly one of the types."""
        fits = type(value) in self.kinds
        if fits and isinstance(value, (list, tuple)):
            fits = all(type(item) is int for item in value)
        if not fits:
            raise TypeError(f"Trying to set {self.name} to {value}, but it must be of type {self.type}")

    def from_plain(self, value: Any) -> Any:
        """The member of an enumeration that a number or a name means; other values as they are."""
        kind = self.kinds[0] if len(self.kinds) == 1 else None
        if not isinstance(kind, type) or not issubclass(kind, Enum) or isinstance(value, (kind, bool)):
            return value
        return kind[value] if isinstance(value, str) else kind(value)


_TYPE_NAMES = {list: "typing.List[int]", tuple: "typing.Tuple[int, ...]"}


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
                kinds, default, *message = entry
                kinds = kinds if isinstance(kinds, tuple) else (kinds,)
                note = message[0] if message else None
                metadata[key] = AttributeMetadata(full, kinds, default, note, _description(full))
                values[key] = copy.deepcopy(default)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_metadata", metadata)

    def _check(self, name: str) -> None:
        if name in self._values:
            return
        close = difflib.get_close_matches(name, self._values, n=1)
        raise ValueError(
            f"'{name}' is not a valid attribute of this config."
            + (f" Did you mean '{self._full(close[0])}'?" if close else "")
        )

    def _full(self, name: str) -> str:
        return f"{self._name}.{name}" if self._name else name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_values" not in self.__dict__:
            raise AttributeError(name)
        self._check(name)
        if name in self._metadata:
            self._metadata[name].warn_if_deprecated()
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        self._check(name)
        if isinstance(self._values[name], OptionCategory):
            raise Exception(  # noqa: TRY002 - the SDK's class
                f"{self._full(name)} is a category and cannot be assigned to."
            )
        metadata = self._metadata[name]
        metadata.warn_if_deprecated()
        if isinstance(value, bool) and metadata.kinds and hasattr(metadata.kinds[0], "from_bool"):
            value = metadata.kinds[0].from_bool(value)  # A program of SDK 2.4 or earlier.
        metadata.check_type(value)
        self._values[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self).__new__(type(self))
        for key, value in self.__dict__.items():
            object.__setattr__(new, key, copy.deepcopy(value, memo))
        return new

    def __repr__(self) -> str:
        lines = (
            f"  {name} = {value if isinstance(value, Enum) else repr(value)}"
            for name, value in flat_options(self).items()
        )
        return os.linesep.join([f"{type(self).__name__}:", *lines])

    def get_attribute_metadata(self, attr: str) -> AttributeMetadata:
        """What the option or category of that dotted name is. ValueError for an unknown one."""
        first, _, rest = attr.partition(".")
        try:
            self._check(first)
            if rest:
                result: AttributeMetadata = self._values[first].get_attribute_metadata(rest)
                return result
        except (ValueError, AttributeError) as error:
            reason = str(error).partition("': ")[2] if rest and "metadata for" in str(error) else str(error)
            raise ValueError(f"Could not get attribute metadata for '{attr}': {reason}") from None
        full = self._full(first)
        return self._metadata.get(first) or AttributeMetadata(full, description=_description(full))

    def to_dict(self) -> dict[str, Any]:
        """All options by dotted name; enumerations are numbers."""
        return {k: v.value if isinstance(v, Enum) else v for k, v in flat_options(self).items()}

    def from_dict(self, dct: Mapping[str, Any]) -> None:
        """Set options by dotted name; enumerations may be numbers or names."""
        for key, value in dct.items():
            *path, last = key.split(".")
            category: Any = self
            for part in path:
                category = getattr(category, part)
            metadata = category._metadata.get(last)
            setattr(category, last, value if metadata is None else metadata.from_plain(value))

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def from_json(self, json_cfg: str) -> None:
        """Set options from JSON."""
        self.from_dict(json.loads(json_cfg))


def _description(name: str) -> str:
    return DESCRIPTIONS.get(name, NO_DESCRIPTION)


def flat_options(category: OptionCategory) -> dict[str, Any]:
    """All options of a category by dotted name. No method: programs read options by name, such as this one's."""
    flat: dict[str, Any] = {}
    for key, value in category._values.items():
        if isinstance(value, OptionCategory):
            flat |= flat_options(value)
        else:
            flat[category._metadata[key].name] = value
    return flat
