"""Pipelined sessions: fill, main and flush for every kind of session; the rules on depth, stages and recomputation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import podrun.popart as popart
from podrun.core.executable import LoadStream, StoreStream
from tests.popart.popart_sessions import modelled, options, weights

pytestmark = pytest.mark.usefixtures("programs_compile_once")

WIDTH, MICRO_BATCH = 8, 4
MANUAL = popart.VirtualGraphMode.Manual
OFFLINE = {n: popart.DeviceManager().createOfflineIPUDevice({"numIPUs": str(n)}) for n in (2, 4)}


class Chain:
    """Dense layers with tanh, layer *i* on IPU ``ipus[i]`` and in stage *i*; l1loss of the last."""

    def __init__(self, ipus, stages=True, recompute=False):
        builder = popart.Builder()
        self.x = y = builder.addInputTensor("FLOAT", [MICRO_BATCH, WIDTH])
        random = np.random.default_rng(0)
        self.weights, self.hidden = [], []
        for stage, ipu in enumerate(ipus):
            with builder.virtualGraph(ipu):
                start = random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 3
                self.weights.append(builder.addInitializedInputTensor(start, f"w{stage}"))
                product = builder.aiOnnx.matmul([y, self.weights[-1]])
                y = builder.aiOnnx.tanh([product])
                made = [product, y]
                if stage == len(ipus) - 1:
                    self.loss = builder.aiGraphcore.l1loss([y], 0.1, reduction=popart.ReductionType.Sum)
                    made.append(self.loss)
            if stages:
                for name in made:
                    builder.pipelineStage(name, stage)
            if recompute and stage == 0:
                builder.recomputeOutputInBackwardPass(y)
            self.hidden.append(y)
        self.model = builder.getModelProto()


def pipelined(**values):
    return options(**{"virtualGraphMode": MANUAL, "enablePipelining": True} | values)


def data(batches, accumulation=1, replicas=1, seed=5):
    shape = (batches, accumulation, replicas, MICRO_BATCH, WIDTH)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def train(chain, opts, batches, ipus, anchors=None, runs=1, optimizer=None):
    """Anchors of each run, weights afterwards, modelled cycles of a step."""
    opts.instrumentWithHardwareCycleCounter = True
    art = popart.AnchorReturnType("All")
    with popart.DeviceManager().acquireAvailableDevice(ipus * opts.local_replicas) as device:
        session = popart.TrainingSession(
            chain.model,
            popart.DataFlow(batches, anchors or {chain.loss: art}),
            chain.loss,
            optimizer or popart.ConstSGD(0.05),
            device,
            userOptions=opts,
        )
        session.prepareDevice()
        session.weightsFromHost()
        found = []
        for run in range(runs):
            arrays = session.initAnchorArrays()
            x = data(batches, opts.micro_batches, opts.local_replicas, seed=run)
            session.run(popart.PyStepIO({chain.x: x}, arrays))
            found.append({name: value.copy() for name, value in arrays.items()})
        session.weightsToHost()
        arrays = {name: np.empty((WIDTH, WIDTH), np.float32) for name in chain.weights}
        session.readWeights(popart.PyWeightsIO(arrays))
        return found, arrays, session.getCycleCount()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.sample(2)
def test_a_model_of_ipus_need_not_have_a_power_of_two(replicas):
    """Three stages on three IPUs for each replica: the bits of three stages on four."""
    chain, found = Chain([0, 1, 2]), []
    opts = pipelined(**accumulating(5), enableReplicatedGraphs=replicas > 1, replicatedGraphCount=replicas)
    for ipus in (3, 4):
        device = popart.DeviceManager().createIpuModelDevice(
            {"numIPUs": ipus * replicas, "tilesPerIPU": 1472}
        )
        made = popart.TrainingSession(
            chain.model,
            popart.DataFlow(1, [chain.loss]),
            chain.loss,
            popart.ConstSGD(0.05),
            device,
            userOptions=opts,
        )
        made.prepareDevice()
        made.weightsFromHost()
        arrays = made.initAnchorArrays()
        made.run(popart.PyStepIO({chain.x: data(1, 5, replicas)}, arrays))
        assert device.numIpus == ipus * replicas
        found.append([arrays[chain.loss], *weights(made, *chain.weights)])
        device.detach()
    for three, four in zip(*found, strict=True):
        np.testing.assert_array_equal(three, four)


def infer(chain, opts, batches, ipus, anchors):
    opts.instrumentWithHardwareCycleCounter = True
    with popart.DeviceManager().acquireAvailableDevice(ipus * opts.local_replicas) as device:
        session = popart.InferenceSession(
            chain.model, popart.DataFlow(batches, anchors), device, userOptions=opts
        )
        session.prepareDevice()
        arrays = session.initAnchorArrays()
        session.run(popart.PyStepIO({chain.x: data(batches, 1, opts.local_replicas)}, arrays))
        return arrays, session.getCycleCount()


def test_the_batches_of_an_inference_step_are_in_the_pipeline_together():
    chain = Chain([0, 1, 2, 3])
    kinds = {name: popart.AnchorReturnType("All") for name in chain.hidden}
    kinds[chain.loss] = popart.AnchorReturnType("Sum")
    replicas = {"enableReplicatedGraphs": True, "replicatedGraphCount": 2}
    plain, slow = infer(chain, options(virtualGraphMode=MANUAL, **replicas), 8, 4, kinds)
    found, fast = infer(chain, pipelined(**replicas), 8, 4, kinds)
    for name, value in plain.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    # 8 batches through 4 stages: 11 cycles of one stage against 32.
    assert fast < 0.5 * slow


@pytest.mark.slow
def test_final_anchors_of_a_pipelined_inference():
    chain = Chain([0, 1])
    kinds = {chain.hidden[1]: popart.AnchorReturnType("Final")}
    whole, _ = infer(
        Chain([0, 1]), pipelined(), MICRO_BATCH, 2, {chain.hidden[1]: popart.AnchorReturnType("All")}
    )
    found, _ = infer(chain, pipelined(), MICRO_BATCH, 2, kinds)
    np.testing.assert_array_equal(found[chain.hidden[1]], whole[chain.hidden[1]][-1])


@pytest.mark.slow  # By default the tests of sharding of the compiler compare its schedules.
@pytest.mark.parametrize("schedule", list(popart.PipelineSchedule.__members__.values()), ids=str)
def test_every_schedule_trains_as_sharding_does(schedule):
    more = {"enableGradientAccumulation": True, "accumulationFactor": 8}
    chain = Chain([0, 1, 2, 3])
    sharded = train(chain, options(virtualGraphMode=MANUAL, **more), 2, 4)
    found = train(chain, pipelined(pipelineSchedule=schedule, **more), 2, 4)
    np.testing.assert_array_equal(found[0][0][chain.loss], sharded[0][0][chain.loss])
    for name, value in sharded[1].items():
        np.testing.assert_array_equal(found[1][name], value)
    if schedule is popart.PipelineSchedule.Sequential:
        assert found[2] == sharded[2]
    else:
        assert found[2] < 0.75 * sharded[2]


@pytest.mark.slow  # By default `tests/compiler/test_sharding.py` changes weights while micro-batches are in flight.
def test_without_accumulation_weights_change_while_batches_are_in_flight():
    """The first batch and the first update are those of sequential execution; later ones see older weights. Weights are
    copied after their own stage's update for the batch."""
    chain = Chain([0, 1])
    batches = 6
    gradients = [f"Gradient___{name}" for name in chain.weights]
    updated = popart.reservedUpdatedVarPrefix() + "w0"
    every = popart.AnchorReturnType("All")
    kinds = dict.fromkeys((chain.loss, *gradients, *chain.weights, updated), every)
    sequential = train(chain, options(virtualGraphMode=MANUAL), batches, 2, kinds)
    found = train(chain, pipelined(), batches, 2, kinds)
    np.testing.assert_allclose(found[0][0][chain.loss][0], sequential[0][0][chain.loss][0], rtol=1e-6)
    for name in gradients:
        np.testing.assert_allclose(found[0][0][name][0], sequential[0][0][name][0], rtol=1e-6)
    assert not np.allclose(found[0][0][chain.loss][2:], sequential[0][0][chain.loss][2:])
    losses, after = in_flight(data(batches, seed=0)[:, 0, 0], 2, 0.05)
    np.testing.assert_allclose(found[0][0][chain.loss], losses, rtol=1e-5)
    for name, values in after.items():
        np.testing.assert_array_equal(found[0][0][name][0], sequential[0][0][name][0])
        np.testing.assert_allclose(found[0][0][name], values, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found[1][name], found[0][0][name][-1])
    np.testing.assert_array_equal(found[0][0][updated], found[0][0]["w0"])
    assert found[2] < sequential[2]


