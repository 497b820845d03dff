"""What the owners of a job do together on a machine: load a program, run it, and end with it.

Everything that goes wrong in a load or a run comes to one place here: it ends the job on this machine, and through
the group of machines on all others, with the same error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from podrun.collectives import Group
from podrun.device.health import Health
from podrun.device.job import (
    Job,
    LoadCall,
    Place,
    RunCall,
    check_agreement,
    check_fit,
    machines_of,
    replicas_of,
    who_is_missing,
)
from podrun.device.meeting import Meeting
from podrun.device.program.check import check_executable
from podrun.device.program.cores import core_for, move_to, turn_on
from podrun.device.program.engine import Disagreement, Engine, Outcome
from podrun.device.program.fabric import Fabric, OfferBook, form_group
from podrun.device.program.streams import OwnerArrays
from podrun.device.trouble import as_poplar_error, different_programs, host_sync_timeout, machine_lost
from podrun.device.usage import Work
from podrun.device.xla.pieces import PieceCache
from podrun.errors import PoplarError
from podrun.executable import Executable
from podrun.faults import FaultPoint, FaultSpec


@dataclass(slots=True)
class Surroundings:
    """A machine as its jobs see it. ``changed`` guards everything that changes, here and in jobs.

    ``clock``: seconds, for reports. ``grace``: see `Machine`. ``cores``: to choose from, and whether the process is
    ``shared``, see `podrun.device.program.cores`.
    ``batches``: done, by IPU. ``work``: done in training (True) and inference.
    """

    place: Place
    fabric: Fabric
    pieces: PieceCache
    health: Health
    faults: FaultPoint
    on_lost: Callable[[], None] | None
    clock: Callable[[], float]
    grace: float
    cores: list[int]
    shared: bool
    changed: threading.Condition
    offers: OfferBook
    batches: dict[int, int]
    work: dict[bool, Work]
    lost: PoplarError | None = None


class Jobs:
    """See the module docstring. `meet` is called without the lock; `fail` and `close` are called with it."""

    def __init__(self, here: Surroundings) -> None:
        self._here = here

    def meet(
        self,
        job: Job,
        meeting: Meeting,
        owner_id: int,
        brought: Any,
        work: Callable[[Job, dict[int, Any]], Any],
        doing: str,
    ) -> Any:
        """Come to a meeting of a job's owners with what one of them brought; the outcome of ``work`` for all."""
        with self._here.changed:
            if not meeting.done:
                meeting.arrivals[owner_id] = brought
            mine = not meeting.done and not job.missing(meeting.arrivals)
            if mine:
                meeting.started = True
                if job.loading is meeting:
                    job.loading = None
            elif not self._here.changed.wait_for(lambda: meeting.done or meeting.started, job.timeout):
                error = host_sync_timeout(job.timeout, who_is_missing(job, meeting, doing))
                self.fail(job, error)
                self._here.changed.notify_all()
            if not mine:
                # Started: the work itself only waits with deadlines of its own.
                self._here.changed.wait_for(lambda: meeting.done)
        if mine:
            meeting.hold(lambda arrivals: work(job, arrivals), lambda error: self._explain(job, error))
        with self._here.changed:
            if job.running is meeting:
                job.running = None
            if job.loading is meeting:
                job.loading = None
            self._here.changed.notify_all()
        return meeting.outcome()

    def load(self, job: Job, arrivals: dict[int, LoadCall]) -> None:
        """The meeting of a load: form the group first, so that whatever fails after it is heard by all
        machines.
        """
        with self._here.changed:
            previous, job.engine = job.engine, None
        if previous is not None:
            previous.close()
        loads = list(arrivals.values())
        first, machines = machines_of(self._here.place, job.range)
        group = form_group(
            self._here.fabric,
            self._here.offers,
            job=job.range,
            first_machine=first,
            rank=self._here.place.machine - first,
            size=machines,
            digest=loads[0].digest,
            timeout=job.timeout + self._here.grace,
            address=self._here.place.meeting_address(first, machines),
        )
        try:
            if any(load.digest != loads[0].digest for load in loads):
                raise different_programs()
            with self._here.changed:
                self._here.health.reset_ipus(job.ipus)
                condition = self._here.health.blocking(job.ipus)
                job.failed = None
                for owner in job.owners.values():
                    owner.written.clear()
            if condition is not None:
                raise condition.error
            executable = loads[0].executable()
            check_executable(executable)
            check_fit(executable, job, machines)
            between = self._between(job, executable)
            engine = Engine(executable, group, self._here.pieces, between, turn=turn_on(self._core(group)))
        except BaseException as error:
            reason = self._explain(job, error)
            self._here.offers.fail(job.range, reason)
            group.abort(reason.to_dict())
            group.close()
            with self._here.changed:
                job.failed = job.failed or reason
            raise
        with self._here.changed:
            job.engine = engine
            left = not job.owners
        if left:  # all owners went while the program was loaded
            engine.close()

    def run(self, job: Job, arrivals: dict[int, RunCall]) -> Outcome:
        """The meeting of a run."""
        engine = job.engine
        assert engine is not None
        try:
            with self._here.changed:
                owners = sorted((job.owners[owner] for owner in arrivals), key=lambda o: o.ipus.first)
                runs = [arrivals[owner.id] for owner in owners]
                check_agreement(owners, runs)
            parts = [
                OwnerArrays(*replicas_of(engine.executable, owner, job), run.inputs, run.outputs)
                for owner, run in zip(owners, runs, strict=True)
            ]
            begin = self._here.clock()
            before = engine.batches_done
            try:
                one = len(owners) == 1 and job.is_of(owners[0])
                move_to(self._core(engine.group))
                outcome = engine.run(runs[0].batches, parts, agreed=one)
                with self._here.changed:
                    kind = engine.executable.training
                    self._here.work[kind] = self._here.work[kind].and_a_run(
                        engine.executable,
                        runs[0].batches,
                        outcome.modelled_seconds,
                        outcome.seconds,
                        position=engine.team.position,
                    )
            finally:
                with self._here.changed:
                    for owner in owners:
                        owner.usage.add(begin, self._here.clock())
                    for ipu in job.ipus:
                        self._here.batches[ipu] += engine.batches_done - before
        except Disagreement:
            raise  # noticed by all machines alike, before anything changed
        except BaseException as error:
            reason = self._explain(job, error)
            spec = self._here.faults.other_end(reason)
            with self._here.changed:
                if spec is not None:
                    self._here.health.record(spec)
                job.failed = job.failed or reason
            engine.abort(reason.to_dict())
            raise
        finally:
            with self._here.changed:
                if job.engine is None:  # all owners left meanwhile
                    engine.close()
        with self._here.changed:
            for owner in owners:
                owner.written.clear()
        return outcome

    def _core(self, group: Group) -> int | None:
        """Where this machine computes, as one of a program's on this host."""
        here = self._here
        return core_for(
            group.host_ranks.index(group.rank), len(group.host_ranks), here.cores, shared=here.shared
        )

    def _between(self, job: Job, executable: Executable) -> Callable[[int, int, int], None]:
        """What the interpreter calls between two instructions: aborts and faults enter here."""
        count = executable.layout.ipus_per_replica
        lists = [[ipu for ipu in job.ipus if (ipu - job.range.first) % count == k] for k in range(count)]
        first = next(k for k, ipus in enumerate(lists) if ipus)

        def between(step: int, ipu: int, instruction: int) -> None:
            if job.failed is not None:
                raise job.failed
            spec = self._here.faults.ask(step, instruction, lists[ipu], leads=ipu == first)
            if spec is not None:
                self._strike(spec)

        return between

    def _strike(self, spec: FaultSpec) -> None:
        if spec.kind == "lost":
            self._here.lost = machine_lost(
                self._here.place.endpoint, self._here.place.machine, self._here.place.first_ipu
            )
            if self._here.on_lost is not None:
                self._here.on_lost()
            raise self._here.lost
        with self._here.changed:
            raise self._here.health.record(spec)

    def fail(self, job: Job, error: PoplarError, *, everywhere: bool = True) -> None:
        """End what the job is doing, here and (unless not ``everywhere``) on all machines; it has to be
        loaded again.
        """
        job.failed = job.failed or error
        for meeting in (job.loading, job.running):
            if meeting is not None and not meeting.started:
                meeting.fail(error)
        job.loading = None if job.loading is not None and job.loading.done else job.loading
        job.running = None if job.running is not None and job.running.done else job.running
        if job.engine is not None and everywhere:
            job.engine.abort(error.to_dict())

    def close(self, job: Job) -> None:
        """Take the program of a job away."""
        self._here.offers.withdraw(job.range)
        if job.engine is not None and (job.running is None or not job.running.started):
            job.engine.close()
        job.engine = None

    def _explain(self, job: Job, error: BaseException) -> PoplarError:
        first, machines = machines_of(self._here.place, job.range)
        ranks = range(first, first + machines)
        names = self._here.place.endpoints
        return as_poplar_error(
            error,
            endpoints=[names[m] if m < len(names) else "in process" for m in ranks],
            first_machine=first,
            first_ipus=[m * self._here.place.ipus for m in ranks],
            timeout=job.timeout,
            alive=self._here.fabric.alive,
        )
