"""A training step of convolutional networks against torch, on the same cores, in one run.

    python benchmarks/train_step.py --torch-python PYTHON [--json FILE] [--rounds N] [--match NAME]

ResNet-18 and MobileNet, batch 16 of 3x64x64, SGD, built with `popart.Builder` and run by a `popart.TrainingSession`
on one IPU; torch runs the same networks from the same weights in another process. Both take turns, a few steps each;
both use the cores that this process may use. ``ours_vs_torch`` is the greatest ratio of the medians. Losses of the
first steps must agree, or the run fails. Without ``--torch-python`` only our times are measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from short_mode import add_short
from train_networks import BATCH, CLASSES, NETWORKS, PIXELS, RATE, weight_shapes

import podrun.popart as popart

STEPS = 5
"""Steps of each turn."""
CHECKED = 2
"""Losses that must agree; each step multiplies the roundings of those before."""
TOLERANCE = 2e-3
"""Difference of losses in the first steps over the loss, or over a tenth of the first where it has fallen below: each
step adds roundings of its own, and falls steeply."""


class PopartLayers:
    """The layers as operators of a Builder."""

    def __init__(self, builder: popart.Builder, weights: dict[str, np.ndarray]) -> None:
        self.builder, self.on, self.weights = builder, builder.aiOnnx, weights

    def _weight(self, name: str, value: np.ndarray | None = None) -> str:
        value = self.weights[name] if value is None else value
        return str(self.builder.addInitializedInputTensor(value, name))

    def conv(self, x: str, name: str, shape: tuple[int, ...], stride: int, pad: int, groups: int) -> str:
        made = self.on.conv(
            [x, self._weight(name)], strides=[stride] * 2, pads=[pad] * 4, dilations=[1, 1], group=groups
        )
        return str(made)

    def norm(self, x: str, name: str, channels: int) -> str:
        inputs = [self._weight(f"{name}.{part}") for part in ("scale", "bias")]
        inputs.append(self._weight(f"{name}.mean", np.zeros(channels, np.float32)))
        inputs.append(self._weight(f"{name}.var", np.ones(channels, np.float32)))
        return str(self.on.batchnormalization([x, *inputs], 5)[0])

    def relu(self, x: str) -> str:
        return str(self.on.relu([x]))

    def add(self, a: str, b: str) -> str:
        return str(self.on.add([a, b]))

    def max_pool(self, x: str) -> str:
        return str(self.on.maxpool([x], 1, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)[0])

    def dense(self, x: str, name: str, shape: tuple[int, int]) -> str:
        pooled = self.on.reshape([self.on.globalaveragepool([x]), self._constant([BATCH, shape[0]])])
        return str(self.on.matmul([pooled, self._weight(name)]))

    def _constant(self, values: list[int]) -> str:
        return str(self.on.constant(np.asarray(values, np.int64)))


class Ours:
    """A prepared session; `steps` runs some."""

    def __init__(self, name: str, weights: dict[str, np.ndarray], x: np.ndarray, labels: np.ndarray) -> None:
        builder = popart.Builder(opsets={"ai.onnx": 9, "ai.onnx.ml": 1, "ai.graphcore": 1})
        image = builder.addInputTensor(popart.TensorInfo("FLOAT", list(x.shape)), "x")
        target = builder.addInputTensor(popart.TensorInfo("INT32", list(labels.shape)), "labels")
        logits = NETWORKS[name](PopartLayers(builder, weights), image)
        loss = builder.aiGraphcore.nllloss(
            [builder.aiOnnx.softmax([logits], axis=1), target], reduction=popart.ReductionType.Mean
        )
        self.session = popart.TrainingSession(
            builder.getModelProto(),
            popart.DataFlow(1, {loss: popart.AnchorReturnType("All")}),
            loss,
            popart.ConstSGD(RATE),
            popart.DeviceManager().createIpuModelDevice({"numIPUs": 1}),
        )
        begin = time.perf_counter()
        self.session.prepareDevice()
        self.session.weightsFromHost()
        self.prepare_s = time.perf_counter() - begin
        self.anchors = self.session.initAnchorArrays()
        self.loss, self.io = loss, popart.PyStepIO({image: x, target: labels}, self.anchors)

    def steps(self, count: int) -> tuple[list[float], list[float]]:
        """Losses and seconds of ``count`` steps."""
        losses, seconds = [], []
        for _ in range(count):
            begin = time.perf_counter()
            self.session.run(self.io)
            losses.append(float(np.mean(self.anchors[self.loss])))
            seconds.append(time.perf_counter() - begin)
        return losses, seconds


def initial_weights(name: str) -> dict[str, np.ndarray]:
    """Normal numbers scaled by fan-in; scales 1, biases 0."""
    rng, found = np.random.default_rng(0), {}
    for weight, shape in weight_shapes(name).items():
        if weight.endswith((".scale", ".bias")):
            found[weight] = np.full(shape, float(weight.endswith(".scale")), np.float32)
        else:
            fan_in = shape[0] if len(shape) == 2 else int(np.prod(shape[1:]))
            found[weight] = (rng.normal(size=shape) * np.sqrt(2 / fan_in)).astype(np.float32)
    return found


def measure(name: str, python: str | None, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a step of both, and their ratio."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(BATCH, 3, PIXELS, PIXELS)).astype(np.float32)
    labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
    weights = initial_weights(name)
    ours = Ours(name, weights, x, labels)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "weights.npz", **weights)
        np.save(Path(folder) / "x.npy", x)
        np.save(Path(folder) / "labels.npy", labels)
        losses, _ = ours.steps(STEPS)
        mine: list[float] = []
        theirs: list[float] = []
        row: dict[str, Any] = {"prepare_s": ours.prepare_s, "losses": losses}
        if python is None:
            for _ in range(rounds):
                mine += ours.steps(STEPS)[1]
            return row | {"ours_ms": 1e3 * statistics.median(mine)}
        script = Path(__file__).with_name("train_step_torch.py")
        with subprocess.Popen(
            [python, str(script), name, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as peer:

            def torch_steps() -> dict[str, Any]:
                assert peer.stdin
                assert peer.stdout
                peer.stdin.write(f"{STEPS}\n")
                peer.stdin.flush()
                answer: dict[str, Any] = json.loads(peer.stdout.readline())
                return answer

            expected = torch_steps()
            least = 0.1 * expected["losses"][0]
            difference = max(
                abs(a - b) / max(b, least)
                for a, b in zip(losses[:CHECKED], expected["losses"][:CHECKED], strict=True)
            )
            if difference > TOLERANCE:
                raise SystemExit(f"{name}: losses differ: ours {losses}, torch's {expected['losses']}")
            for _ in range(rounds):
                mine += ours.steps(STEPS)[1]
                theirs += torch_steps()["seconds"]
            assert peer.stdin
            peer.stdin.close()
    mine_ms, theirs_ms = (1e3 * statistics.median(t) for t in (mine, theirs))
    return row | {
        "ours_ms": mine_ms,
        "torch_ms": theirs_ms,
        "ratio": mine_ms / theirs_ms,
        "ratio_of_least": min(mine) / min(theirs),
        "loss_difference": difference,
        "torch_threads": expected["threads"],
    }


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", help="an interpreter that has torch and NumPy", metavar="PYTHON")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=6, help="turns of five steps each")
    parser.add_argument("--match", default="", help="only networks whose name holds this")
    add_short(parser, match="resnet18", rounds=1, torch_python=sys.executable)
    options = parser.parse_args()
    rows = {n: measure(n, options.torch_python, options.rounds) for n in NETWORKS if options.match in n}
    for name, row in rows.items():
        print(name, "  ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, (int, float))))
    result: dict[str, Any] = {"networks": rows}
    if options.torch_python:
        result["ours_vs_torch"] = max(row["ratio"] for row in rows.values())
        print(f"ours_vs_torch {result['ours_vs_torch']:.2f} (the greater)")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
