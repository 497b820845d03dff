"""Where faults enter: a machine's interpreter asks a `FaultPoint` between two instructions."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from podrun.core.errors import PoplarError
from podrun.core.fault_spec import OF_INSTANCES, PAIRS, FaultSpec, FaultTarget, Struck
from podrun.core.quick_dataclass import dataclass
from podrun.faults.validity import WHOLE_MACHINES, ListPlaces, check_places, check_variable


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that strikes now, in ``batch`` (of an event: the batches that were done)."""

    spec: FaultSpec
    batch: int


@dataclass(slots=True)
class _Planned:
    """A fault that has still to strike. ``job``: the job that it may hit (empty: the next job that attaches).
    ``strikes``: how often it has struck.
    """

    spec: FaultSpec
    job: str
    strikes: int = 0

    @property
    def left(self) -> FaultSpec:
        """The fault as if it were planned now."""
        if not self.strikes:
            return self.spec
        batch = self.spec.batch + self.strikes * self.spec.every
        return replace(self.spec, repeat=self.spec.repeat - self.strikes, batch=batch)

    def batch(self, places: ListPlaces) -> int:
        """The batch of its next strike."""
        if self.spec.seconds is None:
            return self.spec.moment(self.strikes)
        return math.ceil(self.spec.seconds / places.batch_seconds)


HISTORY = 1000
"""Number of strikes that a machine remembers."""


