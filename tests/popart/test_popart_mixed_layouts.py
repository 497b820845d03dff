"""Generated models of many kinds of layers, pipelined and spread: the bits of the same model sharded in one instance.

Beyond `test_popart_combinations`: loops, branches, scans, normalisations, layers without weights, an input for all
replicas, a second loss, anchors of every return type, inference; and instances and hosts that share the replicas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import podrun.popart as popart
from podrun.collectives import create, join_group
from podrun.core.executable import Executable, Retrieval
from podrun.core.layout import IpuRange
from podrun.device import job
from podrun.device.connection import AttachRequest, Refusal, RunResult
from podrun.device.host.client import InProcessMachines
from podrun.device.xla.pieces import PieceCache
from tests.device.conftest import together
from tests.popart.popart_sessions import replicated

WIDTH, ROWS = 8, 4
RETURNED = ("All", "Final", "Sum")
PIECES = PieceCache(None)
OFF_CHIP = popart.TensorLocationSettings(
    popart.TensorLocation(popart.TensorStorage.OffChip, popart.ReplicatedTensorSharding.On), 1, 1
)


class Maker:
    """Adds layers ``[ROWS, WIDTH] -> [ROWS, WIDTH]`` to a builder."""

    def __init__(self, half: bool) -> None:
        self.kind, self.dtype = ("FLOAT16", np.float16) if half else ("FLOAT", np.float32)
        self.builder = popart.Builder()
        self.onnx, self.graphcore = self.builder.aiOnnx, self.builder.aiGraphcore
        self.random = np.random.default_rng(0)
        self.weights: dict[str, np.ndarray] = {}

    def weight(self, *shape: int) -> str:
        start = (self.random.standard_normal(shape) / np.sqrt(WIDTH)).astype(self.dtype)
        name = self.builder.addInitializedInputTensor(start)
        self.weights[name] = start
        return name

    def dense(self, y: str) -> str:
        return self.onnx.tanh([self.onnx.matmul([y, self.weight(WIDTH, WIDTH)])])

    def weightless(self, y: str) -> str:
        return self.onnx.transpose([self.onnx.relu([self.onnx.transpose([y])])])

    def norm(self, y: str) -> str:
        return self.graphcore.groupnormalization([y, self.weight(WIDTH), self.weight(WIDTH)], 2, 1e-3)[0]

    def dropped(self, y: str) -> str:
        return self.onnx.dropout([self.dense(y)], 1, ratio=0.25)[0]

    def loop(self, y: str) -> str:
        """The same dense layer three times."""
        weight, body = self.weight(WIDTH, WIDTH), self.builder.createSubgraphBuilder()
        body.addInputTensor(popart.TensorInfo("INT32", []))
        going = body.addInputTensor(popart.TensorInfo("BOOL", []))
        carried = body.addUntypedInputTensor(y)
        body.addInputTensorFromParentGraph(weight)
        body.addOutputTensor(going)
        body.addOutputTensor(body.aiOnnx.tanh([body.aiOnnx.matmul([carried, weight])]))
        count, on = self.onnx.constant(np.array(3, np.int32)), self.onnx.constant(np.array(True))
        return self.onnx.loop([count, on, y], 1, body)[0]

    def branch(self, y: str) -> str:
        """A dense layer where the values' sum is positive, else a sigmoid."""
        weight = self.weight(WIDTH, WIDTH)
        yes, no = self.builder.createSubgraphBuilder(), self.builder.createSubgraphBuilder()
        for body in (yes, no):
            body.addInputTensorFromParentGraph(y)
            body.addInputTensorFromParentGraph(weight)
        yes.addOutputTensor(yes.aiOnnx.tanh([yes.aiOnnx.matmul([y, weight])]))
        no.addOutputTensor(no.aiOnnx.sigmoid([y]))
        total = self.onnx.reducesum([y], axes=[0, 1], keepdims=0)
        positive = self.onnx.greater([total, self.onnx.constant(np.array(0, self.dtype))])
        return self.onnx.logical_if([positive], 1, no, yes)[0]

    def scan(self, y: str) -> str:
        """Each row sees the one before it."""
        weight, body = self.weight(WIDTH, WIDTH), self.builder.createSubgraphBuilder()
        state = body.addInputTensor(popart.TensorInfo(self.kind, [WIDTH]))
        row = body.addInputTensor(popart.TensorInfo(self.kind, [WIDTH]))
        body.addInputTensorFromParentGraph(weight)
        mixed = body.aiOnnx.add([body.aiOnnx.matmul([state, weight]), row])
        body.addOutputTensor(body.aiOnnx.tanh([mixed]))
        body.addOutputTensor(body.aiOnnx.tanh([mixed]))
        first = self.onnx.constant(np.zeros(WIDTH, self.dtype))
        rows = self.onnx.scan([first, y], 2, body, 1)[1]
        return self.builder.reshape_const(self.onnx, [rows], [ROWS, WIDTH])


