"""What the genuine Triton server and podrun's backend add to a model's own run, and how many requests they answer.

    python benchmarks/serving.py --json

A model of 4 rows of 8 numbers (128 bytes in, 48 out) is compiled, run by `ModelRunner`, then served; gRPC, one client.
"""

from __future__ import annotations

import argparse
import json
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
import tritonclient.grpc as grpcclient
from onnx import TensorProto, helper, numpy_helper
from short_mode import add_short
from tritonclient.utils import InferenceServerException

from podrun.serving.compiler import Compiler
from podrun.serving.runner import ModelRunner

IN_FLIGHT = 16
START_SECONDS = 60.0


def model() -> onnx.ModelProto:
    """``y = relu(x @ w)``."""
    weight = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])],
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


def rate(client: Any, tensor: Any, requests: int) -> float:
    """Requests a second with `IN_FLIGHT` in flight."""
    answers: queue.Queue[Any] = queue.Queue()

    def send() -> None:
        client.async_infer("net", [tensor], lambda result, error: answers.put(error))

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
    version = folder / "net" / "1"
    version.mkdir(parents=True)
    Compiler.compile_and_export(model(), None, version)
    x, y = np.ones((4, 8), np.float32), np.zeros((4, 3), np.float32)
    with ModelRunner(str(version / "executable.popef")) as runner:
        own = median_ms(lambda: runner.execute({"x": x}, {"y": y}), 400)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        grpc, http, metrics = (each.getsockname()[1] for each in sockets)
    words = ["serve", str(folder), "--grpc-port", grpc, "--http-port", http, "--metrics-port", metrics]
    server = subprocess.Popen([sys.executable, "-m", "podrun", *map(str, words)], stderr=subprocess.DEVNULL)
    try:
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{grpc}")
        end = time.monotonic() + START_SECONDS
        while not _ready(client):
            if time.monotonic() > end or server.poll() is not None:
                raise SystemExit("the server does not start: podrun serve says why")
            time.sleep(0.1)
        tensor = grpcclient.InferInput("x", [4, 8], "FP32")
        tensor.set_data_from_numpy(x)
        served = median_ms(lambda: client.infer("net", [tensor]), 400)
        answered = rate(client, tensor, requests)
        client.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return {
        "own_run_median_ms": own,
        "served_median_ms": served,
        "overhead_median_ms": served - own,
        "requests_per_s": answered,
    }


def _ready(client: Any) -> bool:
    try:
        return bool(client.is_model_ready("net"))
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
    text = json.dumps({"schema": "podrun-serving-1", "in_flight": IN_FLIGHT, **figures})
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text)
    else:
        print("\n".join(f"{name}: {value:.2f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
