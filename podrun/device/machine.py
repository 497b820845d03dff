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

from podrun.device.connection import AttachRequest, IpuRange
from podrun.device.health import Health
from podrun.device.job import (
    HOST_SYNC_TIMEOUT,
    Job,
    LoadCall,
    Owner,
    Place,
    RunCall,
    check_outputs,
    owned_part,
    part_of,
    replicas_of,
)
from podrun.device.jobs import Jobs, Surroundings
from podrun.device.meeting import Meeting
from podrun.device.program.engine import UNCOMPARED, Engine, Outcome, digest_of_array
from podrun.device.program.fabric import Fabric, OfferBook
from podrun.device.program.operands import Array
from podrun.device.program.streams import check_inputs
from podrun.device.trouble import process_ended, span
from podrun.device.usage import Usage, Work
from podrun.device.xla.pieces import PieceCache
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
        shared: bool = False,
    ) -> None:
        self._here = Surroundings(
            place=place,
            fabric=fabric,
            pieces=pieces,
            health=Health(place.range, place.partition),
            faults=FaultPoint(place.range, place.machine),
            on_lost=on_lost,
            clock=wall_clock,
            grace=grace,
            cores=sorted(os.sched_getaffinity(0)) if own_cores else [],
            shared=shared,
            changed=threading.Condition(),
            offers=OfferBook(),
            batches=dict.fromkeys(place.range, 0),
            work={True: Work(), False: Work()},
        )
        self._jobs = Jobs(self._here)
        self._ids = itertools.count(1)
        self._owners: dict[int, Owner] = {}
        self._by_range: dict[IpuRange, Job] = {}

    @property
    def place(self) -> Place:
        """Where it stands in its partition."""
        return self._here.place

    @property
    def offers(self) -> OfferBook:
        """The groups it offers to other machines."""
        return self._here.offers

    # --- Owners ---------------------------------------------------------------------------------------------

    def attach(self, request: AttachRequest, *, host: str = "", started: float | None = None) -> int | str:
        """Take the IPUs of ``request.owned`` that lie on this machine: an owner's id, or why not, at once.

        Raises ApplicationRuntimeError for ranges that cannot be right.
        """
        ipus = owned_part(self.place, request)
        with self._here.changed:
            if self._here.lost is not None:
                return self._here.lost.message
            condition = self._here.health.blocking(ipus)
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
            owner = Owner(next(self._ids), request, ipus, host, started, Usage(self._here.clock()))
            self._owners[owner.id] = owner
            job = self._by_range.setdefault(request.job, Job(request.job, part_of(self.place, request.job)))
            job.owners[owner.id] = owner
            self._here.changed.notify_all()
            return owner.id

    def detach(self, owner_id: int, *, died: bool = False) -> None:
        """Let an owner's IPUs go. Idempotent. ``died``: the process ended without saying so."""
        with self._here.changed:
            owner = self._owners.pop(owner_id, None)
            if owner is None:
                return
            job = self._by_range[owner.request.job]
            del job.owners[owner_id]
            # A machine that is lost takes its connections with it; that is the cause, not the other way round.
            error = self._here.lost or process_ended(owner.who, owner.ipus, "ended" if died else "detached")
            # A clean goodbye must not spoil the end of a run that other machines are still in.
            self._jobs.fail(job, error, everywhere=died or job.running is not None)
            if not job.owners:
                del self._by_range[job.range]
                self._jobs.close(job)
            self._here.changed.notify_all()

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
        with self._here.changed:
            job = self._job(owner_id)
            job.timeout = timeout
            meeting = job.loading = job.loading or Meeting()
        self._jobs.meet(
            job,
            meeting,
            owner_id,
            LoadCall(digest, executable, timeout),
            self._jobs.load,
            "prepare the device",
        )

    def write(self, owner_id: int, values: Mapping[str, Array]) -> None:
        """Write variables; they take effect when the next run starts. All owners of a job write
        equal values.
        """
        with self._here.changed:
            engine, owner = self._loaded(owner_id), self._owners[owner_id]
            for name, value in values.items():
                engine.buffers.check_write(name, value)
            if self._job(owner_id).is_of(owner):
                engine.write(values, dict.fromkeys(values, UNCOMPARED))
                return
            digests = {name: digest_of_array(value) for name, value in values.items()}
            owner.written.update(digests)
            fresh = {n: value for n, value in values.items() if engine.pending_digest(n) != digests[n]}
            engine.write(fresh, digests)

    def read(self, owner_id: int, names: Iterable[str]) -> dict[str, Array]:
        """Variables as they stand after the last run: views that stay valid until the next call of this
        owner.
        """
        with self._here.changed:
            return self._loaded(owner_id, even_failed=True).read(names)

    def run(
        self,
        owner_id: int,
        batches: int,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        checked: bool = False,
    ) -> Outcome:
        """Run batches, together with all owners of the job. ``outputs`` are filled: see
        `streams.OwnerArrays`.

        ``checked``: a run with these very arrays has gone well since the program was loaded. Raises the
        program's error, the same one in every owner on every machine.
        """
        with self._here.changed:
            engine = self._loaded(owner_id)
            job = self._job(owner_id)
            replicas = replicas_of(engine.executable, self._owners[owner_id], job)
            if not checked:
                check_inputs(engine.executable, batches, replicas[1], inputs)
                check_outputs(engine.executable, batches, replicas[1], outputs)
            meeting = job.running = job.running or Meeting()
        run = RunCall(batches, inputs, outputs)
        outcome: Outcome = self._jobs.meet(job, meeting, owner_id, run, self._jobs.run, "run")
        return outcome

    # --- Management -----------------------------------------------------------------------------------------

    def move(self, place: Place) -> None:
        """Take another place, or the same one anew: attached processes lose their IPUs. What is broken stays
        broken.
        """
        with self._here.changed:
            self._evict("its machine was configured anew")
            if place.partition != self.place.partition or place.range != self.place.range:
                self._here.health = Health(place.range, place.partition)
                self._here.batches = dict.fromkeys(place.range, 0)
            if place.partition != self.place.partition or place.machine != self.place.machine:
                self._here.faults = FaultPoint(place.range, place.machine)
                self._here.work = {True: Work(), False: Work()}
            self._here.place = place

    def work(self) -> Work:
        """What was done since the machine took its place: training if there was any, else inference."""
        with self._here.changed:
            return self._here.work[True] if self._here.work[True].batches else self._here.work[False]

    def snapshot(self, read: Callable[[Health, Mapping[int, Owner], Mapping[int, int], float], Any]) -> Any:
        """``read(health, owner by IPU, batches done by IPU, now)`` under the machine's lock: for reports."""
        with self._here.changed:
            by_ipu = {ipu: owner for owner in self._owners.values() for ipu in owner.ipus}
            return read(self._here.health, by_ipu, self._here.batches, self._here.clock())

    def plan_faults(self, specs: Sequence[FaultSpec]) -> None:
        """Plan those of ``specs`` that concern this machine."""
        self._here.faults.plan(specs)

    def reset_ipus(self, ipus: Iterable[int]) -> None:
        """IPU_RESET of partition IPUs: their memory is lost, a program on them has to be loaded again."""
        wanted = list(ipus)
        with self._here.changed:
            self._here.health.reset_ipus(wanted)
            self._unload(wanted, f"{span(wanted)} was reset" if wanted else "")

    def reset_links(self) -> None:
        """PARTITION_RESET: links and IPUs; attached processes lose their IPUs."""
        with self._here.changed:
            self._here.health.reset_links()
            self._evict("the partition was reset")

    def power_cycle(self) -> None:
        """FULL_RESET; attached processes lose their IPUs."""
        with self._here.changed:
            self._here.health.power_cycle()
            self._evict("the machine was power-cycled")

    def abort(self, reason: PoplarError) -> None:
        """End every run and load with an error, now: the machine is about to stop."""
        with self._here.changed:
            for job in self._by_range.values():
                self._jobs.fail(job, reason)
            self._here.changed.notify_all()

    # --- Helpers --------------------------------------------------------------------------------------------

    def _job(self, owner_id: int) -> Job:
        owner = self._owners.get(owner_id)
        if owner is None:
            reason = self._here.lost
            raise reason or ApplicationRuntimeError(
                "this process holds no IPUs: they were never attached, or were taken away by a reset",
                hint="Attach to a device first.",
            )
        return self._by_range[owner.request.job]

    def _loaded(self, owner_id: int, *, even_failed: bool = False) -> Engine:
        job = self._job(owner_id)
        if job.failed is not None and not even_failed:
            if job.engine is not None:
                job.engine.abort(job.failed.to_dict())  # so that the other machines do not wait for this one
            raise job.failed
        if job.engine is None:
            raise job.failed or ApplicationRuntimeError(
                "no program is loaded on these IPUs", hint="Load one first (prepareDevice)."
            )
        return job.engine

    def _unload(self, ipus: Iterable[int], reason: str) -> None:
        """Programs on any of ``ipus`` have to be loaded again."""
        wanted = set(ipus)
        for job in self._by_range.values():
            if wanted & set(job.ipus):
                self._jobs.fail(
                    job, ApplicationRuntimeError(reason, hint="Load the program again (prepareDevice).")
                )
        self._here.changed.notify_all()

    def _evict(self, reason: str) -> None:
        """All owners lose their IPUs."""
        self._unload(self.place.range, reason)
        for job in self._by_range.values():
            self._jobs.close(job)
        self._by_range.clear()
        self._owners.clear()