LAYERS: dict[str, Callable[[Maker, str], str]] = {
    "dense": Maker.dense,
    "weightless": Maker.weightless,
    "norm": Maker.norm,
    "dropped": Maker.dropped,
    "loop": Maker.loop,
    "branch": Maker.branch,
    "scan": Maker.scan,
}
OPTIMIZERS: dict[str, Callable[[dict[str, Any]], popart.Optimizer]] = {
    "sgd": popart.SGD,
    "momentum": lambda values: popart.SGD(values | {"defaultMomentum": (0.9, True)}),
    "adam": popart.Adam,
    "lamb": lambda values: popart.Adam(values, popart.AdamMode.Lamb),
    "rmsprop": lambda values: popart.Adaptive(values, popart.AdaptiveMode.RMSProp),
}


@dataclass(frozen=True)
class Mixed:
    """Layer *i* on IPU ``places[i]``. ``added``: the stage that adds an input that all replicas share; ``second``: the
    stage with a loss of its own. ``ahead``: the stage that adds what the program makes of the input before all
    else, and there. Inference without ``optimizer``."""

    places: tuple[int, ...]
    ipus: int
    replicas: int
    layers: tuple[str, ...]
    half: bool
    added: int
    second: int
    optimizer: str | None
    mean: popart.MeanReductionStrategy | None
    returned: tuple[str, ...]
    ahead: int = 0

    @property
    def depth(self) -> int:
        return 2 * len(self.places) - 1 + self.replicas % 3