def in_flight(x, stages, rate):
    """The same in NumPy: stage *s* of batch *b* goes forward in cycle b + s, backward in b + 2(F - 1) - s. Losses, and
    weights after each of their updates."""
    random = np.random.default_rng(0)
    names = [f"w{s}" for s in range(stages)]
    weights = {
        n: (random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 3).astype(float) for n in names
    }
    total, last = len(x), stages - 1
    made = {(-1, b): x[b].astype(float) for b in range(total)}
    wanted, losses, after = {}, np.zeros(total), {n: [] for n in names}
    for cycle in range(total + 2 * last):
        for s, name in enumerate(names):
            forward, backward = cycle - s, cycle - 2 * last + s
            if 0 <= forward < total:
                made[s, forward] = np.tanh(made[s - 1, forward] @ weights[name])
            if s == last and 0 <= forward < total:
                losses[forward] = 0.1 * np.abs(made[s, forward]).sum()
                wanted[s, forward] = 0.1 * np.sign(made[s, forward])
            if 0 <= backward < total:
                z = wanted[s, backward] * (1 - made[s, backward] ** 2)
                wanted[s - 1, backward] = z @ weights[name].T
                weights[name] = weights[name] - rate * made[s - 1, backward].T @ z
                after[name].append(weights[name])
    return losses, after


