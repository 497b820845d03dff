"""``podrun load URL``: how a model server answers under load."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podrun.core.command_line import HELP_OPTIONS, FiniteRange, seconds_range
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    import numpy as np

    from podrun.serving.load.generator import LoadLevel, Measured, Measuring
    from podrun.serving.load.servers import ModelForm

MOST_CONCURRENCY = 10_000
"""Requests in flight of one client: each has a task, and on HTTP a connection."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The options of a command line."""

    url: str
    model: str
    batch_size: int
    concurrency_range: str
    request_rate_range: str
    request_distribution: str
    measurement_interval: float
    warm_up: float
    max_trials: int
    stability_percentage: float
    percentile: float
    timeout: float
    input_data: str
    shape: tuple[str, ...]
    seed: int
    json_file: Path | None


@click.command(
    "podrun load",
    context_settings=HELP_OPTIONS,
    epilog="""\b
    Examples:
      podrun load localhost:8001 -m net --concurrency-range 1:16:5
      podrun load http://localhost:8000 -m net --request-rate-range 100:900:200 --json load.json""",
)
@click.argument("url")
@click.option("-m", "--model", required=True, metavar="NAME", help="The model.")
@click.option(
    "-b", "--batch-size", type=click.IntRange(1), default=1, metavar="N", help="Rows of a request [1]."
)
@click.option("--concurrency-range", default="", metavar="A[:B[:STEP]]", help="Requests in flight [1].")
@click.option("--request-rate-range", default="", metavar="A[:B[:STEP]]", help="Requests a second.")
@click.option(
    "--request-distribution",
    type=click.Choice(["constant", "poisson"]),
    default="constant",
    help="Times between requests of a rate [constant].",
)
@click.option(
    "--measurement-interval", type=FiniteRange(1), default=5000.0, metavar="MS", help="A window [5000]."
)
@click.option("--warm-up", type=FiniteRange(0), default=1000.0, metavar="MS", help="Before the first [1000].")
@click.option("--max-trials", type=click.IntRange(3), default=10, metavar="N", help="Windows at most [10].")
@click.option(
    "--stability-percentage", type=FiniteRange(0.1, 100), default=10.0, metavar="P", help="Spread [10]."
)
@click.option("--percentile", type=FiniteRange(1, 99.99), default=99.0, metavar="P", help="Held stable [99].")
@click.option("--timeout", type=seconds_range(0.001), default=30.0, metavar="S", help="Of a request [30].")
@click.option("--input-data", default="random", metavar="random|zero|FILE.npz", help="What is sent [random].")
@click.option("--shape", multiple=True, metavar="NAME:N,N", help="Dimensions that a model leaves open.")
@click.option("--seed", type=int, default=1, metavar="N", help="Of random data and times [1].")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures."
)
def load_verb(**options: object) -> int:
    """Sends requests to a model server and tells rate and latencies, beside them the time modelled on IPUs.

    URL is HOST:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT for HTTP: servers of the v2 protocol, such as
    Triton. Options are named as perf_analyzer's. Exit code 1: no request was answered.
    """
    import asyncio
    import sys

    from podrun.core.documents import check_outputs_writable, write_output
    from podrun.core.terminal import reporting
    from podrun.serving.load.figures import load_json, load_text

    request = LoadRequest(**options)  # type: ignore[arg-type]  # click checks the types.
    levels = load_levels(request)
    measuring = measuring_of(request)
    check_outputs_writable(request.json_file)
    with reporting(f"measuring {request.model}", sys.stderr, log_after=None):
        measured = asyncio.run(_measured(request, levels, measuring))
    click.echo(load_text(measured, request.batch_size), nl=False)
    if request.json_file is not None:
        document = load_json(request.url, request.model, request.batch_size, measuring, measured)
        write_output(request.json_file, json.dumps(document, indent=1) + "\n")
    return 0 if any(level.whole.answered for level in measured) else 1


def measuring_of(request: LoadRequest) -> Measuring:
    """How to measure, from the command's options: intervals, warm-up, and when figures are stable."""
    from podrun.serving.load.generator import Measuring

    return Measuring(
        request.measurement_interval / 1e3,
        request.warm_up / 1e3,
        request.max_trials,
        request.stability_percentage / 100,
        request.percentile,
    )


async def _measured(
    request: LoadRequest, levels: Sequence[LoadLevel], measuring: Measuring
) -> list[Measured]:
    import time

    from podrun.serving.load.generator import measure
    from podrun.serving.load.servers import connect_server

    server = connect_server(request.url, request.timeout)
    try:
        form = await server.describe(request.model)
        server.prepare(form, _arrays(request, form))
        return [await measure(server, level, measuring, time.perf_counter) for level in levels]
    finally:
        await server.close()


def load_levels(request: LoadRequest) -> list[LoadLevel]:
    """The loads that a command line asks for. Raises UsageError."""
    from podrun.serving.load.generator import LoadLevel

    if request.concurrency_range and request.request_rate_range:
        raise UsageError(
            "--concurrency-range and --request-rate-range exclude each other", hint="Keep one of them."
        )
    if request.request_rate_range:
        evenly = request.request_distribution == "constant"
        rates = load_range(request.request_rate_range, "--request-rate-range")
        return [LoadLevel(rate=rate, evenly=evenly, seed=request.seed) for rate in rates]
    many = load_range(request.concurrency_range or "1", "--concurrency-range")
    if any(value != int(value) for value in many):
        raise UsageError("--concurrency-range has whole numbers", hint="--concurrency-range 1:16:5")
    if many[-1] > MOST_CONCURRENCY:
        raise UsageError(
            f"--concurrency-range ends at {many[-1]:.0f} requests at once",
            hint=f"It holds up to {MOST_CONCURRENCY}.",
        )
    return [LoadLevel(concurrency=int(value)) for value in many]


def load_range(text: str, option: str) -> list[float]:
    """The loads of ``A``, ``A:B`` or ``A:B:STEP``, B included. Raises UsageError."""
    try:
        first, last, step = ([float(word) for word in text.split(":")] + [0.0, 0.0])[:3]
    except ValueError:
        first = last = step = 0.0
    last, step = last or first, step or 1.0
    finite = all(math.isfinite(number) for number in (first, last, step))
    if not finite or first <= 0 or last < first or step <= 0 or text.count(":") > 2:
        raise UsageError(f"{option}: {text!r} is no range", hint=f"As in {option} 1:16:5.")
    count = int((last - first) / step + 1e-9) + 1
    if count > 1000:
        raise UsageError(f"{option}: {text!r} has {count} loads", hint="Give a larger step.")
    return [first + step * number for number in range(count)]


def _arrays(request: LoadRequest, form: ModelForm) -> Mapping[str, np.ndarray]:
    """What one request sends."""
    from podrun.serving.load.request_data import arrays_of_file, request_arrays

    if request.input_data not in ("random", "zero"):
        return arrays_of_file(form, Path(request.input_data), request.batch_size)
    shapes = dict(_shape(text) for text in request.shape)
    return request_arrays(form, request.batch_size, shapes, request.input_data, request.seed)


def _shape(text: str) -> tuple[str, list[int]]:
    parts = re.fullmatch(r"(.+):(\d+(?:,\d+)*)", text)
    if parts is None:
        raise UsageError(f"--shape: {text!r} is no shape", hint="As in --shape x:3,224,224.")
    return parts[1], [int(word) for word in parts[2].split(",")]
