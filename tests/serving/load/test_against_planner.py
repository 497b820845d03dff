"""The planner against the genuine Triton whose runs take their modelled time, scaled so that the host keeps up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from podrun.serving.batching import BatchingRule
from podrun.serving.capacity.arrivals import ArrivalProcess
from podrun.serving.capacity.costs import model_costs
from podrun.serving.capacity.queueing import open_loop
from podrun.serving.compiler import Compiler
from podrun.serving.load.request_data import request_arrays
from podrun.serving.load.servers import connect_server
from podrun.serving.runner import ModelRunner, RuntimeConfig
from tests.serving.servers import triton
from tests.serving.test_runner import OPTIONS, model, rows_of

RUN_SECONDS = 0.5
"""What a run of the scaled model takes: the host's own milliseconds do not matter beside it."""
LEVEL_SECONDS = 40.0
"""How long requests of a load come."""
ALONE = 20
"""Requests one at a time, half of them before and half after those of a load."""
CONFIG = """backend: "poplar"
max_batch_size: 4
input {{ name: "x", data_type: TYPE_FP32, dims: [ 8 ] }}
output {{ name: "y", data_type: TYPE_FP32, dims: [ 3 ] }}
dynamic_batching {{ }}
parameters {{ key: "time_scale" value {{ string_value: "{scale}" }} }}
"""


def test_a_run_takes_its_modelled_time_where_that_is_asked(tmp_path: Path) -> None:
    Compiler.compile_and_export(model(), None, tmp_path, OPTIONS)
    file = tmp_path / "executable.popef"
    (cost,) = model_costs(file, "pod4", None, ()).runs
    config = RuntimeConfig(time_scale=0.02 / cost.seconds)
    with ModelRunner(str(file), config) as runner:
        begin = time.perf_counter()
        futures = [
            runner.execute_async({"x": rows_of(4)}, {"y": np.empty((4, 3), np.float32)}) for _ in range(5)
        ]
        for future in futures:
            future.wait(60)
        assert time.perf_counter() - begin >= 0.1
        assert futures[0].modelled is not None
        assert futures[0].modelled.compute_s + futures[0].modelled.transfer_s == pytest.approx(cost.seconds)


@pytest.mark.slow
@pytest.mark.system
def test_the_planned_curve_is_that_of_the_real_server(tmp_path: Path) -> None:
    """The same requests, measured and planned: p50, p90 and p99 within 15 % at three loads.

    The server's own work for a run is measured beside, with requests one at a time, and planned with
    (`podrun capacity --host-time`). Without it plans are too low by 5 to 19 % on a loaded host, most of all at p99 and
    near full load: a few per cent of a run are a larger share of a queue.
    """
    repository = tmp_path / "models"
    folder = repository / "net" / "1"
    folder.mkdir(parents=True)
    Compiler.compile_and_export(model(), None, folder, OPTIONS)
    costs = model_costs(folder / "executable.popef", "pod4", None, ())
    scale = RUN_SECONDS / costs.runs[0].seconds
    (repository / "net" / "config.pbtxt").write_text(CONFIG.format(scale=scale))
    differences = {}
    with triton(repository, ["net"]) as server:
        for load in (0.3, 0.5, 0.7):
            rate = load * 4 / RUN_SECONDS
            times = ArrivalProcess().unit_times(round(rate * LEVEL_SECONDS), 1, "planner") / rate
            alone, measured = asyncio.run(_latencies(f"grpc://{server.grpc}", times))
            (run,) = costs.with_host_time((float(np.median(alone)) - RUN_SECONDS) / scale).runs
            planned = open_loop(
                times, BatchingRule(4), 1, lambda rows, run=run: scale * run.run_seconds(rows)
            ).latency
            for percent in (50, 90, 99):
                ratio = np.percentile(measured, percent) / np.percentile(planned, percent)
                differences[f"p{percent} at load {load}"] = round(float(ratio) - 1, 3)
    assert {name: off for name, off in differences.items() if abs(off) > 0.15} == {}, differences


async def _latencies(url: str, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Latencies of requests one at a time, and of requests that are sent at these times."""
    server = connect_server(url, 60.0)
    form = await server.describe("net")
    server.prepare(form, request_arrays(form, 1, {}, "random", 1))
    await server.infer()

    async def latency(due: float) -> float:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        answer = await server.infer()
        assert not answer.error
        return time.perf_counter() - due

    try:
        alone = [await latency(time.perf_counter()) for _ in range(ALONE // 2)]
        begin = time.perf_counter()
        measured = await asyncio.gather(*(latency(begin + float(due)) for due in times))
        alone += [await latency(time.perf_counter()) for _ in range(ALONE // 2)]
        return np.array(alone), np.array(measured)
    finally:
        await server.close()
