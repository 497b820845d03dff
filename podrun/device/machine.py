"""One IPU-M2000: who is attached, what is loaded, who waits for whom, what is broken.

Plain Python: no Ray and no gRPC. Host processes (*owners*) attach to IPUs, exclusively. The owners of one
*job* (a range of the partition's IPUs) load one program together and run it together: loads and runs are
`Meeting`s that start when the owners of all of the job's IPUs on this machine have come. Between machines the
program's group of collectives keeps step. Every wait has a deadline; whatever ends a run on one machine ends
it on all, with the same error.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from podrun.device.buffers import Array
from podrun.device.check import check_executable
from podrun.device.connection import AttachRequest, IpuRange
from podrun.device.cores import core_for, on_core
from podrun.device.engine import Disagreement, Engine, Outcome, digest_of_array
from podrun.device.fabric import Fabric, OfferBook, form_group
from podrun.device.health import Health
from podrun.device.job import (
    HOST_SYNC_TIMEOUT,
    Job,
    LoadCall,
    Owner,
    Place,
    RunCall,
    check_agreement,
    check_outputs,
)
from podrun.device.meeting import Meeting
from podrun.device.pieces import PieceCache
from podrun.device.streams import OwnerArrays, check_inputs
from podrun.device.trouble import (
    as_poplar_error,
    different_programs,
    host_sync_timeout,
    machine_lost,
    process_ended,
    span,
)
from podrun.device.usage import Usage, Work
from podrun.errors import ApplicationRuntimeError, PoplarError
from podrun.executable import Executable
from podrun.faults import FaultPoint, FaultSpec


class Machine:
    """See the module docstring. Every public call may come from any thread.

    ``on_lost``: what happens when the machine is lost by a fault (None: it only refuses everything from then
    on). ``grace``: seconds that machines wait longer for each other than for their own owners, so that
    whoever knows the missing one speaks first.
    """

    def __init__(
        self,
        place: Place,
        fabric: Fabric,
        pieces: PieceCache,
        *,
        on_lost: Callable[[], None] | None = None,
        wall_clock: Callable[[], float] = time.time,
        grace: float = 5.0,
        own_cores: bool = False,
    ) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if own_cores else []
        self._grace = grace
        self.place = place
        self.offers = OfferBook()
        self._fabric = fabric
        self._pieces = pieces
        self._on_lost = on_lost
        self._clock = wall_clock
        self._changed = threading.Condition()
        self._ids = itertools.count(1)
        self._owners: dict[int, Owner] = {}
        self._jobs: dict[IpuRange, Job] = {}
        self._health = Health(place.range, place.partition)
        self._faults = FaultPoint(place.range, place.machine)
        self._lost: PoplarError | None = None
        self._batches = dict.fromkeys(place.range, 0)
        self._work = {True: Work(), False: Work()}

    # --- Owners ---------------------------------------------------------------------------------------------

    def attach(self, request: AttachRequest, *, host: str = "", started: float | None = None) -> int | str:
        """Take the IPUs of ``request.owned`` that lie on this machine: an owner's id, or why not, at once.

        Raises ApplicationRuntimeError for ranges that cannot be right.
        """
        ipus = self._check_ranges(request)
        with self._changed:
            if self._lost is not None:
                return self._lost.message
            condition = self._health.blocking(ipus)
            if condition is not None:
                action = "" if condition.action is None else f" ({condition.action.value} needed)"
                return (
                    f"{span(ipus)} cannot be used{action}: {condition.error.message}. {condition.error.hint}"
                )
            for other in self._owners.values():
                both = sorted(set(ipus) & set(other.ipus))
                if both:
                    return f"{span(both)} attached by {other.who}"
                if other.request.job != request.job and set(other.request.job) & set(request.job):
                    return f"{span(other.request.job)} belong to the job of {other.who}"
            owner = Owner(next(self._ids), request, ipus, host, started, Usage(self._clock()))
            self._owners[owner.id] = owner
            whole = IpuRange(
                max(request.job.first, self.place.first_ipu),
                min(request.job.stop, self.place.range.stop) - max(request.job.first, self.place.first_ipu),
            )
            job = self._jobs.setdefault(request.job, Job(request.job, whole))
            job.owners[owner.id] = owner
            self._changed.notify_all()
            return owner.id

    def detach(self, owner_id: int, *, died: bool = False) -> None:
        """Let an owner's IPUs go. Idempotent. ``died``: the process ended without saying so."""
        with self._changed:
            owner = self._owners.pop(owner_id, None)
            if owner is None:
                return
            job = self._jobs[owner.request.job]
            del job.owners[owner_id]
            error = process_ended(owner.who, owner.ipus, "ended" if died else "detached")
            # A clean goodbye must not spoil the end of a run that other machines are still in.
            self._fail(job, error, everywhere=died or job.running is not None)
            if not job.owners:
                del self._jobs[job.range]
                self._close(job)
            self._changed.notify_all()

    # --- Programs -------------------------------------------------------------------------------------------

    def load(
        self,
        owner_id: int,
        digest: str,
        executable: Callable[[], Executable],
        *,
        timeout: float = HOST_SYNC_TIMEOUT,
    ) -> None:
        """Load a program, together with all owners of the job; resets the job's IPUs (their memory is lost).

        ``digest`` names the program's bytes; ``executable`` gives it (called once, in one of the callers'
        threads). ``timeout``: target.hostSyncTimeout of this program, seconds.
        """
        with self._changed:
            job = self._job(owner_id)
            job.timeout = timeout
            meeting = job.loading = job.loading or Meeting()
        self._meet(
            job, meeting, owner_id, LoadCall(digest, executable, timeout), self._load, "prepare the device"
        )

    def write(self, owner_id: int, values: Mapping[str, Array]) -> None:
        """Write variables; they take effect when the next run starts. All owners of a job write
        equal values.
        """
        with self._changed:
            engine, owner = self._loaded(owner_id), self._owners[owner_id]
            for name, value in values.items():
                engine.buffers.check_write(name, value)
            fresh = {}
            for name, value in values.items():
                owner.written[name] = digest_of_array(value)
                if engine.pending_digest(name) != owner.written[name]:
                    fresh[name] = value
            engine.write(fresh)

    def read(self, owner_id: int, names: Iterable[str]) -> dict[str, Array]:
        """Variables as they stand after the last run: views that stay valid until the next call of this
        owner.
        """
        with self._changed:
            return self._loaded(owner_id, even_failed=True).read(names)

    def run(
        self,
        owner_id: int,
        batches: int,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
    ) -> Outcome:
        """Run batches, together with all owners of the job. ``outputs`` are filled: see
        `streams.OwnerArrays`.

        Raises the program's error, the same one in every owner on every machine.
        """
        with self._changed:
            engine = self._loaded(owner_id)
            job = self._job(owner_id)
            replicas = self._replicas(engine, self._owners[owner_id], job)
            check_inputs(engine.executable, batches, replicas[1], inputs)
            check_outputs(engine.executable, batches, replicas[1], outputs)
            meeting = job.running = job.running or Meeting()
        run = RunCall(batches, inputs, outputs)
        outcome: Outcome = self._meet(job, meeting, owner_id, run, self._run, "run")
        return outcome

    # --- Management -----------------------------------------------------------------------------------------

    def move(self, place: Place) -> None:
        """Take another place, or the same one anew: attached processes lose their IPUs. What is broken stays
        broken.
        """
        with self._changed:
            self._evict("its machine was configured anew")
            if place.partition != self.place.partition or place.range != self.place.range:
                self._health = Health(place.range, place.partition)
                self._batches = dict.fromkeys(place.range, 0)
            if place.partition != self.place.partition or place.machine != self.place.machine:
                self._faults = FaultPoint(place.range, place.machine)
                self._work = {True: Work(), False: Work()}
            self.place = place

    def work(self) -> Work:
        """What was done since the machine took its place: training if there was any, else inference."""
        with self._changed:
            return self._work[True] if self._work[True].batches else self._work[False]

    def snapshot(self, read: Callable[[Health, Mapping[int, Owner], Mapping[int, int], float], Any]) -> Any:
        """``read(health, owner by IPU, batches done by IPU, now)`` under the machine's lock: for reports."""
        with self._changed:
            by_ipu = {ipu: owner for owner in self._owners.values() for ipu in owner.ipus}
            return read(self._health, by_ipu, self._batches, self._clock())

    def plan_faults(self, specs: Sequence[FaultSpec]) -> None:
        """Plan those of ``specs`` that concern this machine."""
        self._faults.plan(specs)

    def reset_ipus(self, ipus: Iterable[int]) -> None:
        """IPU_RESET of partition IPUs: their memory is lost, a program on them has to be loaded again."""
        wanted = list(ipus)
        with self._changed:
            self._health.reset_ipus(wanted)
            self._unload(wanted, f"{span(wanted)} was reset" if wanted else "")

    def reset_links(self) -> None:
        """PARTITION_RESET: links and IPUs; attached processes lose their IPUs."""
        with self._changed:
            self._health.reset_links()
            self._evict("the partition was reset")

    def power_cycle(self) -> None:
        """FULL_RESET; attached processes lose their IPUs."""
        with self._changed:
            self._health.power_cycle()
            self._evict("the machine was power-cycled")

    def abort(self, reason: PoplarError) -> None:
        """End every run and load with an error, now: the machine is about to stop."""
        with self._changed:
            for job in self._jobs.values():
                self._fail(job, reason)
            self._changed.notify_all()

    # --- Meetings -------------------------------------------------------------------------------------------

    def _meet(
        self,
        job: Job,
        meeting: Meeting,
        owner_id: int,
        brought: Any,
        work: Callable[[Job, dict[int, Any]], Any],
        doing: str,
    ) -> Any:
        with self._changed:
            if not meeting.done:
                meeting.arrivals[owner_id] = brought
            mine = not meeting.done and not job.missing(meeting.arrivals)
            if mine:
                meeting.started = True
                if job.loading is meeting:
                    job.loading = None
            elif not self._changed.wait_for(lambda: meeting.done or meeting.started, job.timeout):
                error = host_sync_timeout(job.timeout, self._who_is_missing(job, meeting, doing))
                self._fail(job, error)
                self._changed.notify_all()
            if not mine:
                # Started: the work itself only waits with deadlines of its own.
                self._changed.wait_for(lambda: meeting.done)
        if mine:
            meeting.hold(lambda arrivals: work(job, arrivals), lambda error: self._explain(job, error))
        with self._changed:
            if job.running is meeting:
                job.running = None
            if job.loading is meeting:
                job.loading = None
            self._changed.notify_all()
        return meeting.outcome()

    def _load(self, job: Job, arrivals: dict[int, LoadCall]) -> None:
        """The meeting of a load: form the group first, so that whatever fails after it is heard by all
        machines.
        """
        with self._changed:
            previous, job.engine = job.engine, None
        if previous is not None:
            previous.close()
        loads = list(arrivals.values())
        first, machines = self._machines(job)
        group = form_group(
            self._fabric,
            self.offers,
            job=job.range,
            first_machine=first,
            rank=self.place.machine - first,
            size=machines,
            digest=loads[0].digest,
            timeout=job.timeout + self._grace,
        )
        try:
            if any(load.digest != loads[0].digest for load in loads):
                raise different_programs()
            with self._changed:
                self._health.reset_ipus(job.ipus)
                condition = self._health.blocking(job.ipus)
                job.failed = None
                for owner in job.owners.values():
                    owner.written.clear()
            if condition is not None:
                raise condition.error
            executable = loads[0].executable()
            check_executable(executable)
            self._check_fit(executable, job, machines)
            engine = Engine(executable, group, self._pieces, self._between(job, executable))
        except BaseException as error:
            reason = self._explain(job, error)
            self.offers.fail(job.range, reason)
            group.abort(reason.to_dict())
            group.close()
            with self._changed:
                job.failed = job.failed or reason
            raise
        with self._changed:
            job.engine = engine

    def _run(self, job: Job, arrivals: dict[int, RunCall]) -> Outcome:
        """The meeting of a run."""
        engine = job.engine
        assert engine is not None
        try:
            with self._changed:
                owners = sorted((job.owners[owner] for owner in arrivals), key=lambda o: o.ipus.first)
                runs = [arrivals[owner.id] for owner in owners]
                check_agreement(owners, runs)
            parts = [
                OwnerArrays(*self._replicas(engine, owner, job), run.inputs, run.outputs)
                for owner, run in zip(owners, runs, strict=True)
            ]
            begin = self._clock()
            before = engine.batches_done
            try:
                one = len(owners) == 1 and owners[0].request.owned == job.range
                here = engine.group.host_ranks
                core = core_for(here.index(engine.group.rank), len(here), self._cores)
                with on_core(core):
                    outcome = engine.run(runs[0].batches, parts, agreed=one)
                with self._changed:
                    kind = engine.executable.training
                    self._work[kind] = self._work[kind].and_a_run(
                        engine.executable, runs[0].batches, outcome.modelled_seconds, outcome.seconds
                    )
            finally:
                with self._changed:
                    for owner in owners:
                        owner.usage.add(begin, self._clock())
                    for ipu in job.ipus:
                        self._batches[ipu] += engine.batches_done - before
        except Disagreement:
            raise  # noticed by all machines alike, before anything changed
        except BaseException as error:
            reason = self._explain(job, error)
            with self._changed:
                job.failed = job.failed or reason
            engine.group.abort(reason.to_dict())
            raise
        finally:
            with self._changed:
                if job.engine is None:  # all owners left meanwhile
                    engine.close()
        with self._changed:
            for owner in owners:
                owner.written.clear()
        return outcome

    def _between(self, job: Job, executable: Executable) -> Callable[[int, int, int], None]:
        """What the interpreter calls between two instructions: aborts and faults enter here."""
        count = executable.layout.ipus_per_replica
        lists = [[ipu for ipu in job.ipus if (ipu - job.range.first) % count == k] for k in range(count)]

        def between(step: int, ipu: int, instruction: int) -> None:
            if job.failed is not None:
                raise job.failed
            spec = self._faults.ask(step, instruction, lists[ipu], leads=ipu == 0)
            if spec is not None:
                self._strike(spec)

        return between

    def _strike(self, spec: FaultSpec) -> None:
        if spec.kind == "lost":
            self._lost = machine_lost(self.place.endpoint, self.place.machine, self.place.first_ipu)
            if self._on_lost is not None:
                self._on_lost()
            raise self._lost
        with self._changed:
            raise self._health.record(spec)

    # --- Helpers --------------------------------------------------------------------------------------------

    def _check_ranges(self, request: AttachRequest) -> IpuRange:
        """The owned IPUs on this machine."""
        mine, job, owned = self.place.range, request.job, request.owned
        first, stop = max(owned.first, mine.first), min(owned.stop, mine.stop)
        total = self.place.ipus * max(len(self.place.endpoints), 1)
        if not (0 <= job.first <= owned.first < owned.stop <= job.stop <= total) or first >= stop:
            raise ApplicationRuntimeError(
                f"machine {self.place.machine} (IPUs {mine.first}-{mine.stop - 1}) cannot attach IPUs "
                f"{owned.first}-"
                f"{owned.stop - 1} of a job on IPUs {job.first}-{job.stop - 1}"
            )
        inside = job.first // self.place.ipus == (job.stop - 1) // self.place.ipus
        if not inside and (job.first % self.place.ipus or job.count % self.place.ipus):
            raise ApplicationRuntimeError(
                f"a job on IPUs {job.first}-{job.stop - 1} neither fits in one machine nor fills machines of "
                f"{self.place.ipus} IPUs"
            )
        return IpuRange(first, stop - first)

    def _machines(self, job: Job) -> tuple[int, int]:
        """The first machine of a job and how many it has."""
        first, last = job.range.first // self.place.ipus, (job.range.stop - 1) // self.place.ipus
        return first, last - first + 1

    def _check_fit(self, executable: Executable, job: Job, machines: int) -> None:
        layout = executable.layout
        if layout.machines != machines or layout.ipus != job.range.count:
            raise ApplicationRuntimeError(
                f"the program covers {layout.ipus} IPUs on {layout.machines} machine(s), but its "
                "device is IPUs "
                f"{job.range.first}-{job.range.stop - 1} on {machines} machine(s)"
            )
        for owner in job.owners.values():
            if (owner.ipus.first - job.ipus.first) % layout.ipus_per_replica or (
                owner.ipus.count % layout.ipus_per_replica
            ):
                raise ApplicationRuntimeError(
                    f"{owner.who} holds {span(owner.ipus)}, which are not whole replicas of "
                    f"{layout.ipus_per_replica} IPUs"
                )

    def _replicas(self, engine: Engine, owner: Owner, job: Job) -> tuple[int, int]:
        """The machine-local replicas of an owner: first and count."""
        each = engine.executable.layout.ipus_per_replica
        return (owner.ipus.first - job.ipus.first) // each, owner.ipus.count // each

    def _job(self, owner_id: int) -> Job:
        owner = self._owners.get(owner_id)
        if owner is None:
            reason = self._lost
            raise reason or ApplicationRuntimeError(
                "this process holds no IPUs: they were never attached, or were taken away by a reset",
                hint="Attach to a device first.",
            )
        return self._jobs[owner.request.job]

    def _loaded(self, owner_id: int, *, even_failed: bool = False) -> Engine:
        job = self._job(owner_id)
        if job.failed is not None and not even_failed:
            if job.engine is not None:
                job.engine.group.abort(
                    job.failed.to_dict()
                )  # so that the other machines do not wait for this one
            raise job.failed
        if job.engine is None:
            raise job.failed or ApplicationRuntimeError(
                "no program is loaded on these IPUs", hint="Load one first (prepareDevice)."
            )
        return job.engine

    def _fail(self, job: Job, error: PoplarError, *, everywhere: bool = True) -> None:
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
            job.engine.group.abort(error.to_dict())

    def _unload(self, ipus: Iterable[int], reason: str) -> None:
        """Programs on any of ``ipus`` have to be loaded again."""
        wanted = set(ipus)
        for job in self._jobs.values():
            if wanted & set(job.ipus):
                self._fail(
                    job, ApplicationRuntimeError(reason, hint="Load the program again (prepareDevice).")
                )
        self._changed.notify_all()

    def _evict(self, reason: str) -> None:
        """All owners lose their IPUs."""
        self._unload(self.place.range, reason)
        for job in self._jobs.values():
            self._close(job)
        self._jobs.clear()
        self._owners.clear()

    def _close(self, job: Job) -> None:
        self.offers.withdraw(job.range)
        if job.engine is not None and (job.running is None or not job.running.started):
            job.engine.close()
        job.engine = None

    def _explain(self, job: Job, error: BaseException) -> PoplarError:
        first, machines = self._machines(job)
        ranks = range(first, first + machines)
        names = self.place.endpoints
        return as_poplar_error(
            error,
            endpoints=[names[m] if m < len(names) else "in process" for m in ranks],
            first_machine=first,
            first_ipus=[m * self.place.ipus for m in ranks],
            timeout=job.timeout,
            alive=self._fabric.alive,
        )

    def _who_is_missing(self, job: Job, meeting: Meeting, doing: str) -> str:
        late = [o for o in job.owners.values() if o.id not in meeting.arrivals]
        names = [f"{o.who} with {span(o.ipus)} did not {doing}" for o in late]
        nobody = [ipu for ipu in job.missing(meeting.arrivals) if all(ipu not in o.ipus for o in late)]
        if nobody:
            names.append(f"no process attached {span(nobody)}")
        return "; ".join(names)
