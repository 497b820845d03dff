"""A job on one machine: the program that its owners load and run together, and how it ends.

The owners of a job use an `OwnerRendezvous`: all arrive, the last one does the work, and all get its result. An
error in a load or a run ends the job on this machine and, through the group of machines, on all others, with the same
error. Its machine (`podrun.device.machine`) knows who is attached and what is broken; a job knows its program.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from podrun.collectives import ClosedError, Group, create, join
from podrun.core.error_codec import error_to_dict
from podrun.core.errors import ApplicationRuntimeError, ErrorCause, PoplarError
from podrun.core.executable import AllReduce, Executable, ReduceScatter, numpy_dtype
from podrun.core.layout import IpuRange
from podrun.device.activity import BatchActivity, TrafficCounters, activity_of_batches
from podrun.device.error_messages import (
    as_poplar_error,
    batches_in_words,
    different_programs,
    host_sync_timeout,
    ipus_in_words,
)
from podrun.device.health import (
    LASTING,
    Health,
    LastingFaults,
    WorkDone,
    flip_bit,
    instances_here,
    signal_process,
)
from podrun.device.owners import (
    HOST_SYNC_TIMEOUT,
    LoadCall,
    MachinePlace,
    Owner,
    OwnerRendezvous,
    RunCall,
    check_agreement,
    machines_of,
)
from podrun.device.program.check import check_executable
from podrun.device.program.digests import Disagreement, held_by_ipu
from podrun.device.program.engine import Engine, RunOutcome, modelled_step_seconds
from podrun.device.program.fabric import Fabric, JobName, OfferBook, Wait
from podrun.device.program.interpreter import InstructionHook, NotFinite, batch_starts
from podrun.device.program.machine_groups import at_position, choose_core, core_lock_of, pin_thread_to
from podrun.device.program.streams import OwnerArrays, check_outputs, check_stream_arrays
from podrun.device.strikes import strike_error, strike_wait
from podrun.device.xla.pieces import PieceCache
from podrun.faults import FaultPoint, FaultSpec, FaultTarget, ListPlaces, Strike

log = logging.getLogger("podrun.device")


@dataclass(slots=True)
class MachineContext:
    """The services of a machine for its jobs. ``changed`` guards everything that changes, here and in jobs.

    ``clock``: wall time in seconds, for reports. ``grace``: see `Machine`. ``cores`` to choose from, and whether the
    process is ``shared``: see `podrun.device.program.machine_groups`. ``batches``: done, by IPU, and their ``traffic``.
    ``work``: done in training (True) and inference.
    """

    place: MachinePlace
    fabric: Fabric
    pieces: PieceCache
    health: Health
    faults: FaultPoint
    on_lost: Callable[[], None] | None
    on_host_lost: Callable[[], None] | None
    clock: Callable[[], float]
    grace: float
    cores: list[int]
    shared: bool
    changed: threading.Condition
    offers: OfferBook
    batches: dict[int, int]
    traffic: dict[int, TrafficCounters]
    work: dict[bool, WorkDone]
    sleep: Callable[[float], None]
    lost: PoplarError | None = None
    silent_until: float = -math.inf
    """When the machine answers the partition service again, on ``clock``."""


class Job:
    """See the module docstring. ``name``: what its machines call it. ``who``: the launch or process it belongs to, for
    faults.

    `load` and `run` are called without the machine's lock; all other methods are called with it. ``lists``: where the
    batches of the loaded program begin. ``failed``: the error after which the program has to be loaded again.
    """

    def __init__(
        self, context: MachineContext, name: JobName, span: IpuRange, ipus: IpuRange, *, who: str
    ) -> None:
        self._context = context
        self.name, self.range, self.ipus, self.who = name, span, ipus, who
        self.owners: dict[int, Owner] = {}
        self.engine: Engine | None = None
        self.failed: PoplarError | None = None
        self.lists: tuple[ListPlaces, ...] = ()
        self._lasting = LastingFaults()
        self._activity: tuple[BatchActivity, ...] | None = None
        """Of a batch of the loaded program, for each IPU of a replica; None without a model."""
        self._struck: PoplarError | None = None
        """The error of the last fault that struck the job on this machine."""
        self._ended: PoplarError | None = None
        """The reason why the job no longer holds the IPUs."""
        self._group: Group | None = None
        """The group of the job's machines, once it is formed."""
        self._aborted: Group | None = None
        """The group of a load that failed: a machine with its token that joins late gets the reason there."""
        self._timeout = HOST_SYNC_TIMEOUT
        self._loading: OwnerRendezvous | None = None
        self._running: OwnerRendezvous | None = None

    # --- Owners ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether owners have arrived for a run that has not ended."""
        return self._running is not None

    def _missing(self, arrivals: Iterable[int]) -> list[int]:
        """IPUs of the job on this machine whose owners are not among ``arrivals``."""
        there = {ipu for owner in arrivals if owner in self.owners for ipu in self.owners[owner].ipus}
        return [ipu for ipu in self.ipus if ipu not in there]

    def _arrive(self, rendezvous: OwnerRendezvous, owner_id: int, call: LoadCall | RunCall) -> bool:
        """An owner arrives. True: it is the last one and must do the work. False: the rendezvous has ended."""
        if not rendezvous.done:
            rendezvous.arrivals[owner_id] = call
        if not rendezvous.done and not self._missing(rendezvous.arrivals):
            rendezvous.started = True
            return True
        changed = self._context.changed
        if not changed.wait_for(lambda: rendezvous.done or rendezvous.started, self._timeout):
            doing = "run" if isinstance(call, RunCall) else "prepare the device"
            self.fail(host_sync_timeout(self._timeout, self._who_is_missing(rendezvous, doing)))
            changed.notify_all()
        changed.wait_for(lambda: rendezvous.done)  # the work itself has deadlines of its own
        return False

    def _who_is_missing(self, rendezvous: OwnerRendezvous, doing: str) -> str:
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
        spec = None if raised is self._struck else self._context.faults.other_end(reason)
        if spec is not None:
            with self._context.changed:
                self._context.health.record(spec)

    def _end(self, rendezvous: OwnerRendezvous, result: Any, error: BaseException | None) -> None:
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
        context = self._context
        with context.changed:
            previous, self.engine, self._group = self.engine, None, None
            self._close_aborted()
        if previous is not None:
            previous.close()
        loads = list(arrivals.values())
        machines = machines_of(context.place, self.range)[1]
        group = self._form_group(loads[0].digest)
        try:
            if any(load.digest != loads[0].digest for load in loads):
                raise different_programs()
            with context.changed:
                self._check_not_ended()
                context.health.reset_ipus(self.ipus)
                condition = context.health.blocking(self.ipus)
                self.failed = None
                for owner in self.owners.values():
                    owner.written.clear()
            if condition is not None:
                raise condition.error
            executable = loads[0].executable()
            check_executable(executable)
            self._check_fit(executable, machines)
            self.lists = self._lists(executable)
            self._lasting, self._activity = LastingFaults(), activity_of_batches(executable)
            context.faults.check(self.who, self.lists, self._places(executable))
            self.strike_event("load")
            engine = Engine(
                executable,
                group,
                context.pieces,
                self._instruction_hook(),
                lambda k: ipus_in_words(self.lists[k].ipus),
                core_lock=core_lock_of(self._core(group)),
            )
        except BaseException as error:
            reason = self._explain(error)
            context.offers.fail(self.name, reason)
            group.abort(error_to_dict(reason))
            with context.changed:
                self._group, self._aborted = None, group
                self.failed = self.failed or reason
                if self._ended is not None:
                    self._close_aborted()
            raise
        with context.changed:
            self.engine = engine
            ended = self._ended
            if ended is not None:
                self.engine = self._group = None
        if ended is not None:  # while the program was loaded
            engine.abort(error_to_dict(ended))
            engine.close()
            raise ended

    def _close_aborted(self) -> None:
        """Leave the group of a load that failed."""
        aborted, self._aborted = self._aborted, None
        if aborted is not None:
            aborted.close()

    def _check_not_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

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
                group = join(
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

    def _check_fit(self, executable: Executable, machines: int) -> None:
        """Raises ApplicationRuntimeError if a program is not for the IPUs of a job, or an owner holds parts of
        replicas."""
        layout = executable.layout
        if layout.machines != machines or layout.ipus != self.range.count:
            raise ApplicationRuntimeError(
                f"the program covers {layout.ipus} IPUs on {layout.machines} machine(s), but its "
                "device is IPUs "
                f"{self.range.first}-{self.range.stop - 1} on {machines} machine(s)"
            )
        for owner in self.owners.values():
            owned = owner.request.owned
            if (
                owned.first - self.range.first
            ) % layout.ipus_per_replica or owned.count % layout.ipus_per_replica:
                raise ApplicationRuntimeError(
                    f"{owner.who} holds {ipus_in_words(owned)}, which are not whole replicas of "
                    f"{layout.ipus_per_replica} IPUs"
                )

    def _lists(self, executable: Executable) -> tuple[ListPlaces, ...]:
        """For each instruction list of a replica: this machine's IPUs of a job that run it, and where its batches
        begin."""
        count = executable.layout.ipus_per_replica
        ipus = [frozenset(i for i in self.ipus if (i - self.range.first) % count == k) for k in range(count)]
        first = next(k for k, here in enumerate(ipus) if here)
        instances = frozenset(self._instances_here())
        seconds = modelled_step_seconds(executable) / executable.batches_per_pass
        return tuple(
            ListPlaces(
                *(here, batch_starts(work, executable.batches_per_pass), len(work)),
                leads=k == first,
                instances=instances,
                batch_seconds=seconds,
            )
            for k, (here, work) in enumerate(zip(ipus, executable.instructions, strict=True))
        )

    def _places(self, executable: Executable) -> dict[str, frozenset[int]]:
        """The variables that this machine has, each with its IPUs: of a weight those on which it lies."""
        position = (self.ipus.first - self.range.first) // executable.layout.ipus_per_position
        here = at_position(executable, position % executable.layout.machines_per_replica)
        ipus_of = dict.fromkeys(here.variables, frozenset(self.ipus))
        held = held_by_ipu(here)
        for k, names in enumerate(held):
            ipus_of |= dict.fromkeys(names, frozenset(list(self.ipus)[k :: len(held)]))
        return ipus_of

    def _instances_here(self) -> dict[int, Owner]:
        """The owners whose first IPU is on this machine, by the index of their instance."""
        owners = list(self.owners.values())
        owned = [(o.request.owned.first - self.range.first, o.request.owned.count) for o in owners]
        places = instances_here(self.ipus.first - self.range.first, self.ipus.count, owned)
        return {index: owners[place] for index, place in places.items()}

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
        outcome: RunOutcome = rendezvous.outcome()
        return outcome

    def _owners_of(self, rendezvous: OwnerRendezvous) -> list[Owner]:
        """The owners that arrived, in order of IPUs."""
        arrived = [self.owners[owner] for owner in rendezvous.arrivals if owner in self.owners]
        return sorted(arrived, key=lambda owner: owner.ipus.first)

    def _run(self, engine: Engine, rendezvous: OwnerRendezvous, owners: list[Owner]) -> None:
        """The work of the last owner to arrive: run, then note the result for all."""
        context = self._context
        begin, before = context.clock(), engine.batches_done
        outcome: RunOutcome | None = None
        error: BaseException | None = None
        batches = 0
        try:
            runs: list[RunCall] = [rendezvous.arrivals[owner.id] for owner in owners]
            check_agreement(owners, runs)
            batches = runs[0].batches
            parts = [
                OwnerArrays(*self._replicas_of(engine.executable, owner), run.inputs, run.outputs)
                for owner, run in zip(owners, runs, strict=True)
            ]
            agreed = len(owners) == 1 and owners[0].request.owned == self.range
            pin_thread_to(self._core(engine.group))
            outcome = engine.run(batches, parts, agreed=agreed)
            extra = self._lasting.extra_seconds(engine.executable, before, engine.batches_done - before)
            outcome = replace(outcome, modelled_seconds=outcome.modelled_seconds + extra)
        except Disagreement as raised:  # all machines raise it, before anything changed
            error = raised
        except BaseException as raised:
            error, reason = raised, self._explain(raised)
            self._break_other_end(raised, reason)
            with context.changed:
                self.failed = self.failed or reason
            engine.abort(error_to_dict(reason))
        with context.changed:
            modelled = math.nan if outcome is None else outcome.modelled_seconds
            self._note_run(owners, begin, engine.batches_done - before, modelled)
            if outcome is not None:
                for owner in owners:
                    owner.written.clear()
            kind, position = engine.executable.training, engine.groups.position
            if outcome is not None:
                context.work[kind] = context.work[kind].and_a_run(
                    engine.executable, batches, outcome.modelled_seconds, outcome.seconds, position=position
                )
            elif passes := (engine.batches_done - before) // engine.executable.batches_per_pass:
                # What a run did before it failed was computed too.
                modelled = passes * modelled_step_seconds(engine.executable)
                context.work[kind] = context.work[kind].and_a_run(
                    *(engine.executable, passes, 0.0 if math.isnan(modelled) else modelled),
                    *(context.clock() - begin,),
                    position=position,
                )
            if self.engine is None:  # all owners left meanwhile
                engine.close()
            self._end(rendezvous, outcome, error)

    def activity(self) -> dict[int, BatchActivity]:
        """Of a batch of the loaded program, for each of the job's IPUs on this machine; empty without a model."""
        split = self._activity
        if split is None or self.engine is None:
            return {}
        return {ipu: split[(ipu - self.range.first) % len(split)] for ipu in self.ipus}

    def _note_begin(self, engine: Engine, owners: list[Owner]) -> None:
        """Tell reports that a run has begun, and how far it is."""
        before, split = engine.batches_done, self._activity
        batch_s = None if split is None else sum(split[0].seconds)

        def so_far() -> float | None:
            return None if batch_s is None else (engine.batches_done - before) * batch_s

        for owner in owners:
            owner.usage.start(self._context.clock(), so_far, split)

    def _note_run(self, owners: list[Owner], begin: float, batches: int, modelled_s: float) -> None:
        """Note a run of ``batches`` batches that has just ended. ``modelled_s``: NaN: not known, or it failed."""
        context, split = self._context, self._activity
        known = None if split is None else batches * sum(split[0].seconds)
        for owner in owners:
            owner.usage.add(begin, context.clock(), known if math.isnan(modelled_s) else modelled_s, split)
        done = 0 if self.engine is None else self.engine.batches_done
        for ipu in self.ipus:
            context.batches[ipu] += batches
            if split is not None:
                batch = split[(ipu - self.range.first) % len(split)]
                context.traffic[ipu].add(batch, batches, self._lasting.link_error_rate(ipu, done))

    def loaded_engine(self, *, even_failed: bool = False) -> Engine:
        """The loaded program. Raises the error after which it has to be loaded again, unless ``even_failed``."""
        if self.failed is not None and not even_failed:
            if self.engine is not None:
                # So that the other machines do not wait for this one.
                self.engine.abort(error_to_dict(self.failed))
            raise self.failed
        if self.engine is None:
            raise self.failed or ApplicationRuntimeError(
                "no program is loaded on these IPUs", hint="Load one first (prepareDevice)."
            )
        return self.engine

    def _replicas_of(self, executable: Executable, owner: Owner) -> tuple[int, int]:
        """The machine-local replicas of an owner: first and count. A machine has one if replicas span machines."""
        ipus_per_replica = executable.layout.ipus_per_replica
        if executable.layout.machines_per_replica > 1:
            return 0, 1
        return (owner.ipus.first - self.ipus.first) // ipus_per_replica, owner.ipus.count // ipus_per_replica

    def _core(self, group: Group) -> int | None:
        """The core of this machine, as one of a program's on this host."""
        context = self._context
        ranks = group.host_ranks
        return choose_core(ranks.index(group.rank), len(ranks), context.cores, shared=context.shared)

    # --- Faults and the end ---------------------------------------------------------------------------------

    def _instruction_hook(self) -> InstructionHook:
        """The function that the interpreter calls before every instruction: aborts and faults take effect there."""
        lists, who, context = self.lists, self.who, self._context

        def before_instruction(done: int, ipu: int, instruction: int) -> None:
            if self.failed is not None:
                raise self.failed
            while (strike := context.faults.ask(who, done, instruction, lists[ipu])) is not None:
                self._strike(strike)

        return before_instruction

    def strike_event(self, event: str) -> None:
        """Let the faults strike that are planned for an event of the job. Raises the error of a fault that has one."""
        done = self.engine.batches_done if self.engine is not None else 0
        while (strike := self._context.faults.ask_event(event, self.who, done)) is not None:
            self._strike(strike)

    def _strike(self, strike: Strike) -> None:
        """Carry out a fault that strikes now. Raises its error, if it has one."""
        log.info("fault %s strikes in batch %d", strike.spec.text, strike.batch)
        if strike.spec.raises:
            self._struck = strike_error(self._context, strike)
            raise self._struck
        spec = strike.spec
        if spec.kind in LASTING:
            self._lasting.begin(strike)
        elif spec.kind == "corrupt" and self.engine is not None:
            layout = self.engine.executable.layout
            place = (spec.indices[0] - self.ipus.first) // layout.ipus_per_replica
            replica = min(
                place, layout.replicas_per_machine - 1
            )  # A variable that spans machines is the only one here.
            name = str(spec.setting("tensor", ""))
            self.engine.buffers.change(name, replica, lambda value: flip_bit(value, spec))
        elif spec.target is FaultTarget.INSTANCE:
            owner = self._instances_here().get(spec.indices[0])
            if owner is not None:
                signal_process(owner.request.pid, owner.host, spec)
        else:
            strike_wait(self._context, strike, self._exchanged_bytes())

    def throttled_mhz(self, ipu: int) -> float | None:
        """See `LastingFaults.throttled_mhz`; of the batch that runs, or comes next."""
        return None if self.engine is None else self._lasting.throttled_mhz(ipu, self.engine.batches_done)

    def _exchanged_bytes(self) -> int:
        """Bytes that a machine sends to the others for one batch, according to its reductions."""
        if self.engine is None:
            return 0
        work = [
            instruction
            for instructions in self.engine.executable.instructions
            for instruction in instructions
        ]
        names = {i.arena for i in work if isinstance(i, ReduceScatter | AllReduce)}
        arenas = [self.engine.executable.arenas[name] for name in names]
        return sum(arena.size * numpy_dtype(arena.dtype).itemsize for arena in arenas)

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

    def _stop_tiles(self, not_finite: NotFinite) -> PoplarError:
        """Note the floating-point exception that stops a program; returns the error to raise."""
        ipus = sorted(self.lists[not_finite.ipu].ipus)
        batch = self.engine.batches_done if self.engine is not None else 0
        spec = FaultSpec(FaultTarget.IPU, (ipus[0],), batch, not_finite.kind)
        error = strike_error(self._context, Strike(spec, batch))
        what = "infinite" if not_finite.kind == "overflow" else "no numbers"
        return type(error)(
            f"{error.message}: {not_finite.name} has values that are {what}",
            code=error.code,
            where=error.where,
            # No fault was planned: the program did this.
            cause=ErrorCause(batch=batch, ipus=(ipus[0],), tensor=not_finite.name),
            hint=error.hint,
        )

    def _explain(self, error: BaseException) -> PoplarError:
        if isinstance(error, PoplarError):
            return error
        if isinstance(error, NotFinite):
            return self._stop_tiles(error)
        place = self._context.place
        first, machines = machines_of(place, self.range)
        ranks = range(first, first + machines)
        names = place.endpoints
        return as_poplar_error(
            error,
            endpoints=[names[m] if m < len(names) else "in process" for m in ranks],
            first_machine=first,
            first_ipus=[m * place.ipus for m in ranks],
            timeout=self._timeout,
            alive=self._context.fabric.alive,
            died=self.engine.died if self.engine is not None else None,
            doing="" if self.engine is None else batches_in_words(self.engine.batches_done, 1),
            instance_ipus=next((owner.request.owned.count for owner in list(self.owners.values())), 0),
        )