@pytest.mark.parametrize(
    "optimizer",
    [popart.Adam({}), pytest.param(popart.SGD({"defaultMomentum": (0.9, True)}), marks=pytest.mark.slow)],
    ids=["adam", "sgd"],
)
@pytest.mark.slow
def test_updates_in_flight_are_the_same_for_any_number_of_machines(optimizer):
    """Four replicas of two IPUs on two machines against the same data on one replica, by the sum of gradients."""
    chain = Chain([0, 1])
    more = {"enableReplicatedGraphs": True, "replicatedGraphCount": 4}
    kinds = dict.fromkeys((chain.loss, "w0"), popart.AnchorReturnType("All"))
    kinds["w1"] = popart.AnchorReturnType("Final")
    first = train(chain, pipelined(**more), 5, 2, kinds, optimizer=optimizer, runs=2)
    again = train(chain, pipelined(**more), 5, 2, kinds, optimizer=optimizer, runs=2)
    for name, value in first[1].items():
        np.testing.assert_array_equal(again[1][name], value)
        assert np.isfinite(value).all()
        for copied in first[0][1][name].reshape(-1, 4, *value.shape)[-1]:
            np.testing.assert_array_equal(copied, value)
    np.testing.assert_array_equal(first[0][1][chain.loss], again[0][1][chain.loss])


def session(chain, training=True, batches=1, ipus=4, anchors=None, optimizer=None, **values):
    flow = popart.DataFlow(batches, anchors or [chain.loss])
    opts = pipelined(**values)
    if not training:
        return popart.InferenceSession(chain.model, flow, OFFLINE[ipus], userOptions=opts)
    return popart.TrainingSession(
        chain.model, flow, chain.loss, optimizer or popart.ConstSGD(0.1), OFFLINE[ipus], userOptions=opts
    )


def accumulating(factor):
    return {"enableGradientAccumulation": True, "accumulationFactor": factor}


