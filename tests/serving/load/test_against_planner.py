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
    """The same requests, measured and planned: medians and p90 within 15 % at three loads."""
    repository = tmp_path / "models"
    folder = repository / "net" / "1"
    folder.mkdir(parents=True)
    Compiler.compile_and_export(model(), None, folder, OPTIONS)
    (cost,) = model_costs(folder / "executable.popef", "pod4", None, ()).runs
    (repository / "net" / "config.pbtxt").write_text(CONFIG.format(scale=RUN_SECONDS / cost.seconds))
    with triton(repository, ["net"]) as server:
        for load in (0.3, 0.5, 0.7):
            rate = load * 4 / RUN_SECONDS
            times = ArrivalProcess().unit_times(round(rate * 25), 1, "planner") / rate
            measured = asyncio.run(_latencies(f"grpc://{server.grpc}", times))
            planned = open_loop(times, BatchingRule(4), 1, lambda rows: RUN_SECONDS).latency
            for percent in (50, 90):
                assert np.percentile(measured, percent) == pytest.approx(
                    np.percentile(planned, percent), rel=0.15
                ), f"p{percent} at load {load}"


async def _latencies(url: str, times: np.ndarray) -> np.ndarray:
    """Latencies of requests that are sent at these times."""
    server = connect_server(url, 60.0)
    form = await server.describe("net")
    server.prepare(form, request_arrays(form, 1, {}, "random", 1))
    await server.infer()
    begin = time.perf_counter()

    async def latency(due: float) -> float:
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        answer = await server.infer()
        assert not answer.error
        return time.perf_counter() - begin - due

    try:
        return np.array(await asyncio.gather(*(latency(float(due)) for due in times)))
    finally:
        await server.close()
