"""``python -m podrun.collectives.perf``: a table, shaped like nccl-tests', of measured and modelled times of
collectives.

`run` measures: one process for each rank rewrites its values and checks the results in every round. A round writes new
values into a rank's buffer and calls the collective. The time is that of a loop of rounds minus that of the same loop
without the collective, on the slowest rank. The best of a few loops counts, because other programs on the host can only
add time.

The columns *emulated* are wall time on this host; the columns *modelled* are the time that the same collective takes on
an IPU-POD (`podrun.collectives.timing`). Neither is computed from the other.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from podrun import commands
from podrun.collectives import timing
from podrun.collectives.communicator import Communicator
from podrun.collectives.group import Array, Group
from podrun.collectives.rendezvous import create, join
from podrun.core.errors import PodrunError, UsageError
from podrun.core.executable import Reduction, numpy_dtype
from podrun.core.terminal import error_lines, show_error

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


def run(job: Measurement, *, timeout: float = 120.0) -> list[MeasuredSize]:
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
    group = join(token, rank, host=host)
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
    made: list[Array] = []

    def once() -> Any:
        if not made:
            made.append(np.empty(shape, dtype))
        return call(made[0])

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
    def wrong(turn: int, result: Any) -> int:
        each = np.array([_value(turn, rank) for rank in range(group.size)], np.float64)
        if result is None:
            return 0
        if operation in ("all_reduce", "reduce_scatter"):
            combined = {
                Reduction.SUM: each.sum(),
                Reduction.MEAN: each.mean(),
                Reduction.MIN: each.min(),
                Reduction.MAX: each.max(),
                Reduction.PRODUCT: each.prod(),
                Reduction.LOCAL: each[group.rank],
            }[reduction]
            want: Any = np.asarray(combined, dtype)
        elif operation in ("broadcast", "scatter"):
            want = each[0]
        elif operation == "send_receive":
            want = each[group.rank - 1]
        else:
            want = each.reshape(-1, 1)
        return int(np.count_nonzero(result != want))

    return wrong


_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}


def parse_size(text: str) -> int:
    """``8``, ``64K``, ``16M``, ``1G`` in bytes. Raises UsageError for anything else."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdigit() or (unit and unit not in _UNITS) or int(digits) < 1:
        raise UsageError(
            f"{text!r} is not a size", hint="Write a number of bytes, or one with K, M or G: 64K."
        )
    return int(digits) * _UNITS.get(unit, 1)


def modelled(operation: str, nbytes: int, ranks: int, fabric: timing.LinkModel) -> timing.CollectiveTime:
    """The estimate for an operation by its name in `OPERATIONS`."""
    if operation == "send_receive":
        return timing.send(nbytes, fabric) if ranks > 1 else timing.broadcast(nbytes, 1, fabric)
    name = "gather" if operation == "scatter" else operation
    estimate: timing.CollectiveTime = getattr(timing, name)(nbytes, ranks, fabric)
    return estimate


def table_row(row: MeasuredSize, estimate: timing.CollectiveTime, job: Measurement) -> dict[str, Any]:
    """One line of the table as plain data, units in the keys."""
    algbw = row.bytes / row.seconds
    factor = timing.bus_factor(job.operation, job.ranks)
    return {
        "bytes": row.bytes,
        "count": row.count,
        "dtype": job.dtype,
        "reduction": job.reduction,
        "emulated_seconds": row.seconds,
        "emulated_algbw_gb_s": algbw / 1e9,
        "emulated_busbw_gb_s": algbw * factor / 1e9,
        "wrong": row.wrong if job.check else None,
        "modelled_seconds": estimate.seconds,
        "modelled_algbw_gb_s": estimate.algorithm_bandwidth / 1e9,
        "modelled_busbw_gb_s": estimate.bus_bandwidth / 1e9,
        "modelled_method": estimate.method.value,
    }