class FaultPoint:
    """The faults planned for one machine; each strikes as often as its ``repeat`` says. Safe to use from several
    threads.

    ``ipus``: partition indices of the machine's IPUs; ``machine``: its index; ``host``: the index of its host, if it
    is the first machine there. A link belongs to the machines at both of its ends. ``claim`` is called before a fault
    strikes and may return False to prevent it. ``clock``: seconds since 1970, for the history.
    """

    def __init__(
        self,
        ipus: Iterable[int],
        machine: int,
        claim: Callable[[FaultSpec], bool] = lambda spec: True,
        clock: Callable[[], float] = time.time,
        host: int | None = None,
    ) -> None:
        self._host = host
        self._ipus = frozenset(ipus)
        self._machine = machine
        self._claim = claim
        self._lock = threading.Lock()
        self._planned: list[_Planned] = []
        self._history: list[Struck] = []
        self._clock = clock

    def plan(
        self,
        specs: Iterable[FaultSpec],
        job_at: Callable[[FaultSpec], str] = lambda spec: "",
        done_at: Callable[[FaultSpec], int] = lambda spec: 0,
    ) -> None:
        """Add the faults that concern this machine.

        ``job_at``: the job that runs where a fault is to strike; ``done_at``: the batches it has done. A fault of a
        launch that is already planned is not planned twice.
        """
        with self._lock:
            for spec in specs:
                if not self.concerns(spec) or (spec.launch and any(e.spec == spec for e in self._planned)):
                    continue
                if spec.relative:
                    spec = replace(spec, batch=spec.batch + done_at(spec), relative=False)
                self._planned.append(_Planned(spec, spec.launch or job_at(spec)))

    def cancel(self, texts: Collection[str] = ()) -> tuple[str, ...]:
        """Take faults off the plan: those of these texts, or all. Returns the texts of the cancelled faults."""
        with self._lock:
            gone = [
                e
                for e in self._planned
                if not texts or {e.spec.text, str(e.spec), e.left.text, str(e.left)} & set(texts)
            ]
            self._planned = [entry for entry in self._planned if entry not in gone]
        return tuple(entry.spec.text for entry in gone)

    @property
    def planned(self) -> tuple[FaultSpec, ...]:
        """The faults that have still to strike, with the strikes that are left."""
        return tuple(entry.left for entry in self._planned)

    def begin_job(self, job: str, ipus: Collection[int], others: Collection[str] = ()) -> None:
        """A job attaches to ``ipus``. Faults without a job become its faults. Faults of other jobs are disarmed, unless
        the job is among ``others``, which are attached.
        """
        with self._lock:
            for entry in [e for e in self._planned if self._is_on(e.spec, ipus)]:
                if not entry.job:
                    entry.job = job
                elif entry.job != job and entry.job not in others:
                    self._planned.remove(entry)

    def check(
        self,
        job: str,
        lists: Sequence[ListPlaces],
        variables: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> None:
        """Raise UsageError for a planned fault of a job that cannot strike in the program with these lists and
        variables (each with the IPUs on which it lies). Other machines check the faults of the instances that they
        serve.
        """
        for entry in tuple(self._planned):
            if entry.job not in ("", job):
                continue
            spec = entry.spec
            if spec.target in OF_INSTANCES and not any(places.runs(spec) for places in lists):
                with self._lock:
                    self._planned.remove(entry)
                continue
            check_places(spec, lists)
            tensor = spec.setting("tensor", None)
            if tensor is not None:
                check_variable(spec, str(tensor), variables)

    def ask(self, job: str, done: int, instruction: int, places: ListPlaces) -> Strike | None:
        """The fault that strikes a job now, if any.

        ``done``: batches completed before this pass; ``instruction``: the index of the next instruction of the
        list that ``places`` describes.
        """
        if not self._planned:
            return None
        with self._lock:
            for entry in self._planned:
                spec = entry.spec
                if entry.job not in ("", job) or spec.during or not places.runs(spec):
                    continue
                batch = entry.batch(places)
                ahead = batch - done
                if (
                    0 <= ahead < len(places.starts)
                    and places.starts[ahead] + (spec.instruction or 0) == instruction
                    and self._claim(spec)
                ):
                    return self._struck(entry, batch)
        return None

    def ask_event(self, event: str, job: str | None, done: int = 0) -> Strike | None:
        """The fault that strikes at an event, if any. ``job``: None for an event of the machine itself."""
        with self._lock:
            for entry in self._planned:
                ours = job is None or entry.job in ("", job)
                if entry.spec.during == event and ours and self._claim(entry.spec):
                    return self._struck(entry, done)
        return None

    def _struck(self, entry: _Planned, batch: int) -> Strike:
        entry.strikes += 1
        if entry.strikes >= entry.spec.repeat:
            self._planned.remove(entry)
        self._history.append(Struck(entry.spec, entry.job, batch, self._clock()))
        del self._history[:-HISTORY]
        return Strike(entry.spec, batch)

    @property
    def history(self) -> tuple[Struck, ...]:
        """The faults that struck, oldest first; the last `HISTORY` of them."""
        return tuple(self._history)

    def other_end(self, error: PoplarError) -> FaultSpec | None:
        """The link fault that struck another machine with ``error``, counted as a strike on this machine too.

        A link breaks at both ends, though the machine at this end may be stopped before it reaches the fault.
        """
        cause = error.cause
        if cause is None or cause.fault is None or cause.batch is None:
            return None
        with self._lock:
            for entry in self._planned:
                spec = entry.spec
                if spec.target not in PAIRS or not spec.raises or not spec.is_same_fault(cause.fault):
                    continue
                counted_in_batches = spec.seconds is None and not spec.during
                if not counted_in_batches or spec.moment(entry.strikes) == cause.batch:
                    self._struck(entry, cause.batch)
                    return spec
        return None

    def concerns(self, spec: FaultSpec) -> bool:
        """True iff the fault may strike on this machine."""
        return self._is_on(spec, self._ipus)

    def _is_on(self, spec: FaultSpec, ipus: Collection[int]) -> bool:
        if spec.in_program:
            return False
        if spec.target is FaultTarget.HOST:
            return self._host in spec.indices
        if spec.target in WHOLE_MACHINES:
            return self._machine in spec.indices
        if spec.target in OF_INSTANCES:
            return True  # The serving machine is known only when a program is loaded.
        return spec.target is not FaultTarget.SERVICE and any(index in ipus for index in spec.indices)
