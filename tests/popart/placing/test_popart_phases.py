"""Execution phases: placement, its rules, numbers as without phases, and the cost of streaming memory."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from podrun.popart.sessions.run_settings import run_settings
from podrun.runtime.placing import phases_of
from tests.popart.popart_sessions import modelled, options, replicated

pytestmark = pytest.mark.usefixtures("programs_compile_once")

WIDTH, LAYERS = 32, 6
PHASED = popart.VirtualGraphMode.ExecutionPhases
OFFLINE = {n: popart.DeviceManager().createOfflineIPUDevice({"numIPUs": str(n)}) for n in (1, 2, 4)}


class Chain:
    """Layers ``tanh(x @ w)``, the last one added to the first one's result; ``phases[i]`` annotates layer *i*."""

    def __init__(self, phases=(), ipus=(), width=WIDTH, layers=LAYERS):
        builder = popart.Builder()
        self.x = y = builder.addInputTensor("FLOAT", [4, width])
        random = np.random.default_rng(0)
        self.weights = []
        first = ""
        for layer in range(layers):
            start = random.standard_normal((width, width)).astype(np.float32) / 6
            self.weights.append(builder.addInitializedInputTensor(start, f"w{layer}"))
            made = [builder.aiOnnx.matmul([y, self.weights[-1]])]
            made.append(builder.aiOnnx.tanh(made))
            first = first or made[-1]
            if layer == layers - 1:
                made.append(builder.aiOnnx.add([made[-1], first]))
                self.loss = builder.aiGraphcore.l1loss([made[-1]], 0.1, reduction=popart.ReductionType.Sum)
                made.append(self.loss)
            for name in made:
                if layer < len(phases):
                    builder.executionPhase(name, phases[layer])
                if layer < len(ipus):
                    builder.virtualGraph(name, ipus[layer])
            y = made[min(len(made), 2) - 1]
        self.model = builder.getModelProto()


def phased(phases, stages=2, replicas=1, accumulation=1, **values):
    opts = replicated(replicas, accumulation, virtualGraphMode=PHASED, **values)
    opts.executionPhaseSettings.phases = phases
    opts.executionPhaseSettings.stages = stages
    return opts


def off_chip(opts, *kinds):
    for kind in kinds:
        where = popart.TensorLocation(popart.TensorStorage.OffChip)
        setattr(opts, f"{kind}TensorLocationSettings", popart.TensorLocationSettings(where))
    return opts


def session(chain, opts, ipus, optimizer=None):
    flow, device = popart.DataFlow(1, [chain.loss]), OFFLINE[ipus]
    optimizer = optimizer or popart.ConstSGD(0.1)
    return popart.TrainingSession(chain.model, flow, chain.loss, optimizer, device, userOptions=opts)


def places(made, part):
    """One part of the place (ipu, stage, phase) of each placed node, in order."""
    found = [getattr(node.place, part) for node in made.parts.model.placed.graph.nodes]
    return [number for number in found if number is not None]


def train(chain, opts, ipus):
    """Losses and weights of two steps."""
    flow = popart.DataFlow(2, {chain.loss: popart.AnchorReturnType("All")})
    with popart.DeviceManager().acquireAvailableDevice(ipus * opts.local_replicas) as device:
        made = popart.TrainingSession(
            chain.model,
            flow,
            chain.loss,
            popart.SGD({"defaultMomentum": (0.9, True)}),
            device,
            userOptions=opts,
        )
        made.prepareDevice()
        made.weightsFromHost()
        anchors = made.initAnchorArrays()
        shape = (2, opts.micro_batches, opts.local_replicas, 4, WIDTH)
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        made.run(popart.PyStepIO({chain.x: x}, anchors))
        made.weightsToHost()
        arrays = {name: np.empty((WIDTH, WIDTH), np.float32) for name in chain.weights}
        made.readWeights(popart.PyWeightsIO(arrays))
        return {"loss": anchors[chain.loss], **arrays}