def test_a_pipeline_needs_as_many_micro_batches_as_it_has_stages():
    """2F - 1 stages in training, F in inference; equality is enough."""
    chain = Chain([0, 1, 2, 3])
    with pytest.raises(
        popart.popart_exception, match=r"depth \(gradient accumulation factor\) .* stages \(7\)"
    ):
        session(chain, **accumulating(6))
    assert session(chain, **accumulating(7))
    with pytest.raises(popart.popart_exception, match=r"depth \(batchesPerStep\) .* stages \(7\)"):
        session(chain, batches=6)
    assert session(chain, batches=7)
    with pytest.raises(popart.popart_exception, match=r"depth \(batchesPerStep\) .* stages \(4\)"):
        session(chain, training=False, batches=3)
    assert session(chain, training=False, batches=4)
    assert session(chain, pipelineSchedule=popart.PipelineSchedule.Sequential)


def test_stages_are_inferred_from_ipus():
    assert session(Chain([0, 1, 2], stages=False), **accumulating(5))
    with pytest.raises(popart.popart_exception, match="in an earlier pipeline stage than it is produced"):
        session(Chain([0, 1, 0], stages=False), **accumulating(5))
    assert session(Chain([0, 1, 0]), **accumulating(5))


@pytest.mark.parametrize(
    ("scope", "refusal"),
    [
        ("pipelineStage", "Only some ops have had their pipeline stage set"),
        ("virtualGraph", "Either all Ops must have their virtual graph ids set"),
    ],
)
def test_a_place_of_minus_one_counts_as_none(scope, refusal):
    """PopART's way to say that an operator has none."""
    builder = popart.Builder()
    y = builder.addInputTensor("FLOAT", [MICRO_BATCH, WIDTH])
    for place in (0, 1, -1):
        with (
            builder.virtualGraph(max(place, 0)),
            builder.pipelineStage(max(place, 0)),
            getattr(builder, scope)(place),
        ):
            y = builder.aiOnnx.tanh([y])
    with pytest.raises(popart.popart_exception, match=refusal):
        session(SimpleNamespace(model=builder.getModelProto(), loss=y), training=False, batches=3, ipus=2)


def test_consecutive_stages_on_one_ipu_are_one_stage():
    """Three stages would need a depth of 5; the first two are one."""
    made = session(Chain([0, 0, 1]), ipus=2, **accumulating(3))
    made.prepareDevice()
    report = made.parts.program.executable.tile_report
    assert modelled(made) == report
    assert report["pipeline"]["stages"] == 2


@pytest.mark.slow
def test_consecutive_stages_on_one_ipu_train_as_without_stages():
    chain = Chain([0, 0, 1])
    found = train(chain, pipelined(**accumulating(3)), 1, 2)
    sharded = train(chain, options(virtualGraphMode=MANUAL, **accumulating(3)), 1, 2)
    for name, value in sharded[1].items():
        np.testing.assert_array_equal(found[1][name], value)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.sample(2)
def test_one_stage_is_a_pipeline_of_depth_one(accumulation):
    """On one of two IPUs; micro-batches, and batches without accumulation, follow each other."""
    chain, batches = Chain([1, 1]), 3 // accumulation
    values = accumulating(accumulation) if accumulation > 1 else {}
    found = train(chain, pipelined(**values), batches, 2)
    sharded = train(chain, options(virtualGraphMode=MANUAL, **values), batches, 2)
    for name, value in (sharded[0][0] | sharded[1]).items():
        np.testing.assert_array_equal((found[0][0] | found[1])[name], value, err_msg=name)


