"""Measuring collectives on this host: one process for each rank rewrites its values and checks the results in every
round.

A round writes new values into a rank's buffer and calls the collective. The time is that of a loop of rounds minus that
of the same loop without the collective, on the slowest rank. The best of a few loops counts, because other programs on
the host can only add time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from podrun.collectives.communicator import Communicator
from podrun.collectives.group import Group
from podrun.collectives.rendezvous import create, join_group
from podrun.core.errors import UsageError
from podrun.core.executable import Array, Reduction, numpy_dtype
from podrun.core.quick_dataclass import dataclass

OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "send_receive",
)
"""What can be measured. ``send_receive``: every rank sends to the next one and receives from the one before."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to measure. ``sizes`` in bytes as nccl-tests counts them: the larger of a rank's input and output.

    ``variant``: "shared" leaves the result of an all-reduce where all ranks read it, "copy" gives every rank its own,
    "array" is `Communicator` on the caller's arrays. ``hosts``: number of simulated hosts, with TCP between them.
    """

    operation: str
    variant: str
    ranks: int
    sizes: tuple[int, ...]
    dtype: str = "float32"
    reduction: str = "sum"
    seconds: float = 0.05
    loops: int = 8
    hosts: int = 1
    check: bool = True


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """One size's figures: seconds of one collective, and how many elements were wrong over all ranks."""

    bytes: int
    count: int
    seconds: float
    wrong: int


def measure_collectives(job: Measurement, *, timeout: float = 120.0) -> list[MeasuredSize]:
    """Measure, with the ranks in processes of their own; this process is rank 0."""
    if job.operation not in OPERATIONS:
        raise UsageError(f"no collective {job.operation!r}", hint=f"There are: {', '.join(OPERATIONS)}.")
    if job.variant != "array" and job.operation != "all_reduce":
        raise UsageError(f"{job.variant!r} is a way of all_reduce only", hint='Use "array".')
    spawn = multiprocessing.get_context("spawn")
    names = [f"host-{rank * job.hosts // job.ranks}" for rank in range(job.ranks)]
    over = {"address": "127.0.0.1", "host": names[0]} if job.hosts > 1 else {}
    group, token = create(job.ranks, timeout=timeout, **over)  # type: ignore[arg-type]
    peers = [
        spawn.Process(target=_rank, args=(asdict(job), token, rank, names[rank] if job.hosts > 1 else None))
        for rank in range(1, job.ranks)
    ]
    try:
        for peer in peers:
            peer.start()
        return _measure(job, group)
    finally:
        group.close()
        for peer in peers:
            peer.join(timeout)
            if peer.is_alive():
                peer.kill()


def _rank(job: dict[str, Any], token: dict[str, Any], rank: int, host: str | None) -> None:
    group = join_group(token, rank, host=host)
    try:
        _measure(Measurement(**{**job, "sizes": tuple(job["sizes"])}), group)
    finally:
        group.close()


