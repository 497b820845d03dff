"""Collectives on arrays against NumPy, generated; groups of groups; messages."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from collective_ranks import hosts, on_all, ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from test_group_results import NUMPY, bits, expected

from podrun.collectives import Communicator, Group, MismatchError, Reduction, rank_groups
from podrun.collectives.host_memory import RING_BYTES
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core.errors import UsageError
from podrun.core.executable import numpy_dtype

SHAPES = st.one_of(
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(1, 5), st.integers(1, 40)),
    st.just((300_001,)),
)
DTYPES = st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8"])


def data(shape: tuple[int, ...], dtype: str, rank: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([rank, *shape]).integers(0, 50, shape).astype(numpy_dtype(dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@settings(max_examples=7, deadline=None)
@given(shape=SHAPES, dtype=DTYPES, members=st.integers(1, 4), root=st.integers(0, 3))
def test_everything_equals_numpy(shape: tuple[int, ...], dtype: str, members: int, root: int) -> None:
    compare_with_numpy(shape, dtype, members, root)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, dtype=DTYPES, members=st.integers(1, 4), root=st.integers(0, 3))
def test_more_equals_numpy(shape: tuple[int, ...], dtype: str, members: int, root: int) -> None:
    compare_with_numpy(shape, dtype, members, root)


def compare_with_numpy(shape: tuple[int, ...], dtype: str, members: int, root: int) -> None:
    root %= members
    each = [data(shape, dtype, rank) for rank in range(members)]
    pieces = [data((members, *shape), dtype, 10 + rank) for rank in range(members)]

    def work(group: Group) -> None:
        comm, rank = Communicator(group), group.rank
        mine = each[rank].copy()
        np.testing.assert_array_equal(comm.all_gather(mine), np.stack(each))
        np.testing.assert_array_equal(
            comm.all_to_all(pieces[rank]), np.stack([pieces[source][rank] for source in range(members)])
        )
        gathered = comm.gather(mine, root)
        assert (gathered is None) == (rank != root)
        if gathered is not None:
            np.testing.assert_array_equal(gathered, np.stack(each))
        out = np.empty(shape, numpy_dtype(dtype))
        comm.scatter(pieces[rank] if rank == root else None, out, root)
        np.testing.assert_array_equal(out, pieces[root][rank])
        np.testing.assert_array_equal(comm.all_reduce(mine, Reduction.MAX), np.max(each, axis=0))
        np.testing.assert_array_equal(
            comm.reduce_scatter(pieces[rank], Reduction.MIN), np.min(pieces, axis=0)[rank]
        )
        np.testing.assert_array_equal(comm.all_reduce(mine, Reduction.LOCAL), each[rank])
        assert comm.all_reduce(mine, out=mine) is mine
        assert bits(mine) == bits(expected(each, Reduction.SUM))  # as bits: NaN is equal to NaN
        product = comm.all_reduce(each[rank], Reduction.PRODUCT)
        assert bits(product) == bits(expected(each, Reduction.PRODUCT))
        if mine.dtype.kind not in "iu":
            mean = comm.all_reduce(each[rank], Reduction.MEAN)
            assert bits(mean) == bits(expected(each, Reduction.MEAN))
        np.testing.assert_array_equal(comm.broadcast(each[rank].copy(), root), each[root])
        comm.barrier()

    with ranks(members, timeout=60) as groups:
        assert on_all(groups, work) == [None] * members


def test_split_into_consecutive_and_orthogonal_groups() -> None:
    def work(group: Group) -> tuple[list[int], list[int], int | None]:
        comm = Communicator(group)
        mine = np.array([group.rank])
        rows, columns = comm.split([[0, 1], [2, 3]]), comm.split([[0, 2], [3, 1]])
        assert rows is not None
        assert columns is not None
        some = comm.split([[2, 1]])
        result = (
            list(rows.all_gather(mine)[:, 0]),
            list(columns.all_gather(mine)[:, 0]),
            None if some is None else int(some.all_reduce(mine)[0]),
        )
        for part in (rows, columns, some):
            if part is not None:
                part.barrier()
                part.close()
        return result

    with ranks(4) as groups:
        assert on_all(groups, work) == [
            ([0, 1], [0, 2], None),
            ([0, 1], [3, 1], 3),
            ([2, 3], [0, 2], 3),
            ([2, 3], [3, 1], None),
        ]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 1], [1, 2]], "rank 1 is in group 0 and in group 1"),
        ([[0], []], "group 1 of 2 is empty"),
        ([[0, 4]], "rank 4; there are ranks 0 to 3"),
        ([[2, 2]], "rank 2 is in group 0 and in group 0"),
    ],
)
def test_wrong_groups_are_refused(groups: list[list[int]], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        rank_groups(groups, 4)


def test_ranks_that_split_differently_all_learn_of_it() -> None:
    def work(group: Group) -> None:
        Communicator(group).split([[0, 1], [2]] if group.rank else [[0], [1, 2]])

    with ranks(3) as groups:
        for error in on_all(groups, work):
            assert isinstance(error, MismatchError)
            assert "split([[0, 1], [2]])" in error.message


@pytest.mark.parametrize("size", [3, 10_000])
def test_unequal_arrays_fail_on_every_rank(size: int) -> None:
    def work(group: Group) -> None:
        array = np.zeros(size + (group.rank == 1), np.float64 if group.rank == 2 else np.float32)
        Communicator(group).all_reduce(array)

    with ranks(3) as groups:
        errors = on_all(groups, work)
    for error in errors:
        assert isinstance(error, MismatchError)
        assert str(error) == str(errors[0])


def test_messages_between_all_pairs_with_tags_out_of_order() -> None:
    def work(group: Group) -> None:
        comm, rank = Communicator(group), group.rank
        others = [r for r in range(group.size) if r != rank]
        for other in others:
            for tag in (7, 8):
                comm.send(np.full(5, 100 * rank + tag, np.int32), other, tag)
        for other in others:
            for tag in (8, 7):
                assert list(comm.receive(np.empty(5, np.int32), other, tag)) == [100 * other + tag] * 5

    with ranks(3) as groups:
        assert on_all(groups, work) == [None] * 3


def test_a_message_larger_than_the_ring_streams_through() -> None:
    sent = np.arange(RING_BYTES // 4 * 3 + 5, dtype=np.float32)

    def work(group: Group) -> bool:
        comm = Communicator(group)
        if group.rank == 0:
            comm.send(sent, 1)
            return True
        return bool((comm.receive(np.empty_like(sent), 0) == sent).all())

    with ranks(2) as groups:
        assert on_all(groups, work) == [True, True]


def test_a_preface_and_its_array_are_one_message_that_wakes_once() -> None:
    """A sender that has to wait for room may wake the receiver before."""
    preface, large = bytes(range(40)), np.arange(RING_BYTES // 4 * 3 + 5, dtype=np.float32)

    def work(group: Group) -> list[int]:
        assert isinstance(group, SharedMemoryGroup)
        group.patient = True
        rings = []
        for payload in (large[:0], large[:40], large):
            before = group.message_channel(0, 1).rings
            group.barrier()
            if group.rank == 0:
                group.send(payload, 1, preface=preface)
            else:
                assert group.receive_preface(0, len(preface)) == (preface, payload.nbytes)
                received = np.empty_like(payload)
                if payload.size:
                    group.receive_rest(received, 0)
                assert np.array_equal(received, payload)
            group.barrier()
            rings.append(group.message_channel(0, 1).rings - before)
        return rings

    with ranks(2) as groups:
        (alone, short, long), other = on_all(groups, work)
    assert [alone, short, long] == other
    assert (alone, short) == (1, 1)
    assert long >= 1


def test_a_message_of_another_type_fails_on_both_sides() -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            group.send(np.zeros(4, np.float32), 1, 5)
        else:
            group.receive(np.zeros(8, np.float16), 0, 5)
        group.barrier()

    with ranks(2) as groups:
        for error in on_all(groups, work):
            assert isinstance(error, MismatchError)
            assert (
                "receives float16 of 16 bytes from rank 0 with tag 5, which sent float32 of 16"
                in error.message
            )


def test_wrong_arrays_are_refused_before_anything_is_sent() -> None:
    with ranks(2) as groups:
        comm = Communicator(groups[0])
        with pytest.raises(UsageError, match="first axis"):
            comm.all_to_all(np.zeros((3, 2)))
        with pytest.raises(UsageError, match="must be a writable contiguous float64"):
            comm.all_reduce(np.zeros(4), out=np.zeros(4, np.float32))
        with pytest.raises(UsageError, match="no rank 2"):
            comm.broadcast(np.zeros(4), root=2)
        with pytest.raises(UsageError, match="cannot send to rank 0"):
            comm.send(np.zeros(1), 0)
        with pytest.raises(UsageError, match="not Python objects"):
            comm.all_gather(np.array([{}]))


@pytest.mark.slow
@pytest.mark.parametrize(("over_hosts", "rounds"), [(False, 20), (True, 4)])
def test_every_result_of_many_random_collectives_is_right(over_hosts: bool, rounds: int) -> None:
    """500 collectives a round over random groups and sizes, every one checked: 10,000 on one host."""
    plan = np.random.default_rng(11)
    for _ in range(rounds):
        members = int(plan.integers(2, 6))
        seed = int(plan.integers(1 << 30))
        names = "".join(plan.choice(["A", "B", "C"], members))
        with hosts(names, timeout=60) if over_hosts else ranks(members, timeout=60) as groups:
            results = on_all(groups, lambda group, seed=seed: _soak(group, seed))
            assert results == [500] * members


def _soak(group: Group, seed: int) -> int:
    random, comm = np.random.default_rng(seed), Communicator(group)
    subgroups: dict[int, Communicator] = {}
    for _ in range(500):
        subset = int(random.integers(3))
        if subset and subset not in subgroups:
            order = [int(r) for r in random.permutation(group.size)]
            cut = group.size // 2
            part = comm.split([order[:cut], order[cut:]])
            assert part is not None
            subgroups[subset] = part
        where = subgroups[subset] if subset else comm
        size = int(2 ** random.uniform(0, 18))
        _check_one(where, int(random.integers(7)), size, int(random.integers(100)))
    for part in subgroups.values():
        part.barrier()
        part.close()
    group.barrier()
    return 500


def _check_one(comm: Communicator, operation: int, size: int, salt: int) -> None:
    """One collective whose result follows from rank numbers alone."""
    everyone = np.arange(comm.size)[:, None]
    mine = np.full(size, salt + comm.rank, np.int64)
    root = salt % comm.size
    at_root = comm.rank == root
    if operation == 0:
        _check_reduction(comm, size, salt)
    elif operation == 1:
        assert (comm.all_gather(mine) == salt + everyone).all()
    elif operation == 2:
        assert (comm.broadcast(mine, root) == salt + root).all()
    elif operation == 3:
        pieces = np.full((comm.size, size), salt * comm.rank) + everyone
        assert (comm.all_to_all(pieces) == salt * everyone + comm.rank).all()
    elif operation == 4:
        gathered = comm.gather(mine, root)
        assert gathered is None if not at_root else (gathered == salt + everyone).all()
    elif operation == 5:
        whole = np.full((comm.size, size), salt) + everyone
        assert (comm.scatter(whole if at_root else None, mine, root) == salt + comm.rank).all()
    elif comm.size > 1:
        comm.send(mine, (comm.rank + 1) % comm.size, salt)
        before = (comm.rank - 1) % comm.size
        assert (comm.receive(np.empty_like(mine), before, salt) == salt + before).all()


def _check_reduction(comm: Communicator, size: int, salt: int) -> None:
    """Of any type and kind, of an array or where the group's arena lies, in place or not: exact in every type."""
    name = ("float32", "float16", "bfloat16", "float64", "int64", "int32")[salt % 6]
    reduction = (Reduction.SUM, Reduction.MAX, Reduction.MIN, Reduction.PRODUCT)[salt // 6 % 4]
    each = np.arange(comm.size) % 3 + 1
    total = NUMPY[reduction].reduce(each)
    if salt % 5 == 0 or comm.size == 1:
        mine = np.full(size, each[comm.rank], getattr(ml_dtypes, name, name))
        assert (comm.all_reduce(mine, reduction, out=mine if salt % 2 else None) == total).all()
    else:
        arena = f"{name} {size.bit_length()}"
        whole = comm.group.allocate(arena, name, 1 << size.bit_length())
        whole[:size] = each[comm.rank]
        found = comm.group.all_reduce(arena, reduction, count=size, in_place=salt % 2 == 0)
        assert (found == total).all()