def test_pipelines_refuse_options_that_do_not_go_with_stages():
    chain = Chain([0, 1])
    annotated = Chain([0, 1], recompute=True)
    with pytest.raises(popart.popart_exception, match="only whole stages"):
        session(annotated, ipus=2, **accumulating(3))
    assert session(annotated, ipus=2, explicitRecomputation=True, **accumulating(3))
    every = {chain.loss: popart.AnchorReturnType("EveryN", 2)}
    with pytest.raises(popart.popart_exception, match="EveryN does not go with pipelining"):
        session(chain, training=False, batches=4, ipus=2, anchors=every).prepareDevice()
    alone = {"createImplicitPipeliningFwdOnlyProgram": True}
    explicit = {"enableExplicitMainLoops": True, "useHostCopyOps": True}
    for wrong, values in [
        ("without gradient accumulation", {}),
        ("with explicit pipelining", explicit | accumulating(3)),
        ("without implicit pipelining", {"enablePipelining": False} | accumulating(3)),
    ]:
        with pytest.raises(popart.popart_exception, match=f"forward-only program is not supported {wrong}"):
            session(chain, batches=3, ipus=2, **alone, **values)
    clipped = popart.SGD({"defaultLearningRate": (0.1, True)}, [popart.ClipNormSettings.clipAllWeights(1.0)])
    parallel = popart.AccumulateOuterFragmentSettings(popart.AccumulateOuterFragmentSchedule.Scheduler)
    with pytest.raises(popart.popart_exception, match="clipping of a pipelined program needs gradient accum"):
        session(chain, ipus=2, batches=3, optimizer=clipped, accumulateOuterFragmentSettings=parallel)


def shared_weight(ipus):
    """Two products with one weight, on IPUs ``ipus`` and in stages 0 and 2, and one with another between."""
    builder = popart.Builder()
    y = builder.addInputTensor("FLOAT", [MICRO_BATCH, WIDTH])
    names = [builder.addInitializedInputTensor(np.eye(WIDTH, dtype=np.float32), n) for n in ("shared", "own")]
    for stage, (ipu, weight) in enumerate(zip((ipus[0], 1, ipus[1]), (0, 1, 0), strict=True)):
        with builder.virtualGraph(ipu), builder.pipelineStage(stage):
            y = builder.aiOnnx.matmul([y, names[weight]])
            if stage == 2:
                loss = builder.aiGraphcore.l1loss([y], 0.1)
    return SimpleNamespace(model=builder.getModelProto(), loss=loss)


def test_a_variable_is_on_one_virtual_graph():
    with pytest.raises(
        popart.popart_exception, match="Can not copy variable tensor 'shared' between virtual"
    ):
        session(shared_weight([0, 2]), **accumulating(5))
    with pytest.raises(
        popart.popart_exception, match="Can not copy variable tensor 'shared' between virtual"
    ):
        session(shared_weight([0, 2]), training=False, batches=3, constantWeights=False)
    assert session(shared_weight([0, 0]), **accumulating(5))
    assert session(shared_weight([0, 2]), training=False, batches=3), "constants can be copied"
    sequential = popart.PipelineSchedule.Sequential
    assert session(shared_weight([0, 2]), pipelineSchedule=sequential, **accumulating(5))


@pytest.mark.parametrize(("skip", "operator"), [(True, "tanh"), (False, "tanh"), (True, "neg")])
def test_recomputation_for_several_stages_of_an_ipu_is_refused(skip, operator):
    """Stage 2 lies where stage 0 does and (``skip``) reads what it made; so does stage 0's own gradient, of a tanh."""
    builder = popart.Builder()
    x = y = builder.addInputTensor("FLOAT", [MICRO_BATCH, WIDTH])
    for stage, ipu in enumerate([0, 1, 0]):
        with builder.virtualGraph(ipu), builder.pipelineStage(stage):
            weight = builder.addInitializedInputTensor(np.eye(WIDTH, dtype=np.float32))
            y = getattr(builder.aiOnnx, operator)([builder.aiOnnx.matmul([y, weight])])
            if stage == 0:
                x = y
            if stage == 2:
                loss = builder.aiGraphcore.l1loss([builder.aiOnnx.add([x, y]) if skip else y], 0.1)
    model = SimpleNamespace(model=builder.getModelProto(), loss=loss)
    recompute = {"autoRecomputation": popart.RecomputationType.Pipeline, **accumulating(5)}
    if skip and operator == "tanh":
        with pytest.raises(
            popart.popart_exception, match=r"restored for recomputation of a descendent in stages 2, 4"
        ):
            session(model, ipus=2, **recompute)
        assert session(model, ipus=2, explicitRecomputation=True, **recompute)
    else:
        assert session(model, ipus=2, **recompute)
    assert session(model, ipus=2, **accumulating(5))


