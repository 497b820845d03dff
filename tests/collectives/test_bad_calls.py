"""Programs of collectives in which one rank does something else: every rank gets a named error in time, nobody hangs,
and the next group works. The programs are generated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from collective_ranks import PATIENCE, hosts, on_all, ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.collectives import (
    Communicator,
    Group,
    MismatchError,
    RankLostError,
    create,
    join_group,
    rank_groups,
)
from podrun.core.errors import PodrunError, UsageError
from podrun.core.executable import Reduction

TIMEOUT = 0.3
SIZES = (1, 5, 3000, 70_000)
DTYPES: tuple[Any, ...] = (np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.dtype(">f4"))
REDUCTIONS = (Reduction.SUM, Reduction.MAX, Reduction.PRODUCT)


class OwnError(Exception):
    """A rank's own error, none of podrun's."""


def _all_reduce(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    comm.all_reduce(np.ones(size, dtype), REDUCTIONS[salt % 3])


def _in_place(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    mine = np.ones(size, dtype)
    comm.all_reduce(mine, REDUCTIONS[salt % 3], out=mine)


def _arena(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    name = np.dtype(dtype).name
    comm.group.allocate(f"arena {name} {size}", name, size)[:] = 1
    comm.group.all_reduce(f"arena {name} {size}", REDUCTIONS[salt % 3], in_place=salt % 2 == 0)


def _all_gather(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    comm.all_gather(np.ones((size, 1 + salt % 2), dtype))


def _all_to_all(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    comm.all_to_all(np.ones((comm.size, size), dtype))


def _broadcast(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    comm.broadcast(np.ones(size, dtype), salt % comm.size)


def _scatter(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    root = salt % comm.size
    given = np.ones((comm.size, size), dtype) if comm.rank == root else None
    assert (comm.scatter(given, np.zeros(size, dtype), root) == 1).all()


def _gather(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    comm.gather(np.ones(size, dtype), salt % comm.size)


def _ring(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    comm.send(np.ones(size, dtype), (comm.rank + 1) % comm.size, salt % 2)
    comm.receive(np.zeros(size, dtype), (comm.rank - 1) % comm.size, salt % 2)


def _split(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    order = np.random.default_rng(salt).permutation(comm.size)
    part = comm.split([order[:1], order[1:]])
    assert part is not None
    try:
        part.all_reduce(np.ones(size, np.float32))
    finally:
        part.close()


def _barrier(comm: Communicator, size: int, dtype: Any, salt: int) -> None:
    comm.barrier()


Call = Callable[[Communicator, int, Any, int], None]

CALLS: list[Call] = [
    _all_reduce,
    _in_place,
    _arena,
    _all_gather,
    _all_to_all,
    _broadcast,
    _scatter,
    _gather,
    _ring,
    _split,
    _barrier,
]

calls = st.tuples(st.sampled_from(CALLS), st.sampled_from(SIZES), st.sampled_from(DTYPES), st.integers(0, 5))
FAULTS = ("another call", "another size", "another type", "leaves", "raises", "aborts", "does not come")
GONE = ("leaves", "raises", "does not come")
UNSIZED = (_barrier, _split)  # another size or type makes no difference to these, or not to every rank


def _work(group: Group, good: list[Any], wrong: Any, bad_rank: int, fault: str) -> None:
    comm = Communicator(group)
    for call, size, dtype, salt in good:
        call(comm, size, dtype, salt)
    call, size, dtype, salt = wrong
    if group.rank == bad_rank:
        if fault in GONE:
            if fault != "does not come":
                group.close()
            if fault == "raises":
                raise OwnError
            return
        if fault == "aborts":
            group.abort({"type": "PoplarRuntimeError", "message": "enough"})
        if fault == "another call":
            call = _other(call, salt)
        if fault == "another size":
            size += 1
        if fault == "another type":
            dtype = np.uint32
    call(comm, size, dtype, salt)
    for _ in range(3):
        comm.barrier()


def _other(call: Call, salt: int) -> Call:
    """A call that is not the same collective."""
    others = [c for c in CALLS if c is not call and {c, call} != {_all_reduce, _in_place}]
    return others[salt % len(others)]


def _deadline(fault: str) -> float:
    """Of collectives with a fault: an abort comes before the deadline, other ranks may never come."""
    return PATIENCE if fault == "aborts" else TIMEOUT


def _check(members: AbstractContextManager[list[Group]], *program: Any) -> None:
    _good, wrong, bad_rank, fault = program
    began = time.monotonic()
    with members as groups:
        said = on_all(groups, lambda group: _work(group, *program))
    assert time.monotonic() - began < PATIENCE
    others = [error for rank, error in enumerate(said) if rank != bad_rank]
    if fault in GONE:
        assert said[bad_rank] is None or isinstance(said[bad_rank], OwnError | PodrunError)
    else:
        others.append(said[bad_rank])
    assert all(error is None or isinstance(error, PodrunError) for error in others), others
    if wrong[0] not in UNSIZED or fault not in ("another size", "another type"):
        assert None not in others
    if fault == "aborts":
        assert any("enough" in str(error) for error in others)


programs = st.tuples(
    st.lists(calls, max_size=3), calls, st.integers(0, 3), st.sampled_from(FAULTS), st.integers(2, 4)
)


def _on_one_host(program: Any) -> None:
    *rest, bad_rank, fault, members = program
    _check(ranks(members, timeout=_deadline(fault)), *rest, bad_rank % members, fault)
    with ranks(members) as groups:
        assert on_all(groups, lambda group: group.barrier()) == [None] * members


@settings(max_examples=8, deadline=None, derandomize=True)
@given(programs)
def test_who_does_otherwise_ends_it_for_all(program: Any) -> None:
    _on_one_host(program)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(programs)
def test_who_does_otherwise_ends_it_for_all_in_many_programs(program: Any) -> None:
    _on_one_host(program)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(programs, st.text("AB", min_size=4, max_size=4))
def test_who_does_otherwise_ends_it_for_all_over_hosts(program: Any, names: str) -> None:
    *rest, bad_rank, fault, members = program
    _check(hosts(names[:members], timeout=_deadline(fault)), *rest, bad_rank % members, fault)


def test_arrays_that_do_not_fit_are_refused_by_name() -> None:
    with ranks(2) as groups:
        comm = Communicator(groups[0])
        fixed = np.zeros(4)
        fixed.flags.writeable = False
        for given, out in [(np.zeros((2, 3)), np.zeros(4)), (np.zeros((2, 4), np.float32), np.zeros(4))]:
            with pytest.raises(UsageError, match="scatter needs float64"):
                comm.scatter(given, out)
        for call in (lambda: comm.broadcast(fixed, 1), lambda: comm.scatter(None, fixed, 1)):
            with pytest.raises(UsageError, match="writable contiguous"):
                call()
        with pytest.raises(UsageError, match="writable contiguous"):
            comm.receive(fixed, 1)
        for dtype in ("float99", "bfloat99", "object"):
            with pytest.raises(UsageError, match=f"cannot be of '{dtype}'"):
                groups[0].allocate("arena", dtype, 3)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_a_wait_that_could_not_end_is_refused(timeout: float) -> None:
    with pytest.raises(UsageError, match="cannot wait"):
        create(2, timeout=timeout)


@given(
    st.sampled_from(["kind", "size", "host", "pid", "started", "fd", "secret", "timeout"]),
    st.sampled_from([None, "x", []]),
)
def test_a_token_that_says_something_else_is_refused(name: str, value: Any) -> None:
    token = {
        "kind": "host",
        "size": 2,
        "host": "h",
        "pid": 1,
        "started": 1,
        "fd": 3,
        "secret": "0" * 32,
        "timeout": 1.0,
    }
    for spoilt in ({**token, name: value}, {k: v for k, v in token.items() if k != name}):
        with pytest.raises(UsageError, match=r"not a token|another host"):
            join_group(spoilt, 1)


def test_groups_of_numpy_integers_are_those_of_plain_ones() -> None:
    def work(group: Group) -> float:
        pairs = [[0, 2], [1]] if group.rank else [np.array([0, 2]), (np.int64(1),)]
        part = Communicator(group).split(pairs)
        assert part is not None
        with contextlib.closing(part):
            return float(part.all_reduce(np.ones(3))[0])

    with ranks(3) as groups:
        assert on_all(groups, work) == [2.0, 1.0, 2.0]
    for wrong in ([0, 1], [["a"]], [[0.5]], 3):
        with pytest.raises(MismatchError, match="lists of lists"):
            rank_groups(wrong, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [100, 1_100_000])
def test_a_result_that_overlaps_its_values_is_right(size: int) -> None:
    """Every piece is read before a result is written over it."""

    def work(group: Group) -> bool:
        comm = Communicator(group)
        room = np.arange(3 * size, dtype=np.float32)
        want = 2 * room[:size]
        reduced = bool((comm.all_reduce(room[:size], out=room[size // 2 :][:size]) == want).all())
        room[:] = np.arange(3 * size)
        gathered = comm.all_gather(room[:size], out=room[: 2 * size].reshape(2, size))
        return reduced and bool((gathered == np.arange(size)).all())

    with ranks(2) as groups:
        assert on_all(groups, work) == [True, True]


def test_a_token_that_names_other_memory_opens_nothing() -> None:
    """Whoever sends a token may name any file of any process: what is opened has to hold the group's secret."""
    group, token = create(2, timeout=60)
    other, another = create(2, timeout=60)
    with pytest.raises(RankLostError, match="no longer holds the group's shared memory"):
        join_group({**token, "fd": another["fd"]}, 1)
    with pytest.raises(RankLostError, match="no longer holds the group's shared memory"):
        join_group({**token, "secret": "0" * 32}, 1)
    join_group(token, 1).close()
    group.close()
    other.close()
