"""Private memory of machine processes, and an IPU-POD64 that trains on this host.

    python benchmarks/machine_memory.py [--json FILE] [--machines 16]

``idle_mb``: the largest unique set size (memory that only this process has) of a machine process that is configured
but has loaded nothing; ``loaded_mb``: the same while a 784-512-512-10 network trains on all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import mlp
import psutil
from machines import Machines, machines
from short_mode import add_short

TARGETS = {"idle_mb": 350.0}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--machines", type=int, default=16)
    add_short(parser, machines=2)
    arguments = parser.parse_args()
    figures = measure(arguments.machines)
    for key, value in figures.items():
        target = f"   (at most {TARGETS[key]:g})" if key in TARGETS else ""
        print(f"{key:20} {value:.4g}{target}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure(count: int) -> dict[str, Any]:
    """Start, weigh, train, weigh."""
    begin = time.perf_counter()
    with machines(count) as pod:
        started = time.perf_counter() - begin
        idle = private_mb(pod)
        connection = pod.attach()
        begin = time.perf_counter()
        connection.load(mlp.executable(4 * count))
        loaded = time.perf_counter() - begin
        connection.write_variables({**mlp.weights(), "rate": mlp.np.float32(0.001)})
        data = mlp.inputs(4 * count)
        losses, taken = [], []
        for _ in range(20):
            begin = time.perf_counter()
            losses.append(float(connection.run(1, data).anchors["loss"].mean()))
            taken.append(time.perf_counter() - begin)
        if not losses[-1] < losses[0]:
            raise SystemExit(f"the network did not learn: {losses}")
        busy = private_mb(pod)
        connection.close()
    return {
        "machines": count,
        "ipus": 4 * count,
        "idle_mb": max(idle),
        "loaded_mb": max(busy),
        "start_s": started,
        "load_s": loaded,
        "step_ms": statistics.median(taken) * 1e3,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def private_mb(pod: Machines) -> list[float]:
    """Unique set size of each machine process, in MB."""
    return [psutil.Process(process.pid).memory_full_info().uss / 1e6 for process in pod.processes]


if __name__ == "__main__":
    main()
