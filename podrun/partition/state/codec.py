"""Values as messages on the wire and as JSON, derived from their dataclasses.

A field has its own name in both forms, unless its metadata (`spelled`) says otherwise. Tuples become lists, and
dataclasses in them messages or objects; an enum travels under its name with the prefix of the protocol, and is the
value in JSON where that is text, else the name; a fault is its text. `to_message` and `from_message` learn from the
message's own descriptor what a field wants, so that no message is written out a second time. Protocol buffers are not
imported here: who has a message has them.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.faults import FaultSpec

Value = TypeVar("Value")
Convert = Callable[[Any], Any]
_KEY = "spelling"
LARGEST_UNSIGNED = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a field travels. ``wire``: its paths in the message, the first of which is read; none: it does not travel.
    ``none``: the number on the wire for None, which smaller ones mean too."""

    wire: tuple[str, ...]
    json: str
    none: float
    null_if_empty: bool
    negated: bool


def spelled(
    *wire: str,
    json: str = "",
    none: float = 0.0,
    null_if_empty: bool = False,
    negated: bool = False,
    on_wire: bool = True,
) -> Mapping[str, Any]:
    """Metadata of a field: its paths in the message and its key in JSON, where these are not its name.

    ``null_if_empty``: JSON says null instead of an empty value; ``negated``: the message holds the opposite;
    ``on_wire`` False: messages do not have it.
    """
    return {_KEY: (wire if on_wire else None, json, none, null_if_empty, negated)}


def _spellings(kind: type) -> list[tuple[str, Any, Spelling]]:
    """Name, type and spelling of each field of a dataclass."""
    hints = typing.get_type_hints(kind)
    result = []
    for entry in fields(kind):
        wire, json, none, null, negated = entry.metadata.get(_KEY, ((), "", 0.0, False, False))
        paths = () if wire is None else wire or (entry.name,)
        result.append(
            (entry.name, hints[entry.name], Spelling(paths, json or entry.name, none, null, negated))
        )
    return result


def value_to_json(value: object) -> dict[str, Any]:
    """A value as --format json prints it, with keys in the order of its fields."""
    kind: Any = type(value)
    result: dict[str, Any] = {}
    for key, name, null in _json_keys(kind):
        plain = getattr(value, name)
        if type(plain) not in _PLAIN:
            plain = _plain(plain)
        result[key] = (plain or None) if null else plain
    return result


@functools.cache
def _json_keys(kind: Any) -> tuple[tuple[str, str, bool], ...]:
    return tuple((spelling.json, name, spelling.null_if_empty) for name, _, spelling in _spellings(kind))


_PLAIN = frozenset({str, int, float, bool, type(None)})


def _plain(value: object) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return dict(value) if isinstance(value, Mapping) else value_to_json(value)


def to_message(value: Any, message: Any) -> Any:
    """The message of a class for a value. Raises UsageError for a number that the message cannot hold."""
    kind: Any = type(value)
    content: dict[str, Any] = {}
    for name, encode, paths in _codec(kind, message).encoders:
        plain = getattr(value, name)
        if encode is not None:
            plain = encode(plain)
        for head, rest in paths:
            if rest:
                content.setdefault(head, {})[rest] = plain
            else:
                content[head] = plain
    return message(**content)


def from_message(kind: type[Value], message: object) -> Value:
    """The value of a class that a message holds. Raises UsageError for what it cannot mean."""
    of: Any = type(message)
    whole: Any = kind
    codec = _codec(whole, of)
    plain = list(codec.read(message))
    for index, decode in codec.decoders:
        plain[index] = decode(plain[index])
    result: Value = whole(*plain) if codec.whole else whole(**dict(zip(codec.names, plain, strict=True)))
    return result


@dataclass(frozen=True, slots=True)
class _Codec:
    """How the fields of one class travel in one message. ``read``: the plain values of ``names``; ``whole``: these are
    all fields, in their order."""

    names: tuple[str, ...]
    whole: bool
    read: Callable[[Any], tuple[Any, ...]]
    decoders: tuple[tuple[int, Convert], ...]
    encoders: tuple[tuple[str, Convert | None, tuple[tuple[str, str], ...]], ...]


