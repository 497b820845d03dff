"""Where plans of faults come from: files in YAML or JSON (``--fault-plan``), and the environment of a process.

    version: 1
    faults:
      - ipu:5@batch=17:tile-parity
      - target: {link: [2, 3]}
        when: {batch: 17}
        for: 10
        effect: degraded
        settings: {lanes: 4}
        optional: true

An entry is a short form (`podrun.core.fault_spec`) or a mapping that says the same. ``fault-plan.schema.json`` in this
package is `plan_schema`, for editors and other tools.

`ProcessPlan` holds the faults that ``PODRUN_FAULTS`` and the SDK's ``GCDA_OPTIONS`` plan for a program that runs
without ``podrun``.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podrun.core.documents import Document, parse_document, parse_json, read_document
from podrun.core.environment import GCDA_OPTIONS, PODRUN_FAULTS, environment
from podrun.core.errors import UsageError
from podrun.core.fault_effects import kinds_of
from podrun.core.fault_forms import make_fault, parse_fault, parse_faults
from podrun.core.fault_kinds import EVENTS, PROGRAM_EVENTS, REQUESTS, WHERE
from podrun.core.fault_spec import MOST_REPEATS, FaultSpec

VERSION = 1
HINT = "As in: {version: 1, faults: [{target: {ipu: 5}, when: {batch: 17}, effect: tile-parity}]} (podrun help faults)."


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a plan."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Fault plan of podrun (podrun --fault-plan FILE)",
        "type": "object",
        "additionalProperties": False,
        "required": ["version", "faults"],
        "properties": {
            "version": {"const": VERSION},
            "faults": {"type": "array", "items": {"$ref": "#/$defs/fault"}},
        },
        "$defs": {"fault": {"if": {"type": "string"}, "then": True, "else": _entry_schema()}},
    }


def _entry_schema() -> dict[str, Any]:
    """The JSON schema of a fault that is written as a mapping."""
    whole = {"type": "integer", "minimum": 0}
    pair = {"type": "array", "items": whole, "minItems": 2, "maxItems": 2}
    where = {target: pair if form == "A-B" else whole for target, form in WHERE.items()}
    targets: dict[str, Any] = {**where, "service": {"const": "vipu"}}
    effects = sorted({kind for target in WHERE for kind in kinds_of(target)})
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["target", "when", "effect"],
        "properties": {
            "target": {
                "type": "object",
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 1,
                "properties": targets,
            },
            "when": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "batch": whole,
                    "instruction": whole,
                    "time": {"type": "number", "minimum": 0},
                    "during": {"enum": [*EVENTS, *PROGRAM_EVENTS, *REQUESTS]},
                    "rate": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                    "seed": whole,
                },
            },
            "for": {"type": "integer", "minimum": 1},
            "repeat": {
                "type": "object",
                "additionalProperties": False,
                "required": ["times"],
                "properties": {
                    "times": {"type": "integer", "minimum": 1, "maximum": MOST_REPEATS},
                    "every": {"type": "integer", "minimum": 1},
                },
            },
            "effect": {"enum": effects},
            "settings": {"type": "object", "additionalProperties": {"type": ["number", "string"]}},
            "optional": {"type": "boolean"},
        },
    }


def read_plan(path: Path) -> tuple[FaultSpec, ...]:
    """The faults of a plan. Raises NotFoundError, or ConfigError that names file and line."""
    return _faults(read_document(path, hint=HINT))


def parse_plan(text: str, where: str = "the fault plan") -> tuple[FaultSpec, ...]:
    """The faults of a plan that is given as text; ``where``: its name in messages."""
    return _faults(parse_document(text, where, hint=HINT))


def _faults(document: Document) -> tuple[FaultSpec, ...]:
    document.check(plan_schema(), hint=HINT)
    specs: list[FaultSpec] = []
    for number, entry in enumerate(document.value["faults"]):
        place = ("faults", number)
        try:
            spec = parse_fault(entry) if isinstance(entry, str) else _fault(entry)
        except UsageError as error:
            raise document.error(place, error.message, hint=error.hint) from error
        if spec in specs:
            first = document.at(("faults", specs.index(spec)))
            raise document.error(
                place,
                f"fault {spec.text} is planned twice, also at {first}",
                hint="Keep one, or give it repeat: {times: 2}.",
            )
        specs.append(spec)
    return tuple(specs)


def _fault(entry: Mapping[str, Any]) -> FaultSpec:
    """The fault that a mapping describes; its shape is as the schema says."""
    ((target, indices),) = entry["target"].items()
    where = (
        "-".join(map(str, indices)) if isinstance(indices, Sequence) and target != "service" else str(indices)
    )
    when = {name: str(value) for name, value in entry["when"].items()}
    if "for" in entry:
        when["for"] = str(entry["for"])
    repeat = entry.get("repeat", {})
    when |= {
        name: str(repeat[key]) for name, key in (("repeat", "times"), ("every", "every")) if key in repeat
    }
    text = f"{target}:{where}@{','.join(f'{k}={v}' for k, v in when.items())}:{entry['effect']}"
    return make_fault(
        text,
        target,
        where,
        when,
        entry["effect"],
        entry.get("settings", {}),
        optional=entry.get("optional", False),
    )


UNSTRUCK_EXIT_CODE = 3
"""Exit code of a launch, or a standalone program, that ended well although a planned fault did not strike."""


_SOC = "simulateSOCError."


def simulated_soc_errors(environ: Mapping[str, str]) -> tuple[FaultSpec, ...]:
    """The faults that `GCDA_OPTIONS` asks for: a SoC error of IPU 0 when triggerCount batches are done, and once more
    each time the program is loaded again if rearmOnReset is true. Raises UsageError.
    """
    text = environ.get(GCDA_OPTIONS, "")
    if _SOC not in text:
        return ()
    options = parse_json(text, GCDA_OPTIONS, hint="Unset it, or correct it.")
    settings = {key.removeprefix(_SOC): value for key, value in dict(options).items() if key.startswith(_SOC)}
    names = str(settings.get("errorList", "")).replace(",", " ").split()
    count = str(settings.get("triggerCount", ""))
    known = {"IPUSOFTERR": "soft-error"}
    unknown = [name for name in names if name not in known]
    if unknown or not names or not count.isdecimal():
        what = (
            f"no SoC error {unknown[0]}" if unknown else f"{_SOC}errorList needs {_SOC}triggerCount, a number"
        )
        raise UsageError(
            f"{GCDA_OPTIONS}: {what}",
            hint='As in: {"simulateSOCError.errorList": "IPUSOFTERR", "simulateSOCError.triggerCount": "3"}',
        )
    again = str(settings.get("rearmOnReset", "false")).lower() == "true"
    repeat = f",repeat={MOST_REPEATS}" if again else ""
    may_miss = ":optional" if again else ""
    return tuple(
        parse_fault(f"ipu:0@batch={count}{repeat}:{known[name]}{may_miss}") for name in dict.fromkeys(names)
    )


class ProcessPlan:
    """The faults of one process. Each strikes once, in whichever of its emulated PODs it can strike first."""

    def __init__(self, specs: Iterable[FaultSpec]) -> None:
        self._lock = threading.Lock()
        self._planned = list(specs)
        self._all = frozenset(self._planned)
        self._left = {spec: spec.repeat for spec in self._planned}

    @property
    def planned(self) -> tuple[FaultSpec, ...]:
        """The faults that have not struck."""
        return tuple(self._planned)

    def claim(self, spec: FaultSpec) -> bool:
        """Take a fault that is about to strike off the plan. False for a fault of the plan that has struck before."""
        with self._lock:
            if spec in self._planned:
                self._left[spec] -= 1
                if not self._left[spec]:
                    self._planned.remove(spec)
                return True
            return spec not in self._all


def process_plan(environ: Mapping[str, str]) -> ProcessPlan:
    """The plan of `PODRUN_FAULTS`: the text that this process was started with always gives the same plan, another
    text a new one.

    Raises UsageError for text that is not a fault. The plan of this process is checked when the process ends: see
    `report_unstruck`.
    """
    global _of_this_process
    if _of_a_test is not None:
        return _of_a_test
    text = environ.get(PODRUN_FAULTS, "") + environ.get(GCDA_OPTIONS, "")
    specs = (*parse_faults(environ.get(PODRUN_FAULTS, "")), *simulated_soc_errors(environ))
    if not specs or text != environment().get(PODRUN_FAULTS, "") + environment().get(GCDA_OPTIONS, ""):
        return ProcessPlan(specs)
    if _of_this_process is None:
        plan = ProcessPlan(specs)
        atexit.register(_at_exit, plan, os.getpid())
        _of_this_process = plan
    return _of_this_process


def report_unstruck(specs: Iterable[FaultSpec]) -> str:
    """The message that names faults that did not strike; empty if none had to."""
    missed = [spec.text for spec in specs if not spec.optional]
    if not missed:
        return ""
    noun = "a planned fault" if len(missed) == 1 else f"{len(missed)} planned faults"
    return (
        f"{noun} did not strike: {', '.join(missed)}\n"
        "hint: Name a batch that the program reaches, or append :optional to a fault that need not strike.\n"
    )


@contextmanager
def plan_in_process(specs: Iterable[FaultSpec]) -> Iterator[ProcessPlan]:
    """Give every device that is opened inside the block these faults, instead of those of `PODRUN_FAULTS`."""
    global _of_a_test
    before, _of_a_test = _of_a_test, ProcessPlan(specs)
    try:
        yield _of_a_test
    finally:
        _of_a_test = before


_of_this_process: ProcessPlan | None = None
_of_a_test: ProcessPlan | None = None


def _at_exit(plan: ProcessPlan, owner: int) -> None:
    """Name the faults that did not strike, and fail the process unless it fails already with an exception."""
    message = report_unstruck(plan.planned)
    if not message or os.getpid() != owner:
        return
    sys.stdout.flush()
    sys.stderr.write(f"podrun: {message}")
    sys.stderr.flush()
    if getattr(sys, "last_value", None) is None:
        # Python takes no exit code from an exit handler. This handler is registered before a device is opened, so that
        # it runs after those that close devices.
        os._exit(UNSTRUCK_EXIT_CODE)