@dataclass(frozen=True)
class Way:
    """How a case runs; ``hosts`` of its machines by letters. The default: in turn, one instance, one host."""

    schedule: popart.PipelineSchedule | None = None
    instances: int = 1
    hosts: str = "a"
    recompute: popart.RecomputationType = popart.RecomputationType.NoRecompute
    off_chip: bool = False


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mixed, Way]:
    places, ipus = draw(
        st.sampled_from([((0, 1), 2), ((1, 0, 2), 4), ((0, 1, 0), 2), ((0, 4, 5), 8), ((3, 9, 12), 16)])
    )
    replicas = draw(st.sampled_from([n for n in (1, 2, 4) if n * ipus in (2, 4, 8, 16)]))
    stages = st.integers(0, len(places) - 1)
    strategies = popart.MeanReductionStrategy
    case = Mixed(
        places,
        ipus,
        replicas,
        tuple(draw(st.sampled_from(sorted(LAYERS))) for _ in places),
        half=draw(st.booleans()),
        added=draw(stages),
        second=draw(stages),
        optimizer=draw(st.sampled_from([None, *sorted(OPTIMIZERS)])),
        mean=draw(st.sampled_from([None, strategies.Running, strategies.Post])),
        returned=tuple(draw(st.sampled_from(RETURNED)) for _ in range(3)),
        ahead=draw(stages),
    )
    machines = max(1, replicas * ipus // 4)
    types = popart.RecomputationType
    way = Way(
        draw(st.sampled_from(list(popart.PipelineSchedule.__members__.values()))),
        draw(st.sampled_from([n for n in (1, 2, 4) if replicas % n == 0])),
        draw(st.sampled_from(["aaaa", "abab", "aabb"]))[:machines],
        draw(st.sampled_from([types.NoRecompute, types.Standard, types.RecomputeAll])),
        off_chip=draw(st.booleans()),
    )
    return case, way


class Instances:
    """The connection of a session, played by several host processes that share its replicas evenly."""

    def __init__(self, _: Mapping[str, str], ipus: int, count: int) -> None:
        self.total_ipus = ipus
        machines = InProcessMachines(ipus, PIECES)
        self.connections = [machines.connect(threaded=True) for _ in range(count)]

    @property
    def holds_ipus(self) -> bool:
        return all(connection.holds_ipus for connection in self.connections)

    def _all(self, work: Callable[[Any, int], Any]) -> list[Any]:
        found = together([partial(work, c, i) for i, c in enumerate(self.connections)])
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    def try_attach(self, _: AttachRequest) -> Refusal | None:
        share, whole = self.total_ipus // len(self.connections), IpuRange(0, self.total_ipus)
        for i, connection in enumerate(self.connections):
            owned = IpuRange(i * share, share)
            refusal = connection.try_attach(AttachRequest(whole, owned, os.getpid(), "tester", "train.py"))
            if refusal is not None:
                return refusal
        return None

    def load(self, executable: Executable) -> None:
        self.streams, self.replicas = executable.streams, executable.layout.replicas
        self._all(lambda connection, _: connection.load(executable))

    def write_variables(self, values: Mapping[str, np.ndarray]) -> None:
        self._all(lambda connection, _: connection.write_variables(values))

    def read_variables(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        wanted = list(names)
        first, *others = self._all(lambda connection, _: connection.read_variables(wanted))
        for other in others:
            for name, value in first.items():
                np.testing.assert_array_equal(other[name], value, err_msg=name)
        return dict(first)

    def start(
        self,
        batches: int,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray] | None = None,
        *,
        depth: int = 2,
    ) -> SimpleNamespace:
        """A run that is done when it is waited for."""
        return SimpleNamespace(wait=lambda: self.run(batches, inputs, outputs))

    def run(
        self, batches: int, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray] | None = None
    ) -> RunResult:
        each = self.replicas // len(self.connections)

        def part(connection: Any, i: int) -> RunResult:
            own = slice(i * each, (i + 1) * each)
            given = {n: a if self.streams[n].broadcast else a[:, :, own] for n, a in inputs.items()}
            result: RunResult = connection.run(batches, given)
            return result

        results = self._all(part)
        anchors = {
            name: np.concatenate(
                [result.anchors[name] for result in results],
                axis=2 if self.streams[name].retrieval is Retrieval.ALL else 0,
            )
            for name in results[0].anchors
        }
        return RunResult(anchors, results[0].batches_done, 0.0, 0.0)

    def detach(self) -> None:
        for connection in self.connections:
            connection.detach()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def spread(patch: pytest.MonkeyPatch, way: Way) -> None:
    """Sessions from now on: so many instances, and machines that meet as if they were on ``way.hosts``."""
    opened = partial(Instances, count=way.instances)
    patch.setattr("podrun.runtime.device.open_connection", opened)
    patch.setattr("podrun.runtime.device_pool.open_connection", opened)
    if len(set(way.hosts)) > 1:

        def joined(token: Any, rank: int, **more: Any) -> Any:
            return join_group(token, rank, host=way.hosts[rank], **more)

        def created(size: int, *, timeout: float, address: str | None) -> Any:
            return create(size, timeout=timeout, address="127.0.0.1", host=way.hosts[0])

        patch.setattr(job, "create", created)
        patch.setattr(job, "join_group", joined)


