"""What several of these programs share: images of MNIST's shape, and a small network with a place for each
layer.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import popart

PIXELS, HIDDEN, CLASSES = 28 * 28, 64, 10


def images(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """``count`` images ``[count, 784]`` of noise with a bright bar whose place is the label ``[count]``."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    pixels = random.standard_normal((count, 28, 28)) * 0.5
    for image, label in zip(pixels, labels, strict=True):
        image[:, 2 * label + 3 : 2 * label + 5] += 1
    return pixels.reshape(count, PIXELS).astype(np.float32), labels.astype(np.int32)


@dataclass
class Network:
    """A model and the names of its tensors."""

    model: bytes
    x: str
    labels: str
    probabilities: str
    loss: str
    weights: list[str]


def network(batch: int, layers: int = 4, ipus: int = 1, stages: bool = False) -> Network:
    """Layers of tanh, spread over ``ipus`` in order, and as many pipeline stages if asked."""
    random = np.random.default_rng(0)
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [batch, PIXELS]), "images")
    labels = builder.addInputTensor(popart.TensorInfo("INT32", [batch]), "labels")
    sizes = [PIXELS, *[HIDDEN] * (layers - 1), CLASSES]
    weights, h = [], x
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        with ExitStack() as scopes:
            scopes.enter_context(builder.nameScope(f"layer{layer}"))
            if ipus > 1:
                scopes.enter_context(builder.virtualGraph(layer * ipus // layers))
            if stages:
                scopes.enter_context(builder.pipelineStage(layer * ipus // layers))
            start = random.standard_normal((inputs, outputs)) / np.sqrt(inputs)
            weights.append(builder.addInitializedInputTensor(start.astype(np.float32), "w"))
            h = builder.aiOnnx.matmul([h, weights[-1]])
            if layer < layers - 1:
                h = builder.aiOnnx.tanh([h])
            else:
                probabilities = builder.aiOnnx.softmax([h], axis=1)
                loss = builder.aiGraphcore.nllloss([probabilities, labels])
    return Network(builder.getModelProto(), x, labels, probabilities, loss, weights)


def read(session: popart.TrainingSession, names: list[str]) -> dict[str, np.ndarray]:
    """Weights as they are now."""
    session.weightsToHost()
    arrays = {}
    for name in names:
        info = session.getInfo(name)
        arrays[name] = np.empty(info.shape(), info.data_type_lcase())
    session.readWeights(popart.PyWeightsIO(arrays))
    return arrays
