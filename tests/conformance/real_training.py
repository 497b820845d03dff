"""Training sessions of the real-model architectures in the onnx wheel, for tests and benchmarks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

import podrun.popart as popart
from tests.conformance import onnx_suite

FAINT = np.float32(0.1)
"""Brightness of the image. At 1 AlexNet gives some labels less than the least probability that the loss tells apart."""


@dataclass
class Training:
    """A prepared session over one image; ``losses`` runs steps."""

    session: popart.TrainingSession
    loss: str
    feed: dict[str, np.ndarray]
    construct_s: float
    prepare_s: float

    def losses(self, steps: int) -> list[float]:
        """The loss of each of some steps on the same image."""
        anchors = self.session.initAnchorArrays()
        io = popart.PyStepIO(self.feed, anchors)
        found = []
        for _ in range(steps):
            self.session.run(io)
            found.append(float(np.mean(anchors[self.loss])))
        return found


def _normalise_by_batch(model: onnx.ModelProto) -> None:
    """Give batch normalisations the five outputs of training; by given statistics no gradient goes through them."""
    for place, node in enumerate(model.graph.node):
        if node.op_type == "BatchNormalization":
            for name in ("mean", "var", "saved_mean", "saved_var"):
                node.output.append(f"batch_norm_{place}_{name}")


def training(name: str, rate: float, cache: Path | None = None) -> Training:
    """ResNet-50 (``test_resnet50``), AlexNet (``test_bvlc_alexnet``) or another, with the negative log likelihood of a
    label and SGD; batch normalisations train. ``cache``: a folder for compiled programs.

    ``construct_s``: seconds of tracing, differentiation and cost model; ``prepare_s``: of compiling, sending weights.
    """
    case = next(c for c in onnx_suite.cases(("real",)) if c.name == name)
    model = onnx_suite.light_model(case)
    (image,) = (v.name for v in model.graph.input)
    x = FAINT * onnx_suite.random_inputs(model)[image]
    _normalise_by_batch(model)
    probabilities = model.graph.output[0].name
    begin = time.perf_counter()
    builder = popart.Builder(model.SerializeToString())
    labels = builder.addInputTensor(popart.TensorInfo("INT32", [1]), "labels")
    loss = builder.aiGraphcore.nllloss([probabilities, labels], reduction=popart.ReductionType.Mean)
    options = popart.SessionOptions()
    devices = popart.DeviceManager()
    if cache is not None:
        options.enableEngineCaching, options.cachePath = True, str(cache)
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(1, {loss: popart.AnchorReturnType("All")}),
        loss,
        popart.ConstSGD(rate),
        devices.createIpuModelDevice({"numIPUs": 1}) if cache is None else devices.acquireAvailableDevice(1),
        userOptions=options,
    )
    constructed = time.perf_counter()
    session.prepareDevice()
    session.weightsFromHost()
    end = time.perf_counter()
    feed = {image: np.asarray(x), labels: np.asarray([7], np.int32)}
    return Training(session, loss, feed, constructed - begin, end - constructed)
