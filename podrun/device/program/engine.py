"""One program loaded on one machine: its memory, its compiled pieces, its group of machines, and its runs.

Machines of a program agree on the state of things through one small arena, `_CONTROL`: a row of numbers per
machine, gathered at the start of every run. There they find out whether all run equally many batches and
whether all host processes wrote equal values, before anything is changed.

Where replicas span machines, an Engine holds only what its position needs: see `podrun.device.program.positions`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podrun.collectives import Group
from podrun.device.program.buffers import Buffers
from podrun.device.program.cores import ANY_TIME, Turn
from podrun.device.program.interpreter import Between, Interpreter
from podrun.device.program.kept import KeptByReplicas
from podrun.device.program.operands import Array
from podrun.device.program.positions import at_position, ipus_per_position
from podrun.device.program.streams import Drain, Feed, OwnerArrays
from podrun.device.program.team import Team
from podrun.device.xla.heap import give_back
from podrun.device.xla.pieces import PieceCache
from podrun.errors import ApplicationRuntimeError
from podrun.executable import Computation, Copy, Executable, Receive, Send, StoreStream

_CONTROL = "podrun:control"
_CONTROL_ROW = 64
"""int64 numbers per machine in the control arena: batches, batches done, digest of host writes, number of variables
without a value, and the first of these by their place among all names; the rest is padding.
"""
_FIRST_PLACE = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave besides anchors. ``modelled_seconds``: of the batches, on the IPUs (NaN: no model);
    ``seconds``: of this machine.
    """

    batches_done: int
    modelled_seconds: float
    seconds: float


class Disagreement(ApplicationRuntimeError):
    """Machines found out, before anything was changed, that they were not asked for the same. The program
    stays loaded.
    """


class Engine:
    """See the module docstring. ``between``: called before every instruction; ``turn``: held while it computes.
    One thread at a time runs; the machine's lock guards `write` and `read`.
    """

    def __init__(
        self,
        executable: Executable,
        group: Group,
        pieces: PieceCache,
        between: Between,
        clock: Callable[[], float] = time.perf_counter,
        turn: Turn = ANY_TIME,
    ) -> None:
        self.team = Team(group, executable, turn)
        self._turn = turn
        self.executable = at_position(executable, self.team.position)
        self.batches_done = 0
        self._clock = clock
        self._names = sorted(executable.variables)
        self._complete = False
        try:
            self._interpreter = self._prepare(pieces, between)
        except BaseException:
            self.team.close()
            raise
        self._pending: dict[str, Array] = {}
        self._digests: dict[str, bytes] = {}
        self._modelled_seconds = _modelled_step_seconds(executable)
        self._kept = KeptByReplicas(self.executable, self.buffers, self.team.peers)
        # Nobody goes on before every machine has filled what its host keeps one copy of.
        group.barrier()

    @property
    def group(self) -> Group:
        """All machines of the program."""
        return self.team.whole

    def _prepare(self, pieces: PieceCache, between: Between) -> Interpreter:
        executable, team = self.executable, self.team
        for group in (team.whole, team.peers):
            group.allocate(_CONTROL, "int64", _CONTROL_ROW * group.size)
        self.buffers = Buffers(executable, team.peers)
        compiled = {
            name: pieces.piece(c, self._donated(c), self.buffers.updated_in_place(c))
            for name, c in executable.computations.items()
        }
        return Interpreter(
            executable.instructions,
            compiled,
            self.buffers,
            team.whole,
            between,
            first=team.position * ipus_per_position(executable),
            mail=team.mail,
            turn=self._turn,
        )

    def write(self, values: Mapping[str, Array], digests: Mapping[str, bytes]) -> None:
        """Host writes, from the first owner of this machine: kept aside until the next run starts on all
        machines. ``digests``: `digest_of_array` of each, or `UNCOMPARED` for all.
        """
        for name, value in values.items():
            self.buffers.check_write(name, value)
        for name, value in values.items():
            self._pending[name] = np.array(value, copy=True)
            self._digests[name] = digests[name]
        self._kept.take(self._pending)

    def pending_digest(self, name: str) -> bytes | None:
        """`digest_of_array` of what the host wrote since the last run, if it did."""
        return self._digests.get(name)

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """Variables as the host sees them: what it wrote last, else what the last run left. Views, not
        copies.
        """
        found = {}
        for name in names:
            if name in self._pending:
                found[name] = self._pending[name]
            else:
                kept = self._kept.read(name)
                found[name] = self.buffers.read(name) if kept is None else kept
        return found

    def run(self, batches: int, owners: Sequence[OwnerArrays], *, agreed: bool = False) -> Outcome:
        """Run ``batches`` batches for all owners of this machine. All machines of the program run together.

        ``agreed``: one owner holds the whole job, so all machines were asked for the same, and for the next thing
        only when all have answered; they need not meet before they start unless there is something to write, nor
        before they end.
        """
        import jax

        begin = self._clock()
        if not agreed or not self._complete:
            self._agree(batches, self.team.whole)
        elif self._pending:  # the owner wrote the same to all machines that hold it
            with self.team.errors_of_the_program():
                self._agree(batches, self.team.peers)
        feed, drain = Feed(self.executable, owners), Drain(self.executable, owners)
        with jax.enable_x64(True), self.team.errors_of_the_program():
            self._run_batches(batches, feed, drain, agreed)
            self._kept.publish()
            self._gather_slices()
        return Outcome(self.batches_done, batches * self._modelled_seconds, self._clock() - begin)

    def abort(self, error: Mapping[str, Any]) -> None:
        """End the program on all machines with an error as of `PoplarError.to_dict`. Called from any thread."""
        self.team.abort(error)

    def close(self) -> None:
        """Leave the groups of machines, and the kernel the memory that steps took turns with."""
        self.team.close()
        give_back()

    def _run_batches(self, batches: int, feed: Feed, drain: Drain, agreed: bool) -> None:
        mail = self.team.mail
        if mail is not None:
            mail.begin(batches)
        for batch in range(batches):
            if mail is not None:
                mail.await_room(batch)
            # One owner hears from all machines before it asks any of them for more.
            last = agreed and batch == batches - 1
            self._interpreter.run_batch(self.batches_done, batch, feed, drain, host_gathers=last)
            self.batches_done += 1
            if mail is not None:
                mail.end_batch()
        if mail is not None:
            mail.end()

    def _agree(self, batches: int, group: Group) -> None:
        """Meet the machines of a group; nobody runs unless all want the same. Then the host's writes take effect."""
        missing = self.buffers.unwritten - self._pending.keys()
        places = [self._names.index(name) for name in sorted(missing)][: _CONTROL_ROW - _FIRST_PLACE]
        row = [batches, self.batches_done, _digest(self._digests), len(missing), *places]
        rows = self._exchange(row, group)
        _refuse_differences(rows, 1 if group is self.team.peers else self.team.spanned, self._names)
        if rows[group.rank, 2]:
            self.buffers.write(self._pending)
            self._pending, self._digests = {}, {}
            self.team.peers.barrier()
        self._complete = True

    def _exchange(self, row: Sequence[int], group: Group) -> Array:
        control = group.allocate(_CONTROL, "int64", _CONTROL_ROW * group.size)
        start = group.rank * _CONTROL_ROW
        control[start : start + len(row)] = row
        gathered = group.all_gather(_CONTROL)
        return np.array(gathered).reshape(group.size, _CONTROL_ROW)

    def _gather_slices(self) -> None:
        """Where machines share no memory, bring together what each updates its own slice of: the host may read it."""
        if len(self.team.peers.host_ranks) < self.team.peers.size:
            for name, arena in self.executable.arenas.items():
                if arena.sliced:
                    self.buffers.all_gather(name)

    def _donated(self, computation: Computation) -> tuple[int, ...]:
        """Positions of operands that may be used up: temporaries that a Computation made and nothing else refers to
        (the host's arrays, stashes and what is under way between IPUs are not).
        """
        made = {name for c in self.executable.computations.values() for name in c.outputs}
        for instruction in itertools.chain(*self.executable.instructions):
            if isinstance(instruction, Copy):
                made -= {instruction.source, instruction.destination}
            elif isinstance(instruction, Send | Receive | StoreStream):
                made.discard(instruction.buffer)
        return tuple(
            position
            for position, name in enumerate(computation.inputs)
            if name in computation.donated and name in made and self.buffers.is_temporary(name)
        )


