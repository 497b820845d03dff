"""A training step of 16 replicas on four machine processes, against one plain JAX step on the same 512 samples.

    python benchmarks/step_time.py [--json FILE] [--torch-python PYTHON] [--blocks N]

784-512-512-10, 32 samples for each replica, float32, SGD.

* ``step_vs_plain_jax``: how many times longer podrun's step takes, from `run` to its result on the host, inputs and
  losses included. Steps are taken in short blocks, one of podrun's and one of plain JAX's in turn, so that both see
  the same host; the figure is the median over pairs of blocks.
* ``limit_ms``, ``step_vs_limit``, ``limit_vs_plain_jax``: the arithmetic of podrun's step by bare calls of the library
  in as many processes (`bare_step`), in the same turns; how many times longer podrun's step takes than it, and how many
  times longer it takes than plain JAX's.
* ``host_cost_ms``: what a run takes beyond the slowest machine's own time.
* ``torchrun_vs_step``: how many times longer a step of ``torchrun`` with 16 gloo processes takes, where torch is
there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlp
from bare_step import bare_steps
from machines import machines
from short_mode import add_short

REPLICAS, MACHINES = 16, 4
STEPS, WARM_UP = 20, 20
TARGETS = {"step_vs_plain_jax": 1.3, "host_cost_ms": 2.0}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument(
        "--torch-python", default=sys.executable, help="a Python with torch (default: this one)"
    )
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--torch-processes", type=int, default=REPLICAS)
    add_short(parser, blocks=2, torch_processes=2)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"host": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    figures |= measure(arguments.blocks)
    figures |= torchrun(arguments.torch_python, arguments.torch_processes, figures["step_ms"])
    for key, value in figures.items():
        target = f"   (at most {TARGETS[key]:g})" if key in TARGETS else ""
        print(f"{key:20} {value:.3g}{target}" if isinstance(value, float) else f"{key:20} {value}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure(blocks: int) -> dict[str, float]:
    """podrun's step and plain JAX's, block by block."""
    samples = REPLICAS // MACHINES * mlp.BATCH
    with machines(MACHINES) as pod, bare_steps(MACHINES, samples, STEPS) as bare:
        connection = pod.attach()
        connection.load(mlp.executable(REPLICAS))
        connection.write_variables(mlp.weights())
        data, costs = mlp.inputs(REPLICAS), []

        def podrun_step() -> float:
            begin = time.perf_counter()
            result = connection.run(1, data)
            costs.append(time.perf_counter() - begin - result.details["machine_seconds"])
            return float(result.anchors["loss"].mean())

        plain_step = mlp.plain_jax(REPLICAS)
        first = podrun_step(), plain_step()
        if abs(first[0] - first[1]) > 1e-4 * abs(first[1]):
            raise SystemExit(f"podrun and plain JAX do not compute the same loss: {first}")
        for step in (podrun_step, plain_step):
            block(step, WARM_UP)
        bare()
        costs.clear()
        pairs = [(block(podrun_step), block(plain_step), bare()) for _ in range(blocks)]
        connection.close()
    return {
        "step_ms": statistics.median(ours for ours, _, _ in pairs) * 1e3,
        "plain_jax_ms": statistics.median(plain for _, plain, _ in pairs) * 1e3,
        "step_vs_plain_jax": statistics.median(ours / plain for ours, plain, _ in pairs),
        "step_vs_plain_jax_best": min(ours for ours, _, _ in pairs) / min(plain for _, plain, _ in pairs),
        "limit_ms": statistics.median(limit for _, _, limit in pairs) * 1e3,
        "step_vs_limit": statistics.median(ours / limit for ours, _, limit in pairs),
        "limit_vs_plain_jax": statistics.median(limit / plain for _, plain, limit in pairs),
        "host_cost_ms": statistics.median(costs) * 1e3,
    }


def block(step: Callable[[], float], steps: int = STEPS) -> float:
    """Median seconds of some steps."""
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def torchrun(python: str, processes: int, step_ms: float) -> dict[str, Any]:
    """The same step under torchrun with gloo processes, if torch is there."""
    there = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False)
    if there.returncode:
        return {"torchrun_vs_step": None, "torchrun_note": f"not measured: {python} has no torch"}
    script = Path(__file__).with_name("torchrun_step.py")
    command = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        str(script),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environ)
    if run.returncode:
        return {
            "torchrun_vs_step": None,
            "torchrun_note": f"not measured: {run.stderr.strip().splitlines()[-1]}",
        }
    milliseconds = float(run.stdout.split("step_ms")[1].split()[0])
    return {"torchrun_step_ms": milliseconds, "torchrun_vs_step": milliseconds / step_ms}


if __name__ == "__main__":
    main()
