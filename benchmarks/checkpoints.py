"""How long saving a checkpoint keeps training from going on, and what it adds to a batch while it is written beside it.

    python benchmarks/checkpoints.py --json FILE

A program of `--width` squared float32 weights with Adam trains on one emulated IPU in this process, in alternating
blocks of `--batches` batches: blocks without a save, and blocks that begin with one. Medians over blocks.

JSON keys: ``checkpoint_bytes``; ``batch_ms`` without a save; ``save_ms``, the time in `Checkpoints.save`;
``blocked_ms``, the same for a save that is waited for; ``block_ratio``, a block with a save over one without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from short_mode import add_short

from podrun import popart
from podrun.checkpoint import Checkpoints


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--json", type=Path)
    add_short(parser, width=128, batches=3, blocks=2)
    arguments = parser.parse_args()
    session, run = training(arguments.width)
    plain, saving, calls, blocked = [], [], [], []
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        done = 0
        run(5)
        for _ in range(arguments.blocks):
            plain.append(timed(lambda: run(arguments.batches)))
            done += 1
            began = time.perf_counter()
            checkpoints.save(session, done)
            calls.append(time.perf_counter() - began)
            run(arguments.batches)
            saving.append(time.perf_counter() - began)
            checkpoints.wait()
            done += 1
            blocked.append(timed(lambda: checkpoints.save(session, done, wait=True)))  # noqa: B023 - called at once
        size = max(path.stat().st_size for path in Path(folder).iterdir())
    figures = {
        "checkpoint_bytes": size,
        "batch_ms": statistics.median(plain) / arguments.batches * 1e3,
        "save_ms": statistics.median(calls) * 1e3,
        "blocked_ms": statistics.median(blocked) * 1e3,
        "block_ratio": statistics.median(saving) / statistics.median(plain),
    }
    for name, value in figures.items():
        print(f"{name:18} {value:.5g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def training(width: int) -> tuple[popart.TrainingSession, Callable[[int], None]]:
    """A session, and a function that trains it for a number of batches."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [16, width]))
    w = builder.addInitializedInputTensor(np.zeros((width, width), np.float32), "w")
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)
    options = popart.SessionOptions()
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(1, {loss: popart.AnchorReturnType("All")}),
        loss,
        popart.Adam({"defaultLearningRate": (0.01, False)}),
        popart.DeviceManager().acquireAvailableDevice(1),
        userOptions=options,
    )
    session.prepareDevice()
    session.weightsFromHost()
    anchors, data = session.initAnchorArrays(), np.ones((1, 16, width), np.float32)

    def run(batches: int) -> None:
        for _ in range(batches):
            session.run(popart.PyStepIO({x: data}, anchors))

    return session, run


if __name__ == "__main__":
    main()
