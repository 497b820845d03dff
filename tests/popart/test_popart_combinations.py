"""Generated combinations of features of a session over several IPUs: pipelined equals sharded, to the bit.

Replica groups, collectives in the model, halves with automatic loss scaling and stochastic rounding, clipping, means of
gradients, state off chip and cut, recomputation: each has tests of its own; here they occur together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import podrun.popart as popart
from tests.popart.popart_sessions import replicated

WIDTH, MICRO_BATCH, BATCHES, ACCUMULATION = 8, 4, 2, 6
GROUPS = 2
PARALLEL = popart.AccumulateOuterFragmentSettings(popart.AccumulateOuterFragmentSchedule.Scheduler)
CUT = popart.TensorLocation(popart.TensorStorage.OffChip, popart.ReplicatedTensorSharding.On)


@dataclass(frozen=True)
class Combination:
    """Layers with tanh and dropout, layer *i* on IPU ``places[i]``. ``grouped``: the second weight differs between
    halves of the replicas. ``meets``: the first layer's result is averaged over replicas.
    """

    places: tuple[int, ...]
    ipus: int
    replicas: int
    half: bool
    grouped: bool
    meets: bool
    optimizer: str
    scales: bool
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> tuple[bytes, str, str, dict[str, np.ndarray]]:
        """Model, input, loss, and the weights' values."""
        kind, dtype = ("FLOAT16", np.float16) if self.half else ("FLOAT", np.float32)
        builder = popart.Builder()
        x = y = builder.addInputTensor(kind, [MICRO_BATCH, WIDTH])
        random = np.random.default_rng(0)
        apart = popart.VariableSettings(
            popart.CommGroup(popart.CommGroupType.Consecutive, self.replicas // GROUPS)
        )
        weights = {}
        for stage, place in enumerate(self.places):
            with builder.virtualGraph(place), builder.pipelineStage(stage):
                start = (random.standard_normal((WIDTH, WIDTH)) / 3).astype(dtype)
                own = self.grouped and stage == 1
                start = np.stack([start] * GROUPS) if own else start
                more = (apart,) if own else ()
                name = builder.addInitializedInputTensor(start, *more, debugContext=f"w{stage}")
                weights[name] = start
                y = builder.aiOnnx.tanh([builder.aiOnnx.matmul([y, name])])
                (y,) = builder.aiOnnx.dropout([y], 1, ratio=0.2)
                if self.meets and stage == 0:
                    y = builder.aiGraphcore.replicatedallreduce([y], collectiveOperator=1)
                if stage == len(self.places) - 1:
                    loss = builder.aiGraphcore.l1loss([y], 0.1, reduction=popart.ReductionType.Sum)
        return builder.getModelProto(), x, loss, weights

    def rule(self) -> popart.Optimizer:
        values = {"defaultLearningRate": (0.01, False), "lossScaling": (32.0, False)}
        if self.optimizer == "adam":
            return popart.Adam(values)
        clip = [popart.ClipNormSettings.clipAllWeights(1.0)] if self.optimizer == "clipped" else []
        momentum = {"defaultMomentum": (0.9, True)} if self.optimizer == "momentum" else {}
        return popart.SGD(values | momentum, clip)


@st.composite
def combinations(draw: st.DrawFn) -> Combination:
    places, ipus = draw(
        st.sampled_from([((0, 1), 2), ((0, 1, 2), 4), ((0, 1, 0), 2), ((0, 4, 5), 8), ((1, 3, 6), 8)])
    )
    replicas = draw(st.sampled_from([2, 4])) if ipus < 8 else 2
    optimizer = draw(st.sampled_from(["plain", "momentum", "adam", "clipped"]))
    half = draw(st.booleans())
    strategies = popart.MeanReductionStrategy
    options: dict[str, Any] = {
        "accumulationAndReplicationReductionType": draw(
            st.sampled_from([popart.ReductionType.Sum, popart.ReductionType.Mean])
        ),
        "meanAccumulationAndReplicationReductionStrategy": draw(
            st.sampled_from([strategies.Running, strategies.Post])
        ),
        "enableStochasticRounding": half and draw(st.booleans()),
        "accumulateOuterFragmentSettings": PARALLEL,
    }
    if draw(st.booleans()):
        options["optimizerStateTensorLocationSettings"] = popart.TensorLocationSettings(CUT, 1, 1)
    return Combination(
        places,
        ipus,
        replicas,
        half,
        grouped=replicas == 4 and optimizer != "clipped" and draw(st.booleans()),
        meets=draw(st.booleans()),
        optimizer=optimizer,
        scales=half and draw(st.booleans()),
        options=options,
    )


def trained(case: Combination, **more: Any) -> dict[str, np.ndarray]:
    """Losses and weights of two batches."""
    model, x, loss, weights = case.model()
    opts = replicated(
        case.replicas,
        ACCUMULATION,
        virtualGraphMode=popart.VirtualGraphMode.Manual,
        **(case.options | more),
    )
    opts.automaticLossScalingSettings.enabled = case.scales
    flow = popart.DataFlow(BATCHES, {loss: popart.AnchorReturnType("All")})
    with popart.DeviceManager().acquireAvailableDevice(case.ipus * case.replicas) as device:
        session = popart.TrainingSession(model, flow, loss, case.rule(), device, userOptions=opts)
        session.prepareDevice()
        session.weightsFromHost()
        session.setRandomSeed(7)
        anchors = session.initAnchorArrays()
        shape = (BATCHES, ACCUMULATION, case.replicas, MICRO_BATCH, WIDTH)
        data = np.random.default_rng(1).standard_normal(shape)
        session.run(popart.PyStepIO({x: data.astype(np.float16 if case.half else np.float32)}, anchors))
        session.weightsToHost()
        found = {name: np.empty_like(start) for name, start in weights.items()}
        session.readWeights(popart.PyWeightsIO(found))
    return {"loss": anchors[loss], **found}


def check(case: Combination) -> None:
    expected = trained(case)
    assert np.isfinite(expected["loss"]).all()
    again = len(set(case.places)) == len(case.places)  # Else two stages of an IPU would have to recompute.
    for schedule in (popart.PipelineSchedule.Grouped, popart.PipelineSchedule.Interleaved):
        recompute = popart.RecomputationType.Pipeline if again else popart.RecomputationType.NoRecompute
        found = trained(case, enablePipelining=True, pipelineSchedule=schedule, autoRecomputation=recompute)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{schedule} {name}")


@pytest.mark.slow
@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(combinations())
def test_features_that_are_combined_train_like_the_reference(case: Combination) -> None:
    check(case)
