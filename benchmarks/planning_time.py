"""How long planning and costing take: ``python benchmarks/planning_time.py [--json FILE]``.

ResNet-50 training for a POD16 (one IPU per replica, micro-batch 20, recomputation) and BERT-Large training
as it lies on a POD64 (eight IPUs per replica, micro-batch 2, packs of 512 tokens: one encoder layer planned
for each of its 24, embedding and head). Each is traced and planned in a fresh state, then asked again: in the same
process (plans of equal products are kept), and in a new process each, first with an empty plan cache on disk and then
with what that left (``new_process``: seconds in the question alone; ``command``: with the start of Python).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from networks import trace  # noqa: E402
from short_mode import add_short  # noqa: E402

from podrun.costmodel import matmul  # noqa: E402

SIZES = {"batch": 20, "pixels": 224, "layers": 24, "tokens": 512}
SHORT = {"batch": 1, "pixels": 64, "layers": 2, "tokens": 128}


def resnet() -> float:
    """Modelled cycles of one micro-batch of ResNet-50 training."""
    report, _ = trace.image_network(
        "resnet50",
        "gc200",
        SIZES["batch"],
        SIZES["pixels"],
        True,
        "batch",
        True,
        "float16",
        "float16",
        0.6,
        1,
    )
    return float(report["step"]["cycles"])


def bert() -> float:
    """Modelled cycles of one micro-batch of BERT-Large training over all its layers, each planned anew."""
    total = 0.0
    for _ in range(SIZES["layers"]):
        trace.transformer_parts.cache_clear()
        parts = trace.transformer_parts("gc200", 2, SIZES["tokens"], "bert_large", True, "float16", 0.6)
        total += parts["layer"][0]["step"]["cycles"]
    return total + parts["embedding"][0]["step"]["cycles"] + parts["head"][0]["step"]["cycles"]


WORK = {"resnet50_train_pod16": resnet, "bert_large_train_pod64": bert}


def across_processes(name: str, mode: list[str]) -> dict[str, float]:
    """Seconds of the question in two new processes that share a plan cache which is empty at first."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "PODRUN_PLAN_CACHE": folder}
        for when in ("first", "repeat"):
            command = [sys.executable, __file__, *mode, "--only", name]
            start = time.perf_counter()
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
            figures[f"{name}_new_process_{when}_s"] = float(done.stdout)
            figures[f"{name}_command_{when}_s"] = time.perf_counter() - start
    return figures


def timed(work: Callable[[], float]) -> tuple[float, float]:
    """Seconds of the host, and what the work gave."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> int:
    """Measure and print; with ``--json`` also write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", choices=sorted(WORK), help="time one question, with the plan cache as it is"
    )
    add_short(parser)
    options = parser.parse_args()
    if options.short:
        SIZES.update(SHORT)
    if options.only:
        print(timed(WORK[options.only])[0])
        return 0
    os.environ["PODRUN_PLAN_CACHE"] = "off"
    import jax

    jax.eval_shape(lambda x: x, 1.0)
    figures: dict[str, float] = {}
    for name, work in WORK.items():
        matmul.forget()
        figures[f"{name}_s"], cycles = timed(work)
        figures[f"{name}_cycles"] = cycles
    trace.image_network.cache_clear()
    figures["resnet50_replanned_s"], _ = timed(resnet)
    figures["resnet50_repeat_s"], _ = timed(resnet)
    for name in WORK:
        figures |= across_processes(name, ["--short"] if options.short else [])
    for name, value in figures.items():
        print(f"{name:32s}{value:16.3f}")
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.machine(), **figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