def test_phases_take_turns_on_two_ipus():
    made = session(Chain(phases=range(LAYERS)), phased(LAYERS), 2)
    expected = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5]
    assert places(made, "phase") == expected
    assert places(made, "ipu") == [phase % 2 for phase in expected]
    made.prepareDevice()
    report = made.parts.program.executable.tile_report
    assert modelled(made) == report
    order = [s["ipu"] for s in report["segments"]]
    assert order == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0], "six forward (the last also backward), five backward"


def test_one_stage_is_one_ipu():
    made = session(Chain(phases=range(LAYERS)), phased(LAYERS, stages=1), 1)
    assert set(places(made, "ipu")) == {0}
    assert len(modelled(made)["segments"]) == 2 * LAYERS - 1


def test_phases_without_annotations_have_equal_weights():
    assert places(session(Chain(), phased(3), 2), "phase") == [0] * 4 + [1] * 4 + [2] * 6
    # A result is never read in an earlier phase: later layers move up.
    late = session(Chain(phases=[2]), phased(3), 2)
    assert set(places(late, "phase")) == {2}


def test_virtual_graphs_by_hand_follow_the_phase():
    made = session(Chain(phases=range(LAYERS), ipus=[0, 3, 2, 1, 0, 3]), phased(LAYERS), 4)
    assert places(made, "ipu") == [0, 0, 3, 3, 2, 2, 1, 1, 0, 0, 3, 3, 3, 3]
    with pytest.raises(
        popart.popart_exception, match="inconsistent execution phase 1 and virtual graph ID 2"
    ):
        session(Chain(phases=range(LAYERS), ipus=[0, 2]), phased(LAYERS), 4)


@pytest.mark.parametrize(
    ("chain", "opts", "ipus", "word"),
    [
        (Chain(phases=[0, 6]), phased(6), 2, "Maximum phase is 5, but op .* has phase 6"),
        (Chain(), phased(3), 1, "invalid virtual graph 1: each replica has 1 IPUs"),
        (Chain(), phased(3, stages=3), 4, "stages is 1 .* or 2"),
        (Chain(), phased(3, enablePipelining=True), 2, "Pipelining does not go with"),
        (Chain(), options(), 1, None),
    ],
)
def test_phases_with_options_or_devices_that_do_not_fit_are_refused(chain, opts, ipus, word):
    if word is None:
        opts.executionPhaseSettings.phases = 2
        word = "> 1 execution phases requires VirtualGraphMode::ExecutionPhases"
    with pytest.raises(popart.popart_exception, match=word):
        session(chain, opts, ipus)


