"""``python -m podrun.collectives.perf``: a table, shaped like nccl-tests', of measured and modelled times of
collectives.

The columns *emulated* are wall time on this host (`podrun.collectives.measurement`); the columns *modelled* are the
time that the same collective takes on an IPU-POD (`podrun.collectives.timing`). Neither is computed from the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from podrun import commands
from podrun.collectives import timing
from podrun.collectives.measurement import OPERATIONS, MeasuredSize, Measurement, measure_collectives
from podrun.core.command_line import HELP_OPTIONS, FiniteRange, run_command
from podrun.core.errors import UsageError
from podrun.core.executable import Reduction, numpy_dtype

_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}


def parse_size(text: str) -> int:
    """``8``, ``64K``, ``16M``, ``1G`` in bytes. Raises UsageError for anything else."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or (unit and unit not in _UNITS) or int(digits) < 1:
        raise UsageError(
            f"{text!r} is not a size", hint="Write a number of bytes, or one with K, M or G: 64K."
        )
    return int(digits) * _UNITS.get(unit, 1)


_TIMES: Mapping[str, Callable[..., timing.CollectiveTime]] = {
    "all_reduce": timing.all_reduce_time,
    "reduce_scatter": timing.reduce_scatter_time,
    "all_gather": timing.all_gather_time,
    "all_to_all": timing.all_to_all,
    "broadcast": timing.broadcast_time,
    "gather": timing.gather_time,
    "scatter": timing.gather_time,
}
"""The model of each operation; a scatter takes as long as a gather."""


def modelled(operation: str, nbytes: int, ranks: int, fabric: timing.LinkModel) -> timing.CollectiveTime:
    """The estimate for an operation by its name in `OPERATIONS`."""
    if operation == "send_receive":
        return timing.send(nbytes, fabric) if ranks > 1 else timing.broadcast_time(nbytes, 1, fabric)
    return _TIMES[operation](nbytes, ranks, fabric)


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


@click.command("python -m podrun.collectives.perf", context_settings=HELP_OPTIONS)
@click.option(
    "--operation",
    type=click.Choice([*OPERATIONS, "all"]),
    default="all_reduce",
    show_default=True,
    metavar="NAME",
    help=f"Collective to measure: {', '.join(OPERATIONS)}; all: one table for each.",
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
    type=FiniteRange(0, min_open=True),
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
def perf_command(
    json_file: Path | None, target: str, minbytes: str, maxbytes: str, stepfactor: int, **options: Any
) -> None:
    """Measure collectives on this host and model them on an IPU-POD, as a table like that of nccl-tests."""
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
            table_row(row, modelled(operation, row.bytes, job.ranks, fabric), job)
            for row in measure_collectives(job)
        ]
        click.echo(render(rows, job, target))
        tables.append({"job": asdict(job), "rows": rows})
    if json_file is not None:
        data: dict[str, Any] = (
            {"schema": 1, **tables[0]} if len(tables) == 1 else {"schema": 1, "tables": tables}
        )
        try:
            json_file.write_text(json.dumps(data, indent=1) + "\n")
        except OSError as error:
            raise UsageError(
                f"{json_file} cannot be written: {error.strerror}", hint="Name another: --json FILE"
            ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: returns 0, or the exit code of an error."""
    return run_command(perf_command, argv, name="podrun.collectives.perf")


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
