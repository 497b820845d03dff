"""What a group promises, on one host and in one process, against NumPy."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from collective_ranks import on_all, ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.collectives import (
    ClosedError,
    Group,
    MismatchError,
    Reduction,
    create,
    in_process,
    join_group,
    slice_of,
)
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core.errors import ConflictError, UnsupportedError, UsageError

NUMPY = {
    Reduction.SUM: np.add,
    Reduction.MEAN: np.add,
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
    Reduction.PRODUCT: np.multiply,
}
DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int32",
    "uint8",
    "int64",
]


def values(dtype: str, size: int, rank: int) -> np.ndarray[Any, Any]:
    """What rank ``rank`` puts in, different for each."""
    random = np.random.default_rng([size, rank])
    if "float" in dtype:
        return random.normal(1.0, 2.0, size).astype(getattr(ml_dtypes, dtype, dtype))
    return random.integers(0, 100, size).astype(dtype)


def expected(parts: list[np.ndarray[Any, Any]], reduction: Reduction) -> np.ndarray[Any, Any]:
    """The plain NumPy reduction: in rank order, half types in float32, rounded once."""
    dtype = parts[0].dtype
    wide = np.dtype(np.float32) if "float" in dtype.name and dtype.itemsize < 4 else dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = NUMPY[reduction](total, part.astype(wide)).astype(wide)
    if reduction is Reduction.MEAN:
        total = total / wide.type(len(parts))
    return total.astype(dtype)


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@settings(max_examples=40, deadline=None)
@given(
    size=st.one_of(st.integers(1, 300), st.integers(30_000, 70_000)),
    members=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(list(NUMPY)),
    in_turns=st.booleans(),
)
def test_reductions_equal_numpy_to_the_bit(
    size: int, members: int, dtype: str, reduction: Reduction, in_turns: bool
) -> None:
    """Also where ranks share a core and take turns on it, as machines of one process do."""
    if reduction is Reduction.MEAN and "float" not in dtype:
        return
    parts = [values(dtype, size, rank) for rank in range(members)]
    want, core = expected(parts, reduction), threading.Lock()

    def work(group: Group) -> tuple[bytes, bytes]:
        if in_turns and isinstance(group, SharedMemoryGroup):
            group.turn = core
        mine = group.allocate("gradients", dtype, size)
        mine[:] = parts[group.rank]
        scattered = bits(group.reduce_scatter("gradients", reduction))
        reduced = bits(group.all_reduce("gradients", reduction))
        assert bits(mine) == bits(parts[group.rank]) or members == 1
        own = group.all_reduce("gradients", reduction, in_place=True)
        assert bits(own) == reduced
        assert np.shares_memory(own, mine)
        return scattered, reduced

    with ranks(members) as groups:
        for rank, (scattered, reduced) in enumerate(on_all(groups, work)):
            assert scattered == bits(want[slice_of(rank, members, size)])
            assert reduced == bits(want)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("members", [1, 2, 3, 8])
def test_training_sequence_keeps_ranks_equal(members: int) -> None:
    size, batches = 1001, 20

    def work(group: Group) -> bytes:
        gradients = group.allocate("gradients", "float32", size)
        weights = group.shared("weights", "float32", size)
        own = slice_of(group.rank, group.size, size)
        seen = []
        for batch in range(batches):
            gradients[:] = weights * np.float32(0.5) + np.float32(group.rank + batch)
            mine = group.reduce_scatter("gradients", settle=False)
            weights[own] -= np.float32(0.1) * mine
            seen.append(bits(group.all_gather("weights")))
        return b"".join(seen)

    with ranks(members) as groups:
        results = on_all(groups, work)
    weights = np.zeros(size, np.float32)
    for batch in range(batches):
        parts = [weights * np.float32(0.5) + np.float32(rank + batch) for rank in range(members)]
        weights = weights - np.float32(0.1) * expected(parts, Reduction.SUM)
    assert len(set(results)) == 1
    assert results[0][-4 * size :] == bits(weights)


def test_all_gather_of_an_allocated_arena_takes_each_slice_from_its_owner() -> None:
    def work(group: Group) -> list[int]:
        group.allocate("state", "int32", 10)[:] = group.rank
        return list(group.all_gather("state"))

    with ranks(3) as groups:
        assert on_all(groups, work) == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 2]] * 3


def test_local_reduction_keeps_each_ranks_own_values() -> None:
    def work(group: Group) -> tuple[list[int], list[int]]:
        group.allocate("x", "int32", 4)[:] = group.rank
        return (
            list(group.all_reduce("x", Reduction.LOCAL)),
            list(group.reduce_scatter("x", Reduction.LOCAL)),
        )

    with ranks(2) as groups:
        assert on_all(groups, work) == [([0] * 4, [0] * 2), ([1] * 4, [1] * 2)]


def test_buffers_start_at_zero_are_aligned_and_outlive_the_group() -> None:
    for members in (1, 2):
        with ranks(members) as groups:
            mine = groups[0].allocate("a", "float32", 7)
            weights = groups[-1].shared("w", "bfloat16", 3)
            assert groups[0].allocate("a", "float32", 7) is mine
        assert not mine.any()
        assert not weights.any()
        assert mine.ctypes.data % 64 == weights.ctypes.data % 64 == 0


@pytest.mark.usefixtures("path")
def test_nan_and_infinity_go_through() -> None:
    def work(group: Group) -> list[float]:
        group.allocate("x", "float32", 3)[:] = [
            np.nan if group.rank else 1.0,
            np.inf,
            -np.inf if group.rank else np.inf,
        ]
        with np.errstate(invalid="ignore"):
            return [float(x) for x in group.all_reduce("x")]

    with ranks(2) as groups:
        for result in on_all(groups, work):
            assert np.isnan(result[0])
            assert result[1] == np.inf
            assert np.isnan(result[2])


@pytest.mark.parametrize("members", [1, 2])
def test_wrong_calls_are_refused_by_name(members: int) -> None:
    with ranks(members) as groups:
        group = groups[0]
        group.shared("weights", "float32", 4)
        group.allocate("counts", "int32", 4)
        with pytest.raises(UsageError, match=r"no arena 'gradient' on this rank .*counts, weights"):
            group.all_reduce("gradient")
        with pytest.raises(UsageError, match="shared"):
            group.all_reduce("weights")
        with pytest.raises(UnsupportedError, match="mean of int32"):
            group.all_reduce("counts", Reduction.MEAN)
        with pytest.raises(UsageError, match="0 elements"):
            group.allocate("empty", "float32", 0)
        group.close()
        with pytest.raises(ClosedError):
            group.barrier()
        group.close()


def test_ranks_that_are_taken_or_that_the_group_lacks_cannot_join() -> None:
    group, token = create(3)
    other = join_group(token, 2)
    with pytest.raises(ConflictError, match=r"rank 2 .* already taken by process"):
        join_group(token, 2)
    for rank in (0, 3, -1):
        with pytest.raises(UsageError, match=f"rank {rank} cannot join"):
            join_group(token, rank)
    with pytest.raises(UsageError, match="another host"):
        join_group({**token, "host": "elsewhere"}, 1)
    with pytest.raises(UsageError, match="not a token"):
        join_group({"kind": "solo", "size": 1}, 1)
    with pytest.raises(UsageError, match="cannot have 0 ranks"):
        in_process(0)
    group.close()
    other.close()


@pytest.mark.parametrize(
    ("dtype", "size", "shared"), [("float16", 8, False), ("float32", 9, False), ("float32", 8, True)]
)
def test_unequal_arenas_fail_on_every_rank(dtype: str, size: int, shared: bool) -> None:
    def work(group: Group) -> None:
        if group.rank == 1:
            (group.shared if shared else group.allocate)("gradients", dtype, size)
        else:
            group.allocate("gradients", "float32", 8)
        group.barrier()

    with ranks(3) as groups:
        for error in on_all(groups, work):
            assert isinstance(error, MismatchError)
            assert "'gradients'" in error.message
            assert f"{dtype}[{size}]" in error.message


@pytest.mark.usefixtures("path")
def test_different_collectives_fail_on_every_rank() -> None:
    def work(group: Group) -> None:
        group.allocate("gradients", "float32", 8)
        if group.rank == 2:
            group.all_gather("gradients")
        else:
            group.all_reduce("gradients", Reduction.MAX if group.rank else Reduction.SUM)

    with ranks(3) as groups:
        errors = on_all(groups, work)
    assert {str(e) for e in errors} == {str(errors[0])}
    for part in ("float32[8], sum", "float32[8], max", "rank 2 called all_gather('gradients'"):
        assert part in str(errors[0])
