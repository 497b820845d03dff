"""The barrier and what is built on it: one closes each meeting, whoever dies; ways of reducing give equal bits."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest
from collective_ranks import on_all, ranks
from test_group_results import bits, expected, values

from podrun.collectives import Group, RankLostError, Reduction, create, join, plans
from podrun.collectives.board import Board, label
from podrun.collectives.shared_memory import SharedMemoryGroup


def board_of(group: Group) -> Board:
    assert isinstance(group, SharedMemoryGroup)
    return group._board


@pytest.mark.usefixtures("path")
def test_just_one_rank_closes_each_meeting_before_any_goes_on() -> None:
    closed: list[int] = []

    def work(group: Group) -> list[int]:
        seen = []
        for _ in range(300):
            board_of(group).meet_and_close(label("round"), 20, lambda: closed.append(group.rank))
            seen.append(len(closed))
        return seen

    with ranks(4) as groups:
        # Exact: the next meeting cannot be closed before this rank comes to it.
        assert on_all(groups, work) == [list(range(1, 301))] * 4


@pytest.mark.usefixtures("path")
def test_meetings_of_both_kinds_mix() -> None:
    def work(group: Group) -> int:
        sums = []
        for turn in range(100):
            board_of(group).meet_and_close(label("close"), 20, lambda turn=turn: sums.append(turn))
            group.barrier()
        return len(sums)

    with ranks(3) as groups:
        assert sum(on_all(groups, work)) == 100


def _come(token: dict[str, Any], rank: int, pipe: Any) -> None:
    """Come to two meetings; rank 2 comes to the first one last and dies while it closes it."""
    group = join(token, rank, timeout=20)
    board = board_of(group)
    if rank == 2:
        words = board.meetings._words[1]
        while not (words[0] and words[1]):
            os.sched_yield()
        board.meet_and_close(label("first"), 20, lambda: os.kill(os.getpid(), signal.SIGKILL))
        os.kill(
            os.getpid(), signal.SIGKILL
        )  # another rank saw that all had come, and closed it, before this one did
    board.meet_and_close(label("first"), 20, lambda: pipe.send("closed by 1"))
    try:
        group.barrier()
    except RankLostError as error:
        pipe.send(error.rank)
    group.close()


@pytest.mark.system
def test_a_rank_killed_while_it_closes_a_meeting_is_stood_in_for_and_then_named() -> None:
    spawn = multiprocessing.get_context("spawn")
    group, token = create(3, timeout=20)
    ours, theirs = spawn.Pipe()
    peers = [spawn.Process(target=_come, args=(token, rank, theirs)) for rank in (1, 2)]
    for peer in peers:
        peer.start()
    mine: list[str] = []
    board_of(group).meet_and_close(label("first"), 20, lambda: mine.append("closed by 0"))
    with pytest.raises(RankLostError, match="rank 2 of 3") as lost:
        group.barrier()
    assert lost.value.rank == 2
    for peer in peers:
        peer.join(20)
    assert [peer.exitcode for peer in peers] == [0, -signal.SIGKILL]
    said = []
    while ours.poll(0):
        said.append(ours.recv())
    assert said[-1] == 2
    assert len(mine) + len(said[:-1]) == 1
    group.close()
    for peer in peers:
        peer.close()
    for end in (ours, theirs):
        end.close()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("way", "cores"), [("posted", 64), ("by_the_last", 1), ("in_slices", 1)])
@pytest.mark.parametrize("members", [2, 9])
def test_every_way_of_reducing_gives_the_same_bits(
    way: str, cores: int, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    chosen = getattr(plans, way)
    monkeypatch.setattr(plans, way, lambda *arguments: taken.append(way) or chosen(*arguments))
    monkeypatch.setattr(plans, "LAST_BYTES", 0 if way == "in_slices" else 1 << 40)
    size = 4001
    kinds = [
        ("float32", Reduction.SUM),
        ("float32", Reduction.MEAN),
        ("float64", Reduction.SUM),
        ("float16", Reduction.PRODUCT),
        ("bfloat16", Reduction.SUM),
        ("float8_e4m3fn", Reduction.SUM),
        ("int32", Reduction.MIN),
        ("int32", Reduction.SUM),
        ("int64", Reduction.SUM),
        ("uint8", Reduction.MAX),
    ]

    def work(group: Group) -> None:
        board_of(group).cores = cores
        for dtype, reduction in kinds:
            parts = [values(dtype, size, rank) for rank in range(members)]
            mine = group.allocate(dtype, dtype, size)
            want = bits(expected(parts, reduction))
            for _ in range(3):
                mine[:] = parts[group.rank]
                assert bits(group.all_reduce(dtype, reduction)) == want
                assert bits(mine) == bits(parts[group.rank])
                assert bits(group.all_reduce(dtype, reduction, in_place=True)) == want
                mine[:] = parts[group.rank]
                few = [part[:7] for part in parts]
                assert bits(group.all_reduce(dtype, reduction, count=7)) == bits(expected(few, reduction))

    with ranks(members) as groups:
        assert on_all(groups, work) == [None] * members
    assert set(taken) == {way}


@pytest.mark.usefixtures("path")
def test_a_meeting_is_closed_anew_however_many_others_lie_between() -> None:
    """Words are told from stale ones by counts modulo 4: none of them may be taken for this meeting's."""

    def work(group: Group) -> list[int]:
        done = []
        for between in [0, 1, 2, 3, 4, 7, 3, 3, 3, 0, 0, 0, 1, 1]:
            for _ in range(between):
                group.barrier()
            board_of(group).meet_and_close(label("same"), 20, lambda: closed.append(1))
            done.append(len(closed))
        return done

    closed: list[int] = []
    with ranks(3) as groups:
        assert on_all(groups, work) == [list(range(1, 15))] * 3
