"""Wall time per sample at 4, 16, 64 and 256 replicas, each with its own batch of 32, through the `podrun` command.

    python benchmarks/weak_scaling.py [--json FILE] [--replicas 4,16,64,256] [--repeat N]

For each network and size: ``us_per_sample`` (median step over samples of all replicas), ``machines`` and the
``processes`` that hold them, ``machines_mb`` (their proportional share of memory together), ``load_s`` (program loaded
and two steps run), ``command_s`` (the whole command).
``spread`` of a network is the largest time per sample over the smallest; ``spread_from_16`` leaves out 4 replicas,
which are one machine and so use one core whatever the host has. Target: 1.15. Each size is run three times, in turn
with the others, and the run in the middle counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from short_mode import add_short

NETWORKS = ("digits", "784-512-512-10")
TARGET = 1.15
INSTANCES = {256: 4}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--replicas", default="4,16,64,256", metavar="LIST")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, in turn; the median counts")
    add_short(parser, replicas="4,16", repeat=1)
    arguments = parser.parse_args()
    sizes = [int(text) for text in arguments.replicas.split(",")]
    report: dict[str, Any] = {"host": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    for network in NETWORKS:
        runs = [measure(network, size) for _ in range(arguments.repeat) for size in sizes]
        middle = [median([run for run in runs if run["replicas"] == size]) for size in sizes]
        times = {run["replicas"]: run["us_per_sample"] for run in middle}
        larger = [value for size, value in times.items() if size >= 16]
        report[network] = {
            "runs": middle,
            "all_us_per_sample": {
                size: [r["us_per_sample"] for r in runs if r["replicas"] == size] for size in sizes
            },
            "slowest": max(times, key=times.__getitem__),
            "fastest": min(times, key=times.__getitem__),
            "spread": max(times.values()) / min(times.values()),
            "spread_from_16": max(larger) / min(larger) if larger else None,
        }
        said = "{spread:.2f} ({slowest} replicas slowest, {fastest} fastest)".format(**report[network])
        print(f"{network}: spread {said}, at most {TARGET} wanted", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run in the middle by time per sample; of two the slower."""
    return sorted(runs, key=lambda run: run["us_per_sample"])[len(runs) // 2]


def measure(network: str, replicas: int) -> dict[str, Any]:
    """One launch."""
    command = [
        *(str(Path(sys.executable).with_name("podrun")), f"--num-replicas={replicas}"),
        *(f"--num-instances={INSTANCES.get(replicas, 1)}", "--vipu-server-timeout=600"),
        *(str(Path(__file__).with_name("weak_scaling_step.py")), network),
    ]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if "us_per_sample" in line)
    figures: dict[str, Any] = json.loads(line[line.index("{") :])
    figures["command_s"] = round(time.monotonic() - begin, 1)
    print(network, json.dumps(figures), flush=True)
    return figures


if __name__ == "__main__":
    main()