def render(rows: list[dict[str, Any]], job: Measurement, target: str) -> str:
    """The table as nccl-tests prints it."""
    lines = [
        f"# {job.operation} ({job.variant}), {job.ranks} ranks on {job.hosts} host(s), model: {target}",
        f"#{'':38}{'emulated':^36}{'modelled':^48}".rstrip(),
        f"#{'size':>11}{'count':>11}{'type':>9}{'redop':>7}"
        f"{'time':>10}{'algbw':>9}{'busbw':>9}{'#wrong':>8}{'time':>10}{'algbw':>9}{'busbw':>9}  method",
        f"#{'(B)':>11}{'(elements)':>11}{'':>16}"
        f"{'(us)':>10}{'(GB/s)':>9}{'(GB/s)':>9}{'':>8}{'(us)':>10}{'(GB/s)':>9}{'(GB/s)':>9}",
    ]
    for row in rows:
        wrong = "N/A" if row["wrong"] is None else row["wrong"]
        lines.append(
            f" {row['bytes']:>11}{row['count']:>11}{row['dtype']:>9}{row['reduction']:>7}"
            f"{row['emulated_seconds'] * 1e6:>10.1f}{row['emulated_algbw_gb_s']:>9.2f}"
            f"{row['emulated_busbw_gb_s']:>9.2f}{wrong:>8}{row['modelled_seconds'] * 1e6:>10.1f}"
            f"{row['modelled_algbw_gb_s']:>9.2f}{row['modelled_busbw_gb_s']:>9.2f}  {row['modelled_method']}"
        )
    wrong_values = sum(row["wrong"] or 0 for row in rows)
    average = sum(row["emulated_busbw_gb_s"] for row in rows) / max(len(rows), 1)
    lines += [f"# Out of bounds values : {wrong_values} {'FAILED' if wrong_values else 'OK'}"]
    lines += [f"# Avg bus bandwidth    : {average:.3f} GB/s (emulated)"]
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--operation",
    type=click.Choice([*OPERATIONS, "all"]),
    default="all_reduce",
    show_default=True,
    help="Collective to measure; all: one table for each.",
)
@click.option(
    "--variant",
    type=click.Choice(["array", "copy", "shared"]),
    default="array",
    show_default=True,
    help="array: the caller's arrays; for all-reduce also arenas: copy, a result for each rank; shared, one for all.",
)
@click.option(
    "-g", "--ranks", type=int, default=4, show_default=True, help="Number of ranks, each a process."
)
@click.option(
    "--hosts",
    type=int,
    default=1,
    show_default=True,
    help="Number of simulated hosts, with TCP between them.",
)
@click.option("-b", "--minbytes", default="8", metavar="SIZE", show_default=True, help="Smallest size.")
@click.option("-e", "--maxbytes", default="16M", metavar="SIZE", show_default=True, help="Largest size.")
@click.option(
    "-f", "--stepfactor", type=click.IntRange(2), default=4, show_default=True, help="From size to size."
)
@click.option("-d", "--datatype", default="float32", metavar="TYPE", show_default=True, help="Of the values.")
@click.option(
    "-o",
    "--op",
    type=click.Choice([r.value for r in Reduction]),
    default="sum",
    show_default=True,
    help="Reduction.",
)
@click.option("-c", "--check/--no-check", default=True, show_default=True, help="Count wrong values.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=0.05,
    show_default=True,
    help="Seconds of one loop of one size.",
)
@click.option(
    "--target",
    type=click.Choice(list(timing.FABRICS)),
    default="gc200",
    show_default=True,
    help="Chip to model.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write JSON here."
)
def main(
    json_file: Path | None, target: str, minbytes: str, maxbytes: str, stepfactor: int, **options: Any
) -> None:
    """Measure collectives on this host and model them on an IPU-POD, as a table like that of nccl-tests."""
    try:
        sizes = [parse_size(minbytes)]
        while sizes[-1] * stepfactor <= parse_size(maxbytes):
            sizes.append(sizes[-1] * stepfactor)
        options["dtype"], options["reduction"] = options.pop("datatype"), options.pop("op")
        _check(sizes[0], parse_size(maxbytes), options)
        chosen = options.pop("operation")
        operations = OPERATIONS if chosen == "all" else (chosen,)
        fabric = timing.fabric(target)
        tables = []
        for operation in operations:
            job = Measurement(operation=operation, sizes=tuple(sizes), **options)
            rows = [
                table_row(row, modelled(operation, row.bytes, job.ranks, fabric), job) for row in run(job)
            ]
            click.echo(render(rows, job, target))
            tables.append({"job": asdict(job), "rows": rows})
    except PodrunError as error:
        show_error("perf", error)
        sys.exit(error.exit_code)
    if json_file is not None:
        data: dict[str, Any] = (
            {"schema": 1, **tables[0]} if len(tables) == 1 else {"schema": 1, "tables": tables}
        )
        try:
            json_file.write_text(json.dumps(data, indent=1) + "\n")
        except OSError as error:
            what = f"{json_file} cannot be written: {error.strerror}"
            sys.stderr.write(error_lines("perf", what, "Name another: --json FILE"))
            sys.exit(2)


def _check(least: int, most: int, options: dict[str, Any]) -> None:
    """Raise UsageError for options that would fail in every rank's process."""
    if least > most:
        raise UsageError(f"--minbytes is {least} and --maxbytes {most}", hint="Swap them.")
    if options["ranks"] >= 1 and not 1 <= options["hosts"] <= options["ranks"]:
        raise UsageError(
            f"{options['ranks']} ranks cannot lie on {options['hosts']} hosts",
            hint=f"Type --hosts 1 to --hosts {options['ranks']}.",
        )
    name = options["dtype"]
    try:
        known = numpy_dtype(name).kind in "fiuV" and numpy_dtype(name).itemsize > 0
    except (TypeError, AttributeError):
        known = False
    if not known:
        raise UsageError(
            f"{name!r} is not a type of values", hint="As in --datatype float16, bfloat16 or int32."
        )


if __name__ == "__main__":
    sys.exit(commands.run(main, command="podrun.collectives.perf"))