def _modelled_step_seconds(executable: Executable) -> float:
    """Modelled time of one batch; NaN if the Executable has no model of it."""
    step = executable.tile_report.get("step")
    seconds = step.get("seconds") if isinstance(step, Mapping) else None
    return float(seconds) if isinstance(seconds, int | float) else math.nan


UNCOMPARED = b"uncompared"
"""Stands for the digest of what nobody else writes: one owner holds the whole job."""


def digest_of_array(value: Array) -> bytes:
    """A name for an array's bits."""
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return hashlib.blake2b(flat.data, digest_size=16).digest()


def _digest(digests: Mapping[str, bytes]) -> int:
    """63 bits over names and contents; 0 for no values."""
    if not digests:
        return 0
    whole = hashlib.blake2b(digest_size=8)
    for name in sorted(digests):
        whole.update(name.encode() + b"\0" + digests[name])
    return (int.from_bytes(whole.digest(), "little") >> 1) or 1


def _refuse_differences(rows: Array, spanned: int, names: Sequence[str]) -> None:
    """``rows``: of all machines that meet. The host writes the same to every ``spanned``-th of them."""
    for column, what in ((0, "batches in this run"), (1, "batches done since the program was loaded")):
        if len(set(rows[:, column])) > 1:
            listed = ", ".join(f"machine {m}: {n}" for m, n in enumerate(rows[:, column]))
            raise Disagreement(
                f"the machines of the program do not agree on the number of {what}: {listed}",
                hint="Call run with the same batches in every instance.",
            )
    for first in range(spanned):
        odd = [m for m in range(first, len(rows), spanned) if rows[m, 2] != rows[first, 2]]
        if odd:
            raise Disagreement(
                "host processes wrote different weights or other variables: "
                f"those on machine(s) {', '.join(map(str, odd))} differ from those on machine {first}",
                hint="Write the same values in every instance (same initial weights, same random seed).",
            )
    if any(rows[:, 3]):
        missing = {
            names[place]
            for row in rows
            for place in row[_FIRST_PLACE : _FIRST_PLACE + min(row[3], _CONTROL_ROW - _FIRST_PLACE)]
        }
        raise Disagreement(
            f"variables have no value yet: {', '.join(sorted(missing)[:10])}",
            hint="Write the weights to the device before the first run (weightsFromHost).",
        )
