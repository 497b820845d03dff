"""One IPU-M2000: who is attached, what is loaded, who waits for whom, what is broken.

Plain Python: no Ray and no gRPC. Host processes (*owners*) attach to IPUs, exclusively. The owners of one *job* (a
range of the partition's IPUs) load one program together and run it together: loads and runs are `OwnerRendezvous`s that
start when the owners of all of the job's IPUs on this machine have come. The program's group of collectives keeps
machines in step. Every wait has a deadline; an error that ends a run on one machine ends it on all, with the same
error.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from podrun.core.error_codec import copy_error
from podrun.core.errors import ApplicationRuntimeError, IpusTakenError, PoplarError, RecoveryAction, TakenBy
from podrun.core.executable import Array, Executable
from podrun.core.layout import IpuRange
from podrun.core.names import DIGESTS
from podrun.device.activity import Usage
from podrun.device.connection import AttachRequest, Refusal, RunOutcome
from podrun.device.error_messages import ipus_in_words, ipus_taken_away, process_ended
from podrun.device.health import Condition, WorkDone
from podrun.device.job import Job
from podrun.device.machine_context import MachineContext, MachinePlace, owned_part, part_of
from podrun.device.owners import HOST_SYNC_TIMEOUT, LoadCall, MachineMoment, Owner, RunCall
from podrun.device.program.digests import UNCOMPARED, digest_of_array
from podrun.device.program.fabric import Fabric, JobName, OfferBook
from podrun.device.strikes import check_lost_host, strike_machine_event
from podrun.device.xla.pieces import PieceCache
from podrun.faults import OF_INSTANCES, WHOLE_MACHINES, FaultSpec, Struck, check_places


class Machine:
    """One IPU-M2000: who is attached, what is loaded, who waits for whom, what is broken. Every public call may come
    from any thread.

    ``on_lost``: what happens when the machine is lost by a fault (None: it only refuses everything from then on).
    ``on_host_lost``: what happens when its whole host is lost (None: no fault may do that). ``grace``: seconds that
    machines wait longer for each other than for their own owners, so that whoever knows the missing one speaks first.
    ``claim``: see `FaultPoint`. ``agent``: its name, for hints. ``sleep``: how faults wait.
    """

    def __init__(
        self,
        place: MachinePlace,
        fabric: Fabric,
        pieces: PieceCache,
        *,
        on_lost: Callable[[], None] | None = None,
        on_host_lost: Callable[[], None] | None = None,
        wall_clock: Callable[[], float] = time.time,
        grace: float = 5.0,
        own_cores: bool = False,
        shared: bool = False,
        claim: Callable[[FaultSpec], bool] = lambda spec: True,
        agent: str = "",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._context = MachineContext(
            place=place,
            fabric=fabric,
            pieces=pieces,
            agent=agent,
            claim=claim,
            on_lost=on_lost,
            on_host_lost=on_host_lost,
            clock=wall_clock,
            grace=grace,
            cores=sorted(os.sched_getaffinity(0)) if own_cores else [],
            shared=shared,
            sleep=sleep,
        )
        self._ids = itertools.count(1)
        self._owners: dict[int, Owner] = {}
        self._evicted: dict[int, IpusTakenError] = {}
        self._last: dict[int, tuple[str, int, float | None]] = {}
        """The process that let each IPU go last: host, process id, start."""
        self._by_range: dict[IpuRange, Job] = {}

    @property
    def place(self) -> MachinePlace:
        """The machine's place in its partition."""
        return self._context.place

    @property
    def offers(self) -> OfferBook:
        """The groups that it offers to other machines."""
        return self._context.offers

    # --- Owners ---------------------------------------------------------------------------------------------

    def attach(
        self, request: AttachRequest, *, host: str = "", started: float | None = None
    ) -> int | Refusal:
        """Take the IPUs of ``request.owned`` on this machine. Returns at once: an owner's id, or the reason for the
        refusal.

        Raises ApplicationRuntimeError for invalid ranges.
        """
        ipus = owned_part(self.place, request)
        with self._context.changed:
            if self._context.lost is not None:
                return Refusal(self._context.lost.message, self._context.lost)
            condition = self._context.health.blocking(ipus)
            process = (host, request.pid, started)
            holds = any(
                (other.host, other.request.pid, other.started) == process and set(ipus) & set(other.ipus)
                for other in self._owners.values()
            )
            # A process that holds them itself, in a device that it has not detached, is told that, not to reset them.
            if condition is not None and not holds and not self._may_load_again(condition, ipus, process):
                words = condition.refusal(self.place.partition, self._context.agent)
                return Refusal(f"{ipus_in_words(ipus)} {words}", condition.error)
            for other in self._owners.values():
                both = sorted(set(ipus) & set(other.ipus))
                if both:
                    return Refusal(f"{ipus_in_words(both)} attached by {other.who}")
                if other.request.job != request.job and set(other.request.job) & set(request.job):
                    return Refusal(f"{ipus_in_words(other.request.job)} belong to the job of {other.who}")
            owner = Owner(next(self._ids), request, ipus, host, started, Usage(self._context.clock()))
            self._owners[owner.id] = owner
            job = self._by_range.get(request.job)
            if job is None:
                who = request.launch or f"{host}:{request.pid}"
                name = JobName(request.job, request.launch or (who if request.owned == request.job else ""))
                job = Job(self._context, name, request.job, part_of(self.place, request.job), who=who)
                self._by_range[request.job] = job
                self._context.work = {kind: done.of_a_new_job() for kind, done in self._context.work.items()}
                others = {other.who for other in self._by_range.values()}
                self._context.faults.begin_job(who, set(job.ipus), others)
            job.owners[owner.id] = owner
            self._context.changed.notify_all()
            return owner.id

    def _may_load_again(
        self, condition: Condition, ipus: Iterable[int], process: tuple[str, int, float | None]
    ) -> bool:
        """Whether the process that met an error attaches again to load its program, which resets its IPUs."""
        failed = [ipu for ipu in ipus if self._context.health.condition(ipu) is not None]
        return condition.action is RecoveryAction.IPU_RESET and all(
            self._last.get(ipu) == process for ipu in failed
        )

    def detach(self, owner_id: int, *, died: bool = False) -> None:
        """Release an owner's IPUs. Idempotent. ``died``: the process ended without saying so."""
        with self._context.changed:
            owner = self._owners.pop(owner_id, None)
            self._evicted.pop(owner_id, None)
            if owner is None:
                return
            process = (owner.host, owner.request.pid, owner.started)
            self._last |= dict.fromkeys(owner.ipus, process)
            job = self._by_range[owner.request.job]
            del job.owners[owner_id]
            # A lost machine takes its connections with it; the loss is the cause, not the other way round.
            error = self._context.lost or process_ended(
                owner.who, owner.ipus, "ended" if died else "detached", owner.instance
            )
            # A clean goodbye must not spoil the end of a run that other machines are still in.
            job.fail(error, everywhere=died or job.running)
            if not job.owners:
                del self._by_range[job.range]
                job.close(error)
            self._context.changed.notify_all()

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
        with self._context.changed:
            job = self._job(owner_id)
        job.load(owner_id, LoadCall(digest, executable, timeout))

    def write(self, owner_id: int, values: Mapping[str, Array]) -> None:
        """Write variables, for the next run. All owners of a job write equal values."""
        with self._context.changed:
            job, owner = self._job(owner_id), self._owners[owner_id]
            engine = job.loaded_engine()
            for name, value in values.items():
                engine.buffers.check_write(name, value)
            if owner.request.owned == job.range:
                engine.write(values, dict.fromkeys(values, UNCOMPARED))
                return
            digests = {name: digest_of_array(value) for name, value in values.items()}
            owner.written.update(digests)
            fresh = {n: value for n, value in values.items() if engine.pending_digest(n) != digests[n]}
            engine.write(fresh, digests)

    def read(self, owner_id: int, names: Iterable[str]) -> dict[str, Array]:
        """Variables after the last run: views, valid until the owner's next call. Of `DIGESTS` alone: that."""
        wanted = list(names)
        with self._context.changed:
            job = self._job(owner_id)
            engine = job.loaded_engine(even_failed=True)
            if wanted == [DIGESTS]:
                return {DIGESTS: np.array(list(zip(job.ipus, engine.digests(), strict=True)), np.uint64)}
            try:
                job.strike_event("read")
            except PoplarError as error:
                job.fail(error)
                self._context.changed.notify_all()
                raise
            return engine.read(wanted)

    def run(
        self,
        owner_id: int,
        batches: int,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        checked: bool = False,
    ) -> RunOutcome:
        """Run batches, together with all owners of the job. ``outputs`` are filled: see `streams.OwnerArrays`.

        ``checked``: a run with these very arrays has gone well since the program was loaded. Raises the
        program's error, the same one in every owner on every machine.
        """
        job = self._job(owner_id)
        return job.run(owner_id, RunCall(batches, inputs, outputs, checked))

    # --- Management -----------------------------------------------------------------------------------------

    def move(self, place: MachinePlace) -> None:
        """Take another place, or the same one again: attached processes lose their IPUs. Broken things stay broken."""
        with self._context.changed:
            self._evict(TakenBy.NEW_PLACE)
            if place.partition != self.place.partition or place.range != self.place.range:
                self._context.begin_ipus(place)
            if place.partition != self.place.partition or place.machine != self.place.machine:
                self._context.begin_work(place)
            self._context.place = place

    def work(self) -> WorkDone:
        """The work since the machine took its place: training if there was any, else inference."""
        with self._context.changed:
            work = self._context.work
            return work[True] if work[True].batches else work[False]

    def snapshot(self, read: Callable[[MachineMoment], Any]) -> Any:
        """``read(moment)`` under the machine's lock: for reports."""
        context = self._context
        with context.changed:
            by_ipu = {ipu: owner for owner in self._owners.values() for ipu in owner.ipus}
            activity = {ipu: one for job in self._by_range.values() for ipu, one in job.activity().items()}
            moment = MachineMoment(
                *(context.health, by_ipu, context.batches, context.traffic, activity, context.clock())
            )
            return read(moment)

    def throttled_mhz(self, ipu: int) -> float | None:
        """The clock to which a fault throttles an IPU now; None if none does."""
        with self._context.changed:
            clocks = [job.throttled_mhz(ipu) for job in self._by_range.values()]
        return min((clock for clock in clocks if clock is not None), default=None)

    def plan_faults(self, specs: Sequence[FaultSpec]) -> None:
        """Plan those of ``specs`` that concern this machine.

        Raises UsageError, and plans none, if one of them cannot strike in the program loaded at its place.
        """
        with self._context.changed:
            for spec in specs:
                check_lost_host(self._context, spec)
            mine = [spec for spec in specs if self._context.faults.concerns(spec)]
            for spec in mine:
                for job in self._jobs_at(spec):
                    if job.engine is not None and spec.launch in ("", job.who):
                        check_places(spec, job.lists, done=job.engine.batches_done)
            self._context.faults.plan(
                mine,
                lambda spec: next((job.who for job in self._jobs_at(spec)), ""),
                lambda spec: max(
                    (job.engine.batches_done for job in self._jobs_at(spec) if job.engine), default=0
                ),
            )

    def cancel_faults(self, texts: Sequence[str] = ()) -> tuple[str, ...]:
        """Take faults off the plan: those of these texts, or all. Returns the texts of the cancelled ones."""
        return self._context.faults.cancel(texts)

    def struck_faults(self) -> tuple[Struck, ...]:
        """The faults that struck since the machine took its place."""
        return self._context.faults.history

    def planned_faults(self) -> tuple[FaultSpec, ...]:
        """The faults that have not struck."""
        return self._context.faults.planned

    def reset_ipus(self, ipus: Iterable[int]) -> None:
        """IPU_RESET of partition IPUs: their memory is lost, a program on them has to be loaded again."""
        wanted = list(ipus)
        with self._context.changed:
            self._context.health.reset_ipus(wanted)
            self._unload(wanted, f"{ipus_in_words(wanted)} was reset" if wanted else "")

    def reset_links(self) -> None:
        """PARTITION_RESET: links and IPUs; attached processes lose their IPUs."""
        strike_machine_event(self._context, "partition-reset")
        with self._context.changed:
            self._context.health.reset_links()
            self._evict(TakenBy.PARTITION_RESET)

    def power_cycle(self, taken_by: TakenBy = TakenBy.POWER_CYCLE) -> None:
        """FULL_RESET; attached processes lose their IPUs, and read by what. A machine that leaves its partition forgets
        what it did there: it may come back, or serve another partition of that name.
        """
        with self._context.changed:
            self._context.health.power_cycle()
            self._evict(taken_by)
            if taken_by in (TakenBy.REMOVAL, TakenBy.MOVE):
                self._context.begin_ipus(self.place)
                self._context.begin_work(self.place)

    def abort(self, reason: PoplarError) -> None:
        """End every run and load with an error, now: the machine is about to stop."""
        with self._context.changed:
            for job in self._by_range.values():
                job.fail(reason)
            self._context.changed.notify_all()

    # --- Helpers --------------------------------------------------------------------------------------------

    @property
    def answers(self) -> bool:
        """False while a fault drops the answers to the partition service."""
        return self._context.clock() >= self._context.silent_until

    def _jobs_at(self, spec: FaultSpec) -> list[Job]:
        """The jobs that a fault on this machine may hit."""
        whole = spec.target in (*WHOLE_MACHINES, *OF_INSTANCES)
        return [job for job in self._by_range.values() if whole or set(spec.indices) & set(job.ipus)]

    def _job(self, owner_id: int) -> Job:
        owner = self._owners.get(owner_id)
        if owner is None:
            if self._context.lost is not None:
                raise self._context.lost
            if owner_id in self._evicted:
                raise copy_error(self._evicted[owner_id])
            raise ApplicationRuntimeError(
                "this process holds no IPUs: they were never attached, or were released",
                hint="Attach to a device first.",
            )
        return self._by_range[owner.request.job]

    def _unload(self, ipus: Iterable[int], reason: str) -> None:
        """Drop the programs on any of ``ipus``: they have to be loaded again."""
        wanted = set(ipus)
        for job in self._by_range.values():
            if wanted & set(job.ipus):
                job.fail(ApplicationRuntimeError(reason, hint="Load the program again (prepareDevice)."))
        self._context.changed.notify_all()

    def _evict(self, taken_by: TakenBy) -> None:
        """All owners lose their IPUs."""
        taken = ipus_taken_away(taken_by, self.place.partition)
        for job in self._by_range.values():
            job.fail(taken)
            job.close(taken)
        self._context.changed.notify_all()
        self._by_range.clear()
        self._evicted |= dict.fromkeys(self._owners, taken)
        self._owners.clear()
