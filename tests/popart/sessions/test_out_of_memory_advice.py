"""What the hint of an out-of-memory error names is followed literally, and the program fits as promised.

A supposed chip of 16 tiles makes models of a few megabytes too large, so that each costs little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import podrun.popart as popart

TARGET = "gc200:tiles=16"
STORAGE, SHARDING, RECOMPUTE = popart.TensorStorage, popart.ReplicatedTensorSharding, popart.RecomputationType
ADAM = {"defaultLearningRate": (0.1, False)}


@dataclass(frozen=True)
class Layers:
    """Equal layers, products or (``channels``) convolutions, and how they are trained and placed."""

    depth: int = 1
    width: int = 512
    batch: int = 2
    channels: int = 0
    train: bool = True
    adam: bool = False
    half: bool = False
    accumulation: int = 1
    replicas: int = 1
    stages: int = 1
    recompute: bool = False
    anchor_all: bool = False
    places: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def fullest(self) -> tuple[int, str]:
        """Bytes of the fullest tile, and the hint if they are too many."""
        session, hint = self._session(), ""
        try:
            session.prepareDevice()
        except popart.OutOfMemoryException as error:
            hint = error.hint or ""
        ipus = session.parts.program.executable.tile_report["ipus"]
        return max(ipu["memory"]["max_tile_bytes"] for ipu in ipus), hint

    def _session(self) -> Any:
        builder, dtype = popart.Builder(), np.float16 if self.half else np.float32
        shape = [self.batch, *([self.channels] * bool(self.channels)), self.width]
        if self.channels:
            shape.append(self.width)
        x = h = builder.addInputTensor(popart.TensorInfo("FLOAT16" if self.half else "FLOAT", shape))
        anchors = []
        for layer in range(self.depth):
            stage = layer * self.stages // self.depth
            with builder.virtualGraph(stage), builder.pipelineStage(stage):
                h = self._layer(builder, h, dtype)
            anchors.append(h)
        with builder.virtualGraph(self.stages - 1), builder.pipelineStage(self.stages - 1):
            loss = builder.aiGraphcore.l1loss([h], 0.1, reduction=popart.ReductionType.Mean)
        device = popart.DeviceManager().createOfflineIPUDevice({"numIPUs": str(self.stages * self.replicas)})
        device.device.target = TARGET
        steps = self.stages if not self.train else 1
        flow = popart.DataFlow(steps, [loss, *(anchors if self.anchor_all else [])])
        assert x
        model = builder.getModelProto()
        if not self.train:
            return popart.InferenceSession(model, flow, device, userOptions=self._options())
        optimizer = popart.Adam(ADAM) if self.adam else popart.ConstSGD(0.1)
        return popart.TrainingSession(model, flow, loss, optimizer, device, userOptions=self._options())

    def _layer(self, builder: Any, h: str, dtype: Any) -> str:
        if self.channels:
            w = builder.addInitializedInputTensor(np.zeros((self.channels, self.channels, 3, 3), dtype))
            h = builder.aiOnnx.conv([h, w], [1, 1], 1, [3, 3], [1, 1, 1, 1], [1, 1])
        else:
            h = builder.aiOnnx.matmul(
                [h, builder.addInitializedInputTensor(np.zeros((self.width,) * 2, dtype))]
            )
        return str(builder.aiOnnx.sigmoid([h]))

    def _options(self) -> popart.SessionOptions:
        made = popart.SessionOptions()
        if self.stages > 1:
            made.virtualGraphMode, made.enablePipelining = popart.VirtualGraphMode.Manual, True
        if self.train and self.accumulation > 1:
            made.enableGradientAccumulation, made.accumulationFactor = True, self.accumulation
        if self.replicas > 1:
            made.enableReplicatedGraphs, made.replicatedGraphCount = True, self.replicas
        if self.recompute:
            made.autoRecomputation = RECOMPUTE.Pipeline if self.stages > 1 else RECOMPUTE.Standard
        for setting, place in self.places.items():
            getattr(made, setting).location = popart.TensorLocation(*place)
        return made


TOO_LARGE = {
    "weights": Layers(4, 1024, train=False),
    "activations": Layers(8, 256, 2048),
    "relaxed by recomputation": Layers(30, 128, 512),
    "weights in training": Layers(2, 1024),
    "optimizer state": Layers(1, 900, adam=True),
    "state, accumulated": Layers(1, 900, adam=True, accumulation=4),
    "state, sharded": Layers(1, 740, adam=True, accumulation=4, replicas=4),
    "activations in inference": Layers(8, 256, 8192, train=False),
    "recomputing already": Layers(8, 256, 4096, recompute=True),
    "pipeline of two": Layers(4, 256, 2048, stages=2, accumulation=8),
    "as many stages as layers": Layers(4, 256, 2048, stages=4, accumulation=16),
    "pipeline with state": Layers(6, 500, 64, stages=2, accumulation=8, adam=True),
    "pipeline of large weights": Layers(4, 1400, stages=2, accumulation=8),
    "recomputing pipeline": Layers(8, 256, 1024, stages=2, accumulation=8, recompute=True),
    "convolutions": Layers(6, 64, 16, channels=16),
    "convolutions in inference": Layers(6, 128, 4, channels=16, train=False),
    "one large image": Layers(6, 256, 1, channels=8),
    "one huge weight": Layers(1, 2048),
    "one huge weight in inference": Layers(1, 2048, train=False),
    "anchors": Layers(8, 256, 1024, train=False, anchor_all=True),
    "halves": Layers(4, 1024, half=True),
    "halves with activations": Layers(8, 256, 2048, half=True),
    "many small weights": Layers(40, 300, 1),
    "one operator": Layers(1, 512, 16384, train=False),
    "replicas": Layers(8, 256, 1024, replicas=2),
    "weights and activations": Layers(6, 400, 600),
}
"""One program for each content of an IPU's memory that can be too much, and for each way of running."""
SETTINGS = {
    "optimizer state": "optimizerStateTensorLocationSettings",
    "accumulators": "accumulatorTensorLocationSettings",
    "weights": "weightTensorLocationSettings",
}


