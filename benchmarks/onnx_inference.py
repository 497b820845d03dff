"""Inference of the real-model architectures in the onnx wheel against onnxruntime, on the same cores, in
one run.

    python benchmarks/onnx_inference.py [--json FILE] [--repeats N] [--match NAME]

Both run batch 1 on all cores that this process may use, in turns of some runs each. Times are the least of all turns,
so a busy machine slows both alike. ``ours_vs_onnxruntime`` is the geometric mean of the ratios; 1 is equal,
above 1 is slower.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "conformance"))

import onnx_suite
from short_mode import add_short

import podrun.onnx_backend as backend

RUNS_OF_A_TURN = 4


def _turn(run: Callable[[], Any]) -> list[float]:
    """Seconds of each run of one side's turn. The first is not counted: the other side's threads may still be looking
    for work then, as onnxruntime's do for a while after a run.
    """
    run()
    times = []
    for _ in range(RUNS_OF_A_TURN):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def measure(case: Any, repeats: int) -> dict[str, Any]:
    """Both times for one model, in milliseconds, the compile time of ours in seconds, and the greatest
    difference."""
    import onnxruntime

    model = onnx_suite.light_model(case)
    inputs = onnx_suite.random_inputs(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    ours = backend.prepare(model)
    started = time.perf_counter()
    got = ours.run(inputs)
    compile_s = time.perf_counter() - started
    expected = session.run(None, inputs)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        times[0].extend(_turn(lambda: ours.run(inputs)))
        times[1].extend(_turn(lambda: session.run(None, inputs)))
    error = max(
        float(np.max(np.abs(a - b) / max(1.0, np.abs(b).max()))) for a, b in zip(got, expected, strict=True)
    )
    mine, theirs = min(times[0]), min(times[1])
    return {
        "ours_ms": 1e3 * mine,
        "onnxruntime_ms": 1e3 * theirs,
        "ratio": mine / theirs,
        "compile_s": compile_s,
        "greatest_difference": error,
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--match", default="")
    add_short(parser, match="squeezenet", repeats=1)
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for case in onnx_suite.cases(("real",)):
        if options.match not in case.name:
            continue
        name = case.name.removeprefix("test_")
        rows[name] = row = measure(case, options.repeats)
        print(
            f"{name:14} ours {row['ours_ms']:8.1f} ms  onnxruntime {row['onnxruntime_ms']:8.1f} ms  "
            f"ratio {row['ratio']:5.2f}  compile {row['compile_s']:5.1f} s  "
            f"difference {row['greatest_difference']:.1e}",
            flush=True,
        )
    mean = math.exp(sum(math.log(r["ratio"]) for r in rows.values()) / len(rows))
    result = {
        "ours_vs_onnxruntime": mean,
        "worst_ratio": max(r["ratio"] for r in rows.values()),
        "cores": len(os.sched_getaffinity(0)),
        "models": rows,
    }
    print(f"ours_vs_onnxruntime {mean:.2f} (geometric mean), worst {result['worst_ratio']:.2f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
