"""Groups over several hosts: the same promises and the same bits as on one.

Hosts are made by name: ranks that give different host names share no memory and talk over TCP.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_ranks import PATIENCE, hosts, on_all, set_deadlines
from faulty_ranks import PROCESSES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_group_results import NUMPY, bits, expected, values

from podrun.collectives import (
    Communicator,
    Group,
    GroupError,
    MismatchError,
    RankLostError,
    RankMissingError,
    Reduction,
    create,
    host_reduction,
    join_group,
    mesh,
    slice_of,
    tcp_link,
)
from podrun.collectives.host_reduction import HostLanes
from podrun.core.errors import ConflictError, PodrunError

LAYOUTS = ["AB", "AABB", "ABC", "ABAB", "AAB", "ABBA", "AABBCC"]


REDUCTIONS = given(
    names=st.sampled_from(LAYOUTS),
    size=st.one_of(st.integers(1, 50), st.integers(100_000, 400_000)),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "int32"]),
    reduction=st.sampled_from(list(NUMPY)),
)


@settings(max_examples=5, deadline=None)
@REDUCTIONS
@example(names="ABC", size=30, dtype="float16", reduction=Reduction.MEAN)
def test_same_bits_as_on_one_host(names: str, size: int, dtype: str, reduction: Reduction) -> None:
    reduce_over_hosts(names, size, dtype, reduction)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@REDUCTIONS
def test_more_has_the_same_bits_as_on_one_host(
    names: str, size: int, dtype: str, reduction: Reduction
) -> None:
    reduce_over_hosts(names, size, dtype, reduction)


def reduce_over_hosts(names: str, size: int, dtype: str, reduction: Reduction) -> None:
    if reduction is Reduction.MEAN and dtype == "int32":
        return
    members = len(names)
    parts = [values(dtype, size, rank) for rank in range(members)]
    want = expected(parts, reduction)

    def work(group: Group) -> None:
        own = slice_of(group.rank, members, size)
        mine = group.allocate("gradients", dtype, size)
        weights = group.shared("weights", dtype, size)
        for _ in range(2):
            mine[:] = parts[group.rank]
            scattered = group.reduce_scatter("gradients", reduction, settle=False)
            assert bits(scattered) == bits(want[own])
            weights[own] = scattered
            assert bits(group.all_gather("weights")) == bits(want)
        assert bits(group.all_reduce("gradients", reduction)) == bits(want)
        assert bits(group.all_reduce("gradients", reduction, in_place=True)) == bits(want)
        assert bits(mine) == bits(want)
        group.barrier()

    with hosts(names) as groups:
        assert on_all(groups, work) == [None] * members


@pytest.mark.parametrize("names", ["AB", "ABB", "ABC"])
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.sample(5)
def test_many_pieces_through_small_buffers(monkeypatch: pytest.MonkeyPatch, names: str, near: bool) -> None:
    """As long vectors travel: between near hosts through small buffers, more pieces than one call sends."""
    monkeypatch.setattr(mesh, "NEAR", 1.0 if near else 0.0)
    small = 100 * 1024  # no kernel's own choice
    monkeypatch.setattr(tcp_link, "CACHED_BUFFER", small)
    monkeypatch.setattr(host_reduction, "PIECE_BYTES", 400)
    monkeypatch.setattr(host_reduction, "_PIECES", 1 << 30)
    monkeypatch.setattr(host_reduction, "_MUCH", 1)
    parts = [values("float32", 100_000, rank) for rank in range(len(names))]
    want = expected(parts, Reduction.SUM)

    def work(group: Any) -> set[int]:
        for _ in range(2):
            group.allocate("x", "float32", 100_000)[:] = parts[group.rank]
            assert bits(group.all_reduce("x")) == bits(want)
        links = group._mesh.links.values()
        return {link.incoming.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for link in links}

    with hosts(names) as groups:
        for sizes in on_all(groups, work):
            assert (sizes == {small}) == near, sizes


MOVES = given(
    names=st.sampled_from(LAYOUTS), size=st.sampled_from([0, 1, 7, 300_001]), root=st.integers(0, 5)
)


@settings(max_examples=3, deadline=None)
@MOVES
def test_moving_data_equals_numpy(names: str, size: int, root: int) -> None:
    move_data(names, size, root)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@MOVES
def test_moving_more_data_equals_numpy(names: str, size: int, root: int) -> None:
    move_data(names, size, root)


def move_data(names: str, size: int, root: int) -> None:
    members = len(names)
    root %= members
    each = [np.arange(size, dtype=np.int32) * (rank + 1) for rank in range(members)]
    pieces = [
        np.arange(members * size, dtype=np.int32).reshape(members, size) + rank for rank in range(members)
    ]

    def work(group: Group) -> None:
        comm, rank = Communicator(group), group.rank
        np.testing.assert_array_equal(comm.all_gather(each[rank]), np.stack(each))
        np.testing.assert_array_equal(comm.all_to_all(pieces[rank]), np.stack([p[rank] for p in pieces]))
        np.testing.assert_array_equal(comm.broadcast(each[rank].copy(), root), each[root])
        gathered = comm.gather(each[rank], root)
        assert (gathered is None) == (rank != root)
        if gathered is not None:
            np.testing.assert_array_equal(gathered, np.stack(each))
        out = comm.scatter(pieces[rank] if rank == root else None, np.empty(size, np.int32), root)
        np.testing.assert_array_equal(out, pieces[root][rank])
        np.testing.assert_array_equal(comm.all_reduce(each[rank]), np.sum(each, axis=0))
        for other in range(members):
            if other != rank:
                comm.send(each[rank], other, tag=rank)
        for other in range(members):
            if other != rank:
                np.testing.assert_array_equal(
                    comm.receive(np.empty(size, np.int32), other, tag=other), each[other]
                )

    with hosts(names) as groups:
        assert on_all(groups, work) == [None] * members


def test_groups_within_and_across_hosts() -> None:
    def work(group: Group) -> tuple[list[int], list[int]]:
        comm, mine = Communicator(group), np.array([group.rank])
        within, across = comm.split([[0, 1], [2, 3]]), comm.split([[0, 2], [1, 3]])
        assert within is not None
        assert across is not None
        result = list(within.all_gather(mine)[:, 0]), list(across.all_gather(mine)[:, 0])
        group.barrier()
        within.close()
        across.close()
        return result

    with hosts("AABB") as groups:
        assert on_all(groups, work) == [
            ([0, 1], [0, 2]),
            ([0, 1], [1, 3]),
            ([2, 3], [0, 2]),
            ([2, 3], [1, 3]),
        ]
        assert [group.host_ranks for group in groups] == [(0, 1), (0, 1), (2, 3), (2, 3)]


@given(names=st.lists(st.sampled_from("ABCD"), min_size=2, max_size=12))
def test_every_lane_has_one_handler_on_every_host(names: list[str]) -> None:
    layout = HostLanes.from_names(names)
    assert [rank for _, run in layout.runs for rank in run] == list(range(len(names)))
    for lane in range(len(names)):
        handlers = {layout.handler(host, lane) for host in range(layout.hosts)}
        assert len(handlers) == layout.hosts
        assert lane in handlers
    for host in range(layout.hosts):
        handled = sorted(lane for rank in layout.ranks_on[host] for lane in layout.lanes_of(rank))
        assert handled == list(range(len(names)))


def test_a_rank_that_never_joins_is_named() -> None:
    with hosts("AAB", timeout=0.3, absent=(2,)) as groups:
        for error in on_all(groups, lambda group: group.barrier()):
            assert isinstance(error, RankMissingError)
            assert "rank 2 never joined" in str(error)


def test_a_rank_that_does_not_come_is_named_on_every_host() -> None:
    with hosts("ABB") as groups:
        on_all(groups, lambda group: group.barrier())
        set_deadlines(groups, 0.3)
        errors = on_all(groups[:2], lambda group: group.barrier())
        with pytest.raises(RankMissingError):
            groups[2].barrier()
    for error in errors:
        assert isinstance(error, RankMissingError)


def test_a_rank_that_leaves_is_named_on_every_host() -> None:
    def work(group: Group) -> None:
        group.allocate("x", "float32", 1000)
        group.barrier()
        if group.rank == 2:
            group.close()
        else:
            group.all_reduce("x")

    with hosts("AABB", timeout=2 * PATIENCE) as groups:
        began = time.monotonic()
        errors = on_all(groups, work)
        assert time.monotonic() - began < PATIENCE
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], RankLostError), errors[rank]
        assert errors[rank].rank == 2
        assert "rank 2" in str(errors[rank])


def test_abort_reaches_every_host() -> None:
    def work(group: Group) -> None:
        group.barrier()
        if group.rank == 3:
            group.abort({"type": "PoplarRuntimeError", "message": "tile parity", "where": "IPU 5"})
        group.barrier()

    with hosts("AABB") as groups:
        assert [str(error) for error in on_all(groups, work)] == ["tile parity"] * 4


def test_different_collectives_are_named_on_every_host() -> None:
    def work(group: Group) -> None:
        group.allocate("x", "float32", 64)
        if group.rank < 2:
            group.all_reduce("x")
        else:
            group.all_reduce("x", Reduction.MAX)

    with hosts("AABB") as groups:
        for error in on_all(groups, work):
            assert isinstance(error, MismatchError)
            assert "sum" in str(error)
            assert "max" in str(error)


def test_a_message_cut_short_is_named() -> None:
    with hosts("AB") as groups:
        on_all(groups, lambda group: group.barrier())
        cut: Any = groups[1]
        link = cut._mesh.links[0].outgoing
        link.sendall(b"pdcf" + bytes(20))  # a part of a header, and the end
        link.shutdown(socket.SHUT_WR)
        with pytest.raises(
            RankLostError, match=r"rank 1 closed its connection in the middle .* at 24 of \d+ bytes"
        ):
            groups[0].barrier()


def test_strangers_are_not_let_in() -> None:
    group, token = create(2, address="127.0.0.1")
    stranger = join_group({**token, "key": "0" * 32}, 1)
    set_deadlines([group], 0.3)
    for error in on_all([group, stranger], lambda g: g.barrier()):
        assert isinstance(error, RankMissingError | RankLostError)
    with socket.create_connection(("127.0.0.1", token["port"])) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert sock.recv(100) == b""
    stranger.close()
    group.close()


def test_a_taken_rank_and_a_taken_port_are_refused() -> None:
    group, token = create(3, address="127.0.0.1")

    def come(taker: Group) -> None:
        try:
            taker.barrier()
        except GroupError:  # the other one would wait for rank 2
            group.abort({"type": "PoplarRuntimeError", "message": "enough"})
            raise

    first, second = join_group(token, 1), join_group(token, 1)
    refusals = [error for error in on_all([first, second], come) if isinstance(error, GroupError)]
    assert any("rank 1 of the group was already taken" in str(error) for error in refusals)
    with pytest.raises(ConflictError, match="cannot listen on"):
        create(2, address="127.0.0.1", port=token["port"])
    for each in (first, second, group):
        each.close()
    with pytest.raises(RankLostError, match="cannot reach rank 0"):
        join_group(token, 2, timeout=0.1)


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with hosts("AABB") as groups:
        on_all(groups, lambda group: group.barrier())
    assert threading.active_count() == before


def _remote_rank(token: dict[str, Any], pipe: Any) -> None:
    """Rank 1 on a host of its own: joins, sums once, says so, and waits to be killed."""
    group = join_group(token, 1, host="B")
    group.allocate("x", "float32", 1000)[:] = 1
    pipe.send(float(group.all_reduce("x")[0]))
    pipe.recv()


@pytest.mark.system
def test_a_killed_remote_process_is_named_and_the_group_can_be_made_again() -> None:
    for _ in range(2):
        group, token = create(2, address="127.0.0.1", timeout=2 * PATIENCE, host="A")
        ours, theirs = PROCESSES.Pipe()
        peer = PROCESSES.Process(target=_remote_rank, args=(token, theirs))
        peer.start()
        group.allocate("x", "float32", 1000)[:] = 2
        assert float(group.all_reduce("x")[0]) == 3.0
        assert ours.poll(PATIENCE)
        assert ours.recv() == 3.0
        peer.kill()
        began = time.monotonic()
        with pytest.raises(RankLostError, match=r"rank 1 .*in all_reduce\('x'") as lost:
            group.all_reduce("x")
        assert lost.value.rank == 1
        assert time.monotonic() - began < PATIENCE
        peer.join(PATIENCE)
        group.close()
        peer.close()
        for end in (ours, theirs):
            end.close()


def _reduce_on_and_on(group: Any, strike: Callable[[], None] = lambda: None) -> None:
    """Reduce until the group ends; once all are up, with a deadline of a second."""
    for turn in range(1_000_000):
        group.allocate("x", "float32", 300_000)[:] = turn
        group.all_reduce("x")
        if turn == 3:
            group._timeout = group._mesh._timeout = group._local._timeout = 1.0
        if turn == 10:
            strike()


def _rank_of_two_hosts(token: dict[str, Any], rank: int, pipe: Any) -> None:
    """Rank ``rank`` of a group on hosts "AABB" that reduces until the group ends, and says how it did."""
    group = join_group(token, rank, host="AABB"[rank])
    try:
        _reduce_on_and_on(group)
    except PodrunError as error:
        pipe.send((type(error).__name__, str(error)))
    group.close()


@pytest.mark.system
@pytest.mark.parametrize(
    ("fate", "named"), [(signal.SIGKILL, RankLostError), (signal.SIGSTOP, RankMissingError)]
)
def test_a_host_that_dies_or_freezes_while_reducing_is_named_on_every_rank_in_time(
    fate: signal.Signals, named: type[PodrunError]
) -> None:
    group, token = create(4, address="127.0.0.1", timeout=30, host="A")
    ours, theirs = PROCESSES.Pipe()
    peers = [PROCESSES.Process(target=_rank_of_two_hosts, args=(token, rank, theirs)) for rank in (1, 2, 3)]
    for peer in peers:
        peer.start()
    struck: list[float] = []

    def strike() -> None:
        struck.append(time.monotonic())
        for peer in peers[1:]:
            os.kill(peer.pid or 0, fate)

    try:
        with pytest.raises(named) as error:
            _reduce_on_and_on(group, strike)
        assert time.monotonic() - struck[0] < PATIENCE
        assert ours.poll(PATIENCE)
        kind, message = ours.recv()
        assert kind == named.__name__
        for text in (str(error.value), message):  # each names the rank it found missing first
            assert "all_reduce('x'" in text
            assert "rank 2" in text or "rank 3" in text
    finally:
        for peer in peers:
            peer.kill()
            peer.join(60)
            peer.close()
        group.close()
        for end in (ours, theirs):
            end.close()