def followed(program: Layers, what: str, settings: str) -> Layers:
    """The program with a change of options that a hint names."""
    shards = what.startswith("shard")
    place = (STORAGE.OnChip, SHARDING.On) if shards else (STORAGE.OffChip,)
    names = [setting for name, setting in SETTINGS.items() if name in what]
    for name in (*names, *(["autoRecomputation"] if "recompute" in what else [])):
        assert name in settings
    return replace(
        program, places=dict.fromkeys(names, place), recompute=program.recompute or "recompute" in what
    )


def changed(program: Layers, what: str) -> list[Layers]:
    """Programs with a change of the program itself that a hint names, less of it first."""
    found = [program]
    if "FLOAT16" in what:
        found = [replace(one, half=True) for one in found]
    if "smaller micro-batch" in what:
        found = [replace(one, batch=batch) for one in found for batch in (program.batch // 8, 1) if batch]
    if "pipeline" in what:
        stages = [n for n in range(program.stages + 1, program.depth + 1) if program.depth % n == 0]
        found = [
            replace(one, stages=n, accumulation=max(one.accumulation, 2 * n)) for one in found for n in stages
        ]
    return found


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.sample(27)
def test_what_is_advised_makes_the_program_fit(name: str) -> None:
    program = TOO_LARGE[name]
    _, hint = program.fullest()
    tried = re.fullmatch(r"To fit, by the model: (.*)\.", hint)
    for change in tried[1].split("; or ") if tried else ():
        parts = re.fullmatch(r"(.*) \((.*)\): ([\d,]+) B on the fullest tile", change)
        assert parts, hint
        promised = int(parts[3].replace(",", ""))
        assert followed(program, parts[1], parts[2]).fullest() == (promised, ""), change
    may = re.fullmatch(r"It may fit if you (.*)\.", hint)
    for what in may[1].split(", or ") if may else ():
        assert any(not other.fullest()[1] for other in changed(program, what)), what
    if not tried and not may:
        assert hint.startswith("No setting makes it fit: ")
        said = hint.split(". ")[0]
        assert ("with its gradient" in said) == program.train
        for options in (
            {"recompute": True},
            {"places": dict.fromkeys(SETTINGS.values(), (STORAGE.OffChip,))},
        ):
            if program.train or "places" in options:
                assert replace(program, **options).fullest()[1], options


@pytest.mark.slow
def test_each_kind_of_advice_is_given_to_some_program() -> None:
    hints = [program.fullest()[1] for program in TOO_LARGE.values()]
    assert all(hints)
    for words in ("keep weights", "recompute", "shard", "smaller micro-batch", "pipeline", "FLOAT16", "No "):
        assert any(words in hint for hint in hints), words
