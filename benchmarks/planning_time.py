"""How long planning and costing take: ``python benchmarks/planning_time.py [--json FILE]``.

ResNet-50 training for a POD16 (one IPU per replica, micro-batch 20, recomputation) and BERT-Large training
as it lies on a POD64 (eight IPUs per replica, micro-batch 2, packs of 512 tokens: one encoder layer planned
for each of its 24, embedding and head). Each is traced and planned in a fresh state, then asked again
(plans of equal products are kept).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from networks import trace  # noqa: E402

from podrun.device.tiles import matmul  # noqa: E402


def resnet() -> float:
    """Modelled cycles of one micro-batch of ResNet-50 training."""
    report, _ = trace.image_network(
        "resnet50", "gc200", 20, 224, True, "batch", True, "float16", "float16", 0.6, 1
    )
    return float(report["step"]["cycles"])


def bert() -> float:
    """Modelled cycles of one micro-batch of BERT-Large training over all its layers, each planned anew."""
    total = 0.0
    for _ in range(24):
        trace.transformer_parts.cache_clear()
        parts = trace.transformer_parts("gc200", 2, 512, "bert_large", True, "float16", 0.6)
        total += parts["layer"][0]["step"]["cycles"]
    return total + parts["embedding"][0]["step"]["cycles"] + parts["head"][0]["step"]["cycles"]


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
    options = parser.parse_args()
    import jax

    jax.eval_shape(lambda x: x, 1.0)
    figures: dict[str, float] = {}
    for name, work in (("resnet50_train_pod16", resnet), ("bert_large_train_pod64", bert)):
        matmul.forget()
        figures[f"{name}_s"], cycles = timed(work)
        figures[f"{name}_cycles"] = cycles
    trace.image_network.cache_clear()
    figures["resnet50_replanned_s"], _ = timed(resnet)
    figures["resnet50_repeat_s"], _ = timed(resnet)
    for name, value in figures.items():
        print(f"{name:32s}{value:16.3f}")
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.machine(), **figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
