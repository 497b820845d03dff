"""Errors as plain values, for another process or a file, and back."""

from __future__ import annotations

import enum
import inspect
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from podrun.core.errors import ErrorCause, Fault, InternalError, PodrunError, ServiceError, UsageError
from podrun.core.fault_spec import FaultSpec

RESERVED = frozenset(("type", "bases", "message", "hint", "exit_code", "fault"))
"""Keys that no field of an error may use."""


AnyError = TypeVar("AnyError", bound=PodrunError)


def error_classes() -> Iterator[type[PodrunError]]:
    """`PodrunError` and all its loaded subclasses, base classes first."""
    waiting, seen = [PodrunError], {PodrunError}
    while waiting:
        kind = waiting.pop(0)
        yield kind
        new = [derived for derived in kind.__subclasses__() if derived not in seen]
        seen.update(new)
        waiting += new


def fields_of(kind: type[PodrunError]) -> Mapping[str, Any]:
    """The fields that an error class declares, each with its annotated type."""
    hints = get_type_hints(kind.__init__)
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {
        p.name: hints.get(p.name, Any) for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "hint"
    }


def error_to_dict(error: PodrunError) -> dict[str, Any]:
    """Plain data, ready for JSON, from which `error_from_dict` makes an equal error."""
    kind = type(error)
    bases = [base.__name__ for base in kind.__mro__[1:] if issubclass(base, PodrunError)]
    data: dict[str, Any] = {
        "type": kind.__name__,
        "bases": bases,
        "message": error.message,
        "hint": error.hint,
    }
    data |= {"exit_code": error.exit_code, "fault": error.fault.value}
    return data | {name: _plain(getattr(error, name)) for name in fields_of(kind) if hasattr(error, name)}


def error_from_dict(data: Mapping[str, Any], *, unknown: type[PodrunError] = ServiceError) -> PodrunError:
    """The error that `error_to_dict` described; an error of class ``unknown`` if neither its class nor a base is
    loaded.

    A class whose required fields are missing or wrong arrives as its nearest base that can be made.
    """
    name, bases = str(data.get("type", "")), data.get("bases", ())
    wanted = [name, *(bases if isinstance(bases, (list, tuple)) else ())]
    loaded: dict[str, type[PodrunError]] = {}
    for kind in error_classes():
        loaded.setdefault(kind.__name__, kind)
    for candidate in wanted:
        candidate_type = loaded.get(candidate) if isinstance(candidate, str) else None
        error = _made(candidate_type, data, exact=candidate == name) if candidate_type is not None else None
        if error is not None:
            return error
    return _made(unknown, data, exact=False) or ServiceError(str(data.get("message", "")))


def error_to_json(error: PodrunError) -> str:
    """`error_to_dict` as JSON text."""
    return json.dumps(error_to_dict(error))


def error_from_json(text: str | bytes, *, unknown: type[PodrunError] = ServiceError) -> PodrunError:
    """The error that `error_to_json` described. ServiceError if the text is not a JSON object."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        return ServiceError("another process reported an error that cannot be read")
    return error_from_dict(data, unknown=unknown)


def cause_to_dict(cause: ErrorCause) -> dict[str, Any]:
    """Plain data, ready for JSON, from which `cause_from_dict` makes an equal cause."""
    plain: dict[str, Any] = _plain(cause)
    return plain


def cause_from_dict(data: object) -> ErrorCause | None:
    """The cause that `cause_to_dict` described; None for anything else."""
    try:
        cause: ErrorCause = _typed(ErrorCause, data)
    except (KeyError, TypeError, ValueError):
        return None
    return cause


def copy_error(error: AnyError) -> AnyError:
    """An equal error without traceback, so that several threads may each raise one."""
    copied = _made(type(error), error_to_dict(error), exact=True)
    if not isinstance(copied, type(error)):
        raise InternalError(f"a {type(error).__name__} cannot be made again from its fields")
    return copied


def _made(kind: type[PodrunError], data: Mapping[str, Any], *, exact: bool) -> PodrunError | None:
    """An error of a class; None if the data lack a field that the class requires. ``exact`` means that this is the
    class that was described, so that the message need not name another.
    """
    message, hint, name = str(data.get("message", "")), data.get("hint"), str(data.get("type", ""))
    fields = {}
    for field, annotation in fields_of(kind).items():
        try:
            fields[field] = _typed(annotation, data[field])
        except (KeyError, TypeError, ValueError):
            continue  # Keep the constructor's default, if there is one.
    try:
        error = kind(
            message if exact or not name else f"{name}: {message}",
            hint=None if hint is None else str(hint),
            **fields,
        )
    except TypeError:
        return None
    code, fault = data.get("exit_code"), data.get("fault")
    if type(code) is int and code != error.exit_code:
        error.exit_code = code
    if isinstance(fault, str) and fault in {member.value for member in Fault} and fault != error.fault.value:
        error.fault = Fault(fault)
    return error


def _plain(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, FaultSpec):
        return str(value)
    if isinstance(value, ErrorCause) and value.fault is None:
        return _by_name(value) | {"fault": ""}
    if is_dataclass(value) and not isinstance(value, type):
        return _by_name(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _by_name(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _fault(text: object) -> FaultSpec | None:
    """The fault that another process names; None if it names none, or one that this release does not know."""
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no text")
    from podrun.core.fault_forms import (
        parse_fault,  # Few errors hold faults: programs start without their grammar.
    )

    try:
        return parse_fault(text) if text else None
    except UsageError:
        return None


def value_hints(kind: type) -> dict[str, Any]:
    """The types of a value's fields. `podrun.core.errors` imports no faults, so that commands start without them."""
    return get_type_hints(kind, localns={"FaultSpec": FaultSpec})


def _typed(annotation: Any, value: Any) -> Any:
    """A received value in the form that its annotation asks for. Raises TypeError, KeyError or ValueError if it does
    not fit.
    """
    if annotation == FaultSpec | None:
        return _fault(value)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any or (origin is None and annotation in (int, float, str, bool, type(None))):
        if annotation is not Any and type(value) is not annotation:
            raise TypeError(f"{value!r} is not of type {annotation}")
        return value
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation[value]
    if isinstance(annotation, type) and is_dataclass(annotation):
        if not isinstance(value, Mapping):
            raise TypeError(f"{value!r} is not an object")
        hints = value_hints(annotation)
        return annotation(**{name: _typed(hints[name], value[name]) for name in hints if name in value})
    if origin is tuple and arguments[1:] == (...,):
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{value!r} is not a list")
        return tuple(_typed(arguments[0], item) for item in value)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _typed(option, value)
            except (KeyError, TypeError, ValueError):
                continue
    raise TypeError(f"no field of an error has type {annotation}")
