"""``podrun capacity MODEL``: how much POD a service needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.serving.capacity.planning import PlannedService


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """The options of a command line."""

    models: tuple[Path, ...]
    target: str
    rate: tuple[str, ...]
    slo: tuple[str, ...]
    arrivals: tuple[str, ...]
    batch: str
    delay: str
    preferred_batch: str
    rows: int
    ipus_per_replica: int | None
    host_time: str
    price: tuple[str, ...]
    requests: int
    seed: int
    json_file: Path | None
    html: Path | None


@click.command(
    "podrun capacity",
    context_settings=HELP_OPTIONS,
    epilog="""\b
    Examples:
      podrun capacity model.onnx --target pod16 --rate 5000/s --slo p99=20ms
      podrun capacity model.popef --rate 800/s --arrivals burst:cv=4
      podrun capacity a.onnx b.onnx --rate 900/s --rate 40/s --slo p99=20ms""",
)
@click.argument("models", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--target", default="pod16", metavar="NAME", help="The POD [pod16].")
@click.option(
    "--rate", multiple=True, metavar="N/s", help="Requests a second; one for each model, or one for all."
)
@click.option(
    "--slo", multiple=True, metavar="pN=TIME,...", help="Latencies to hold, as in p50=5ms,p99=20ms."
)
@click.option(
    "--arrivals",
    multiple=True,
    metavar="FORM",
    help="poisson, even, burst:cv=C, trace:FILE, closed:clients=N,think=TIME [poisson].",
)
@click.option("--batch", default="", metavar="N,...", help="Compiled batch sizes to try [1 to 64].")
@click.option(
    "--delay", default="", metavar="TIME,...", help="Delays of the batcher to try [parts of a run]."
)
@click.option(
    "--preferred-batch", default="", metavar="N,...", help="Sizes that the batcher runs at once [none]."
)
@click.option("--rows", type=click.IntRange(1), default=1, metavar="N", help="Samples of a request [1].")
@click.option("--ipus-per-replica", type=click.IntRange(1), metavar="N", help="Pipeline stages [1].")
@click.option(
    "--host-time",
    default="0ms",
    metavar="TIME",
    help="The server's own work for each run, beside the model's [0ms].",
)
@click.option("--price", multiple=True, metavar="POD=N", help="What an hour of a POD costs.")
@click.option(
    "--requests", type=click.IntRange(100), default=200_000, metavar="N", help="Of the final run [200000]."
)
@click.option("--seed", type=int, default=1, metavar="N", help="Of the arrivals [1].")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures."
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with pictures.")
def capacity_verb(**options: object) -> int:
    """Says which POD serves a model at a rate within its latencies, with which batch and delay, and what is left.

    Requests wait in virtual time for replicas whose runs take as long as the tile model says. MODEL is an ONNX
    file, or a compiled one (executable.popef). Exit code 1: the target does not hold it.
    """
    from podrun.core.documents import check_outputs_writable, write_output
    from podrun.core.terminal import reporting
    from podrun.serving.capacity.answer import answer_capacity, answer_json
    from podrun.serving.capacity.presentation import answer_text, capacity_page
    from podrun.serving.capacity.quantities import read_prices

    request = CapacityRequest(**options)  # type: ignore[arg-type]  # click checks the types.
    check_outputs_writable(request.json_file, request.html)
    with reporting("planning", sys.stderr, log_after=None):
        answer = answer_capacity(services_of(request), request.target, read_prices(request.price))
    click.echo(answer_text(answer), nl=False)
    if request.json_file is not None:
        write_output(request.json_file, json.dumps(answer_json(answer), indent=1) + "\n")
    if request.html is not None:
        write_output(request.html, capacity_page(answer))
    return 0 if answer.holds else 1


def services_of(request: CapacityRequest) -> list[PlannedService]:
    """The services that a command line names. Raises PodrunError for what cannot be."""
    from podrun.costmodel.target import system
    from podrun.serving.capacity.arrivals import read_arrivals
    from podrun.serving.capacity.costs import model_costs
    from podrun.serving.capacity.planning import BatcherChoices, PlannedService, ServiceDemand
    from podrun.serving.capacity.quantities import duration_seconds, read_objectives, requests_per_second

    system(request.target)
    count = len(request.models)
    rates = for_each_model(request.rate, count, "--rate")
    goals = for_each_model(request.slo, count, "--slo")
    forms = for_each_model(request.arrivals, count, "--arrivals")
    batcher = BatcherChoices(
        tuple(duration_seconds(word, "--delay") for word in request.delay.split(",") if request.delay),
        batch_sizes(request.preferred_batch, "--preferred-batch"),
    )
    services = []
    for number, path in enumerate(request.models):
        arrivals = read_arrivals(forms[number] or "poisson")
        rate = requests_per_second(rates[number]) if rates[number] else None
        if rate is None and arrivals.kind not in ("trace", "closed"):
            raise UsageError(f"how many requests does {path.name} get?", hint="--rate 5000/s")
        if rate is not None and arrivals.kind == "closed":
            raise UsageError("clients that wait for answers have no --rate", hint="Leave --rate out.")
        objectives = read_objectives(goals[number]) if goals[number] else ()
        demand = ServiceDemand(
            rate, objectives, arrivals, request.rows, request.requests, request.seed, batcher
        )
        costs = model_costs(path, request.target, request.ipus_per_replica, batch_sizes(request.batch))
        costs = costs.with_host_time(duration_seconds(request.host_time, "--host-time"))
        services.append(PlannedService(costs, demand, f"{number}:{path.name}"))
    return services


def for_each_model(values: Sequence[str], models: int, option: str) -> list[str]:
    """The values of an option by model: one for all, or one each. Raises UsageError."""
    if len(values) <= 1:
        return [values[0] if values else ""] * models
    if len(values) != models:
        raise UsageError(
            f"{option} is given {len(values)} times for {models} models", hint="Once, or once a model."
        )
    return list(values)


def batch_sizes(text: str, option: str = "--batch") -> tuple[int, ...]:
    """Batch sizes of ``1,4,16``, ascending. Raises UsageError that names the option."""
    try:
        sizes = sorted({int(word) for word in text.split(",")} if text else ())
    except ValueError:
        sizes = [0]
    if sizes and sizes[0] < 1:
        raise UsageError(f"{option}: {text!r} are no batch sizes", hint=f"As in {option} 1,4,16.")
    return tuple(sizes)
