"""``poprt_exec poprt_run_popef --popef FILE``: a compiled model run on made-up data, with its latency and throughput.

PopRT's wheel has a compiled program of that name; ``poprt_exec`` runs it. Threads give requests to one runner, each its
share. Times are those of the emulation; what is modelled of the IPUs stands beside them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.stop_signals import in_daemon_thread

if TYPE_CHECKING:
    import numpy as np

    from podrun.serving.runtime.factory import AnyRunner

RUNNERS = ("lightRunner", "hostConcatRunner", "packRunner")


@dataclass(frozen=True, slots=True)
class PackChoices:
    """Options of ``packRunner``."""

    most: int
    timeout_us: int
    dynamic: str
    mask: str


def make_named_runner(kind: str, file: Path, rows: int, pack: PackChoices) -> AnyRunner:
    """The runner that the command names; ``""``: `ModelRunner`, which batches where ``rows`` are not the
    compiled ones.
    """
    from podrun.serving.runtime.config import OFF, LightRunnerConfig, RuntimeConfig
    from podrun.serving.runtime.factory import make_runner
    from podrun.serving.runtime.host_concat import HostConcatRunnerConfig
    from podrun.serving.runtime.pack_runner import PackRunnerConfig

    if kind == "lightRunner":
        return make_runner(str(file), LightRunnerConfig())
    if kind == "hostConcatRunner":
        return make_runner(str(file), HostConcatRunnerConfig())
    if kind == "packRunner":
        config = PackRunnerConfig(
            timeout_microseconds=pack.timeout_us, max_valid_num=pack.most, dynamic_input_name=pack.dynamic
        )
        config.enable_input_single_row_mode(pack.mask)
        return make_runner(str(file), config)
    return make_runner(str(file), RuntimeConfig(batching_dim=0 if rows else OFF, timeout_ns=1_000_000))


def chosen_graph(runner: AnyRunner, index: int | None) -> AnyRunner:
    """The runner of one model of a fused file; that of any other file is left. UsageError where no model is named, or
    none can be.
    """
    from podrun.serving.runtime.fusion_runner import ModelFusionRunner

    if not isinstance(runner, ModelFusionRunner):
        if index is not None:
            raise UsageError("--index is for fused models, which ModelRunner runs; this is none")
        return runner
    if index is None:
        graphs = ", ".join(map(str, runner.graphs))
        raise UsageError(f"the file holds the graphs {graphs}", hint="--index says which one runs.")
    return runner.graph(index)


def made_up(runner: AnyRunner, rows: int, length: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Inputs of one request, from a fixed seed, and arrays for its outputs. ``length``: of a sample, for
    `PackRunner`.
    """
    import numpy as np

    from podrun.serving.runtime.pack_runner import PackRunner

    source = np.random.default_rng(0)

    def shape_of(shape: tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(runner, PackRunner):
            return (length, *shape[2:])
        return (rows, *shape[1:]) if rows and shape else shape

    inputs = {}
    for description in runner.get_execute_inputs():
        shape = shape_of(description.shape)
        values = source.random(shape) if description.dtype.kind == "f" else source.integers(0, 2, shape)
        inputs[description.name] = np.asarray(values).astype(description.dtype)
    outputs = {d.name: np.empty(shape_of(d.shape), d.dtype) for d in runner.get_execute_outputs()}
    return inputs, outputs


def measured(runner: AnyRunner, requests: int, threads: int, rows: int, length: int) -> list[float]:
    """Seconds of each request. Raises a request's error."""
    times: list[float] = []

    def work(share: int) -> None:
        inputs, outputs = made_up(runner, rows, length)
        for _ in range(share):
            begin = time.perf_counter()
            runner.execute(inputs, outputs)
            times.append(time.perf_counter() - begin)

    shares = [requests // threads + (n < requests % threads) for n in range(threads)]
    workers = [in_daemon_thread(partial(work, share), "podrun-requests") for share in shares]
    for worker in wait(workers).done:
        worker.result()
    return times


def latency_lines(times: list[float], seconds: float, rows: int) -> Mapping[str, str]:
    """The lines of the report: latencies in ms, requests and rows a second."""
    import numpy as np

    values = np.array(times) * 1e3
    return {
        "Requests": str(len(times)),
        "Max latency": f"{values.max():.3f} ms",
        "Min latency": f"{values.min():.3f} ms",
        "Average latency": f"{values.mean():.3f} ms",
        "P99 latency": f"{np.percentile(values, 99):.3f} ms",
        "Throughput": f"{len(times) / seconds:.1f} requests/s, {len(times) * rows / seconds:.1f} samples/s",
    }


SCRIPTS = {
    "auto_sharding.py": "podrun.serving.convert.auto_sharding:auto_sharding_command",
    "model_debugger.py": "podrun.serving.convert.model_debugger:debugger_command",
}
"""Programs that PopRT publishes as scripts, and where they are here. They are imported when they are asked for."""


class ProgramGroup(click.Group):
    """Programs by name; those of `SCRIPTS` also without ``.py``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *SCRIPTS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = SCRIPTS.get(cmd_name) or SCRIPTS.get(f"{cmd_name}.py")
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = place.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group("poprt_exec", cls=ProgramGroup, context_settings=HELP_OPTIONS)
def exec_command() -> None:
    """Run a program of PopRT's: poprt_run_popef, auto_sharding.py or model_debugger.py."""


@exec_command.command("poprt_run_popef", context_settings=HELP_OPTIONS)
@click.option("--popef", "file", required=True, type=click.Path(path_type=Path), help="The compiled model.")
@click.option("--runner", type=click.Choice(RUNNERS), default=None, help="Another runner than ModelRunner.")
@click.option("--iteration", type=click.IntRange(1), default=100, show_default=True, help="Requests.")
@click.option("--numThreads", "threads", type=click.IntRange(1, 256), default=3, show_default=True)
@click.option("--batchSize", "rows", type=click.IntRange(1), default=None, help="Rows of a request.")
@click.option("--index", type=click.IntRange(0), default=None, help="Graph of a fused model.")
@click.option("--maxValidNum", "most", type=click.IntRange(0), default=0, help="Samples of a packed batch.")
@click.option("--packTimeout", "timeout_us", type=click.IntRange(0), default=0, help="Microseconds.")
@click.option("--dynamicInputName", "dynamic", default="", help="The input of varying length.")
@click.option("--maskName", "mask", default="", help="The input that numbers the samples of a row.")
def run_popef_verb(
    file: Path,
    runner: str | None,
    iteration: int,
    threads: int,
    rows: int | None,
    index: int | None,
    **pack: str | int,
) -> int:
    """Run a compiled model on made-up data and print latency and throughput."""
    choices = PackChoices(int(pack["most"]), int(pack["timeout_us"]), str(pack["dynamic"]), str(pack["mask"]))
    runner_of_file = make_named_runner(runner or "", file, rows or 0, choices)
    try:
        named = chosen_graph(runner_of_file, index)
        inputs = named.get_execute_inputs()
        shape = inputs[0].shape
        length = max(1, shape[1] // 4) if runner == "packRunner" and len(shape) > 1 else 0
        measured(named, threads, threads, rows or 0, length)  # The first runs compile.
        begin = time.perf_counter()
        times = measured(named, iteration, threads, rows or 0, length)
        samples = 1 if runner == "packRunner" else rows or (shape[0] if shape else 1)
        for name, value in latency_lines(times, time.perf_counter() - begin, samples).items():
            click.echo(f"{name}: {value}")
    finally:
        runner_of_file.close()
    return 0
