"""Running statistics of several replicas: each follows its own data, from where its group starts, and the host reads
those of one replica, of each group, or all; against NumPy, over replicas, groups, machines, hosts and instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import podrun.popart as popart
from podrun.popart import CommGroup, CommGroupType, VariableRetrievalMode, VariableSettings
from tests.popart.popart_sessions import replicated
from tests.popart.test_popart_mixed_layouts import Way, spread

ROWS, CHANNELS, BATCHES, MOMENTUM = 3, 4, 2, 0.75
MODES = [VariableRetrievalMode.OnePerGroup, VariableRetrievalMode.AllReplicas]
TYPES = [
    CommGroup(CommGroupType.All, 0),
    CommGroup(CommGroupType.Consecutive, 2),
    CommGroup(CommGroupType.Orthogonal, 2),
    CommGroup(CommGroupType.Ungrouped, 0),
]


@dataclass(frozen=True)
class Case:
    """A batch normalization of the input; its statistics have the settings."""

    replicas: int
    accumulation: int
    group: CommGroup
    mode: VariableRetrievalMode

    @property
    def settings(self) -> VariableSettings:
        return VariableSettings(self.group, self.mode)

    @property
    def group_of(self) -> list[int]:
        grouping = self.settings.getReplicaGrouping(self.replicas)
        return [grouping.group_of(replica) for replica in range(self.replicas)]

    def host(self, groups: int) -> tuple[int, ...]:
        """A shape with so many values, as the host has it."""
        return (groups, CHANNELS) if groups > 1 else (CHANNELS,)

    def start(self) -> np.ndarray:
        """Means of the groups, as the model has them."""
        shape = self.host(max(self.group_of) + 1)
        return np.random.default_rng(2).standard_normal(shape).astype(np.float32)

    def of_each(self, stored: np.ndarray) -> np.ndarray:
        """Of each replica, from those of groups."""
        return stored.reshape(-1, CHANNELS)[self.group_of]

    def shown(self, each: np.ndarray) -> np.ndarray:
        """What the host reads."""
        if self.mode is VariableRetrievalMode.AllReplicas:
            return each
        return self.stored(each)

    def stored(self, each: np.ndarray) -> np.ndarray:
        """What a model has: the first replicas of the groups'."""
        groups = self.group_of
        firsts = [groups.index(group) for group in range(max(groups) + 1)]
        return each[firsts].reshape(self.host(len(firsts)))

    def data(self, seed: int) -> np.ndarray:
        shape = (BATCHES, self.accumulation, self.replicas, ROWS, CHANNELS)
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    def moved(self, each: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Means of all replicas after a step."""
        for micro in x.reshape(-1, self.replicas, ROWS, CHANNELS).astype(np.float64):
            each = MOMENTUM * each + (1 - MOMENTUM) * micro.mean(1)
        return each

    def model(self) -> tuple[bytes, str, str]:
        builder = popart.Builder()
        x = builder.addInputTensor("FLOAT", [ROWS, CHANNELS], "x")
        ones, zeros = np.ones(CHANNELS, np.float32), np.zeros(CHANNELS, np.float32)
        given = [builder.addInitializedInputTensor(v, n) for n, v in (("scale", ones), ("bias", zeros))]
        mean = self.start()
        for name, value in (("mean", mean), ("variance", np.ones_like(mean))):
            given.append(builder.addInitializedInputTensor(value, self.settings, debugContext=name))
        shape = builder.aiOnnx.constant(np.array([ROWS, CHANNELS, 1], np.int64))
        y = builder.aiOnnx.batchnormalization(
            [builder.aiOnnx.reshape([x, shape]), *given], 5, momentum=MOMENTUM
        )[0]
        loss = builder.aiGraphcore.l1loss([y], 0.1)
        return builder.getModelProto(), x, loss

    def session(self, device: Any, model: bytes | str | None = None) -> popart.TrainingSession:
        made, _, loss = self.model()
        flow = popart.DataFlow(BATCHES, {loss: popart.AnchorReturnType("All")})
        options = replicated(self.replicas, self.accumulation)
        session = popart.TrainingSession(
            model or made, flow, loss, popart.ConstSGD(0.1), device, userOptions=options
        )
        session.prepareDevice()
        session.weightsFromHost()
        return session


@contextmanager
def device_for(case: Case, way: Way) -> Iterator[Any]:
    """A device whose replicas instances share as ``way`` says."""
    with (
        pytest.MonkeyPatch.context() as patch,
        popart.DeviceManager().acquireAvailableDevice(case.replicas) as device,
    ):
        device.detach()
        spread(patch, way)
        device.attach()
        yield device


def run(session: popart.Session, x: np.ndarray) -> None:
    session.run(popart.PyStepIO({"x": x}, session.initAnchorArrays()))


def read(case: Case, session: popart.Session, name: str = "mean") -> np.ndarray:
    """After weightsToHost, into an array of the shape that the settings give."""
    session.weightsToHost()
    array = np.empty(case.settings.shapeOnHost([CHANNELS], case.replicas), np.float32)
    session.readWeights(popart.PyWeightsIO({name: array}))
    return array


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


def check(case: Case, way: Way, folder: Path) -> None:
    with device_for(case, way) as device:
        session = case.session(device)
        each = case.of_each(case.start())
        same(read(case, session), case.shown(each))
        for seed in (3, 4):
            run(session, case.data(seed))
            each = case.moved(each, case.data(seed))
        same(read(case, session), case.shown(each))
        session.modelToHost(str(folder / "half.onnx"))
        saved = {t.name: t for t in onnx.load(folder / "half.onnx").graph.initializer}
        same(onnx.numpy_helper.to_array(saved["mean"]), case.stored(each))

        # What the host has goes back: to a whole group its first replica's, with AllReplicas to each its own.
        session.weightsFromHost()
        if case.mode is VariableRetrievalMode.OnePerGroup:
            each = case.of_each(case.stored(each))
        run(session, case.data(5))
        each = case.moved(each, case.data(5))
        same(read(case, session), case.shown(each))

        told = np.random.default_rng(6).standard_normal(case.shown(each).shape).astype(np.float32)
        session.writeWeights(popart.PyWeightsIO({"mean": told}))
        session.weightsFromHost()
        np.testing.assert_array_equal(read(case, session), told)
        run(session, case.data(7))
        each = told if case.mode is VariableRetrievalMode.AllReplicas else case.of_each(told)
        same(read(case, session), case.shown(case.moved(each, case.data(7))))

        other = case.session(device, str(folder / "half.onnx"))
        run(other, case.data(8))
        from_file = case.of_each(onnx.numpy_helper.to_array(saved["mean"]))
        same(read(case, other), case.shown(case.moved(from_file, case.data(8))))
        other.resetHostWeights(str(folder / "half.onnx"))
        other.weightsFromHost()
        same(read(case, other), case.shown(from_file))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, Way]:
    replicas = draw(st.sampled_from([2, 4, 8, 16]))
    case = Case(replicas, draw(st.integers(1, 2)), draw(st.sampled_from(TYPES)), draw(st.sampled_from(MODES)))
    hosts = draw(st.sampled_from(["aaaa", "abab", "aabb"]))[: max(1, replicas // 4)]
    return case, Way(instances=draw(st.sampled_from([n for n in (1, 2, 4) if n <= replicas])), hosts=hosts)


FEW = settings(
    max_examples=1,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def test_groups_over_machines_hosts_and_instances(tmp_path: Path) -> None:
    check(Case(8, 2, TYPES[2], MODES[0]), Way(instances=2, hosts="ab"), tmp_path)


@pytest.mark.parametrize(
    "group", [TYPES[1], pytest.param(TYPES[0], marks=pytest.mark.slow)], ids=["groups", "shared"]
)
def test_statistics_of_all_replicas_come_back_in_any_grouping(tmp_path: Path, group: CommGroup) -> None:
    check(Case(4, 2, group, MODES[1]), Way(instances=2), tmp_path)


@pytest.mark.slow
@settings(FEW, max_examples=40)
@given(cases())
def test_statistics_come_back_in_generated_layouts(tmp_path: Path, drawn: tuple[Case, Way]) -> None:
    check(*drawn, tmp_path)


@pytest.mark.slow
def test_each_replica_has_the_statistics_of_a_session_of_its_own(device_of: Callable[[int], Any]) -> None:
    """Means and variances, to the last bits but of rounding; the default gives those of replica 0."""
    together = Case(4, 2, TYPES[0], MODES[1])
    session = together.session(device_of(4))
    run(session, together.data(3))
    default = Case(4, 2, TYPES[0], MODES[0])
    plain = default.session(device_of(4))
    run(plain, together.data(3))
    alone = Case(1, 2, TYPES[0], MODES[0])
    single = alone.session(device_of(1))
    for replica in range(4):
        single.resetHostWeights(alone.model()[0])
        single.weightsFromHost()
        run(single, np.ascontiguousarray(together.data(3)[:, :, replica]))
        for name in ("mean", "variance"):
            same(read(together, session, name)[replica], read(alone, single, name))
    for name in ("mean", "variance"):
        np.testing.assert_array_equal(read(default, plain, name), read(together, session, name)[0])


def test_wrong_sizes_and_what_cannot_be_read(device_of: Callable[[int], Any]) -> None:
    case = Case(4, 1, TYPES[1], MODES[1])
    session = case.session(device_of(4))
    for wrong in (np.zeros(CHANNELS, np.float32), np.zeros((2, CHANNELS), np.float32)):
        with pytest.raises(popart.popart_runtime_error, match="Differing sizes for weight 'mean'"):
            session.writeWeights(popart.PyWeightsIO({"mean": wrong}))
        with pytest.raises(popart.popart_runtime_error, match=r"the weight 64 \(float32, shape \[4, 4\]\)"):
            session.readWeights(popart.PyWeightsIO({"mean": wrong}))
    with pytest.raises(popart.popart_exception, match=r"'mean' is .*\[4\]\) in the model, but .*\[2, 4\]"):
        session.resetHostWeights(Case(4, 1, CommGroup(CommGroupType.Consecutive, 4), MODES[0]).model()[0])
    reduced = Case(4, 1, TYPES[1], VariableRetrievalMode.AllReduceReplicas)
    with pytest.raises(popart.popart_exception, match=r"running statistics.*AllReduceReplicas") as caught:
        reduced.session(device_of(4))
    assert "OnePerGroup or AllReplicas" in str(caught.value.hint)
