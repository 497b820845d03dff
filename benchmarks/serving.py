"""What the genuine Triton server and podrun's backend add to a model's own run, and how many requests they answer.

    python benchmarks/serving.py --json

Models whose requests have 1 kB and 150 kB (4 rows of 64 and of 9,600 numbers, 3 a row back) are compiled, run by
`ModelRunner` as the backend runs them, then served; gRPC, one client. The rate is that of the small one, with 16
requests in flight. Limits stand beside the figures. On a loaded host look at processor time: of a run by the backend's
own way, and of a served request in the server and its instances.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import tritonclient.grpc as grpcclient
from onnx import TensorProto, helper, numpy_helper
from short_mode import add_short
from tritonclient.utils import InferenceServerException

from podrun.serving.compiler import Compiler
from podrun.serving.runner import ModelRunner

IN_FLIGHT = 16
START_SECONDS = 180.0


SIZES = {"1kB": 64, "150kB": 9600}
"""Numbers in a row of the input; 4 rows of 4 bytes each."""
LIMITS = {"overhead_1kB_ms": 1.5, "overhead_150kB_ms": 3.0, "requests_per_s": 800.0}
"""What is asked of a quiet host."""


def model(width: int) -> onnx.ModelProto:
    """``y = relu(x @ w)``."""
    weight = np.random.default_rng(0).standard_normal((width, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 3])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """The median time of a call, milliseconds, after 50 calls."""
    times = []
    for turn in range(50 + repeats):
        begin = time.perf_counter()
        call()
        if turn >= 50:
            times.append(time.perf_counter() - begin)
    return float(np.median(times)) * 1e3


def processor_s(pid: int | None = None) -> float:
    """Processor time of this process, or of a process and its children."""
    if pid is None:
        return time.process_time()
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def rate(client: Any, tensor: Any, requests: int) -> float:
    """Requests a second with `IN_FLIGHT` in flight."""
    answers: queue.Queue[Any] = queue.Queue()

    def send() -> None:
        client.async_infer("1kB", [tensor], lambda result, error: answers.put(error))

    begin = time.perf_counter()
    for _ in range(IN_FLIGHT):
        send()
    for done in range(requests):
        if (error := answers.get(timeout=60)) is not None:
            raise error
        if done < requests - IN_FLIGHT:
            send()
    return requests / (time.perf_counter() - begin)


def measure(folder: Path, requests: int) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    inputs = {name: np.ones((4, width), np.float32) for name, width in SIZES.items()}
    for name, width in SIZES.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        Compiler.compile_and_export(model(width), None, version)
        x, y = inputs[name], np.zeros((4, 3), np.float32)
        with ModelRunner(str(version / "executable.popef")) as runner:
            spent = processor_s()
            own = median_ms(lambda r=runner, x=x, y=y: r.run_now([r.prepared({"x": x}, {"y": y})]), 400)
            spent = processor_s() - spent
        figures[f"own_run_{name}_ms"] = own
        figures[f"own_run_{name}_processor_ms"] = spent / 450 * 1e3
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        grpc, http, metrics = (each.getsockname()[1] for each in sockets)
    words = ["serve", str(folder), "--grpc-port", grpc, "--http-port", http, "--metrics-port", metrics]
    server = subprocess.Popen([sys.executable, "-m", "podrun", *map(str, words)], stderr=subprocess.DEVNULL)
    try:
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{grpc}")
        end = time.monotonic() + START_SECONDS
        while not all(_ready(client, name) for name in SIZES):
            if time.monotonic() > end or server.poll() is not None:
                raise SystemExit("the server does not start: podrun serve says why")
            time.sleep(0.1)
        for name, x in inputs.items():
            tensor = grpcclient.InferInput("x", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            spent = processor_s(server.pid)
            served = median_ms(lambda n=name, t=tensor: client.infer(n, [t]), 400)
            spent = processor_s(server.pid) - spent
            figures[f"served_{name}_ms"] = served
            figures[f"served_{name}_processor_ms"] = spent / 450 * 1e3
            figures[f"overhead_{name}_ms"] = served - figures[f"own_run_{name}_ms"]
            if name == "1kB":
                figures["requests_per_s"] = rate(client, tensor, requests)
        client.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return figures


def _ready(client: Any, name: str) -> bool:
    try:
        return bool(client.is_model_ready(name))
    except InferenceServerException:
        return False


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print JSON, or write it to a file"
    )
    parser.add_argument("--requests", type=int, default=2000, help="of each measurement [2000]")
    add_short(parser, requests=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="podrun-serving-") as folder:
        figures = measure(Path(folder), options.requests)
    load = os.getloadavg()[0]
    text = json.dumps(
        {"schema": "podrun-serving-2", "in_flight": IN_FLIGHT, "load": load, "limits": LIMITS, **figures}
    )
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text)
    else:
        asked = {name: f" (asked: {limit:g})" for name, limit in LIMITS.items()}
        print("\n".join(f"{name}: {value:.2f}{asked.get(name, '')}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
