"""Replicas of 8 and 16 IPUs: sessions whose stages lie on several machines give the bits of one machine."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.placing.test_popart_pipelining import MANUAL, Chain, infer, pipelined, train
from tests.popart.popart_sessions import options, replicated, weights
from tests.popart.program.test_popart_loss_scaling import automatic, inputs, scaled, two_layers

REPLICATED = {"enableReplicatedGraphs": True, "replicatedGraphCount": 2}
ACCUMULATED = {"enableGradientAccumulation": True, "accumulationFactor": 7}


def clipped(chain):
    return popart.SGD(
        {"defaultLearningRate": (0.05, True), "defaultMomentum": (0.9, True)},
        clip_norm_settings=[popart.ClipNormSettings.clipAllWeights(0.3)],
    )


def assert_same(found, expected):
    """Anchors of each run, and weights; not modelled time: another machine is further away."""
    for run, other in zip(found[0], expected[0], strict=True):
        for (name, value), (_, wanted) in zip(run.items(), other.items(), strict=True):
            np.testing.assert_array_equal(value, wanted, err_msg=name)
    for (name, value), (_, wanted) in zip(found[1].items(), expected[1].items(), strict=True):
        np.testing.assert_array_equal(value, wanted, err_msg=name)


@pytest.mark.parametrize("optimizer", [None, clipped], ids=["sgd", "clipping by the norm of all weights"])
@pytest.mark.slow  # By default `tests/device/test_spanning.py` trains a pipeline over machines as on one.
def test_a_pipeline_over_two_machines_trains_as_on_one(optimizer):
    found = []
    for places, ipus in (([0, 3, 4, 7], 8), ([0, 1, 2, 3], 4)):
        chain = Chain(places)
        chosen = None if optimizer is None else optimizer(chain)
        opts = pipelined(**ACCUMULATED, **REPLICATED)
        opts.accumulateOuterFragmentSettings = popart.AccumulateOuterFragmentSettings(
            popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized
        )
        found.append(train(chain, opts, 2, ipus, runs=2, optimizer=chosen))
    assert_same(*found)


@pytest.mark.slow
def test_sharded_over_four_machines_trains_as_on_one():
    found = [
        train(Chain(places, stages=False), options(virtualGraphMode=MANUAL, **ACCUMULATED), 2, ipus)
        for places, ipus in (([0, 5, 15], 16), ([0, 1, 2], 4))
    ]
    assert_same(*found)


@pytest.mark.slow
def test_inference_over_two_machines():
    found = []
    for places, ipus in (([0, 4, 5, 7], 8), ([0, 1, 2, 3], 4)):
        chain = Chain(places)
        kinds = {chain.hidden[0]: popart.AnchorReturnType("All"), chain.loss: popart.AnchorReturnType("Sum")}
        found.append(infer(chain, pipelined(**REPLICATED), 6, ipus, kinds)[0])
    for (name, value), (_, wanted) in zip(found[0].items(), found[1].items(), strict=True):
        np.testing.assert_array_equal(value, wanted, err_msg=name)


@pytest.mark.slow
def test_eight_stages_are_faster_than_eight_shards_on_the_modelled_ipus():
    chain = Chain(list(range(8)))
    more = {"enableGradientAccumulation": True, "accumulationFactor": 16}
    sharded = train(chain, options(virtualGraphMode=MANUAL, **more), 1, 8)
    found = train(chain, pipelined(**more), 1, 8)
    assert_same(found, sharded)
    assert found[2] < 0.5 * sharded[2]


@pytest.mark.parametrize(
    "rounds", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["nearest", "stochastic"]
)
@pytest.mark.slow
def test_the_loss_scale_and_rounding_move_on_with_every_machine(rounds):
    """Two replicas whose layers lie on the first and the second machine, against both layers on one machine."""
    seen = []
    for ipus, second in ((2, 1), (8, 4)):
        x, loss, model = two_layers(second)
        made = scaled(replicated(2, 4))
        made.accumulationAndReplicationReductionType = popart.ReductionType.Mean
        made.meanAccumulationAndReplicationReductionStrategy = popart.MeanReductionStrategy.Running
        made.virtualGraphMode = MANUAL
        made.enableStochasticRounding = made.enableLoadAndOffloadRNGState = rounds
        with popart.DeviceManager().acquireAvailableDevice(2 * ipus) as device:
            session = popart.TrainingSession(
                fnModel=model,
                dataFlow=popart.DataFlow(6, {"finalLossScale": popart.AnchorReturnType("All")}),
                loss=loss,
                optimizer=automatic(2.0**10),
                deviceInfo=device,
                userOptions=made,
            )
            session.prepareDevice()
            session.weightsFromHost()
            anchors = session.initAnchorArrays()
            for seed in (4, 5):
                session.run(popart.PyStepIO({x: inputs(seed, 6, 4, 2)}, anchors))
            seen.append((*weights(session, "w0", "w1"), anchors["finalLossScale"]))
    for one, two in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, two)
    assert len(set(seen[0][2].ravel())) > 1
