"""Nested arguments and results as a flat list of leaves and back.

Tuples, named tuples, lists and dictionaries keep their types and orders; other types can be registered, as
``poptorch.registerCustomArgParser`` does. Anything else is a leaf.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podrun.poptorch.errors import Error


class StructureParser(ABC):
    """How to take a type of the user's apart (``poptorch.ICustomArgParser``)."""

    @abstractmethod
    def yieldTensors(self, struct: Any) -> Iterator[Any]:
        """The leaves, always in the same order."""

    @abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[Any]) -> Any:
        """A structure equal to ``original_structure`` with other leaves."""


_parsers: dict[type, StructureParser] = {}


def register_parser(arg_data_type: type, arg_parser: StructureParser | None) -> None:
    """Take values of a type and its subclasses apart with a parser; None: no longer. Error for a parser of another base
    class than `StructureParser`."""
    if arg_parser is None:
        _parsers.pop(arg_data_type, None)
        return
    if not isinstance(arg_parser, StructureParser):
        raise Error(
            f"registerCustomArgParser takes a parser derived from poptorch.ICustomArgParser, not "
            f"{type(arg_parser).__name__}"
        )
    _parsers[arg_data_type] = arg_parser


def registered_parsers() -> dict[type, StructureParser]:
    """All registered parsers, by type, for another process."""
    return dict(_parsers)


def adopt_parsers(parsers: Mapping[type, StructureParser]) -> None:
    """Register what `registered_parsers` gave."""
    _parsers.update(parsers)


def has_parser(value: Any) -> bool:
    """Whether a parser is registered for a value's type."""
    return _parser_of(value) is not None


def _parser_of(value: Any) -> StructureParser | None:
    for kind in type(value).__mro__:
        if kind in _parsers:
            return _parsers[kind]
    return None


@dataclass(frozen=True, slots=True)
class Structure:
    """A nested value without its leaves. ``rebuild(leaves)`` gives a value of the same types."""

    rebuild: Callable[[Iterator[Any]], Any]
    description: Any
    """Types, lengths and keys: equal for values of the same structure."""
    leaves: int


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a nested value, and its structure."""
    if (parser := _parser_of(value)) is not None:
        leaves = list(parser.yieldTensors(value))
        return leaves, Structure(
            lambda items: parser.reconstruct(value, items),
            (type(value).__qualname__, len(leaves)),
            len(leaves),
        )
    if isinstance(value, dict):
        keys = list(value)
        return _of_children(
            [value[key] for key in keys],
            lambda items: _new_mapping(value, keys, items),
            (type(value).__name__, frozenset(keys)),
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _of_children(list(value), lambda items: type(value)(*items), type(value).__name__)
    if isinstance(value, (tuple, list)):
        kind = type(value)
        return _of_children(list(value), kind, kind.__name__)
    return [value], Structure(next, "leaf", 1)


def _new_mapping(original: Any, keys: Sequence[Any], items: Sequence[Any]) -> Any:
    made = dict(zip(keys, items, strict=True))
    return made if type(original) is dict else type(original)(made)


def _of_children(
    children: Sequence[Any], make: Callable[[list[Any]], Any], kind: Any
) -> tuple[list[Any], Structure]:
    leaves: list[Any] = []
    structures = []
    for child in children:
        found, structure = flatten(child)
        leaves += found
        structures.append(structure)
    return leaves, Structure(
        lambda items: make([structure.rebuild(items) for structure in structures]),
        (kind, tuple(structure.description for structure in structures)),
        len(leaves),
    )


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The nested value that `flatten` took apart, with other leaves."""
    return structure.rebuild(iter(leaves))
