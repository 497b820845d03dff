"""Tensor locations through sessions: the same bits, less memory, more traffic; refusals and warnings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import podrun.popart as popart
from podrun.popart import (
    CommGroup,
    CommGroupType,
    ReplicatedTensorSharding,
    TensorLocation,
    TensorLocationSettings,
    TensorStorage,
)
from tests.popart.popart_sessions import linear, replicated, training, weights

pytestmark = pytest.mark.usefixtures("programs_compile_once")

SHARDED = TensorLocation(TensorStorage.OnChip, ReplicatedTensorSharding.On)
STREAMED = TensorLocation(TensorStorage.OffChip, ReplicatedTensorSharding.On)
KINDS = ("weight", "optimizerState", "accumulator", "activation")


def settings(location: TensorLocation, *kinds: str, least: int = 1) -> dict[str, Any]:
    """Options that put all tensors of some kinds to one place."""
    return {
        f"{kind}TensorLocationSettings": TensorLocationSettings(location, 1, least) for kind in kinds or KINDS
    }


def trained(opts: popart.SessionOptions, replicas: int, accumulation: int, device: Any) -> list[np.ndarray]:
    case = linear()
    adam = popart.Adam({"defaultLearningRate": (0.1, False), "defaultWeightDecay": (0.1, True)})
    session = training(case, [case.loss, case.y], device, batches=2, optimizer=adam, opts=opts)
    x = np.random.default_rng(2).normal(size=(2, accumulation, replicas, 3, 4)).astype(np.float32)
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({case.x: x}, anchors))
    states = [f"Accl1___{case.w}", f"Accl2___{case.w}"]
    return [anchors[case.loss], anchors[case.y], *weights(session, case.w, *states)]


@pytest.mark.parametrize(
    ("location", "replicas", "accumulation"),
    [
        (STREAMED, 8, 1),
        *(
            pytest.param(location, replicas, accumulation, marks=pytest.mark.slow)
            for location, replicas, accumulation in (
                (SHARDED, 4, 3),
                (SHARDED, 8, 1),
                (STREAMED, 1, 2),
                (STREAMED, 4, 3),
                (TensorLocation(TensorStorage.OffChip), 4, 3),
            )
        ),
    ],
)
@pytest.mark.sample(2)
def test_no_bit_depends_on_locations(location: Any, replicas: int, accumulation: int, device_of: Any) -> None:
    expected = trained(replicated(replicas, accumulation), replicas, accumulation, device_of(replicas))
    opts = replicated(replicas, accumulation, **settings(location))
    found = trained(opts, replicas, accumulation, device_of(replicas))
    for first, second in zip(found, expected, strict=True):
        np.testing.assert_array_equal(first, second)


def modelled(opts: popart.SessionOptions, replicas: int = 4) -> dict[str, Any]:
    """The tile report of a program with 512 x 512 weights."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 512]))
    y = builder.aiOnnx.matmul([x, builder.addInitializedInputTensor(np.zeros((512, 512), np.float32), "w")])
    loss = builder.aiGraphcore.l1loss([y], 0.5)
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(1, [loss]),
        loss,
        popart.Adam({"defaultLearningRate": (0.1, True)}),
        popart.DeviceManager({}).createOfflineIPUDevice({"numIPUs": replicas}),
        userOptions=opts,
    )
    session.prepareDevice()
    report = session.parts.program.executable.tile_report  # type: ignore[union-attr]
    return {
        "content": report["ipus"][0]["memory"]["by_content"],
        "causes": report["step"]["seconds_by_cause"],
    }


@pytest.mark.slow
def test_a_sharding_domain_cuts_over_its_replicas() -> None:
    domain = CommGroup(CommGroupType.Consecutive, 2)
    halves = TensorLocation(TensorStorage.OnChip, ReplicatedTensorSharding.On, domain)
    whole, half, quarter = (
        modelled(replicated(4, **more))["content"]["optimizer_state"]
        for more in ({}, settings(halves, "optimizerState"), settings(SHARDED, "optimizerState"))
    )
    assert half == pytest.approx(whole / 2, rel=1e-3)
    assert quarter == pytest.approx(whole / 4, rel=1e-3)


def test_small_tensors_stay_whole_on_chip() -> None:
    plain = modelled(replicated(4))
    large = TensorLocationSettings(STREAMED, 512 * 512 + 1, 512 * 512 + 1)
    same = modelled(replicated(4, optimizerStateTensorLocationSettings=large))
    assert same == plain
    moved = TensorLocationSettings(STREAMED, 512 * 512, 512 * 512)
    found = modelled(replicated(4, optimizerStateTensorLocationSettings=moved))
    assert found["content"].get("optimizer_state", 0) < 100  # the step counter
    assert found["causes"]["streaming"] > 0


def test_one_tensor_may_be_elsewhere_than_its_kind() -> None:
    plain = modelled(replicated(4, 2))
    opts = replicated(4, 2, tensorLocationSettingsOverride={"w": SHARDED, "Accum___w": STREAMED})
    found = modelled(opts)
    assert found["content"]["weights"] == plain["content"]["weights"] / 4
    assert "accumulators" not in found["content"]
    assert found["causes"]["collectives"] > 0  # the weight is gathered


def test_sharding_that_divides_nothing_is_refused_or_warned_of(capsys: Any) -> None:
    thirds = TensorLocation(
        TensorStorage.OnChip, ReplicatedTensorSharding.On, CommGroup(CommGroupType.Consecutive, 3)
    )
    with pytest.raises(popart.popart_exception, match="group of 3 replicas does not divide the 4 replicas"):
        modelled(replicated(4, **settings(thirds, "weight")))
    modelled(replicated(1, **settings(SHARDED, "weight", "accumulator")), 1)
    assert "one replica: tensors stay whole" in capsys.readouterr().err