@functools.cache
def _codec(kind: Any, message: Any) -> _Codec:
    names: list[str] = []
    paths: list[str] = []
    decoders: list[tuple[int, Convert]] = []
    encoders: list[tuple[str, Convert | None, tuple[tuple[str, str], ...]]] = []
    for name, hint, spelling in _spellings(kind):
        if not spelling.wire:
            continue
        encode, decode = _converters(hint, _descriptor(message, spelling.wire[0]), spelling, name)
        if decode is not None:
            decoders.append((len(names), decode))
        names.append(name)
        paths.append(spelling.wire[0])
        split = tuple((head, rest) for head, _, rest in (path.partition(".") for path in spelling.wire))
        encoders.append((name, encode, split))
    read: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*paths)
    if len(paths) == 1:  # `attrgetter` of one name gives no tuple.
        one = read
        read = lambda entry: (one(entry),)  # noqa: E731
    whole = names == [entry.name for entry in fields(kind)]
    return _Codec(tuple(names), whole, read, tuple(decoders), tuple(encoders))


def _descriptor(message: Any, path: str) -> Any:
    descriptor = message.DESCRIPTOR
    *outer, last = path.split(".")
    for name in outer:
        descriptor = descriptor.fields_by_name[name].message_type
    return descriptor.fields_by_name[last]


def _converters(
    hint: Any, descriptor: Any, spelling: Spelling, name: str
) -> tuple[Convert | None, Convert | None]:
    """What a field needs on its way into a message and out of it; None where it stays as it is."""
    if spelling.negated:
        return operator.not_, operator.not_
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return _optional(next(of for of in inner if of is not type(None)), descriptor, spelling, name)
    if origin is tuple:
        encode, decode = _converters(inner[0], descriptor, spelling, name)
        return _listed(list, encode), _listed(tuple, decode)
    if hint is FaultSpec:
        return str, _fault
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _of_enum(hint, descriptor, name)
    if is_dataclass(hint):
        message = descriptor.message_type._concrete_class
        kind = typing.cast(type, hint)
        return lambda value: to_message(value, message), lambda entry: from_message(kind, entry)
    if origin is not None:
        return dict, lambda entries: dict(sorted(entries.items()))
    if descriptor.cpp_type == descriptor.CPPTYPE_UINT32:
        return lambda value: unsigned(value, name.replace("_", "-")), None
    return None, None


def _fault(text: str) -> FaultSpec:
    from podrun.faults import parse_fault  # Few messages hold faults: programs start without their grammar.

    return parse_fault(text)


def _optional(of: Any, descriptor: Any, spelling: Spelling, name: str) -> tuple[Convert, Convert]:
    encode, decode = _converters(of, descriptor, spelling, name)
    none = int(spelling.none) if descriptor.enum_type else spelling.none

    def to_wire(value: object) -> Any:
        return none if value is None else encode(value) if encode else value

    def from_wire(plain: Any) -> Any:
        return None if plain <= none else decode(plain) if decode else plain

    return to_wire, from_wire


def _listed(kind: Callable[[Any], Any], convert: Convert | None) -> Convert:
    if convert is None:
        return kind
    return lambda entries: kind(map(convert, entries))


def _of_enum(kind: type[enum.Enum], descriptor: Any, name: str) -> tuple[Convert, Convert]:
    """The members of an enum, by the number of ``PREFIX_MEMBER`` in the protocol; by name where that wants text."""
    if descriptor.enum_type is None:
        return operator.attrgetter("name"), kind.__members__.__getitem__
    numbers = {entry.name.partition("_")[2]: entry.number for entry in descriptor.enum_type.values}
    to_number = {member: numbers[member.name] for member in kind}
    to_member = {number: member for member, number in to_number.items()}

    def decode(number: int) -> enum.Enum:
        if number not in to_member:
            known = ", ".join(entry.name for entry in descriptor.enum_type.values)
            raise UsageError(f"there is no {name.replace('_', ' ')} {number}", hint=f"There are: {known}.")
        return to_member[number]

    return to_number.__getitem__, decode


def unsigned(value: int, what: str) -> int:
    """The number, if a message can hold it. Raises UsageError, which names ``what``."""
    if not 0 <= value <= LARGEST_UNSIGNED:
        raise UsageError(f"{what} {value} is out of range", hint=f"Use 0 to {LARGEST_UNSIGNED}.")
    return value


ERROR_METADATA_KEY = "podrun-error-bin"
"""Trailing metadata with the error as JSON."""