def _measure(job: Measurement, group: Group) -> list[MeasuredSize]:
    rows = []
    for nbytes in job.sizes:
        count = max(1, nbytes // numpy_dtype(job.dtype).itemsize)
        with _round(job, group, count) as (rewrite, collective, wrong):
            seconds, errors = _time(job, group, rewrite, collective, wrong)
        rows.append(MeasuredSize(nbytes, count, seconds, errors))
    return rows


def _time(
    job: Measurement,
    group: Group,
    rewrite: Callable[[int], None],
    collective: Callable[[], Any],
    wrong: Callable[[int, Any], int],
) -> tuple[float, int]:
    """Seconds of one collective, and wrong elements over all ranks and checked rounds."""
    talk = Communicator(group)
    errors = 0
    for turn in range(2):
        rewrite(turn)
        result = collective()
        errors += wrong(turn, result) if job.check else 0
        group.barrier()
    began = time.perf_counter()
    rewrite(0)
    collective()
    once = float(talk.all_reduce(np.array([time.perf_counter() - began]), Reduction.MAX)[0])
    rounds = int(np.clip(job.seconds / max(once, 1e-7), 2, 2000))
    best = np.array([np.inf, np.inf])
    for _ in range(job.loops):
        loops = [_loop(group, rounds, rewrite, collective), _loop(group, rounds, rewrite, None)]
        best = np.minimum(best, talk.all_reduce(np.array(loops), Reduction.MAX))
    seconds = max(float(best[0] - best[1]), 1e-9) / rounds
    rewrite(rounds)
    result = collective()
    errors += wrong(rounds, result) if job.check else 0
    return seconds, int(talk.all_reduce(np.array([errors]))[0])


def _loop(
    group: Group, rounds: int, rewrite: Callable[[int], None], collective: Callable[[], Any] | None
) -> float:
    group.barrier()
    began = time.perf_counter()
    for turn in range(rounds):
        rewrite(turn)
        if collective is not None:
            collective()
    return time.perf_counter() - began


_Round = tuple[Callable[[int], None], Callable[[], Any], Callable[[int, Any], int]]


@contextlib.contextmanager
def _round(job: Measurement, group: Group, count: int) -> Iterator[_Round]:
    """How to write a round's values, do the collective, and count wrong elements of its result."""
    dtype, reduction = numpy_dtype(job.dtype), Reduction(job.reduction)
    if job.variant != "array":
        yield _all_reduce_round(job, group, count, reduction)
        return
    comm, size = Communicator(group), group.size
    pieces = job.operation in ("reduce_scatter", "all_to_all", "scatter")
    share = max(1, count // size)
    mine: Array = np.zeros((size, share) if pieces else count, dtype)
    if job.operation in ("all_gather", "gather"):
        mine = np.zeros(share, dtype)

    def rewrite(turn: int) -> None:
        mine[...] = _value(turn, group.rank)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": _with_out(lambda out: comm.all_reduce(mine, reduction, out=out), mine.shape, dtype),
        "reduce_scatter": _with_out(
            lambda out: comm.reduce_scatter(mine, reduction, out=out), mine.shape[1:], dtype
        ),
        "all_gather": _with_out(lambda out: comm.all_gather(mine, out=out), (size, *mine.shape), dtype),
        "all_to_all": _with_out(lambda out: comm.all_to_all(mine, out=out), mine.shape, dtype),
        "broadcast": lambda: comm.broadcast(mine, 0),
        "gather": lambda: comm.gather(mine, 0),
        "scatter": _with_out(
            lambda out: comm.scatter(mine if comm.rank == 0 else None, out, 0), mine.shape[1:], dtype
        ),
    }
    if job.operation == "send_receive":
        calls[job.operation] = _with_out(lambda out: _pass_on(comm, mine, out), mine.shape, dtype)
    yield rewrite, calls[job.operation], _checker(job.operation, group, dtype, reduction)


def _pass_on(comm: Communicator, mine: Array, out: Array) -> Array:
    """Send to the next rank and receive from the one before. Even ranks send first and odd ones receive first, so that
    messages larger than the capacity of a connection do not all wait for one another.
    """
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        out[...] = mine
    elif comm.rank % 2:
        comm.receive(out, before)
        comm.send(mine, following)
    else:
        comm.send(mine, following)
        comm.receive(out, before)
    return out


def _with_out(call: Callable[[Array], Any], shape: Sequence[int], dtype: np.dtype[Any]) -> Callable[[], Any]:
    """The call with a result array that is made on first use and then used again."""
    outputs: list[Array] = []

    def once() -> Any:
        if not outputs:
            outputs.append(np.empty(shape, dtype))
        return call(outputs[0])

    return once


def _all_reduce_round(job: Measurement, group: Group, count: int, reduction: Reduction) -> _Round:
    """All-reduce of a buffer in the group's memory."""
    arena = f"{job.dtype} {count}"
    mine = group.allocate(arena, job.dtype, count)
    in_place = job.variant == "copy"

    def rewrite(turn: int) -> None:
        mine[:] = _value(turn, group.rank)

    def collective() -> Array:
        return group.all_reduce(arena, reduction, in_place=in_place)

    check = _checker("all_reduce", group, mine.dtype, reduction)
    return rewrite, collective, check


def _value(turn: int, rank: int) -> int:
    """The value that a rank writes in a round: a small whole number, so that sums are exact in every dtype."""
    return 1 + (turn + rank) % 3


def _checker(
    operation: str, group: Group, dtype: np.dtype[Any], reduction: Reduction
) -> Callable[[int, Any], int]:
    def wrong(turn: int, result: object) -> int:
        values = np.array([_value(turn, rank) for rank in range(group.size)], np.float64)
        if result is None:
            return 0
        if operation in ("all_reduce", "reduce_scatter"):
            combined = {
                Reduction.SUM: values.sum(),
                Reduction.MEAN: values.mean(),
                Reduction.MIN: values.min(),
                Reduction.MAX: values.max(),
                Reduction.PRODUCT: values.prod(),
                Reduction.LOCAL: values[group.rank],
            }[reduction]
            want: Any = np.asarray(combined, dtype)
        elif operation in ("broadcast", "scatter"):
            want = values[0]
        elif operation == "send_receive":
            want = values[group.rank - 1]
        else:
            want = values.reshape(-1, 1)
        return int(np.count_nonzero(result != want))

    return wrong
