"""The faults that ``PODRUN_FAULTS`` plans for a program that runs without ``podrun``."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from podrun.core.environment import environment
from podrun.core.errors import UsageError
from podrun.faults.spec import MOST_REPEATS, FaultSpec, parse_fault, parse_faults

VARIABLE = "PODRUN_FAULTS"
"""Faults to plan, separated by semicolons or white space."""
UNSTRUCK_EXIT_CODE = 3
"""Exit code of a launch, or a standalone program, that ended well although a planned fault did not strike."""


GCDA_OPTIONS = "GCDA_OPTIONS"
"""The SDK's own way in: JSON with ``simulateSOCError.errorList``, ``.triggerCount`` and ``.rearmOnReset``."""
_SOC = "simulateSOCError."


def simulated_soc_errors(environ: Mapping[str, str]) -> tuple[FaultSpec, ...]:
    """The faults that `GCDA_OPTIONS` asks for: a SoC error of IPU 0 when triggerCount batches are done, and once more
    each time the program is loaded again if rearmOnReset is true. Raises UsageError.
    """
    text = environ.get(GCDA_OPTIONS, "")
    if _SOC not in text:
        return ()
    try:
        options = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{GCDA_OPTIONS} is not JSON: {error}", hint="Unset it, or correct it.") from error
    given = {key.removeprefix(_SOC): value for key, value in dict(options).items() if key.startswith(_SOC)}
    names = str(given.get("errorList", "")).replace(",", " ").split()
    count = str(given.get("triggerCount", ""))
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
    again = str(given.get("rearmOnReset", "false")).lower() == "true"
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
        """Take a fault that is about to strike off the plan. False for one of the plan's that struck before."""
        with self._lock:
            if spec in self._planned:
                self._left[spec] -= 1
                if not self._left[spec]:
                    self._planned.remove(spec)
                return True
            return spec not in self._all


def process_plan(environ: Mapping[str, str]) -> ProcessPlan:
    """The plan of `VARIABLE`: what this process was started with always gives the same one, another text a new one.

    Raises UsageError for text that is no fault. The plan of this process is checked when the process ends: see
    `report_unstruck`.
    """
    global _of_this_process
    if _of_a_test is not None:
        return _of_a_test
    text = environ.get(VARIABLE, "") + environ.get(GCDA_OPTIONS, "")
    specs = (*parse_faults(environ.get(VARIABLE, "")), *simulated_soc_errors(environ))
    if not specs or text != environment().get(VARIABLE, "") + environment().get(GCDA_OPTIONS, ""):
        return ProcessPlan(specs)
    if _of_this_process is None:
        plan = ProcessPlan(specs)
        atexit.register(_at_exit, plan, os.getpid())
        _of_this_process = plan
    return _of_this_process


def report_unstruck(specs: Iterable[FaultSpec]) -> str:
    """The message that names faults that did not strike; empty if none has to."""
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
    """Every device that is opened meanwhile in this process has these faults, instead of those of `VARIABLE`."""
    global _of_a_test
    before, _of_a_test = _of_a_test, ProcessPlan(specs)
    try:
        yield _of_a_test
    finally:
        _of_a_test = before


_of_this_process: ProcessPlan | None = None
_of_a_test: ProcessPlan | None = None


def _at_exit(plan: ProcessPlan, owner: int) -> None:
    """Name the faults that did not strike; fail the process unless it fails already with an exception."""
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
