"""How long the compiler takes: tracing, differentiation, cost model and export, and loading from its cache.

    python benchmarks/compile_time.py [--json FILE]

Keys (seconds unless named otherwise, median of five in one warm process): ``mlp_s``, ``cnn_s``:
compile_program of 784-512-512-10 on 16 replicas and of a digits CNN; ``cnn_cached_s``: the same from the
executable cache with the front end's digest; ``cnn_first_s``: the first in a fresh process, without the
import of JAX; ``cnn_file_kib``: size of the Executable. ``resnet50_cold_s``: a training session of the ResNet-50 in the
onnx wheel, constructed and prepared (traced, costed, compiled) in a fresh process with empty caches;
``resnet50_cached_s``: the same in another process with the caches that it left (``enableEngineCaching``, ``cachePath``
and compiled pieces); ``..._cpu_s``: their processor time,
which other work on the machine does not stretch. ``--only resnet50`` leaves out the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from mlp import Descent
from short_mode import add_short

from podrun.compiler.cache import ExecutableCache
from podrun.compiler.compile import CompileOptions, compile_program
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program
from podrun.core import executable_file
from podrun.core.executable import TensorSpec


def _program(
    name: str, shapes: Mapping[str, tuple[int, ...]], sample: tuple[int, ...], logits: Callable[..., Any]
) -> Program:
    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        logs = jax.nn.log_softmax(logits(p, inputs["x"]))
        return {"loss": -jnp.mean(jnp.sum(logs * jax.nn.one_hot(inputs["y"], 10), axis=-1))}

    return Program(
        name=name,
        forward=forward,
        parameters={n: ParameterSpec(TensorSpec(n, "float32", s), True) for n, s in shapes.items()},
        inputs={
            "x": InputSpec(TensorSpec("x", "float32", (32, *sample))),
            "y": InputSpec(TensorSpec("y", "int32", (32,))),
        },
        anchors=(AnchorSpec("loss"),),
        replicas=16,
        loss="loss",
        update=Descent(0.1),
    )


def mlp() -> Program:
    """784-512-512-10."""
    sizes = (784, 512, 512, 10)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        shapes |= {f"w{i}": (sizes[i], sizes[i + 1]), f"b{i}": (sizes[i + 1],)}

    def logits(p: Mapping[str, Any], x: Any) -> Any:
        for i in range(3):
            x = x @ p[f"w{i}"] + p[f"b{i}"]
            x = jax.nn.relu(x) if i < 2 else x
        return x

    return _program("mlp", shapes, (784,), logits)


def cnn() -> Program:
    """Three convolutions and two dense layers on 8x8 digits."""
    shapes: dict[str, tuple[int, ...]] = {"c0": (16, 1, 3, 3), "c1": (32, 16, 3, 3), "c2": (32, 32, 3, 3)}
    shapes |= {"w0": (512, 64), "b0": (64,), "w1": (64, 10), "b1": (10,)}

    def logits(p: Mapping[str, Any], x: Any) -> Any:
        for name, stride in (("c0", 1), ("c1", 2), ("c2", 1)):
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, p[name], (stride, stride), "SAME"))
        x = jax.nn.relu(x.reshape(32, -1) @ p["w0"] + p["b0"])
        return x @ p["w1"] + p["b1"]

    return _program("digits", shapes, (1, 8, 8), logits)


def median_seconds(run: Callable[[], object]) -> float:
    """Median of five, after one that does not count."""
    run()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def first_seconds() -> float:
    """The first compilation of a fresh process."""
    code = (
        "import time, compile_time\nbegin = time.perf_counter()\n"
        "compile_time.compile_program(compile_time.cnn())\nprint(time.perf_counter() - begin)"
    )
    folder = Path(__file__).resolve().parent
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True, timeout=300
    )
    return float(run.stdout)


def real_seconds(network: str, cache: Path) -> tuple[float, float]:
    """Seconds and processor seconds that constructing and preparing training takes in a fresh process."""
    code = (
        "import time, pathlib, real_training\n"
        "cpu = time.process_time()\n"
        f"made = real_training.training({network!r}, 0.01, pathlib.Path({str(cache / 'programs')!r}))\n"
        "print(made.construct_s + made.prepare_s, time.process_time() - cpu)"
    )
    folder = Path(__file__).resolve().parents[1] / "tests" / "conformance"
    environment = {**os.environ, "PODRUN_CACHE_DIR": str(cache)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    wall, processor = run.stdout.split()
    return float(wall), float(processor)


def real_network(network: str) -> dict[str, float]:
    """A network of the onnx wheel, cold and from the caches."""
    label = network.removeprefix("test_")
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name in ("cold", "cached"):
            found[f"{label}_{name}_s"], found[f"{label}_{name}_cpu_s"] = real_seconds(network, Path(folder))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the compiler.")
    parser.add_argument("--json", type=Path, help="write the figures to FILE", metavar="FILE")
    parser.add_argument("--only", default="", choices=("", "small", "resnet50"), help="measure only this")
    parser.add_argument("--network", default="test_resnet50", help="of the onnx wheel")
    add_short(parser, network="test_shufflenet")
    arguments = parser.parse_args()
    network = arguments.network
    parts = {"small": small, "resnet50": lambda: real_network(network)}
    found: dict[str, float] = {}
    for name, measure in parts.items():
        if arguments.only in ("", name):
            found |= measure()
    for key, value in found.items():
        print(f"{key:22} {value:.4f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def small() -> dict[str, float]:
    """The perceptron and the digits CNN."""
    with tempfile.TemporaryDirectory() as folder:
        options = CompileOptions(cache=ExecutableCache(Path(folder)), program_digest="benchmark")
        return {
            "mlp_s": median_seconds(lambda: compile_program(mlp())),
            "cnn_s": median_seconds(lambda: compile_program(cnn())),
            "cnn_cached_s": median_seconds(lambda: compile_program(cnn(), options=options)),
            "cnn_first_s": first_seconds(),
            "cnn_file_kib": len(executable_file.dumps(compile_program(cnn()))) / 1024,
        }


if __name__ == "__main__":
    main()
