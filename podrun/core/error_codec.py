"""Errors as plain data and back: how an error of one process is raised in another.

`error_to_dict` writes any `PodrunError`: its class and the classes it derives from by name, message, hint, exit code,
whose fault it is, and its fields. A field is a keyword-only parameter of the class's constructor that the error keeps
as an attribute of the same name (``rank``, ``recovery_action``, ``profile_path``). `error_from_dict` finds the class
among the subclasses of `PodrunError` that this process has loaded. Where the class is not loaded, the error arrives as
its nearest loaded base, with the name of its class in the message and its own exit code and fault.

Nothing received is evaluated: names are looked up among error classes, and values are checked against the annotations
of the constructor.
"""

from __future__ import annotations

import enum
import inspect
import json
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from podrun.core.errors import Fault, PodrunError, ServiceError

RESERVED = frozenset(("type", "bases", "message", "hint", "exit_code", "fault"))
"""Keys that no field of an error may have."""

AnyError = TypeVar("AnyError", bound=PodrunError)


def error_classes() -> Iterator[type[PodrunError]]:
    """`PodrunError` and all of its subclasses that are loaded, bases before the classes derived from them."""
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
    """The error that `error_to_dict` described; an ``unknown`` if neither its class nor a base of it is loaded.

    A class whose fields do not have the values they need arrives as its nearest base that can be made.
    """
    name, bases = str(data.get("type", "")), data.get("bases", ())
    wanted = [name, *(bases if isinstance(bases, (list, tuple)) else ())]
    loaded: dict[str, type[PodrunError]] = {}
    for kind in error_classes():
        loaded.setdefault(kind.__name__, kind)
    for candidate in wanted:
        found = loaded.get(candidate) if isinstance(candidate, str) else None
        error = _made(found, data, exact=candidate == name) if found is not None else None
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


def copy_error(error: AnyError) -> AnyError:
    """An equal error without traceback, so that several threads may each raise one."""
    copied = _made(type(error), error_to_dict(error), exact=True)
    assert isinstance(copied, type(error))
    return copied


def _made(kind: type[PodrunError], data: Mapping[str, Any], *, exact: bool) -> PodrunError | None:
    """An error of a class; None if the data lack a field that the class requires. ``exact``: it is the class that
    was described, so the message need not name another.
    """
    message, hint, name = str(data.get("message", "")), data.get("hint"), str(data.get("type", ""))
    fields = {}
    for field, annotation in fields_of(kind).items():
        try:
            fields[field] = _typed(annotation, data[field])
        except (KeyError, TypeError, ValueError):
            continue  # the constructor's default stands, if there is one
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
    if isinstance(fault, str) and fault in {each.value for each in Fault} and fault != error.fault.value:
        error.fault = Fault(fault)
    return error


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _typed(annotation: Any, value: Any) -> Any:
    """A received value as its annotation wants it. Raises TypeError, KeyError or ValueError if it is another."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any or (origin is None and annotation in (int, float, str, bool, type(None))):
        if annotation is not Any and type(value) is not annotation:
            raise TypeError(f"{value!r} is not of type {annotation}")
        return value
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation[value]
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
