"""How long an answer about capacity takes: ResNet-50 on a POD64, a million requests.

    python benchmarks/capacity.py [--json FILE] [--requests N] [--network NAME] [--rate N/s]

``answer_s``: wall time of `podrun capacity` in a process of its own, from plans on disk; ``cold_s``: with an empty
cache, so that the model is traced and costed at each batch. ``*_cpu_s``: their processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from short_mode import add_short

WRITER = Path(__file__).resolve().parents[1] / "examples" / "serving" / "write_model.py"
TARGETS = {"answer_s": 10.0}
BATCHES = (1, 4, 16)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--rate", default="200k/s")
    add_short(parser, requests=20_000, network="alexnet", rate="20k/s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for batch in BATCHES:
            words = [arguments.network, "--batch", str(batch), str(Path(folder, f"net-b{batch}.onnx"))]
            subprocess.run([sys.executable, WRITER, *words], check=True, stdout=subprocess.DEVNULL)
        cold_s, cold_cpu_s = answered(Path(folder), arguments.rate, arguments.requests)
        answer_s, answer_cpu_s = answered(Path(folder), arguments.rate, arguments.requests)
    figures = {"cold_s": cold_s, "cold_cpu_s": cold_cpu_s, "answer_s": answer_s, "answer_cpu_s": answer_cpu_s}
    for name, value in figures.items():
        print(f"{name:14} {value:.2f}" + (f"   (at most {TARGETS[name]:g})" if name in TARGETS else ""))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def answered(folder: Path, rate: str, requests: int) -> tuple[float, float]:
    """Seconds of one command, wall and processor time."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    words = ["capacity", str(folder / "net-b{batch}.onnx"), "--batch", ",".join(map(str, BATCHES))]
    words += ["--target", "pod64", "--rate", rate, "--slo", "p99=20ms", "--requests", str(requests)]
    begin, before = time.perf_counter(), _cpu()
    subprocess.run(
        [sys.executable, "-m", "podrun", *words], check=True, env=environ, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - begin, _cpu() - before


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