@pytest.mark.slow
def test_stages_of_one_ipu_update_their_weights_in_turn():
    """Without accumulation; against NumPy as above, where stages know no IPUs."""
    chain, batches = Chain([0, 1, 0]), 7
    kinds = dict.fromkeys((chain.loss, *chain.weights), popart.AnchorReturnType("All"))
    found = train(chain, pipelined(), batches, 2, kinds)
    losses, after = in_flight(data(batches, seed=0)[:, 0, 0], 3, 0.05)
    np.testing.assert_allclose(found[0][0][chain.loss], losses, rtol=1e-5)
    for name, values in after.items():
        np.testing.assert_allclose(found[0][0][name], values, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found[1][name], found[0][0][name][-1])


@pytest.mark.parametrize("kind", ["NoRecompute", "Pipeline"])
@pytest.mark.sample(2)
def test_recomputation_changes_no_number(kind):
    chain = Chain([0, 1])
    more = {**accumulating(4), "autoRecomputation": getattr(popart.RecomputationType, kind)}
    plain = train(chain, pipelined(**accumulating(4)), 1, 2)
    found = train(chain, pipelined(**more), 1, 2)
    for name, value in plain[1].items():
        np.testing.assert_array_equal(found[1][name], value)
    assert (found[2] > plain[2]) is (kind == "Pipeline"), "forward work is done again"


def test_the_report_shows_the_bubble():
    shares = {}
    for name, schedule in popart.PipelineSchedule.__members__.items():
        made = session(Chain([0, 1, 2, 3]), pipelineSchedule=schedule, **accumulating(12))
        shares[name] = modelled(made).get("pipeline", {})
    grouped = shares["Grouped"]
    assert (grouped["fill_cycles"], grouped["main_cycles"], grouped["flush_cycles"]) == (6, 6, 6)
    assert (grouped["stages"], grouped["period"]) == (4, 1)
    assert 0 < shares["Interleaved"]["idle_share"] < 0.75
    assert 0 < grouped["idle_share"] < 0.75
    assert shares["Sequential"] == {}


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_restored_is_what_was_stashed(recompute):
    """For every batch, in the order of the batches; also of an input, which alone is left when stages recompute."""
    chain, kind = Chain([0, 1, 2]), popart.AnchorReturnType("All")
    names = [chain.x] if recompute else [chain.x, *chain.hidden[:2]]
    anchors = {prefix + name: kind for name in names for prefix in ("", popart.reservedRestoredPrefix())}
    more = {"autoRecomputation": popart.RecomputationType.Pipeline} if recompute else {}
    ((found,), _, _) = train(chain, pipelined(**more), 7, 4, anchors)
    for name in names:
        assert len({batch.tobytes() for batch in found[name]}) == 7
        np.testing.assert_array_equal(found[f"Restored___{name}"], found[name])
    made = session(chain, batches=7, anchors=[f"Restored___{chain.x}"], **more)
    made.prepareDevice()
    work = made.parts.program.executable.instructions[0]
    first = next(k for k, i in enumerate(work) if isinstance(i, StoreStream))
    assert sum(isinstance(i, LoadStream) for i in work[:first]) == 5, (
        "the first batch is back after five cycles"
    )
    for name in [chain.hidden[2], *(chain.hidden[:1] if recompute else ())]:
        with pytest.raises(popart.popart_exception, match=r"`Restored___.*' not in Ir Tensors"):
            session(chain, batches=7, anchors=[f"Restored___{name}"], **more)
    with pytest.raises(popart.popart_exception, match="Restored___Tanh:0 is what comes out of it"):
        session(chain, batches=7, anchors=["Stashed___Tanh:0"])
