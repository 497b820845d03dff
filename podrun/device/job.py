"""A job on one machine: the program that its owners load and run together, and how it ends.

The owners of a job use an `OwnerRendezvous`: all arrive, the last one does the work, and all get its result. An
error in a load or a run ends the job on this machine and, through the group of machines, on all others, with the same
error. Its machine (`podrun.device.machine`) knows who is attached and what is broken; a job knows its program.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from podrun.collectives import ClosedError, Group, create, join_group
from podrun.core.error_codec import error_to_dict
from podrun.core.errors import PoplarError
from podrun.core.layout import IpuRange
from podrun.device.connection import RunOutcome
from podrun.device.error_messages import (
    JobMachines,
    as_poplar_error,
    batches_in_words,
    different_programs,
    host_sync_timeout,
    ipus_in_words,
)
from podrun.device.job_program import JobProgram
from podrun.device.machine_context import MachineContext, machines_of
from podrun.device.owners import (
    HOST_SYNC_TIMEOUT,
    Call,
    LoadCall,
    Owner,
    OwnerRendezvous,
    Result,
    RunCall,
    check_agreement,
)
from podrun.device.program.check import check_executable
from podrun.device.program.digests import Disagreement
from podrun.device.program.engine import Engine
from podrun.device.program.fabric import JobName, Wait
from podrun.device.program.interpreter import NotFinite
from podrun.device.program.machine_groups import core_lock_of, pin_thread_to
from podrun.device.program.streams import OwnerArrays, check_outputs, check_stream_arrays

log = logging.getLogger("podrun.device")


class Job(JobProgram):
    """A job on one machine: the program that its owners load and run together. ``name``: what its machines call it.

    `load` and `run` are called without the machine's lock; all other methods are called with it.
    """

    def __init__(
        self, context: MachineContext, name: JobName, span: IpuRange, ipus: IpuRange, *, who: str
    ) -> None:
        super().__init__(context, span, ipus, who)
        self.name = name
        self._ended: PoplarError | None = None
        """The reason why the job no longer holds the IPUs."""
        self._group: Group | None = None
        """The group of the job's machines, once it is formed."""
        self._aborted: Group | None = None
        """The group of a load that failed: a machine with its token that joins late gets the reason there."""
        self._timeout = HOST_SYNC_TIMEOUT
        self._loading: OwnerRendezvous[LoadCall, None] | None = None
        self._running: OwnerRendezvous[RunCall, RunOutcome] | None = None

    # --- Owners ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether owners have arrived for a run that has not ended."""
        return self._running is not None

    def _missing(self, arrivals: Iterable[int]) -> list[int]:
        """IPUs of the job on this machine whose owners are not among ``arrivals``."""
        there = {ipu for owner in arrivals if owner in self.owners for ipu in self.owners[owner].ipus}
        return [ipu for ipu in self.ipus if ipu not in there]

    def _arrive(self, rendezvous: OwnerRendezvous[Call, Result], owner_id: int, call: Call) -> bool:
        """An owner arrives. True: it is the last one and must do the work. False: the rendezvous has ended."""
        if not rendezvous.done:
            rendezvous.arrivals[owner_id] = call
        owner = self.owners.get(owner_id)
        alone = owner is not None and owner.ipus == self.ipus
        if not rendezvous.done and (alone or not self._missing(rendezvous.arrivals)):
            rendezvous.started = True
            return True
        changed = self._context.changed
        if not changed.wait_for(lambda: rendezvous.done or rendezvous.started, self._timeout):
            doing = "run" if isinstance(call, RunCall) else "prepare the device"
            self.fail(host_sync_timeout(self._timeout, self._who_is_missing(rendezvous, doing)))
            changed.notify_all()
        changed.wait_for(lambda: rendezvous.done)  # the work itself has deadlines of its own
        return False

    def _who_is_missing(self, rendezvous: OwnerRendezvous[Call, Result], doing: str) -> str:
        """Text for the owners that did not arrive, and for IPUs that no process holds."""
        late = [o for o in self.owners.values() if o.id not in rendezvous.arrivals]
        names = [f"{o.who} with {ipus_in_words(o.ipus)} did not {doing}" for o in late]
        nobody = [ipu for ipu in self._missing(rendezvous.arrivals) if all(ipu not in o.ipus for o in late)]
        if nobody:
            names.append(f"no process attached {ipus_in_words(nobody)}")
        return "; ".join(names)

    # --- Load -----------------------------------------------------------------------------------------------

    def load(self, owner_id: int, call: LoadCall) -> None:
        """Load a program together with all owners of the job. Raises the same error for all of them."""
        changed = self._context.changed
        with changed:
            self._timeout = call.timeout
            rendezvous = self._loading = self._loading or OwnerRendezvous()
            last = self._arrive(rendezvous, owner_id, call)
            if last:
                self._loading = None
        if last:
            error: BaseException | None = None
            try:
                self._load(rendezvous.arrivals)
            except BaseException as raised:
                error = raised
                self._break_other_end(raised, self._explain(raised))
            with changed:
                self._end(rendezvous, None, error)
        rendezvous.outcome()

    def _break_other_end(self, raised: BaseException, reason: PoplarError) -> None:
        """Note what broke here too, if the error is that of a link which struck at its other end."""
        spec = None if raised is self.struck else self._context.faults.other_end(reason)
        if spec is not None:
            with self._context.changed:
                self._context.health.record(spec)

    def _end(
        self, rendezvous: OwnerRendezvous[Call, Result], result: Result | None, error: BaseException | None
    ) -> None:
        """End a rendezvous whose work is done, and wake its owners."""
        if error is None:
            rendezvous.succeed(result)
        else:
            rendezvous.fail(self._explain(error))
        if self._running is rendezvous:
            self._running = None
        self._context.changed.notify_all()
        if error is not None and not isinstance(error, Exception):
            raise error

    def _load(self, arrivals: Mapping[int, LoadCall]) -> None:
        """Load the program. The group is formed first, so that all machines hear of a later error."""
        with self._context.changed:
            previous, self.engine, self._group = self.engine, None, None
            self._close_aborted()
        if previous is not None:
            previous.close()
        loads = list(arrivals.values())
        group = self._form_group(loads[0].digest)
        try:
            engine = self._make_engine(loads, group)
        except BaseException as error:
            self._abort_load(group, self._explain(error))
            raise
        with self._context.changed:
            self.engine = engine
            ended = self._ended
            if ended is not None:
                self.engine = self._group = None
        if ended is not None:  # while the program was loaded
            engine.abort(error_to_dict(ended))
            engine.close()
            raise ended

    def _make_engine(self, loads: Sequence[LoadCall], group: Group) -> Engine:
        """The program, checked and compiled on IPUs that were reset. Raises what forbids to load it here."""
        context = self._context
        if any(load.digest != loads[0].digest for load in loads):
            raise different_programs()
        with context.changed:
            if self._ended is not None:
                raise self._ended
            context.health.reset_ipus(self.ipus)
            condition = context.health.blocking(self.ipus)
            self.failed = None
            for owner in self.owners.values():
                owner.written.clear()
        if condition is not None:
            raise condition.error
        executable = loads[0].executable()
        check_executable(executable)
        self.prepare(executable, machines_of(context.place, self.range)[1])
        self.strike_event("load")
        self._core = self._choose_core(group)
        return Engine(
            executable,
            group,
            context.pieces,
            self._instruction_hook(),
            lambda k: ipus_in_words(self.lists[k].ipus),
            core_lock=core_lock_of(self._core),
            strikes_between=any(spec.instruction for spec in context.faults.planned),
        )

    def _abort_load(self, group: Group, reason: PoplarError) -> None:
        """Tell all machines of a group why its load failed here."""
        self._context.offers.fail(self.name, reason)
        group.abort(error_to_dict(reason))
        with self._context.changed:
            self._group, self._aborted = None, group
            self.failed = self.failed or reason
            if self._ended is not None:
                self._close_aborted()

    def _close_aborted(self) -> None:
        """Leave the group of a load that failed."""
        aborted, self._aborted = self._aborted, None
        if aborted is not None:
            aborted.close()

    def _form_group(self, digest: str) -> Group:
        """The group of a job's machines. A job that has ended meanwhile leaves no offer, and machines that have joined
        its group get the reason. Raises the error that ended it.
        """
        context = self._context
        first, machines = machines_of(context.place, self.range)
        rank, timeout = context.place.machine - first, self._timeout + context.grace
        token: Mapping[str, Any] = {}
        try:
            if rank == 0:
                group, token = create(
                    machines, timeout=timeout, address=context.place.rendezvous_address(first, machines)
                )
            else:
                wait = Wait(timeout, lambda: self._ended is None)
                group = join_group(
                    context.fabric.claim(first, self.name, rank, digest, wait), rank, timeout=timeout
                )
        except ClosedError:
            raise self._ended or ClosedError("the job has ended") from None
        with context.changed:
            if self._ended is None:
                self._group = group
                if rank == 0 and machines > 1:
                    context.offers.publish(self.name, digest, token, group.abort)
                return group
            ended = self._ended
        group.abort(error_to_dict(ended))
        group.close()
        raise ended

    # --- Run ------------------------------------------------------------------------------------------------

    def run(self, owner_id: int, call: RunCall) -> RunOutcome:
        """Run batches together with all owners of the job. Raises the same error for all of them.

        The machine's lock is taken twice: to arrive, and to note the result.
        """
        changed = self._context.changed
        with changed:
            engine = self.loaded_engine()
            if not call.checked:
                replicas = self._replicas_of(engine.executable, self.owners[owner_id])[1]
                check_stream_arrays(engine.executable, call.batches, replicas, call.inputs)
                check_outputs(engine.executable, call.batches, replicas, call.outputs)
            rendezvous = self._running = self._running or OwnerRendezvous()
            last = self._arrive(rendezvous, owner_id, call)
            owners = self._owners_of(rendezvous) if last else []
            self._note_begin(engine, owners)
        if last:
            self._run(engine, rendezvous, owners)
        return rendezvous.outcome()

    def _owners_of(self, rendezvous: OwnerRendezvous[RunCall, RunOutcome]) -> list[Owner]:
        """The owners that arrived, in order of IPUs."""
        arrived = [self.owners[owner] for owner in rendezvous.arrivals if owner in self.owners]
        return sorted(arrived, key=lambda owner: owner.ipus.first)

    def _run(
        self, engine: Engine, rendezvous: OwnerRendezvous[RunCall, RunOutcome], owners: list[Owner]
    ) -> None:
        """The work of the last owner to arrive: run, then note the result for all."""
        context = self._context
        begin, before = context.clock(), engine.batches_done
        outcome: RunOutcome | None = None
        error: BaseException | None = None
        runs = [rendezvous.arrivals[owner.id] for owner in owners]
        try:
            check_agreement(owners, runs)
            outcome = self._run_engine(engine, owners, runs)
        except Disagreement as raised:  # all machines raise it, before anything changed
            error = raised
        except BaseException as raised:
            error, reason = raised, self._explain(raised)
            self._break_other_end(raised, reason)
            with context.changed:
                self.failed = self.failed or reason
            engine.abort(error_to_dict(reason))
        with context.changed:
            passed = engine.batches_done - before
            self._note_run(owners, begin, passed, math.nan if outcome is None else outcome.modelled_seconds)
            if outcome is not None:
                for owner in owners:
                    owner.written.clear()
            self._note_work(engine, runs[0].batches, passed, outcome, begin)
            if self.engine is None:  # all owners left meanwhile
                engine.close()
            self._end(rendezvous, outcome, error)

    def _run_engine(self, engine: Engine, owners: Sequence[Owner], runs: Sequence[RunCall]) -> RunOutcome:
        """Run the batches that all owners ask for, in the modelled time that lasting faults make of it."""
        before = engine.batches_done
        parts = [
            OwnerArrays(*self._replicas_of(engine.executable, owner), run.inputs, run.outputs)
            for owner, run in zip(owners, runs, strict=True)
        ]
        agreed = len(owners) == 1 and owners[0].request.owned == self.range
        pin_thread_to(self._core)
        outcome = engine.run(runs[0].batches, parts, agreed=agreed)
        extra = self._lasting.extra_seconds(engine.executable, before, engine.batches_done - before)
        return replace(outcome, modelled_seconds=outcome.modelled_seconds + extra) if extra else outcome

    # --- The end -----------------------------------------------------------------------------------------------
    def fail(self, error: PoplarError, *, everywhere: bool = True) -> None:
        """End the job's work, here and (if ``everywhere``) on all machines. The program has to be loaded again."""
        self.failed = self.failed or error
        for rendezvous in (self._loading, self._running):
            if rendezvous is not None and not rendezvous.started:
                rendezvous.fail(error)
        self._loading = None if self._loading is not None and self._loading.done else self._loading
        self._running = None if self._running is not None and self._running.done else self._running
        if self.engine is not None and everywhere:
            self.engine.abort(error_to_dict(error))
        elif self.engine is None and self._group is not None:  # a load is under way
            self._group.abort(error_to_dict(error))

    def close(self, reason: PoplarError) -> None:
        """The job no longer holds the IPUs: remove its program and its offer. ``reason``: for owners that still
        wait."""
        self._ended = self._ended or reason
        self._context.offers.withdraw(self.name)
        self._close_aborted()
        if self.engine is not None and (self._running is None or not self._running.started):
            self.engine.close()
            self._group = None
        self.engine = None

    def _explain(self, error: BaseException) -> PoplarError:
        if isinstance(error, PoplarError):
            return error
        if isinstance(error, NotFinite):
            return self._stop_tiles(error)
        place = self._context.place
        first, machines = machines_of(place, self.range)
        ranks, names = range(first, first + machines), place.endpoints
        return as_poplar_error(
            error,
            JobMachines(
                tuple(names[m] if m < len(names) else "in process" for m in ranks),
                first,
                tuple(m * place.ipus for m in ranks),
                self._timeout,
                self._context.fabric.alive,
                died=self.engine.died if self.engine is not None else None,
                doing="" if self.engine is None else batches_in_words(self.engine.batches_done, 1),
                instance_ipus=next((owner.request.owned.count for owner in list(self.owners.values())), 0),
            ),
        )
