"""What goes wrong between hosts, generated: connections that end or fall silent in the middle of a message, and ranks
that ask for different things. Every rank gets a named error in time, and a new group works at once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from collective_ranks import PATIENCE, hosts, on_all, set_deadlines
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.collectives import (
    Communicator,
    Group,
    MismatchError,
    RankLostError,
    RankMissingError,
    Reduction,
    mesh,
    tcp_link,
)
from podrun.collectives.registrar import Registrar
from podrun.collectives.tcp_link import FrameKind
from podrun.core.errors import PodrunError

TIMEOUT = 0.2
LAYOUTS = ["AB", "AAB", "ABB", "AABB", "ABC"]


class Cut:
    """A socket that takes ``left`` more bytes; what is sent then ends the connection, or is lost."""

    def __init__(self, sock: socket.socket, left: int, *, closes: bool) -> None:
        self.sock, self.left, self.closes, self.reached = sock, left, closes, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def sendmsg(self, parts: Sequence[memoryview], ancillary: Sequence[Any] = (), flags: int = 0) -> int:
        whole = b"".join(parts)
        if len(whole) <= self.left:
            sent = self.sock.sendmsg([whole], [], flags)
            self.left -= sent
            return sent
        if not self.reached:
            self.reached = True
            self.sock.settimeout(PATIENCE)
            self.sock.sendall(whole[: self.left])
            if self.closes:
                self.sock.shutdown(socket.SHUT_WR)
        if self.closes:
            raise BrokenPipeError
        return len(whole)


def sum_all(comm: Communicator) -> None:
    mine = np.full(200_000, comm.rank, np.float32)
    assert comm.all_reduce(mine)[-1] == sum(range(comm.size))


def gather_all(comm: Communicator) -> None:
    assert comm.all_gather(np.full(50_000, comm.rank))[-1, -1] == comm.size - 1


def swap_all(comm: Communicator) -> None:
    assert comm.all_to_all(np.full((comm.size, 9000), comm.rank))[-1, -1] == comm.size - 1


def from_each(comm: Communicator) -> None:
    for root in range(comm.size):
        assert comm.broadcast(np.full(9000, comm.rank), root)[-1] == root


WORKS: list[Callable[[Communicator], None]] = [sum_all, gather_all, swap_all, from_each]


@settings(max_examples=6, deadline=None)
@given(
    names=st.sampled_from(LAYOUTS),
    work=st.sampled_from(WORKS),
    left=st.one_of(st.integers(0, 200), st.integers(0, 500_000)),
    closes=st.booleans(),
)
def test_a_connection_cut_anywhere_is_named_on_every_rank(
    names: str, work: Callable[[Communicator], None], left: int, closes: bool
) -> None:
    for deadline in (TIMEOUT, 10 * TIMEOUT, 100 * TIMEOUT):
        reached, errors = _cut_and_go_on(names, work, left, closes, deadline)
        if reached:  # if not, the host was so busy that a rank was late before
            break
    assert reached
    for error in errors:
        assert isinstance(error, RankLostError | RankMissingError), error
        assert "rank" in str(error)
    with hosts(names) as groups:
        assert on_all(groups, lambda group: work(Communicator(group))) == [None] * len(names)


def _cut_and_go_on(
    names: str, work: Callable[[Communicator], None], left: int, closes: bool, deadline: float
) -> tuple[bool, list[Any]]:
    """Whether the cut was reached, and how each rank ended, if the last one's connection is cut after ``left`` bytes
    and collectives wait for ``deadline`` seconds.
    """

    def on_and_on(group: Group) -> None:
        for _ in range(200):  # the same calls on all ranks: one may be a call ahead when the cut comes
            work(Communicator(group))
        group.barrier()  # whoever has seen no harm yet learns of it

    last = len(names) - 1
    with hosts(names) as groups:
        on_all(groups, lambda group: group.barrier())
        set_deadlines(groups, deadline)
        layout, mesh = groups[last]._lanes, groups[last]._mesh  # type: ignore[attr-defined]
        link = mesh.links[layout.handler(0, last)]  # the one that carries its values
        cut = link.outgoing = Cut(link.outgoing, left, closes=closes)
        began = time.monotonic()
        errors = on_all(groups, on_and_on)
        assert time.monotonic() - began < PATIENCE
    return cut.reached, errors


NUMBERS = st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1))


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(list(FrameKind)),
    a=NUMBERS,
    b=NUMBERS,
    tag=NUMBERS,
    nbytes=st.one_of(st.integers(0, 2000), st.integers(0, 2**63)),
    gathers=st.booleans(),
)
def test_frames_that_no_member_would_send_are_named(
    kind: FrameKind, a: int, b: int, tag: int, nbytes: int, gathers: bool
) -> None:
    """As of a member with a fault: the right collective, but a part that it does not have, or of another size."""

    def work(group: Group) -> None:
        group.allocate("x", "float32", 500)
        (group.all_gather if gathers else group.all_reduce)("x")

    with hosts("AB") as groups:
        assert on_all(groups, work) == [None, None]
        set_deadlines(groups, TIMEOUT)
        faulty: Any = groups[1]
        what = faulty._last_calls[-1]
        header = tcp_link._HEADER.pack(tcp_link._MAGIC, kind, a, b, tag, nbytes, what)
        faulty._mesh.links[0].outgoing.sendall(header + bytes(min(nbytes, 2000)))
        with pytest.raises(PodrunError, match="rank 1"):
            work(groups[0])  # waits for rank 1, which sends nothing more


def reduce_arena(group: Group, dtype: str, size: int, reduction: Reduction) -> None:
    group.allocate("gradients", dtype, size)
    group.all_reduce("gradients", reduction)


def reduce_array(group: Group, dtype: str, size: int, reduction: Reduction) -> None:
    Communicator(group).all_reduce(np.ones(size, dtype), reduction)


def stack_array(group: Group, dtype: str, size: int, reduction: Reduction) -> None:
    Communicator(group).all_gather(np.ones(size, dtype))


def root_array(group: Group, dtype: str, size: int, reduction: Reduction) -> None:
    Communicator(group).broadcast(np.ones(size, dtype), root=group.size - 1)


@settings(max_examples=20, deadline=None)
@given(
    names=st.sampled_from(LAYOUTS),
    call=st.sampled_from([reduce_arena, reduce_array, stack_array, root_array]),
    size=st.sampled_from([1, 3000, 40_000]),
    other=st.sampled_from(["dtype", "size", "reduction", "call"]),
    data=st.data(),
)
def test_a_rank_that_differs_is_told_to_every_rank(
    names: str, call: Callable[..., None], size: int, other: str, data: st.DataObject
) -> None:
    odd = data.draw(st.integers(0, len(names) - 1), "odd rank")
    if other == "reduction" and call in (stack_array, root_array):
        other = "dtype"

    def work(group: Group) -> None:
        differs = group.rank == odd
        dtype = "int32" if differs and other == "dtype" else "float32"
        reduction = Reduction.MAX if differs and other == "reduction" else Reduction.SUM
        if differs and other == "call":
            group.barrier()
        else:
            call(group, dtype, size + (differs and other == "size"), reduction)
        group.barrier()

    with hosts(names, timeout=2 * PATIENCE) as groups:
        began = time.monotonic()
        errors = on_all(groups, work)
        assert time.monotonic() - began < PATIENCE, "found out at once, not by the deadline"
    for error in errors:
        assert isinstance(error, MismatchError), error
        assert f"rank {odd}" in str(error)


def test_an_error_that_is_told_late_is_not_taken_for_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is slow to tell the others why rank 1 has ended the group."""
    monkeypatch.setattr(mesh, "_GRACE", 0.0)
    waits, told = threading.Event(), Registrar._abort

    def tell_late(registrar: Registrar, error: dict[str, Any]) -> None:
        assert waits.wait(PATIENCE)
        told(registrar, error)

    with hosts("ABC") as groups:
        assert on_all(groups, lambda group: group.barrier()) == [None] * 3
        monkeypatch.setattr(Registrar, "_abort", tell_late)
        groups[2]._mesh._report = waits.set  # type: ignore[attr-defined]
        groups[1].abort({"type": "PoplarRuntimeError", "message": "enough"})
        (error,) = on_all(groups[2:], lambda group: gather_all(Communicator(group)))
    assert "enough" in str(error), error


@pytest.mark.parametrize(("names", "absent"), [("ABB", 1), ("ABC", 2)])
def test_a_rank_that_never_joins_a_second_time_either(names: str, absent: int) -> None:
    for _ in range(2):
        with hosts(names, timeout=TIMEOUT, absent=(absent,)) as groups:
            for error in on_all(groups, lambda group: group.barrier()):
                assert isinstance(error, RankMissingError)
                assert f"rank {absent} never joined" in str(error)
    with hosts(names) as groups:
        assert on_all(groups, lambda group: group.barrier()) == [None] * 3


def test_a_failed_group_stays_failed() -> None:
    with hosts("AB") as groups:
        groups[1].abort({"type": "PoplarRuntimeError", "message": "enough"})
        for _ in range(2):
            for error in on_all(groups, lambda group: group.barrier()):
                assert isinstance(error, PodrunError)
                assert "enough" in str(error)
