"""What is broken on a machine, what makes it whole again, and what slows it down.

Only the recovery action that an error names clears it, or a stronger one that includes it: a partition reset resets
IPUs too, and power-cycling resets everything. A machine that is lost, or has failed for good, comes back only as a new
one.

Some faults raise no error. Slow and throttled IPUs, slow machines and degraded links lengthen the modelled time of
batches (`LastingFaults`); the others, such as a flipped bit or a stopped host process, happen at the moment of the
strike. `podrun.faults.DISTURBANCES` lists them.

`WorkDone` is for reports: what a machine has done. `podrun.device.activity` says how busy it is.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from podrun.core.errors import PoplarError, RecoveryAction, UsageError
from podrun.core.executable import Executable
from podrun.core.ipu_states import IpuErrorState
from podrun.core.quick_dataclass import dataclass
from podrun.device.activity import LINK_CAUSES
from podrun.faults import EFFECTS, FaultSpec, FaultTarget, Strike, error_for, recovery_hint


@dataclass(frozen=True, slots=True)
class Condition:
    """One broken thing: the state that monitor tools show, the error that it raises, and what clears it (None: nothing
    does).
    """

    state: IpuErrorState
    error: PoplarError
    action: RecoveryAction | None

    def refusal(self, partition: str, agent: str) -> str:
        """Why nobody can attach to what is broken, and what to do."""
        needed = "" if self.action is None else f" ({self.action.value} needed)"
        hint = recovery_hint(
            *(self.action, type(self.error), self.error.where, partition, agent), attached=False
        )
        return f"cannot be used{needed}: {self.error.message}. {hint}"


class Health:
    """The broken things of one machine whose partition IPUs are ``ipus``; ``agent``: its name, for hints.
    Guarded by the machine's lock.
    """

    def __init__(self, ipus: Iterable[int], partition: str, agent: str = "") -> None:
        self._agent = agent
        self._mine = frozenset(ipus)
        self._partition = partition
        self._ipus: dict[int, Condition] = {}
        self._links: dict[tuple[int, int], Condition] = {}
        self._machine: Condition | None = None

    def record(self, spec: FaultSpec, batch: int | None = None) -> PoplarError:
        """Note that the fault happened, in ``batch``; gives the error to raise."""
        effect = EFFECTS[spec.target.value, spec.kind]
        error = error_for(spec, partition=self._partition, agent=self._agent, batch=batch)
        if effect.state is None:
            return error  # Nothing stays broken.
        condition = Condition(effect.state, error, effect.action)
        match spec.target:
            case FaultTarget.IPU:
                self._ipus[spec.indices[0]] = condition
            case FaultTarget.LINK:
                self._links[spec.indices[0], spec.indices[1]] = condition
            case FaultTarget.MACHINE | FaultTarget.GW_LINK:
                self._machine = condition
        return condition.error

    def blocking(self, ipus: Iterable[int]) -> Condition | None:
        """The worst thing that keeps ``ipus`` from being used, if any."""
        if self._machine is not None:
            return self._machine
        wanted = set(ipus)
        for ends, condition in sorted(self._links.items()):
            if wanted & set(ends):
                return condition
        return next((c for ipu, c in sorted(self._ipus.items()) if ipu in wanted), None)

    def condition(self, ipu: int) -> Condition | None:
        """The condition of an IPU or its whole machine, without links."""
        return self._machine or self._ipus.get(ipu)

    def links_down(self, ipu: int) -> tuple[int, ...]:
        """The IPUs to which the IPU's link is down."""
        return tuple(sorted(a + b - ipu for a, b in self._links if ipu in (a, b)))

    def reset_ipus(self, ipus: Iterable[int]) -> None:
        """Clear the errors of these IPUs that an IPU_RESET clears."""
        for ipu in ipus:
            if ipu in self._ipus and self._ipus[ipu].action is RecoveryAction.IPU_RESET:
                del self._ipus[ipu]

    def reset_links(self) -> None:
        """PARTITION_RESET: retrain links and reset all IPUs."""
        self._links.clear()
        self.reset_ipus(self._mine)
        if self._machine is not None and self._machine.action is RecoveryAction.PARTITION_RESET:
            self._machine = None

    def power_cycle(self) -> None:
        """FULL_RESET. A machine that failed for good stays failed."""
        self._ipus.clear()
        self._links.clear()
        if self._machine is not None and self._machine.action is not None:
            self._machine = None


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The work of a machine. Modelled seconds are of the IPUs, emulation seconds of this host's clock.

    ``samples``: on its replicas, counted by the first machine of each. It becomes None with a program that does not say
    how many samples a micro-batch holds, until the next job.
    """

    batches: int = 0
    samples: int | None = 0
    modelled_s: float = 0.0
    emulation_s: float = 0.0

    def of_a_new_job(self) -> WorkDone:
        """The counts with which a new job begins: those so far, and 0 samples where it was not known how many there
        were.
        """
        return self if self.samples is not None else replace(self, samples=0)

    def and_a_run(
        self,
        executable: Executable,
        passes: int,
        modelled_s: float,
        emulation_s: float,
        *,
        position: int = 0,
    ) -> WorkDone:
        """The sum of this and ``passes`` passes of a program. ``position``: of the machine within its replicas."""
        per_pass = samples_per_pass(executable) if position == 0 else 0
        samples = None if per_pass is None or self.samples is None else self.samples + passes * per_pass
        batches = passes * executable.batches_per_pass
        return WorkDone(
            self.batches + batches, samples, self.modelled_s + modelled_s, self.emulation_s + emulation_s
        )


def samples_per_pass(executable: Executable) -> int | None:
    """Samples of one pass on one machine; None if the front end does not say how many a micro-batch holds."""
    per_micro_batch = executable.metadata.get("samples_per_micro_batch")
    if not isinstance(per_micro_batch, int):
        return None
    return per_micro_batch * executable.accumulation_factor * executable.layout.replicas_per_machine


log = logging.getLogger("podrun.device")

LANES = 8
"""Lanes of an IPU-Link."""


@dataclass(frozen=True, slots=True)
class _Lasting:
    """A fault that lengthens batches ``first`` to ``last`` (None: all that follow)."""

    spec: FaultSpec
    first: int
    last: int | None

    def covers(self, batch: int) -> bool:
        return self.first <= batch and (self.last is None or batch <= self.last)


class LastingFaults:
    """Faults that lengthen the batches of a job on one machine. They end with the loaded program."""

    def __init__(self) -> None:
        self._found: list[_Lasting] = []

    def begin(self, strike: Strike) -> None:
        """Begin a fault with its batch."""
        spec = strike.spec
        last = strike.batch + spec.lasts - 1 if spec.lasts else None
        self._found.append(_Lasting(spec, strike.batch, last))

    def throttled_mhz(self, ipu: int, batch: int) -> float | None:
        """The lowest clock to which a fault throttles an IPU in a batch; None if none does."""
        throttled = [e.spec for e in self._found if e.spec.kind == "throttled" and e.covers(batch)]
        return min((spec.number("mhz") for spec in throttled if ipu in spec.indices), default=None)

    def link_error_rate(self, ipu: int, batch: int) -> float:
        """The largest share of packets that a degraded link of an IPU sends again in a batch."""
        if not self._found:
            return 0.0
        degraded = [e.spec for e in self._found if e.spec.kind == "degraded" and e.covers(batch)]
        return max((spec.number("error-rate") for spec in degraded if ipu in spec.indices), default=0.0)

    def extra_seconds(self, executable: Executable, done: int, batches: int) -> float:
        """Modelled seconds that the faults add to ``batches`` batches after ``done``; 0 without a model."""
        if not self._found:
            return 0.0
        step = executable.tile_report.get("step")
        if not isinstance(step, Mapping) or not step.get("seconds"):
            return 0.0
        batches_per_pass = executable.batches_per_pass
        total = float(step["seconds"]) / batches_per_pass
        causes: Mapping[str, float] = step.get("seconds_by_cause", {})
        links = sum(float(causes.get(name, 0.0)) for name in LINK_CAUSES) / batches_per_pass
        clock = float(step.get("cycles", 0)) / float(step["seconds"])
        added = 0.0
        for batch in range(done, done + batches):
            now = [entry.spec for entry in self._found if entry.covers(batch)]
            chip = max((_chip_factor(spec, clock) for spec in now), default=1.0)
            link = max((_link_factor(spec) for spec in now), default=1.0)
            added += (total - links) * (chip - 1.0) + links * (link - 1.0)
        return added


def _chip_factor(spec: FaultSpec, clock_hz: float) -> float:
    if spec.kind == "throttled":
        return max(1.0, clock_hz / (spec.number("mhz") * 1e6))
    return spec.number("factor") if spec.kind == "slow" else 1.0


def _link_factor(spec: FaultSpec) -> float:
    """Factor for fewer lanes that carry the same bytes, and for packets that are sent again."""
    if spec.kind != "degraded":
        return 1.0
    return LANES / spec.number("lanes") / (1.0 - spec.number("error-rate"))


LASTING = ("slow", "throttled", "degraded")


def flip_bit(value: np.ndarray, spec: FaultSpec) -> None:
    """Flip one bit of an array, in place. Raises UsageError if it has no such element or bit."""
    flat = value.reshape(-1)
    if not np.shares_memory(flat, value):
        raise UsageError(f"fault {spec.text}: the variable does not lie in one piece")
    element, bit = int(spec.number("element")), int(spec.number("bit"))
    if element >= flat.size or bit >= 8 * flat.dtype.itemsize:
        raise UsageError(
            f"fault {spec.text}: the variable has elements 0 to {flat.size - 1} of {8 * flat.dtype.itemsize} bits"
        )
    octets = flat.view(np.uint8).reshape(flat.size, -1)
    octets[element, bit // 8] ^= np.uint8(1 << bit % 8)


def signal_process(pid: int, host: str, spec: FaultSpec, kill: Callable[[int, int], Any] = os.kill) -> None:
    """Kill a host process, or stop it for a time. One on another host is out of reach, which is logged."""
    if host not in ("", socket.gethostname()):
        log.warning("fault %s: process %d is on %s, out of reach of this machine", spec.text, pid, host)
        return
    if spec.kind == "killed":
        kill(pid, signal.SIGKILL)
        return
    kill(pid, signal.SIGSTOP)
    timer = threading.Timer(spec.number("seconds"), _continue, (pid, kill))
    timer.daemon = True
    timer.name = "podrun-fault-hung"
    timer.start()


def _continue(pid: int, kill: Callable[[int, int], Any]) -> None:
    try:
        kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        log.debug("process %d has ended while it was stopped", pid)


def instances_here(first: int, count: int, owners: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Instances whose first IPU is among ``count`` from ``first``, by index: the place of their owner in ``owners``.

    ``owners``: the first IPU within the job and the number of IPUs of each.
    """
    places = {}
    for place, (start, size) in enumerate(owners):
        if first <= start < first + count:
            places[start // size] = place
    return places
