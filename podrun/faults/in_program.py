"""Faults that strike in the process of an instance: when it writes a checkpoint, or takes part in
a collective of instances.

podrun writes those of a launch to a file that `PODRUN_PROGRAM_FAULTS` names in the environment of its instances, one
a line. An instance notes each strike in a second file beside it, so that a fault strikes as often as planned however
often instances are started. In a program without podrun they come from its `ProcessPlan`.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from podrun.core.environment import (
    OMPI_COMM_WORLD_RANK,
    PODRUN_PROGRAM_FAULTS,
    PODRUN_RESTART_COUNT,
    environment,
)
from podrun.core.fault_forms import parse_fault
from podrun.core.fault_spec import FaultSpec, FaultTarget
from podrun.core.quick_dataclass import dataclass
from podrun.faults.plan_file import process_plan

log = logging.getLogger("podrun.faults")

_WAKE = (
    "import os, signal, sys, time; pid = os.pidfd_open(int(sys.argv[1])); os.kill(int(sys.argv[1]), signal.SIGSTOP); "
    "time.sleep(float(sys.argv[2])); signal.pidfd_send_signal(pid, signal.SIGCONT)"
)
"""Source of a program that stops the process of a number, and lets it continue after some seconds."""


class ProgramFaults:
    """The faults of one instance. ``claim`` is called before a fault strikes; False if it has struck as often as it
    may. ``kill`` ends this process.
    """

    def __init__(
        self,
        planned: Callable[[], Iterable[FaultSpec]],
        claim: Callable[[FaultSpec], bool],
        instance: int = 0,
        kill: Callable[[int, int], object] = os.kill,
    ) -> None:
        self._planned, self._claim, self._instance, self._kill = planned, claim, instance, kill

    def take(self, event: str, among: Collection[int] | None = None) -> FaultSpec | None:
        """The fault that strikes this instance at an event, if any. ``among``: the instances that take part."""
        for spec in tuple(self._planned()):
            if among is not None and not set(spec.indices) <= set(among):
                continue
            if spec.during == event and self._instance in spec.indices and self._claim(spec):
                log.warning("fault %s strikes", spec.text)
                return spec
        return None

    def through_write(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The bytes of a checkpoint on their way to the disk, which a fault may stop.

        A full disk takes as many bytes as the fault says, and raises OSError; an instance is killed or stopped after
        the first piece.
        """
        spec = self.take("checkpoint-write")
        if spec is None:
            yield from pieces
            return
        room = int(spec.number("bytes"))
        for number, piece in enumerate(pieces):
            if spec.target is FaultTarget.DISK:
                size = memoryview(piece).nbytes
                if size > room:
                    yield memoryview(piece).cast("B")[:room]
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                room -= size
            elif number == 1:
                self._strike(spec)
            yield piece

    def _strike(self, spec: FaultSpec) -> None:
        if spec.kind == "killed":
            self._kill(os.getpid(), signal.SIGKILL)
        else:
            words = (sys.executable, "-c", _WAKE, str(os.getpid()), str(spec.number("seconds")))
            subprocess.Popen(words, start_new_session=True).wait()


def program_faults(environ: Mapping[str, str] | None = None) -> ProgramFaults:
    """The faults that may strike in this process."""
    variables = environment(environ)
    rank = variables.get(OMPI_COMM_WORLD_RANK, "0")
    instance = int(rank) if rank.isdecimal() else 0
    if variables.get(PODRUN_PROGRAM_FAULTS):
        plan, number = (
            PlanOfALaunch(Path(variables[PODRUN_PROGRAM_FAULTS])),
            variables.get(PODRUN_RESTART_COUNT, "0"),
        )
        life = int(number) if number.isdecimal() else 0
        return ProgramFaults(
            lambda: plan.planned_for(instance, life),
            lambda spec: plan.note_strike(spec, instance, life),
            instance,
        )
    own = process_plan(variables)
    return ProgramFaults(lambda: [spec for spec in own.planned if spec.in_program], own.claim, instance)


@dataclass(frozen=True, slots=True)
class _JointStrike:
    """One strike of a fault: in which life, and the instances that it has struck."""

    life: int
    instances: set[int]

    def misses(self, instance: int, life: int) -> bool:
        """True iff it has still to strike an instance."""
        return self.life == life and instance not in self.instances


class PlanOfALaunch:
    """The file with a launch's faults that strike in instances, and the file of strikes beside it."""

    def __init__(self, file: Path) -> None:
        self._file, self._struck = file, file.with_name(file.name + ".struck")

    def write(self, faults: Sequence[FaultSpec]) -> None:
        """Write these faults to the file."""
        self._file.write_text("".join(f"{spec.text}\n" for spec in faults), encoding="utf-8")

    def left(self) -> list[FaultSpec]:
        """The faults that have still to strike."""
        return [spec for spec in self._planned() if len(self._strikes(spec)) < spec.repeat]

    def planned_for(self, instance: int, life: int) -> list[FaultSpec]:
        """The faults that may strike an instance that was started ``life`` times before. A fault between two instances
        strikes both of them at once, and counts once.
        """
        planned = []
        for spec in self._planned():
            strikes = self._strikes(spec)
            if len(strikes) < spec.repeat or any(s.misses(instance, life) for s in strikes):
                planned.append(spec)
        return planned

    def note_strike(self, spec: FaultSpec, instance: int = 0, life: int = 0) -> bool:
        """Note that a fault strikes. This is written before the strike, which may end the process."""
        handle = os.open(self._struck, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, f"{instance} {life} {time.time()} {spec.text}\n".encode())
        finally:
            os.close(handle)
        return True

    def strikes(self) -> list[tuple[str, FaultSpec, float]]:
        """Each strike as an instance told it: the instance, the fault, and seconds of the wall clock."""
        parts = [line.split(" ", 3) for line in self._lines(self._struck)]
        return [
            (f"instance {instance}", parse_fault(text), float(seconds))
            for instance, _, seconds, text in parts
        ]

    def _planned(self) -> list[FaultSpec]:
        return [parse_fault(line) for line in self._lines(self._file)]

    def _strikes(self, spec: FaultSpec) -> list[_JointStrike]:
        """How often a fault has struck, and which instances."""
        strikes: list[_JointStrike] = []
        for line in self._lines(self._struck):
            instance, life, _, text = line.split(" ", 3)
            if text != spec.text:
                continue
            joined = next((s for s in strikes if s.misses(int(instance), int(life))), None)
            if joined is None or len(spec.indices) == 1:
                strikes.append(_JointStrike(int(life), {int(instance)}))
            else:
                joined.instances.add(int(instance))
        return strikes

    @staticmethod
    def _lines(file: Path) -> list[str]:
        return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
