"""One program loaded on one machine: its memory, its compiled pieces, its group of machines, and its runs.

The machines of a program compare their states through one small arena, `_CONTROL`, with a row of numbers per machine,
gathered at the start of a run. Before anything changes they see whether all run the same number of batches and whether
all host processes wrote equal values.

Where replicas span machines, an Engine holds only what its position needs: see `podrun.device.program.machine_groups`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from podrun.collectives import Group
from podrun.core.environment import environment
from podrun.core.errors import ApplicationRuntimeError, PoplarError
from podrun.core.executable import (
    FLOATING_POINT_EXCEPTIONS,
    Array,
    Computation,
    Compute,
    Copy,
    Executable,
    Receive,
    Send,
    StoreStream,
)
from podrun.core.shared_region import RegionName
from podrun.core.terminal import FIRST_BATCH, note_moment, reported_steps
from podrun.device.connection import RunOutcome
from podrun.device.crash_records import (
    CrashReader,
    busiest_layers,
    describe_piece,
    own_crash_record,
    survive_stack_overflow,
)
from podrun.device.program.buffers import Buffers
from podrun.device.program.digests import (
    CONTROL_ROW,
    FIRST_PLACE,
    held_by_ipu,
    program_state_digest,
    refuse_differences,
)
from podrun.device.program.interpreter import InstructionHook, Interpreter
from podrun.device.program.machine_groups import (
    NO_CORE_LOCK,
    CoreLock,
    MachineGroups,
    at_position,
    ipus_per_position,
)
from podrun.device.program.streams import Drain, Feed, OwnerArrays, ReplicaState
from podrun.device.xla.clients import machine_settings, return_freed_memory
from podrun.device.xla.pieces import PieceCache

_CONTROL = "podrun:control"


class Engine:
    """One program loaded on one machine: its memory, its compiled pieces, its group of machines, and its runs.

    ``before_instruction``: called before every instruction. ``core_lock``: held while it computes. ``ipus``: text for
    the IPUs of this machine that are IPU *k* of a replica, built when it is needed. ``strikes_between``: as of
    `Interpreter`. One thread at a time runs; the machine's lock guards `write` and `read`.
    """

    def __init__(
        self,
        executable: Executable,
        group: Group,
        pieces: PieceCache,
        before_instruction: InstructionHook,
        ipus: Callable[[int], str],
        clock: Callable[[], float] = time.perf_counter,
        core_lock: CoreLock = NO_CORE_LOCK,
        strikes_between: bool = False,
    ) -> None:
        self._strikes_between = strikes_between
        self.groups = MachineGroups(group, executable, core_lock)
        self._core_lock = core_lock
        self.executable = at_position(executable, self.groups.position)
        self.batches_done = 0
        self._clock = clock
        self._names = sorted(executable.variables)
        self._complete = False
        self._slot = contextlib.ExitStack()
        try:
            self._interpreter = self._prepare(pieces, before_instruction, ipus)
        except BaseException:
            self._slot.close()
            self.groups.close()
            raise
        self._pending: dict[str, Array] = {}
        self._digests: dict[str, bytes] = {}
        self._modelled_seconds = modelled_step_seconds(executable)
        self._replica_state = ReplicaState(self.executable, self.buffers, self.groups.peers)
        # No machine continues before each has filled the arenas of which its host keeps one copy.
        group.barrier()

    @property
    def group(self) -> Group:
        """All machines of the program."""
        return self.groups.program

    def _prepare(
        self, pieces: PieceCache, before_instruction: InstructionHook, ipus: Callable[[int], str]
    ) -> Interpreter:
        survive_stack_overflow()
        executable, groups = self.executable, self.groups
        for group in (groups.program, groups.peers):
            group.allocate(_CONTROL, "int64", CONTROL_ROW * group.size)
        self._other_records = self._records_of_others()
        self.buffers = Buffers(executable, groups.peers)
        produced = self._produced()
        compiled = {
            name: pieces.piece(c, self._donated(c, produced), self.buffers.updated_in_place(c))
            for name, c in reported_steps("compiling piece", executable.computations.items())
        }
        first = groups.position * ipus_per_position(executable)
        texts = {
            (k, i.computation): describe_piece(
                executable.computations[i.computation], layers, ipus(first + k)
            )
            for k, work in enumerate(executable.instructions)
            for layers in [busiest_layers(executable.tile_report, first + k)]
            for i in work
            if isinstance(i, Compute)
        }
        return Interpreter(
            executable.instructions,
            compiled,
            self.buffers,
            groups.program,
            before_instruction,
            self._slot.enter_context(own_crash_record().slot(texts)),
            first=first,
            finite=bool(executable.metadata.get(FLOATING_POINT_EXCEPTIONS)),
            messages=groups.messages,
            core_lock=self._core_lock,
            strikes_between=self._strikes_between,
        )

    def write(self, values: Mapping[str, Array], digests: Mapping[str, bytes]) -> None:
        """Take host writes from the first owner of this machine; they are applied when the next run starts on all
        machines. ``digests``: `digest_of_array` of each, or `UNCOMPARED` for all.
        """
        for name, value in values.items():
            self.buffers.check_write(name, value)
        for name, value in values.items():
            self._pending[name] = _lasting(value)
            self._digests[name] = digests[name]
        self._replica_state.note_writes(self._pending)

    def pending_digest(self, name: str) -> bytes | None:
        """`digest_of_array` of what the host wrote since the last run, if it did."""
        return self._digests.get(name)

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """Variables as the host sees them: what it wrote last, else what the last run left. Views, not
        copies.
        """
        values = {}
        for name in names:
            if name in self._pending:
                values[name] = self._pending[name]
            else:
                value = self._replica_state.read(name)
                values[name] = self.buffers.read(name) if value is None else value
        return values

    def digests(self) -> list[int]:
        """A digest of the weights and optimizer state that lie on each IPU of this machine, in order: 64 bits."""
        ipus, own = self._held, self.buffers.own_copies.replicas
        alike = [self._digest(names, None) for names in ipus]
        return [
            self._digest(names, replica) if replica in own else digest
            for replica in range(self.executable.layout.replicas_per_machine)
            for names, digest in zip(ipus, alike, strict=True)
        ]

    def _digest(self, names: Iterable[str], replica: int | None) -> int:
        """``replica``: None for those without copies of their own."""
        import xxhash

        whole = xxhash.xxh3_64()
        for name in names:
            value = self._pending.get(name)
            if value is None:
                value = self.buffers.read(name, -1 if replica is None else replica)
            whole.update(name.encode() + b"\0")
            whole.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return whole.intdigest()

    @functools.cached_property
    def _held(self) -> list[list[str]]:
        """For each IPU of a replica on this machine, the weights and optimizer state on it."""
        return held_by_ipu(self.executable)

    def run(self, batches: int, owners: Sequence[OwnerArrays], *, agreed: bool = False) -> RunOutcome:
        """Run ``batches`` batches for all owners of this machine. All machines of the program run together.

        ``agreed``: one owner holds the whole job. It asks all machines for the same, and for the next run only when all
        have answered. So the machines need no barrier at the end of the run, and compare states at its start only if
        there are values to write.
        """
        begin = self._clock()
        survive_stack_overflow()
        if not agreed or not self._complete:
            self._agree(batches, self.groups.program)
        elif self._pending:  # the owner wrote the same to all machines that hold it
            with self.groups.errors_with_program_ranks():
                self._agree(batches, self.groups.peers)
        feed, drain = Feed(self.executable, owners), Drain(self.executable, owners)
        with machine_settings(), self.groups.errors_with_program_ranks():
            self._run_batches(batches, feed, drain, agreed)
            self._replica_state.exchange()
            self._gather_slices()
        return RunOutcome(self.batches_done, batches * self._modelled_seconds, self._clock() - begin)

    def abort(self, error: Mapping[str, Any]) -> None:
        """End the program on all machines with an error as of `PoplarError.to_dict`. Called from any thread."""
        self.groups.abort(error)

    def close(self) -> None:
        """Leave the groups of machines, and return freed memory to the kernel."""
        self.groups.close()
        self._slot.close()
        return_freed_memory()

    def died(self, rank: int, machine: int, endpoint: str) -> PoplarError | None:
        """The error for another machine of this host whose native code died; None if it ended in another way."""
        record = self._other_records.get(rank)
        return None if record is None else record.error(machine, endpoint, environment())

    def _records_of_others(self) -> dict[int, CrashReader]:
        """By rank: crash records of machines of this host in other processes."""
        program, name = self.groups.program, own_crash_record().name
        rows = self._exchange([name.pid, name.fd, name.inode, name.size], program)
        readers = {}
        for rank in program.host_ranks:
            if rows[rank, 0] != name.pid:
                # A process in another container cannot be opened: if it dies it is reported as lost.
                with contextlib.suppress(ApplicationRuntimeError):
                    readers[rank] = CrashReader.of_peer(RegionName(*(int(n) for n in rows[rank, :4])))
        return readers

    def _run_batches(self, batches: int, feed: Feed, drain: Drain, agreed: bool) -> None:
        messages = self.groups.messages
        if messages is not None:
            messages.begin(batches)
        for batch in range(batches):
            if messages is not None:
                messages.await_room(batch)
            # A sole owner waits for all machines before it asks any of them for the next run.
            last = agreed and batch == batches - 1
            self._interpreter.run_batch(self.batches_done, batch, feed, drain, host_gathers=last)
            if self.batches_done == 0:
                note_moment(FIRST_BATCH)
            self.batches_done += self.executable.batches_per_pass
            if messages is not None:
                messages.end_batch()
        if messages is not None:
            messages.end()

    def _agree(self, batches: int, group: Group) -> None:
        """Compare states with the machines of a group; raises Disagreement if they differ. Then apply the host's
        writes."""
        missing = self.buffers.unwritten - self._pending.keys()
        places = [self._names.index(name) for name in sorted(missing)][: CONTROL_ROW - FIRST_PLACE]
        row = [batches, self.batches_done, program_state_digest(self._digests), len(missing), *places]
        rows = self._exchange(row, group)
        refuse_differences(
            rows, 1 if group is self.groups.peers else self.groups.machines_per_replica, self._names
        )
        if rows[group.rank, 2]:
            self.buffers.write(self._pending)
            self._pending, self._digests = {}, {}
            self.groups.peers.barrier()
        self._complete = True

    def _exchange(self, row: Sequence[int], group: Group) -> Array:
        control = group.allocate(_CONTROL, "int64", CONTROL_ROW * group.size)
        start = group.rank * CONTROL_ROW
        control[start : start + len(row)] = row
        gathered = group.all_gather(_CONTROL)
        return np.array(gathered).reshape(group.size, CONTROL_ROW)

    def _gather_slices(self) -> None:
        """Gather arenas of which each machine updated its slice, where machines share no memory: the host may read
        them."""
        if len(self.groups.peers.host_ranks) < self.groups.peers.size:
            for name, arena in self.executable.arenas.items():
                if arena.sliced:
                    self.buffers.all_gather(name)

    def _produced(self) -> set[str]:
        """Temporaries that a Computation made and that nothing else refers to. The host's arrays, stashes and messages
        between IPUs are not among them.
        """
        produced = {name for c in self.executable.computations.values() for name in c.outputs}
        for instruction in itertools.chain(*self.executable.instructions):
            if isinstance(instruction, Copy):
                produced -= {instruction.source, instruction.destination}
            elif isinstance(instruction, Send | Receive | StoreStream):
                produced.discard(instruction.buffer)
        return produced

    def _donated(self, computation: Computation, produced: Set[str]) -> tuple[int, ...]:
        """Positions of operands that the piece may overwrite: those that are ``produced`` (`_produced`)."""
        return tuple(
            position
            for position, name in enumerate(computation.inputs)
            if name in computation.donated and name in produced and self.buffers.is_temporary(name)
        )


def _lasting(value: Array) -> Array:
    """A value that stays as it is: the array itself if it is read-only and owns its memory, else a copy."""
    return value if value.flags.owndata and not value.flags.writeable else np.array(value)


def modelled_step_seconds(executable: Executable) -> float:
    """Modelled time of one batch; NaN if the Executable has no model of it."""
    step = executable.tile_report.get("step")
    seconds = step.get("seconds") if isinstance(step, Mapping) else None
    return float(seconds) if isinstance(seconds, int | float) else math.nan
