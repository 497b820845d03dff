"""What recording, and comparing replicas, add to a training step of 16 replicas on four machine processes.

    python benchmarks/recording.py [--json FILE] [--blocks N]

784-512-512-10, 32 samples for each replica, float32, SGD. Steps are taken in short blocks, one recorded and one not in
turn, so that both see the same host.

JSON keys: ``step_ms`` without; ``recording_ratio``, the median over pairs of blocks; ``added_ms`` by the recorder's own
work alone (digests of inputs and losses, and two lines), the median of many calls without a run; ``compare_ms``: one
comparison of the weights on all IPUs; ``both_ratio``: recorded, with a comparison after every tenth batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import mlp
from machines import machines
from short_mode import add_short
from step_time import MACHINES, REPLICAS, WARM_UP, block

from podrun.device.connection import RunResult
from podrun.record.recorder import EventRecorder, RecordedConnection

TARGET = 1.02
EVERY = 10
"""Batches from one comparison to the next."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--blocks", type=int, default=25)
    add_short(parser, blocks=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments.blocks, Path(folder, "instance-0.jsonl"))
    for key, value in figures.items():
        target = f"   (at most {TARGET:g})" if key.endswith("_ratio") else ""
        print(f"{key:16} {value:.4g}{target}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure(blocks: int, file: Path) -> dict[str, float]:
    """Steps with and without a recorder, block by block."""
    with machines(MACHINES) as pod:
        connection = pod.attach()
        recorded = RecordedConnection(connection, EventRecorder(file, "instance 0", 0))
        recorded.load(mlp.executable(REPLICAS))
        recorded.write_variables(mlp.weights())
        data = mlp.inputs(REPLICAS)

        def step(through: Any) -> float:
            return float(through.run(1, data).anchors["loss"].mean())

        for each in (connection, recorded):
            block(lambda: step(each), WARM_UP)  # noqa: B023 - called at once
        pairs = []
        for number in range(blocks):
            order = (connection, recorded) if number % 2 else (recorded, connection)
            taken = {id(each): block(lambda: step(each)) for each in order}  # noqa: B023 - called at once
            pairs.append((taken[id(recorded)], taken[id(connection)]))
        result = connection.run(1, data)
        added = RecordedConnection(_Answers(result), EventRecorder(file, "instance 0", 0))
        own = block(lambda: step(added), 300)
        compare = block(lambda: len(recorded.read_digests()), 50)
        connection.close()
    plain = statistics.median(plain for _, plain in pairs)
    ratio = statistics.median(ours / plain for ours, plain in pairs)
    return {
        "step_ms": plain * 1e3,
        "recording_ratio": ratio,
        "added_ms": own * 1e3,
        "compare_ms": compare * 1e3,
        "both_ratio": ratio + compare / EVERY / plain,
    }


class _Answers:
    """A connection whose runs take no time."""

    def __init__(self, result: RunResult) -> None:
        self._result = result

    def run(self, batches: int, inputs: Any, outputs: Any = None) -> RunResult:
        """The same result each time."""
        time.sleep(0)
        return self._result


if __name__ == "__main__":
    main()