def built(case: Mixed) -> tuple[Maker, str, str, str, list[str]]:
    """The model, its two inputs, its loss, and what each stage makes."""
    make = Maker(case.half)
    x = y = make.builder.addInputTensor(make.kind, [ROWS, WIDTH])
    same = make.builder.addInputTensor(
        popart.TensorInfo(make.kind, [WIDTH]), popart.InputSettings(popart.ReplicatedStreamMode.Broadcast)
    )
    hidden, losses = [], []
    with make.builder.virtualGraph(case.places[case.ahead]), make.builder.pipelineStage(case.ahead):
        seen = make.onnx.relu([x])
    for stage, (place, layer) in enumerate(zip(case.places, case.layers, strict=True)):
        with make.builder.virtualGraph(place), make.builder.pipelineStage(stage):
            y = LAYERS[layer](make, y)
            if stage == len(case.places) - 1:
                y = make.dense(y)  # So that there is something to train.
            y = make.onnx.add([y, same]) if stage == case.added else y
            y = make.onnx.add([y, seen]) if stage == case.ahead else y
            hidden.append(y)
            if stage in (case.second, len(case.places) - 1):
                losses.append(make.graphcore.l1loss([y], 0.1, reduction=popart.ReductionType.Sum))
            if stage == len(case.places) - 1:
                loss = losses[0] if len(losses) == 1 else make.onnx.add(losses)
    return make, x, same, loss, hidden


def outcome(case: Mixed, way: Way) -> dict[str, np.ndarray]:
    """Anchors of two steps, and weights after them."""
    make, x, same, loss, hidden = built(case)
    trains = case.optimizer is not None
    batches, accumulation = (2, case.depth) if trains else (case.depth, 1)
    opts = replicated(case.replicas, accumulation, virtualGraphMode=popart.VirtualGraphMode.Manual)
    if way.schedule is not None:
        opts.enablePipelining, opts.pipelineSchedule = True, way.schedule
    if trains:
        opts.autoRecomputation = way.recompute
    if case.mean is not None:
        opts.accumulationAndReplicationReductionType = popart.ReductionType.Mean
        opts.meanAccumulationAndReplicationReductionStrategy = case.mean
    if way.off_chip:
        opts.weightTensorLocationSettings = opts.optimizerStateTensorLocationSettings = OFF_CHIP
    names = [hidden[0], hidden[-1], f"Gradient___{hidden[0]}" if trains else loss]
    anchors = dict(zip(names, map(popart.AnchorReturnType, case.returned), strict=True))
    flow = popart.DataFlow(batches, anchors)
    with (
        pytest.MonkeyPatch.context() as patch,
        popart.DeviceManager().acquireAvailableDevice(case.ipus * case.replicas) as device,
    ):
        device.detach()
        spread(patch, way)
        device.attach()
        model = make.builder.getModelProto()
        if case.optimizer is not None:
            rule = OPTIMIZERS[case.optimizer]({"defaultLearningRate": (0.01, False)})
            session = popart.TrainingSession(model, flow, loss, rule, device, userOptions=opts)
        else:
            session = popart.InferenceSession(model, flow, device, userOptions=opts)
        session.prepareDevice()
        if trains:
            session.weightsFromHost()
        session.setRandomSeed(3)
        random, found = np.random.default_rng(1), {}
        for step in range(2):
            data = {
                x: random.standard_normal((batches, accumulation, case.replicas, ROWS, WIDTH)),
                same: random.standard_normal((batches, accumulation, WIDTH)),
            }
            arrays = session.initAnchorArrays()
            session.run(popart.PyStepIO({n: a.astype(make.dtype) for n, a in data.items()}, arrays))
            found |= {f"{step} {name}": value for name, value in arrays.items()}
        if trains:
            session.weightsToHost()
            weights = {name: np.empty_like(start) for name, start in make.weights.items()}
            session.readWeights(popart.PyWeightsIO(weights))
            found |= weights
    return found


def check(case: Mixed, way: Way) -> None:
    expected, found = outcome(case, Way()), outcome(case, way)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.isfinite(value).all(), name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_halves_in_loops_and_branches_over_instances_and_hosts() -> None:
    """With a running mean, whose accumulator has to be read where it is added to."""
    case = Mixed(
        places=(0, 1),
        ipus=4,
        replicas=2,
        layers=("loop", "branch"),
        half=True,
        added=1,
        second=0,
        optimizer="rmsprop",
        mean=popart.MeanReductionStrategy.Running,
        returned=RETURNED,
        ahead=1,
    )
    check(case, Way(popart.PipelineSchedule.Grouped, 2, "ab", popart.RecomputationType.Standard, True))


@pytest.mark.slow
@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_many_mixed_layouts_train_like_the_reference(drawn: tuple[Mixed, Way]) -> None:
    check(*drawn)