@pytest.mark.parametrize(
    ("replicas", "accumulation", "layers"),
    [
        (1, 2, 3),
        pytest.param(1, 2, LAYERS, marks=pytest.mark.slow),
        pytest.param(2, 3, LAYERS, marks=pytest.mark.slow),
    ],
)
def test_numbers_are_those_of_the_same_pieces_without_phases(replicas, accumulation, layers):
    """To the bit against pipeline stages of the same operators (run in sequence); to rounding against one IPU."""
    everything = ("weight", "optimizerState", "accumulator", "activation")
    chain = Chain(phases=range(layers), layers=layers)
    two = train(chain, phased(layers, 2, replicas, accumulation), 2)
    streamed = train(chain, off_chip(phased(layers, 2, replicas, accumulation), *everything), 2)
    one = train(chain, phased(layers, 1, replicas, accumulation), 1)
    plain = train(Chain(layers=layers), replicated(replicas, accumulation), 1)
    for name, value in two.items():
        np.testing.assert_array_equal(one[name], value, err_msg=name)
        np.testing.assert_array_equal(streamed[name], value, err_msg=name)
        np.testing.assert_allclose(plain[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_phases_over_two_machines():
    """The same phases on virtual graphs of two machines give the same bits. (With several replicas folding differs.)"""
    near = train(Chain(phases=range(LAYERS)), phased(LAYERS, 2, 1, 2), 2)
    far = train(Chain(phases=range(LAYERS), ipus=[0, 5, 2, 7, 4, 1]), phased(LAYERS, 2, 1, 2), 8)
    for name, value in near.items():
        np.testing.assert_array_equal(far[name], value, err_msg=name)


@pytest.mark.parametrize("phases", [0, 1])
def test_one_phase_is_no_phase(phases, caplog):
    """Phases and their options do not count; virtual graphs do, as by hand."""
    made = session(Chain(), phased(phases, stages=3), 2)
    assert len(modelled(made)["segments"]) == 1
    assert f"only {phases} phases were defined" in caplog.text
    placed = [0, 0, 0, 1, 1, 1]
    made = session(
        Chain(phases=[7] * LAYERS, ipus=placed), phased(phases, enablePipelining=True, accumulation=3), 2
    )
    assert places(made, "stage") == places(made, "ipu") == [0] * 6 + [1] * 8
    with pytest.raises(popart.popart_exception, match="Either all Ops must have their virtual graph ids set"):
        session(Chain(ipus=placed[:4]), phased(phases), 2)


def streaming(opts, ipus, width=WIDTH, layers=LAYERS):
    made = session(Chain(phases=range(layers), width=width, layers=layers), opts, ipus)
    return modelled(made)["step"]["seconds_by_cause"].get("streaming", 0.0)


def test_what_streams_is_counted():
    """Weights come for forward and backward work (the last phase needs them once), and to and fro for the update."""
    assert streaming(phased(LAYERS), 2) == 0.0
    weight = WIDTH * WIDTH * 4
    on_demand = phased(LAYERS, stages=1)
    found = streaming(off_chip(on_demand, "weight"), 1)
    # Plain SGD: dx = dz @ w^T is needed in all but the first phase's backward work.
    uses = LAYERS + (LAYERS - 2) + 2 * LAYERS
    assert found == pytest.approx(uses * weight / 20e9)


def test_preloading_hides_streams_behind_compute():
    width, layers = 256, 4
    preload = off_chip(phased(layers), "weight", "activation")
    on_demand = off_chip(phased(layers), "weight", "activation")
    on_demand.executionPhaseSettings.weightIOSchedule = popart.ExecutionPhaseIOSchedule.OnDemand
    assert 0 < streaming(preload, 2, width, layers) < streaming(on_demand, 2, width, layers)


def test_the_schedule_batches_what_updates_need():
    """Batch: all weights' state at once, while the other IPU updates; Interleaving: one weight's after another."""
    found, layers = {}, 4
    for schedule in ("Interleaving", "Batch"):
        opts = off_chip(phased(layers), "optimizerState")
        opts.executionPhaseSettings.schedule = getattr(popart.ExecutionPhaseSchedule, schedule)
        made = session(Chain(phases=range(layers), width=128, layers=layers), opts, 2, popart.Adam({}))
        report = modelled(made)
        held = sum(ipu["memory"]["not_always_live_peak_bytes"] for ipu in report["ipus"])
        found[schedule] = report["step"]["seconds_by_cause"]["streaming"], held
    assert found["Batch"][0] < found["Interleaving"][0]
    assert found["Batch"][1] > found["Interleaving"][1]
    alone = phased(LAYERS, stages=1)
    alone.executionPhaseSettings.schedule = popart.ExecutionPhaseSchedule.Batch
    assert not phases_of(run_settings(alone)).batched, "one IPU has nobody to take turns with"


@pytest.mark.parametrize(("phases", "streams"), [([0, 0, 0, 1, 1, 1], False), ([0, 0, 1, 1, 2, 2], True)])
def test_neighbouring_phases_keep_activations_on_chip(phases, streams):
    """The first layer's result is read by the last one: in the next phase, or in the one after that."""
    chain = Chain(phases=phases)
    opts = off_chip(phased(1 + max(phases), stages=1), "activation")
    made = popart.InferenceSession(
        chain.model, popart.DataFlow(1, [chain.loss]), OFFLINE[1], userOptions=opts
    )
    causes = modelled(made)["step"]["seconds_by_cause"]
    expected = 2 * 4 * WIDTH * 4 / 20e9 if streams else 0.0
    assert causes.get("streaming", 0.0) == pytest.approx(expected)
