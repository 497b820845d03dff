"""Ranks that do not come, die, leave or give up: an error that names them, on every rank."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
from collective_ranks import PATIENCE, hold_clock, on_all, ranks
from faulty_ranks import PROCESSES

from podrun.collectives import Group, GroupError, RankLostError, RankMissingError, create, join_group
from podrun.collectives.linux import Futex
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core.error_codec import error_to_dict
from podrun.core.errors import ApplicationRuntimeError, ErrorCode, RecoverableRuntimeError, RecoveryAction


def test_a_rank_that_does_not_come_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(3, timeout=20.0) as groups:
        hold_clock(monkeypatch, waiting=2, seconds=20.0)
        groups[0].allocate("gradients", "float32", 8)
        groups[1].allocate("gradients", "float32", 8)
        errors = on_all(groups[:2], lambda group: group.all_reduce("gradients"))
        with pytest.raises(RankMissingError) as late:
            groups[2].barrier()
    for error in [*errors, late.value]:
        assert isinstance(error, RankMissingError)
        assert error.ranks == (2,)
        assert f"rank 2 (process {os.getpid()})" in error.message
        assert "all_reduce('gradients': allocated float32[8], sum) waited 20.0 s" in error.message


def test_a_rank_that_never_joined_is_named() -> None:
    group, token = create(3, timeout=0.1)
    other = join_group(token, 1, timeout=0.1)
    for error in on_all([group, other], lambda g: g.barrier()):
        assert isinstance(error, RankMissingError)
        assert "2 (never joined)" in error.message
    group.close()
    other.close()


@pytest.mark.usefixtures("path")
def test_a_rank_that_leaves_is_named_at_once() -> None:
    with ranks(3, timeout=2 * PATIENCE) as groups:

        def work(group: Group) -> None:
            if group.rank == 1:
                group.close()
            else:
                group.barrier()

        began = time.monotonic()
        results = on_all(groups, work)
        assert time.monotonic() - began < PATIENCE
    for rank in (0, 2):
        assert isinstance(results[rank], RankLostError)
        assert results[rank].rank == 1
        assert "rank 1 of 3 left the group while others waited for it in barrier" in results[rank].message


@pytest.mark.usefixtures("path")
def test_leaving_after_the_last_collective_is_no_error() -> None:
    def work(group: Group) -> str:
        group.barrier()
        group.close()
        return "done"

    for _ in range(50):
        with ranks(4) as groups:
            assert on_all(groups, work) == ["done"] * 4


@pytest.mark.usefixtures("path")
def test_abort_gives_every_rank_the_same_error() -> None:
    error = RecoverableRuntimeError(
        "tile parity",
        recovery_action=RecoveryAction.IPU_RESET,
        code=ErrorCode.MEMORY_ERROR,
        where="IPU 5",
        hint="gc-reset -d 5",
    )
    with ranks(3) as groups:

        def work(group: Group) -> None:
            if group.rank == 1:
                group.abort(error_to_dict(error))
            group.barrier()

        for result in on_all(groups, work):
            assert isinstance(result, RecoverableRuntimeError)
            assert error_to_dict(result) == error_to_dict(error)


def test_the_first_of_many_aborts_stands() -> None:
    for _ in range(20):
        with ranks(4) as groups:

            def work(group: Group) -> None:
                group.abort({"type": "Custom", "message": f"by rank {group.rank}"})
                group.barrier()

            errors = on_all(groups, work)
        assert {type(error) for error in errors} == {GroupError}
        assert len({str(error) for error in errors}) == 1


def test_abort_from_another_thread_wakes_a_waiting_rank() -> None:
    with ranks(2) as groups:
        thread = threading.Timer(0.05, groups[0].abort, [{"type": "PoplarRuntimeError", "message": "enough"}])
        thread.start()
        with pytest.raises(Exception, match="enough"):
            groups[0].barrier()
        thread.join()


def test_a_group_whose_memory_is_gone_but_for_its_doorbells_can_be_closed_and_aborted() -> None:
    """Whoever failed a group rings the doorbells of channels, of which nothing else may be left."""
    with ranks(2) as groups:
        members = [group for group in groups if isinstance(group, SharedMemoryGroup)]
        assert len(members) == 2
        for group in members:
            group.message_channel(0, 1)
        for group in members:
            group._channels.clear()
            group._memory.close()
        gc.collect()
        groups[0].abort(error_to_dict(ApplicationRuntimeError("the pump stopped")))
        for error in on_all(groups, lambda group: group.barrier()):
            assert isinstance(error, ApplicationRuntimeError)


def test_an_abort_after_the_end_rings_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(2) as groups:
        groups[0].close()
        woken: list[Futex] = []
        monkeypatch.setattr(Futex, "wake", lambda futex: woken.append(futex))
        groups[0].abort(error_to_dict(ApplicationRuntimeError("the pump stopped")))
        assert not woken
        groups[1].abort(error_to_dict(ApplicationRuntimeError("the pump stopped")))
        assert woken


def test_a_very_long_error_still_arrives() -> None:
    with ranks(2) as groups:
        groups[0].abort({"type": "PoplarRuntimeError", "message": "x" * 200_000, "hint": "y" * 200_000})
        with pytest.raises(Exception, match="xxx"):
            groups[1].barrier()


def _rank(token: dict[str, Any], rank: int, pipe: Any) -> None:
    """A rank in a process of its own: joins, sums once, then does as told."""
    group = join_group(token, rank)
    group.allocate("gradients", "float32", 100_000)[:] = rank
    pipe.send(float(group.all_reduce("gradients")[rank]))
    if pipe.recv() == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except RankLostError as error:
        pipe.send(str(error))
    group.close()


def _answer(pipe: Any) -> Any:
    assert pipe.poll(PATIENCE), "no answer from a rank"
    return pipe.recv()


@pytest.mark.system
def test_a_killed_process_is_named_and_the_group_can_be_made_again() -> None:
    for attempt in range(2):
        group, token = create(3, timeout=2 * PATIENCE)
        pipes = [PROCESSES.Pipe() for _ in range(2)]
        peers = [PROCESSES.Process(target=_rank, args=(token, r, pipes[r - 1][1])) for r in (1, 2)]
        for peer in peers:
            peer.start()
        group.allocate("gradients", "float32", 100_000)[:] = attempt
        assert float(group.all_reduce("gradients")[0]) == 3.0 + attempt
        assert [_answer(pipe) for pipe, _ in pipes] == [3.0 + attempt] * 2
        pipes[0][0].send("go on")
        pipes[1][0].send("die")
        began = time.monotonic()
        with pytest.raises(RankLostError, match=rf"rank 2 of 3 \(process {peers[1].pid}\) died") as lost:
            group.barrier()
        assert time.monotonic() - began < PATIENCE
        assert _answer(pipes[0][0]) == str(lost.value)
        group.close()
        for peer in peers:
            peer.join(PATIENCE)
        assert [peer.exitcode for peer in peers] == [0, -signal.SIGKILL]
        for peer, ends in zip(peers, pipes, strict=True):
            peer.close()
            for end in ends:
                end.close()


def _reduce_on_and_on(group: Group) -> None:
    for turn in range(1_000_000):
        name = f"arena {turn % 50}"
        group.allocate(name, "float32", 1000)[:] = group.rank
        group.all_reduce(name)


def _busy_rank(token: dict[str, Any], rank: int, pipe: Any) -> None:
    """A rank that makes arenas and reduces them until the group ends; says how it ended."""
    group = join_group(token, rank, timeout=20)
    pipe.send("joined")
    try:
        _reduce_on_and_on(group)
    except RankLostError as error:
        pipe.send(error.rank)
    group.close()


@pytest.mark.slow
@pytest.mark.system
def test_ranks_killed_at_any_moment_are_named() -> None:
    for attempt in range(10):
        group, token = create(4, timeout=20)
        pipes = [PROCESSES.Pipe() for _ in range(3)]
        peers = [PROCESSES.Process(target=_busy_rank, args=(token, r, pipes[r - 1][1])) for r in (1, 2, 3)]
        for peer in peers:
            peer.start()
        assert [_answer(pipe) for pipe, _ in pipes] == ["joined"] * 3
        victim = attempt % 3
        threading.Timer(0.01 + 0.013 * attempt, peers[victim].kill).start()
        with pytest.raises(RankLostError) as lost:
            _reduce_on_and_on(group)
        assert lost.value.rank == victim + 1
        assert [_answer(pipes[k][0]) for k in range(3) if k != victim] == [victim + 1] * 2
        group.close()
        for peer, ends in zip(peers, pipes, strict=True):
            peer.join(timeout=60)
            peer.close()
            for end in ends:
                end.close()
