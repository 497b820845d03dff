"""A job's program on one machine: which IPUs run which lists, what reports read of its runs, how faults strike it."""

from __future__ import annotations

import logging
import math

from podrun.collectives import Group
from podrun.core.error_codec import error_to_dict
from podrun.core.errors import ApplicationRuntimeError, ErrorCause, PoplarError
from podrun.core.executable import Executable
from podrun.core.layout import IpuRange
from podrun.device.activity import BatchActivity, activity_of_batches
from podrun.device.connection import RunOutcome
from podrun.device.error_messages import ipus_in_words
from podrun.device.health import LASTING, LastingFaults, flip_bit, instances_here, signal_process
from podrun.device.machine_context import MachineContext
from podrun.device.owners import Owner
from podrun.device.program.digests import held_by_ipu
from podrun.device.program.engine import Engine, modelled_step_seconds
from podrun.device.program.instruction_lists import batch_starts
from podrun.device.program.interpreter import InstructionHook, NotFinite
from podrun.device.program.machine_groups import at_position, choose_core
from podrun.device.strikes import exchanged_bytes, strike_error, strike_wait
from podrun.faults import FaultSpec, FaultTarget, ListPlaces, Strike

log = logging.getLogger("podrun.device")


class JobProgram:
    """A job's program on one machine. ``span``: the job's IPUs, ``ipus``: those on this machine. ``who``: the launch or
    process it belongs to, for faults.

    ``lists``: where the batches of the loaded program begin. ``failed``: the error after which the program has to be
    loaded again. ``struck``: the error of the last fault that struck the job on this machine.
    """

    def __init__(self, context: MachineContext, span: IpuRange, ipus: IpuRange, who: str) -> None:
        self._context = context
        self.range, self.ipus, self.who = span, ipus, who
        self.owners: dict[int, Owner] = {}
        self.engine: Engine | None = None
        self.failed: PoplarError | None = None
        self.struck: PoplarError | None = None
        self.lists: tuple[ListPlaces, ...] = ()
        self._lasting = LastingFaults()
        self._core: int | None = None
        """The core of this machine, if it keeps to one."""
        self._activity: tuple[BatchActivity, ...] | None = None
        """Of a batch of the loaded program, for each IPU of a replica; None without a model."""

    # --- Places ---------------------------------------------------------------------------------------------

    def prepare(self, executable: Executable, machines: int) -> None:
        """Make ready for a program on the job's ``machines``. Raises ApplicationRuntimeError if it does not fit its
        IPUs, and UsageError for a planned fault that cannot strike in it.
        """
        self._check_fit(executable, machines)
        self.lists = self._lists(executable)
        self._lasting, self._activity = LastingFaults(), activity_of_batches(executable)
        self._context.faults.check(self.who, self.lists, self._places(executable))

    def _check_fit(self, executable: Executable, machines: int) -> None:
        """Raises ApplicationRuntimeError if a program is not for the IPUs of a job, or an owner holds parts of
        replicas."""
        layout = executable.layout
        if layout.machines != machines or layout.ipus != self.range.count:
            raise ApplicationRuntimeError(
                f"the program covers {layout.ipus} IPUs on {layout.machines} machine(s), but its device is IPUs "
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

    # --- Reports ----------------------------------------------------------------------------------------------

    def activity(self) -> dict[int, BatchActivity]:
        """What each of the job's IPUs on this machine does in a batch of the loaded program; empty without a model."""
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

    def _note_work(
        self, engine: Engine, batches: int, passed: int, outcome: RunOutcome | None, begin: float
    ) -> None:
        """Note what a run of ``batches`` passes computed; what it did before it failed (``outcome`` None) was computed
        too. ``passed``: batches that it did.
        """
        work, kind, executable = self._context.work, engine.executable.training, engine.executable
        if outcome is not None:
            passes, modelled, emulation = batches, outcome.modelled_seconds, outcome.seconds
        elif passes := passed // executable.batches_per_pass:
            modelled = passes * modelled_step_seconds(executable)
            modelled, emulation = 0.0 if math.isnan(modelled) else modelled, self._context.clock() - begin
        else:
            return
        position = engine.groups.position
        work[kind] = work[kind].and_a_run(executable, passes, modelled, emulation, position=position)

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

    def _choose_core(self, group: Group) -> int | None:
        """The core of this machine, as one of a program's on this host."""
        context = self._context
        ranks = group.host_ranks
        return choose_core(ranks.index(group.rank), len(ranks), context.cores, shared=context.shared)

    # --- Faults -----------------------------------------------------------------------------------------------

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
            self.struck = strike_error(self._context, strike)
            raise self.struck
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
            sent = 0 if self.engine is None else exchanged_bytes(self.engine.executable)
            strike_wait(self._context, strike, sent)

    def throttled_mhz(self, ipu: int) -> float | None:
        """See `LastingFaults.throttled_mhz`; of the batch that runs, or comes next."""
        return None if self.engine is None else self._lasting.throttled_mhz(ipu, self.engine.batches_done)

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
