"""Errors survive the way to another process: class, message, hint, exit code, fault and every declared field."""

from __future__ import annotations

import enum
import functools
import importlib
import json
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

import podrun
from podrun.core.error_codec import (
    RESERVED,
    cause_from_dict,
    cause_to_dict,
    copy_error,
    error_classes,
    error_from_dict,
    error_from_json,
    error_to_dict,
    error_to_json,
    fields_of,
    value_hints,
)
from podrun.core.errors import (
    DeadlineError,
    ErrorCause,
    ExistsError,
    GraphMemoryAllocationError,
    PodrunError,
    RecoverableRuntimeError,
    RecoveryAction,
    ServiceError,
    SystemRuntimeError,
    UsageError,
)
from podrun.faults import FaultSpec, parse_fault

CLASS = re.compile(r"^[ ]*class (\w+)\(([^()]*)\):", re.MULTILINE)
"""A class that has bases: its name and they. To parse all files takes seconds."""


@functools.cache
def _modules_with_errors() -> tuple[str, ...]:
    """The modules whose source derives a class from `PodrunError` or from one that does. Importing all modules would
    import every framework."""
    root = Path(podrun.__file__).parent
    derived: list[tuple[str, str, set[str]]] = []  # (module, class, last words of its bases)
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        if not module.startswith(("podrun.compat", "podrun.poptorch")) and not module.endswith("__main__"):
            for name, bases in CLASS.findall(path.read_text(encoding="utf-8")):
                derived.append((module, name, set(re.findall(r"\w+(?=\s*(?:,|$))", bases))))
    errors, count = {"PodrunError"}, 0
    while count < len(errors):
        count = len(errors)
        errors |= {name for _, name, bases in derived if bases & errors}
    return tuple(sorted({module for module, name, _ in derived if name in errors}))


def _all_error_classes() -> list[type[PodrunError]]:
    """Every error class of the package, but PopTorch's, which are raised in the user's process and never travel."""
    for module in _modules_with_errors():
        importlib.import_module(module)
    return [
        kind
        for kind in error_classes()
        if kind.__module__.startswith("podrun.") and not kind.__module__.startswith("podrun.poptorch.")
    ]


def _sample(annotation: Any) -> Any:
    """A value of an annotated type that is no default."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return list(annotation)[-1]
    if get_origin(annotation) is tuple:
        return (_sample(get_args(annotation)[0]), _sample(get_args(annotation)[0]))
    if annotation is FaultSpec:
        return parse_fault("link:2-3@batch=7,repeat=2:down")
    if isinstance(annotation, type) and is_dataclass(annotation):
        return annotation(**{name: _sample(hint) for name, hint in value_hints(annotation).items()})
    samples = {int: 7, str: "somewhere", float: 2.5, bool: True}
    if annotation in samples:
        return samples[annotation]
    return _sample(get_args(annotation)[0])


def test_every_error_class_arrives_as_itself_with_all_that_it_declares() -> None:
    classes = _all_error_classes()
    assert len(classes) > 40
    for kind in classes:
        fields = {name: _sample(annotation) for name, annotation in fields_of(kind).items()}
        assert not RESERVED & fields.keys(), kind
        error = kind("what happened", hint="what to do", **fields)
        arrived = error_from_json(error_to_json(error))
        assert type(arrived) is kind
        assert (arrived.message, str(arrived), arrived.hint) == (
            "what happened",
            "what happened",
            "what to do",
        )
        assert (arrived.exit_code, arrived.fault) == (error.exit_code, error.fault)
        for name, value in fields.items():
            assert getattr(arrived, name) == value, (kind, name)


def test_a_cause_tells_its_fault_in_the_short_form_and_an_unknown_one_is_none() -> None:
    assert cause_to_dict(ErrorCause())["fault"] == ""
    plain = cause_to_dict(ErrorCause(fault=parse_fault("ipu:5@batch=17:tile-parity"), ipus=(5,)))
    assert plain["fault"] == "ipu:5@batch=17:tile-parity"
    assert cause_from_dict(plain | {"fault": "ipu:5@batch=17:of-the-next-release"}) == ErrorCause(ipus=(5,))
    assert cause_from_dict(plain | {"fault": 3}) is None


def test_class_names_of_errors_are_unique() -> None:
    names = [kind.__name__ for kind in _all_error_classes()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", [DeadlineError, ExistsError])
def test_specific_classes_are_not_flattened(kind: type[PodrunError]) -> None:
    assert type(error_from_dict(error_to_dict(kind("m")))) is kind


def test_the_path_of_the_memory_report_survives() -> None:
    arrived = error_from_dict(
        error_to_dict(GraphMemoryAllocationError("too big", profile_path="/tmp/p.json"))
    )
    assert isinstance(arrived, GraphMemoryAllocationError)
    assert arrived.profile_path == "/tmp/p.json"


def test_an_unknown_class_arrives_as_its_nearest_known_base() -> None:
    data = {"type": "Newer", "bases": ["Odd", "ExistsError", "UsageError", "PodrunError"], "message": "m"}
    arrived = error_from_dict({**data, "hint": "h", "exit_code": 5, "fault": "system"})
    assert type(arrived) is ExistsError
    assert (arrived.message, arrived.hint, arrived.exit_code) == ("Newer: m", "h", 5)
    assert arrived.fault.value == "system"
    assert UsageError("another").exit_code == 2


def test_what_nobody_knows_is_a_service_error_or_what_the_caller_says() -> None:
    assert type(error_from_dict({"type": "Foreign", "message": "m"})) is ServiceError
    assert type(error_from_dict({"type": "Foreign", "message": "m"}, unknown=UsageError)) is UsageError
    assert str(error_from_dict({"message": "m"})) == "m"


@pytest.mark.parametrize("action", [None, 3, "NO_SUCH_RESET", ["IPU_RESET"]])
def test_a_class_without_a_field_it_needs_arrives_as_its_base(action: object) -> None:
    data = error_to_dict(RecoverableRuntimeError("m", recovery_action=RecoveryAction.IPU_RESET))
    assert type(error_from_dict({**data, "recovery_action": action})) is SystemRuntimeError


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"type": ["UsageError"], "bases": {"a": 1}}'])
def test_whatever_is_received_gives_an_error_and_no_exception(text: str) -> None:
    assert isinstance(error_from_json(text), PodrunError)


def test_a_field_of_another_type_keeps_its_default() -> None:
    data = error_to_dict(GraphMemoryAllocationError("m", profile_path="p"))
    arrived = error_from_dict({**data, "profile_path": 3, "hint": 4, "exit_code": "x", "fault": []})
    assert isinstance(arrived, GraphMemoryAllocationError)
    assert (arrived.profile_path, arrived.hint, arrived.exit_code) == ("", "4", 1)


def test_a_copy_is_equal_and_another_object() -> None:
    error = RecoverableRuntimeError("m", recovery_action=RecoveryAction.FULL_RESET, where="IPU 3", hint="h")
    copied = copy_error(error)
    assert copied is not error
    assert error_to_dict(copied) == error_to_dict(error)


def test_plain_data_is_json() -> None:
    assert json.loads(error_to_json(UsageError("m"))) == error_to_dict(UsageError("m"))
