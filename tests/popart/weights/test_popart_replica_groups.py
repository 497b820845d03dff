"""VariableSettings: weights for each group of replicas through sessions, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import podrun.popart as popart
from podrun.popart import CommGroup, CommGroupType, VariableRetrievalMode, VariableSettings
from tests.popart.popart_sessions import INPUTS, MICRO_BATCH, OUTPUTS, replicated

RATE = 0.25
ORTHOGONAL = VariableSettings(CommGroup(CommGroupType.Orthogonal, 2))


class Grouped:
    """``loss = 0.5 sum |x @ w|`` with groups for ``w``; its gradient is ``0.5 x^T sign(x @ w)``."""

    def __init__(
        self, settings: VariableSettings, replicas: int, dtype: str = "float32", embed: bool = False
    ) -> None:
        self.replicas = replicas
        self.groups = settings.groups(replicas)
        shape = (INPUTS, OUTPUTS) if len(self.groups) == 1 else (len(self.groups), INPUTS, OUTPUTS)
        self.start = np.random.default_rng(3).standard_normal(shape).astype(dtype)
        builder = popart.Builder()
        if embed:
            builder.embedReplicationFactor(replicas)
        self.x = builder.addInputTensor(popart.TensorInfo("FLOAT", [MICRO_BATCH, INPUTS]))
        self.w = builder.addInitializedInputTensor(self.start, settings, debugContext="w")
        y = builder.aiOnnx.matmul([self.x, self.w])
        self.loss = builder.aiGraphcore.l1loss([y], 0.5, reduction=popart.ReductionType.Sum)
        self.builder, self.model, self.y = builder, builder.getModelProto(), y

    def session(
        self,
        device: Any,
        *,
        accumulation: int = 1,
        optimizer: Any = None,
        load: Path | None = None,
        **more: Any,
    ) -> Any:
        session = popart.TrainingSession(
            self.model,
            popart.DataFlow(2, {self.loss: popart.AnchorReturnType("All")}),
            self.loss,
            optimizer or popart.ConstSGD(RATE),
            device,
            userOptions=replicated(self.replicas, accumulation, **more),
        )
        if load is not None:
            session.loadExecutable(str(load))
        session.prepareDevice()
        session.weightsFromHost()
        return session

    def data(self, accumulation: int) -> np.ndarray:
        shape = (2, accumulation, self.replicas, MICRO_BATCH, INPUTS)
        return np.random.default_rng(4).standard_normal(shape).astype(np.float32)

    def run(self, session: Any, x: np.ndarray) -> np.ndarray:
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({self.x: x}, anchors))
        return anchors[self.loss]

    def trained(self, x: np.ndarray, divisor: float = 1.0) -> np.ndarray:
        """Weights after two batches, ``[groups, *shape]``."""
        w = self.start.reshape(-1, INPUTS, OUTPUTS).astype(np.float64)
        for batch in x.astype(np.float64):
            gradient = np.zeros_like(w)
            for micro in batch:
                for g, members in enumerate(self.groups):
                    for r in members:
                        gradient[g] += 0.5 * micro[r].T @ np.sign(micro[r] @ w[g])
            w = w - RATE * gradient / divisor
        return w


def read(session: Any, name: str, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    array = np.empty(shape, dtype)
    session.weightsToHost()
    session.readWeights(popart.PyWeightsIO({name: array}))
    return array


@pytest.mark.parametrize(
    "settings",
    [
        VariableSettings(CommGroup(CommGroupType.All, 0)),
        pytest.param(VariableSettings(CommGroup(CommGroupType.Consecutive, 2)), marks=pytest.mark.slow),
        ORTHOGONAL,
        pytest.param(VariableSettings(CommGroup(CommGroupType.Ungrouped, 0)), marks=pytest.mark.slow),
    ],
    ids=["all", "consecutive", "orthogonal", "ungrouped"],
)
@pytest.mark.parametrize(("replicas", "accumulation"), [(4, 2), (8, 1)])
@pytest.mark.sample(9)
def test_each_group_of_replicas_trains_its_own_weights(
    settings: VariableSettings, replicas: int, accumulation: int, device_of: Any
) -> None:
    case = Grouped(settings, replicas)
    session = case.session(device_of(replicas), accumulation=accumulation)
    x = case.data(accumulation)
    losses = case.run(session, x)
    expected = case.trained(x)
    np.testing.assert_allclose(
        read(session, case.w, case.start.shape).reshape(expected.shape), expected, rtol=2e-5, atol=2e-6
    )
    first = case.start.reshape(-1, INPUTS, OUTPUTS)
    seen = [next(g for g, members in enumerate(case.groups) if r in members) for r in range(replicas)]
    np.testing.assert_allclose(
        losses.reshape(2, accumulation, replicas)[0, 0],
        [0.5 * np.abs(x[0, 0, r] @ first[seen[r]]).sum() for r in range(replicas)],
        rtol=1e-5,
    )
    assert session.getInfo(case.w).shape() == [INPUTS, OUTPUTS]


def test_retrieval_from_all_replicas(device_of: Any) -> None:
    settings = VariableSettings(CommGroup(CommGroupType.Orthogonal, 2), VariableRetrievalMode.AllReplicas)
    case = Grouped(settings, 4)
    session = case.session(device_of(4))
    case.run(session, case.data(1))
    found = read(session, case.w, (4, INPUTS, OUTPUTS))
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])
    assert not np.array_equal(found[0], found[1])
    np.testing.assert_allclose(found[:2], case.trained(case.data(1)), rtol=2e-5, atol=2e-6)
    changed = found + np.float32(1)
    session.writeWeights(popart.PyWeightsIO({case.w: changed}))
    session.weightsFromHost()
    np.testing.assert_array_equal(read(session, case.w, (4, INPUTS, OUTPUTS)), changed)
    changed[2] += 1
    with pytest.raises(popart.popart_exception, match="replicas 0 and 2 share the value"):
        session.writeWeights(popart.PyWeightsIO({case.w: changed}))


def test_an_executable_of_groups_is_loaded(tmp_path: Path, device_of: Any) -> None:
    case, device = Grouped(ORTHOGONAL, 4), device_of(4)
    x = case.data(1)
    first = case.session(device)
    first.saveExecutable(str(tmp_path))
    losses = case.run(first, x)
    np.testing.assert_array_equal(case.run(case.session(device, load=tmp_path), x), losses)
    other = Grouped(VariableSettings(CommGroup(CommGroupType.Ungrouped, 0)), 4)
    with pytest.raises(popart.popart_exception, match="its weights are"):
        other.session(device, load=tmp_path)


def test_weights_are_saved_by_groups_and_training_goes_on_from_there(tmp_path: Path, device_of: Any) -> None:
    case = Grouped(ORTHOGONAL, 4)
    adam = popart.Adam({"defaultLearningRate": (0.1, False)})
    session = case.session(device_of(4), optimizer=adam)
    x = case.data(1)
    case.run(session, x)
    session.modelToHost(str(tmp_path / "half.onnx"))
    saved = {
        t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "half.onnx").graph.initializer
    }
    assert saved[case.w].shape == saved[f"Accl1___{case.w}"].shape == (2, INPUTS, OUTPUTS)
    case.run(session, x)
    twice = read(session, case.w, (2, INPUTS, OUTPUTS))

    resumed = Grouped(ORTHOGONAL, 4)
    resumed.model = str(tmp_path / "half.onnx")
    other = resumed.session(device_of(4), optimizer=adam)
    resumed.run(other, x)
    np.testing.assert_array_equal(read(other, case.w, (2, INPUTS, OUTPUTS)), twice)
    session.resetHostWeights(str(tmp_path / "half.onnx"))
    session.weightsFromHost()
    np.testing.assert_array_equal(read(session, case.w, (2, INPUTS, OUTPUTS)), saved[case.w])


@pytest.mark.parametrize("checked", [(1,), pytest.param((0, 1), marks=pytest.mark.slow)], ids=str)
def test_lamb_takes_the_norm_of_each_group(device_of: Any, checked: tuple[int, ...]) -> None:
    case = Grouped(VariableSettings(CommGroup(CommGroupType.Consecutive, 2)), 4)
    lamb = popart.Adam(
        {"defaultLearningRate": (0.1, False), "defaultWeightDecay": (0.0, True)}, mode=popart.AdamMode.Lamb
    )
    session = case.session(device_of(4), optimizer=lamb)
    x = case.data(1)
    case.run(session, x)
    found = read(session, case.w, (2, INPUTS, OUTPUTS))
    for g in checked:
        alone = Grouped(VariableSettings(CommGroup(CommGroupType.All, 0)), 2)
        single = alone.session(device_of(2), optimizer=lamb)
        single.writeWeights(popart.PyWeightsIO({alone.w: case.start[g]}))
        single.weightsFromHost()
        alone.run(single, np.ascontiguousarray(x[:, :, 2 * g : 2 * g + 2]))
        np.testing.assert_allclose(found[g], read(single, alone.w, (INPUTS, OUTPUTS)), rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_momentum_starts_from_each_groups_weights(device_of: Any) -> None:
    case = Grouped(ORTHOGONAL, 4)
    sgd = popart.SGD(
        {
            "defaultLearningRate": (RATE, True),
            "defaultMomentum": (0.5, True),
            "defaultWeightDecay": (0.1, True),
        }
    )
    session = case.session(device_of(4), optimizer=sgd)
    x = case.data(1)
    case.run(session, x)
    w, v = case.start.astype(np.float64), 0.0
    for batch in x.astype(np.float64):
        gradient = np.zeros_like(w)
        for g, members in enumerate(case.groups):
            for r in members:
                gradient[g] += 0.5 * batch[0][r].T @ np.sign(batch[0][r] @ w[g])
        v = 0.5 * v + gradient + 0.1 * w
        w = w - RATE * v
    np.testing.assert_allclose(read(session, case.w, case.start.shape), w, rtol=5e-5, atol=5e-6)


def test_mean_reduction_divides_by_all_replicas_afterwards_and_by_the_group_while_running(
    device_of: Any,
) -> None:
    case = Grouped(ORTHOGONAL, 4)
    x = case.data(2)
    mean = popart.ReductionType.Mean
    for strategy, divisor in (
        (popart.MeanReductionStrategy.Post, 4 * 2),
        (popart.MeanReductionStrategy.Running, 2 * 2),
    ):
        session = case.session(
            device_of(4),
            accumulation=2,
            accumulationAndReplicationReductionType=mean,
            meanAccumulationAndReplicationReductionStrategy=strategy,
        )
        case.run(session, x)
        expected = case.trained(x, divisor)
        np.testing.assert_allclose(read(session, case.w, case.start.shape), expected, rtol=2e-5, atol=2e-6)


def test_inference_with_weights_of_groups(device_of: Any) -> None:
    case = Grouped(ORTHOGONAL, 4, embed=True)
    assert case.builder.getTensorShape(case.w) == [INPUTS, OUTPUTS]
    assert case.builder.getTensorShape(case.y) == [MICRO_BATCH, OUTPUTS]
    session = popart.InferenceSession(
        case.model,
        popart.DataFlow(1, {case.y: popart.AnchorReturnType("All")}),
        device_of(4),
        userOptions=replicated(4),
    )
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    x = case.data(1)[0, 0]
    session.run(popart.PyStepIO({case.x: x}, anchors))
    expected = np.stack([x[r] @ case.start[r % 2] for r in range(4)])
    np.testing.assert_allclose(anchors[case.y], expected, rtol=1e-5, atol=1e-6)


def test_variables_whose_groups_do_not_fit_are_refused(device_of: Any) -> None:
    case = Grouped(ORTHOGONAL, 4)
    case.replicas = 8
    with pytest.raises(popart.popart_exception, match="has 4 groups, so its host shape starts with 4"):
        case.session(device_of(8))
    thirds = Grouped(VariableSettings(CommGroup(CommGroupType.Consecutive, 3)), 6)
    thirds.replicas = 4
    with pytest.raises(popart.popart_exception, match="group of 3 replicas does not divide the 4 replicas"):
        thirds.session(device_of(4))
    with pytest.raises(popart.popart_exception, match="stride and group size cannot be stored"):
        popart.Builder().addInitializedInputTensor(np.zeros((2, 3), np.float32), VariableSettings(2, 2))
    with pytest.raises(popart.popart_exception, match="no CommGroupType"):
        CommGroup(popart.ReplicaGrouping(8, 2, 2))
    assert CommGroup(popart.ReplicaGrouping(8, 4, 2)) == CommGroup(CommGroupType.Orthogonal, 2)


def test_each_group_clips_by_its_own_norm(device_of: Any) -> None:
    """On two machines whose replicas belong to both groups: every replica gives its group's norm."""
    case = Grouped(ORTHOGONAL, 8)
    clipped = popart.SGD({"defaultLearningRate": (RATE, True)}, [popart.ClipNormSettings.clipAllWeights(1.0)])
    final = popart.AnchorReturnType("Final")
    session = popart.TrainingSession(
        case.model,
        popart.DataFlow(1, {"GlobalNorm___0": final}),
        case.loss,
        clipped,
        device_of(8),
        userOptions=replicated(8),
    )
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    x = case.data(1)[0, 0]
    session.run(popart.PyStepIO({case.x: x}, anchors))
    session.weightsToHost()
    found = {case.w: np.empty_like(case.start)}
    session.readWeights(popart.PyWeightsIO(found))
    for g, members in enumerate(case.groups):
        gradient = sum(0.5 * x[r].T @ np.sign(x[r] @ case.start[g]) for r in members)
        norm = np.sqrt((gradient**2).sum())
        np.testing.assert_allclose(anchors["GlobalNorm___0"][list(members)], norm, rtol=1e-5)
        np.testing.assert_allclose(
            found[case.w][g], case.start[g] - RATE * gradient / norm, rtol=1e-4, atol=1e-6
        )
