"""Generated programs with much state, started in one layout and continued in another: the same bits as in one alone.

Beyond `test_popart_mixed_layouts`: execution phases, weights of replica groups of every kind and retrieval, sizes that
no number of replicas divides, both types at once, running statistics, every optimizer's modes and types of state, new
hyper-parameters on the way; each kind of state sharded or off chip; a model file carried from one layout to another.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import podrun.popart as popart
from podrun.device.program import program_memory
from tests.popart.popart_sessions import replicated
from tests.popart.test_popart_mixed_layouts import Way, spread

BATCHES, TABLE = 2, 11
HALF, SINGLE = popart.DataType.FLOAT16, popart.DataType.FLOAT
IN_TURN = Way()
STATE = ("weight", "optimizerState", "accumulator")
PLACES = {
    "whole": [((0,), 1), ((0, 0, 0), 1)],
    "stages": [((0, 1), 2), ((0, 1, 2), 4), ((0, 4, 5), 8), ((3, 9, 12), 16)],
    "phases": [((0, 1), 2), ((0, 1, 0), 2), ((0, 1, 0, 1), 4)],
}


@dataclass(frozen=True)
class Case:
    """Layer *i* on IPU ``places[i]``, from ``sizes[i]`` to ``sizes[i + 1]`` features, its weight in ``groups[i]``.
    ``looked_up``: the input is rows of a table. ``moving``: the first layer keeps running statistics. ``mixed``: the
    second layer is of single precision in a half model."""

    kind: str
    places: tuple[int, ...]
    ipus: int
    replicas: int
    accumulation: int
    sizes: tuple[int, ...]
    groups: tuple[tuple[str, int] | None, ...]
    retrieval: str
    half: bool
    looked_up: bool
    moving: bool
    mixed: bool
    optimizer: str
    mode: Any
    state_type: Any
    mean: popart.MeanReductionStrategy | None


@dataclass(frozen=True)
class Layout:
    """How a case runs. ``held``: where each kind of `STATE` is; ``reduced_whole``: bytes of the largest arena that one
    machine reduces for all."""

    way: Way = IN_TURN
    held: tuple[str, ...] = ("", "", "")
    reduced_whole: int = program_memory.REDUCED_WHOLE


MODES: dict[str, list[Any]] = {
    "sgd": list(popart.SGDAccumulatorAndMomentum.__members__.values()),
    "adam": list(popart.AdamMode.__members__.values()),
    "adaptive": [popart.AdaptiveMode.AdaGrad, popart.AdaptiveMode.RMSProp, popart.AdaptiveMode.AdaDelta],
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, Layout]:
    kind = draw(st.sampled_from(sorted(PLACES)))
    places, ipus = draw(st.sampled_from(PLACES[kind]))
    replicas = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if n * ipus <= 16]))
    sizes = st.sampled_from([1, 3, 5, 8, 16])
    members = st.sampled_from([n for n in (1, 2, 4, 8) if n <= replicas])
    group = st.one_of(
        st.none(),
        st.tuples(st.sampled_from(["Consecutive", "Orthogonal"]), members),
        st.just(("Ungrouped", 0)),
    )
    half, optimizer = draw(st.booleans()), draw(st.sampled_from(sorted(MODES)))
    strategies = popart.MeanReductionStrategy
    case = Case(
        kind,
        places,
        ipus,
        replicas,
        draw(st.integers(1, 6)),
        tuple(draw(sizes) for _ in range(len(places) + 1)),
        tuple(draw(group) if replicas > 1 else None for _ in places),
        draw(st.sampled_from(["OnePerGroup", "AllReplicas", "AllReduceReplicas"])),
        half,
        draw(st.booleans()),
        draw(st.booleans()),
        half and len(places) > 1 and draw(st.booleans()),
        optimizer,
        draw(st.sampled_from(MODES[optimizer])),
        draw(st.sampled_from([HALF, SINGLE])) if half else SINGLE,
        draw(st.sampled_from([None, strategies.Running, strategies.Post])),
    )
    pipelined = kind == "stages" and case.accumulation >= 2 * len(places) - 1 and not case.moving
    schedules = [None, popart.PipelineSchedule.Grouped, popart.PipelineSchedule.Interleaved]
    way = Way(
        draw(st.sampled_from(schedules)) if pipelined else None,
        draw(st.sampled_from([n for n in (1, 2, 4) if replicas % n == 0])),
        draw(st.sampled_from(["aaaa", "abab", "aabb", "abca"]))[: max(1, replicas * ipus // 4)],
    )
    held = tuple(draw(st.sampled_from(["", "off", "off, cut", "cut"])) for _ in STATE)
    return case, Layout(way, held, draw(st.sampled_from([0, program_memory.REDUCED_WHOLE])))


class Model:
    """The model of a case: its input, loss, and an array to read each weight into."""

    def __init__(self, case: Case) -> None:
        self.case, self.builder, self.random = case, popart.Builder(), np.random.default_rng(0)
        self.arrays: dict[str, np.ndarray] = {}
        self.names: list[str] = []
        onnx, self.dtype = self.builder.aiOnnx, np.dtype(np.float16 if case.half else np.float32)
        kind = "FLOAT16" if case.half else "FLOAT"
        y = self.input = (
            self.builder.addInputTensor("INT32", [2])
            if case.looked_up
            else self.builder.addInputTensor(kind, [2, case.sizes[0]])
        )
        for layer, place in enumerate(case.places):
            with contextlib.ExitStack() as scopes:
                if case.kind == "stages":
                    scopes.enter_context(self.builder.virtualGraph(place))
                    scopes.enter_context(self.builder.pipelineStage(layer))
                elif case.kind == "phases":
                    scopes.enter_context(self.builder.executionPhase(layer))
                if layer == 0 and case.looked_up:
                    y = onnx.gather([self.weight((TABLE, case.sizes[0]), self.dtype, None), y], 0)
                single = case.mixed and layer == 1
                y = onnx.cast([y], "FLOAT") if single else y
                y = self.layer(layer, y, np.dtype(np.float32) if single else self.dtype)
                y = onnx.cast([y], kind) if single else y
                if layer == len(case.places) - 1:
                    self.loss = self.builder.aiGraphcore.l1loss([y], 0.1)

    def layer(self, layer: int, y: str, dtype: np.dtype) -> str:
        onnx, (rows, out) = self.builder.aiOnnx, self.case.sizes[layer : layer + 2]
        y = onnx.matmul([y, self.weight((rows, out), dtype, self.case.groups[layer])])
        y = onnx.add([y, self.weight((out,), dtype, None)])
        if self.case.moving and layer == 0:
            kept = [self.weight((out,), dtype, None, start) for start in (1, 0, 0, 1)]
            y = self.builder.reshape_const(onnx, [y], [2, out, 1])
            y = onnx.batchnormalization([y, *kept], 5, 1e-3, 0.9)[0]
            y = self.builder.reshape_const(onnx, [y], [2, out])
        return onnx.tanh([y])

    def weight(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        group: tuple[str, int] | None,
        start: float | None = None,
    ) -> str:
        value = self.random.standard_normal(shape) / 2 if start is None else np.full(shape, start)
        if group is None:
            name = self.builder.addInitializedInputTensor(value.astype(dtype))
            read = shape
        else:
            retrieval = getattr(popart.VariableRetrievalMode, self.case.retrieval)
            kind = popart.CommGroup(getattr(popart.CommGroupType, group[0]), group[1])
            apart = popart.VariableSettings(kind, retrieval)
            count = len(apart.groups(self.case.replicas))
            each = np.stack([value * (1 + index / 8) for index in range(count)]) if count > 1 else value
            name = self.builder.addInitializedInputTensor(each.astype(dtype), apart)
            whole = self.case.retrieval == "AllReplicas"
            read = (self.case.replicas, *shape) if whole else each.shape
        self.arrays[name] = np.empty(read, dtype)
        self.names.append(name)
        return name

    def data(self, step: int) -> np.ndarray:
        """Input for a step of `BATCHES`."""
        random, whole = np.random.default_rng(step), (BATCHES, self.case.accumulation, self.case.replicas, 2)
        if self.case.looked_up:
            return random.integers(0, TABLE, whole).astype(np.int32)
        return random.standard_normal((*whole, self.case.sizes[0])).astype(self.dtype)


def rule(case: Case, rate: float, last: str) -> popart.Optimizer:
    """The optimizer; the weight called ``last`` learns at half the rate."""
    values = {
        "defaultLearningRate": (rate, False),
        "defaultWeightDecay": (0.01, True),
        "lossScaling": (4.0, False),
    }
    made: popart.Optimizer
    if case.optimizer == "sgd":
        made = popart.SGD(values | {"defaultMomentum": (0.9, True)}, [], case.mode)
    elif case.optimizer == "adam":
        made = popart.Adam(values, case.mode, accl1_type=case.state_type)
    else:
        made = popart.Adaptive(values, case.mode, accl1_type=case.state_type)
    made.insertSpecific(last, {"learningRate": (rate / 2, False)})
    return made


def options_of(case: Case, layout: Layout) -> popart.SessionOptions:
    modes = popart.VirtualGraphMode
    made = replicated(case.replicas, case.accumulation)
    if case.kind == "stages":
        made.virtualGraphMode = modes.Manual
    elif case.kind == "phases":
        made.virtualGraphMode = modes.ExecutionPhases
        made.executionPhaseSettings.phases, made.executionPhaseSettings.stages = len(case.places), 2
    if layout.way.schedule is not None:
        made.enablePipelining, made.pipelineSchedule = True, layout.way.schedule
    if case.mean is not None:
        made.accumulationAndReplicationReductionType = popart.ReductionType.Mean
        made.meanAccumulationAndReplicationReductionStrategy = case.mean
    for kind, held in zip(STATE, layout.held, strict=True):
        storage = popart.TensorStorage.OffChip if "off" in held else popart.TensorStorage.OnChip
        cut = popart.ReplicatedTensorSharding.On if "cut" in held else popart.ReplicatedTensorSharding.Off
        where = popart.TensorLocationSettings(popart.TensorLocation(storage, cut), 1, 1)
        setattr(made, f"{kind}TensorLocationSettings", where)
    return made


def outcome(case: Case, folder: Path, *layouts: Layout) -> dict[str, np.ndarray]:
    """Losses of two steps, one in each layout, and weights after them. A model file carries the state."""
    model, found = Model(case), {}
    proto: bytes = model.builder.getModelProto()
    for step, layout in enumerate(layouts):
        flow = popart.DataFlow(BATCHES, {model.loss: popart.AnchorReturnType("All")})
        with (
            pytest.MonkeyPatch.context() as patch,
            popart.DeviceManager().acquireAvailableDevice(case.ipus * case.replicas) as device,
        ):
            patch.setattr(program_memory, "REDUCED_WHOLE", layout.reduced_whole)
            device.detach()
            spread(patch, layout.way)
            device.attach()
            opts, first = options_of(case, layout), rule(case, 0.02, model.names[-1])
            session = popart.TrainingSession(proto, flow, model.loss, first, device, userOptions=opts)
            session.prepareDevice()
            session.weightsFromHost()
            session.updateOptimizerFromHost(rule(case, 0.02 / (1 + step), model.names[-1]))
            anchors = session.initAnchorArrays()
            session.run(popart.PyStepIO({model.input: model.data(step)}, anchors))
            found[f"loss {step}"] = anchors[model.loss]
            session.modelToHost(str(folder / "model.onnx"))
            proto = (folder / "model.onnx").read_bytes()
            session.weightsToHost()
            session.readWeights(popart.PyWeightsIO(model.arrays))
    return found | model.arrays


def check(case: Case, layout: Layout, folder: Path) -> None:
    expected, found = outcome(case, folder, Layout(), Layout()), outcome(case, folder, Layout(), layout)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.isfinite(value).all(), name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(drawn=cases())
def test_no_layout_changes_a_bit_of_any_state(drawn: tuple[Case, Layout], tmp_path: Path) -> None:
    check(*drawn, tmp_path)


@pytest.mark.slow
def test_lamb_in_groups_goes_on_over_hosts_off_chip(tmp_path: Path) -> None:
    """Norms of whole weights, of which each group of replicas has one, in machines that share none of their memory."""
    case = Case(
        kind="phases",
        places=(0, 1),
        ipus=2,
        replicas=4,
        accumulation=3,
        sizes=(5, 3, 7),
        groups=(("Orthogonal", 2), None),
        retrieval="AllReplicas",
        half=True,
        looked_up=False,
        moving=False,
        mixed=True,
        optimizer="adam",
        mode=popart.AdamMode.Lamb,
        state_type=HALF,
        mean=popart.MeanReductionStrategy.Running,
    )
    check(case, Layout(Way(None, 2, "ab"), ("off, cut", "off, cut", "cut"), 0), tmp_path)
