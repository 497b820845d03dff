"""The machines of a program as one of them sees them: all, those that hold what it holds, and those it sends to.

Where replicas lie on one machine, all machines hold the same: there is one group. Where a replica spans several, the
machines at one position of their replicas reduce and gather with each other (`Team.peers`), and those of one replica
exchange messages (`Team.mail`). Whatever ends the program for one machine ends all groups it is in; as each machine
that hears of it does the same, all hear.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from podrun.collectives import Communicator, Group, RankLostError, RankMissingError
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.device.program.cores import ANY_TIME, Turn
from podrun.device.program.mail import Line, Mail, of_the_program
from podrun.device.program.positions import ipus_per_position, traffic
from podrun.executable import Executable


class Team:
    """See the module docstring. ``whole``: the group of all machines, by rank.

    ``spanned``: machines of a replica; ``turn``: held while gradients are summed. Made by all machines at the same
    time; `abort` may come from any thread.
    """

    def __init__(self, whole: Group, executable: Executable, turn: Turn = ANY_TIME) -> None:
        self.whole = whole
        self.spanned = executable.layout.machines_per_replica
        self.position = whole.rank % self.spanned
        self.peers: Group = whole
        self.mail: Mail | None = None
        self._lines: list[Line] = []
        if self.spanned > 1:
            try:
                self._part(executable)
            except BaseException:
                self._leave_parts()
                raise
        if isinstance(self.peers, SharedMemoryGroup):
            self.peers.turn = turn

    @property
    def peer_ranks(self) -> tuple[int, ...]:
        """The ranks of the peers among all machines."""
        return tuple(range(self.position, self.whole.size, self.spanned))

    def abort(self, error: Mapping[str, Any]) -> None:
        """End the program on all machines, with an error as of `PoplarError.to_dict`."""
        self.whole.abort(error)
        if self.peers is not self.whole:
            self.peers.abort(error)
        for line in self._lines:
            line.group.abort(error)

    def close(self) -> None:
        """Leave all groups. A run has ended, or was aborted."""
        self._leave_parts()
        self.whole.close()

    def _leave_parts(self) -> None:
        for line in self._lines:
            line.close()
        if self.peers is not self.whole:
            self.peers.close()

    @contextlib.contextmanager
    def errors_of_the_program(self) -> Iterator[None]:
        """Errors of the group of peers name machines by their place among them: name them by that among all."""
        if self.spanned == 1:
            yield
            return
        try:
            yield
        except (RankLostError, RankMissingError) as error:
            named = of_the_program(error, self.peer_ranks)
            if named is error:
                raise
            raise named from error

    def _part(self, executable: Executable) -> None:
        """Make the group of peers, and a line to each machine of the replica that there are messages for."""
        everybody, spanned = Communicator(self.whole), self.spanned
        firsts = range(0, self.whole.size, spanned)
        mine = everybody.split([[first + p for first in firsts] for p in range(spanned)])
        assert mine is not None
        self.peers = mine.group
        counts = {
            (t.source, t.dest): t.messages
            for t in traffic(executable.instructions, ipus_per_position(executable))
        }
        for low, high in sorted({(min(pair), max(pair)) for pair in counts}):
            both = everybody.split([[first + low, first + high] for first in firsts])
            if both is not None:
                other = high if self.position == low else low
                first = self.whole.rank - self.position
                sends, receives = (counts.get(p, 0) for p in ((self.position, other), (other, self.position)))
                ranks = (first + low, first + high)
                self._lines.append(Line(both.group, other, ranks, sends, receives))
        self.mail = Mail(self._lines, ipus_per_position(executable))
        for group in (self.peers, *(line.group for line in self._lines)):
            group.barrier()  # Between hosts members meet at their first call: let that be now, and in this order.
