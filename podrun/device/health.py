"""What is broken on a machine, and what makes it whole again.

Only the action that an error names clears it, or a stronger one that includes it: resetting the partition
resets IPUs too, power-cycling resets everything. A machine that is lost, or has failed for good, comes back
only as a new one.

`Usage` and `WorkDone` say how busy something is, and what it has done: for reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from podrun.core.errors import PoplarError, RecoveryAction
from podrun.core.executable import Executable
from podrun.faults import EFFECTS, FaultSpec, FaultTarget, error_for


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that is broken: the phrase monitor tools show, the error it raises, and what clears it (None:
    nothing).
    """

    state: str
    error: PoplarError
    action: RecoveryAction | None


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
        if not effect.state:
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
        """What is wrong with an IPU or its whole machine, links apart."""
        return self._machine or self._ipus.get(ipu)

    def links_down(self, ipu: int) -> tuple[int, ...]:
        """The IPUs to which the IPU's link is down."""
        return tuple(sorted(a + b - ipu for a, b in self._links if ipu in (a, b)))

    def reset_ipus(self, ipus: Iterable[int]) -> None:
        """IPU_RESET."""
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


_WINDOW = 1.0
_KEPT = 256


class Usage:
    """Busy time since ``begin`` (seconds). Two shares: of the last second, and since the beginning."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._total = 0.0
        self._spans: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, start: float, stop: float) -> None:
        """Busy from ``start`` to ``stop``; spans come in order."""
        self._total += max(stop - start, 0.0)
        self._spans.append((start, stop))

    def recent_percent(self, now: float, running_since: float | None = None) -> float:
        """Of the last second (or of the time since the beginning, if that is less), 0 to 100."""
        since = max(now - _WINDOW, self._begin)
        spans = [*self._spans, (running_since, now)] if running_since is not None else self._spans
        busy = sum(max(min(stop, now) - max(start, since), 0.0) for start, stop in spans)
        return _percent(busy, now - since)

    def session_percent(self, now: float, running_since: float | None = None) -> float:
        """Since the beginning, 0 to 100."""
        busy = self._total + (now - running_since if running_since is not None else 0.0)
        return _percent(busy, now - self._begin)


def _percent(busy: float, whole: float) -> float:
    return min(max(100.0 * busy / whole, 0.0), 100.0) if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What a machine has done. Modelled seconds are of the IPUs, emulation seconds of this host's clock.

    ``samples``: on its replicas, counted by the first machine of each. None from a program on that does not say how
    many samples a micro-batch holds, until the next job.
    """

    batches: int = 0
    samples: int | None = 0
    modelled_s: float = 0.0
    emulation_s: float = 0.0

    def of_a_new_job(self) -> WorkDone:
        """The same, with samples counted anew where the job before did not say how many there were."""
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
        each = samples_per_pass(executable) if position == 0 else 0
        samples = None if each is None or self.samples is None else self.samples + passes * each
        batches = passes * executable.batches_per_pass
        return WorkDone(
            self.batches + batches, samples, self.modelled_s + modelled_s, self.emulation_s + emulation_s
        )


def samples_per_pass(executable: Executable) -> int | None:
    """Samples of one pass on one machine; None if the front end does not say how many a micro-batch holds."""
    each = executable.metadata.get("samples_per_micro_batch")
    if not isinstance(each, int):
        return None
    return each * executable.accumulation_factor * executable.layout.replicas_per_machine
