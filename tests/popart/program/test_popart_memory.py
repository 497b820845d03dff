"""Memory saved by a session's options: recomputation, state and accumulators off chip or cut over replicas."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import options, replicated

pytestmark = pytest.mark.usefixtures("programs_compile_once")

WIDTH, LAYERS, BATCH = 256, 4, 512
RECOMPUTE = popart.RecomputationType


def network(
    annotate: Any = None, ipus: int = 1, norm: bool = False, layers: int = LAYERS
) -> tuple[bytes, str]:
    """Dense layers and a loss; ``annotate`` gets the builder and each layer's outputs; layers spread over IPUs."""
    builder = popart.Builder()
    half = np.float16
    x = builder.addInputTensor(popart.TensorInfo("FLOAT16", [BATCH, WIDTH]))
    for layer in range(layers):
        ipu = layer * ipus // layers
        with builder.virtualGraph(ipu), builder.pipelineStage(ipu):
            w = builder.addInitializedInputTensor(np.zeros((WIDTH, WIDTH), half))
            made = [builder.aiOnnx.matmul([x, w])]
            if norm:
                ones, zeros = (
                    builder.addInitializedInputTensor(np.full(WIDTH, value, half)) for value in (1, 0)
                )
                made.append(builder.aiGraphcore.groupnormalization([made[-1], ones, zeros], 4)[0])
            made.append(builder.aiOnnx.tanh([made[-1]]))
            x = made[-1]
            if annotate is not None:
                annotate(builder, layer, made)
    with builder.virtualGraph(ipus - 1), builder.pipelineStage(ipus - 1):
        loss = builder.aiGraphcore.l1loss([x], 0.5)
    return builder.getModelProto(), loss


def session(
    model: tuple[bytes, str], opts: popart.SessionOptions, ipus: int = 1, optimizer: Any = None
) -> popart.TrainingSession:
    """A prepared offline session. Out of memory is an error, as everywhere."""
    device = popart.DeviceManager({}).createOfflineIPUDevice({"numIPUs": ipus})
    flow = popart.DataFlow(1, {model[1]: popart.AnchorReturnType("Final")})
    made = popart.TrainingSession(
        model[0], flow, model[1], optimizer or popart.ConstSGD(0.1), device, userOptions=opts
    )
    made.prepareDevice()
    return made


def contents(made: popart.TrainingSession, ipu: int = 0) -> Mapping[str, int]:
    """Bytes on an IPU by content."""
    return {use.ipu: use.memory.bytes_by_content for use in made.getReport().ipu_memory}[ipu]


def adam(**values: Any) -> Any:
    """Adam with two states, in single precision."""
    return popart.Adam({"defaultLearningRate": (0.1, True)}, **values)


WEIGHTS = LAYERS * WIDTH * WIDTH


@functools.cache
def on_chip() -> popart.TrainingSession:
    """Everything in its usual place, with accumulation. Tests read its report alone."""
    return session(network(), replicated(1, 4), optimizer=adam())


def test_everything_a_training_step_needs_is_counted() -> None:
    made = on_chip()
    found = contents(made)
    assert found["weights"] == 2 * WEIGHTS
    assert found["optimizer_state"] == pytest.approx(2 * 4 * WEIGHTS, rel=1e-3)
    assert found["accumulators"] == 2 * WEIGHTS
    # The input of a micro-batch and the loss that is anchored.
    assert found["streams"] == BATCH * WIDTH * 2 + 2
    report = made.getReport()
    memory = report.fullest().memory
    assert sum(found.values()) == memory.total_bytes
    assert memory.max_tile_bytes == max(interval.total_bytes for interval in memory.by_tile)
    assert contents(session(network(), replicated(1, 1), optimizer=adam())).get("accumulators") is None


def test_standard_recomputation_holds_less_and_takes_longer() -> None:
    model = network(layers=8)
    plain = session(model, replicated(1, 4))
    again = session(model, replicated(1, 4, autoRecomputation=RECOMPUTE.Standard))
    assert contents(again)["activations"] < 0.7 * contents(plain)["activations"]
    cycles = [made.getReport().cycles for made in (plain, again)]
    assert cycles[0] < cycles[1] < 1.6 * cycles[0]
    assert contents(again)["weights"] == contents(plain)["weights"]


def test_annotated_outputs_are_recomputed_and_others_are_not() -> None:
    def every_other(builder: popart.Builder, layer: int, made: list[str]) -> None:
        if layer % 2:
            for output in made:
                builder.recomputeOutputInBackwardPass(output)

    layers = 12
    plain = session(network(layers=layers), options())
    some = session(network(every_other, layers=layers), options())
    saved = contents(plain)["activations"] - contents(some)["activations"]
    # Half of the layers keep nothing of theirs, an activation in half precision; what is made again takes some back.
    assert layers / 3 <= saved / (BATCH * WIDTH * 2) <= layers / 2
    assert some.getReport().cycles > plain.getReport().cycles


@pytest.mark.slow
def test_norms_alone_are_recomputed() -> None:
    model = network(norm=True)
    plain = session(model, options())
    norms = session(model, options(autoRecomputation=RECOMPUTE.NormOnly))
    assert contents(norms)["activations"] < contents(plain)["activations"]
    operators = [made.getReport().operators() for made in (plain, norms)]
    # Products are not made again.
    products = [sum(c for name, c in found.items() if "matmul" in name) for found in operators]
    assert products[0] == pytest.approx(products[1], rel=0.01)


@pytest.mark.parametrize("rule", ["Pipeline", "RecomputeAll"])
@pytest.mark.sample(2)
def test_a_pipeline_that_recomputes_stashes_only_what_enters_its_stages(rule: str) -> None:
    def opts(**values: Any) -> popart.SessionOptions:
        return replicated(
            1, 8, enablePipelining=True, virtualGraphMode=popart.VirtualGraphMode.Manual, **values
        )

    layers = 8
    model = network(ipus=4, layers=layers)
    plain = session(model, opts(), 4)
    again = session(model, opts(autoRecomputation=RECOMPUTE[rule]), 4)
    activation = BATCH * WIDTH * 2
    for ipu in range(3):
        flight = 2 * (4 - 1 - ipu) + 1
        before, after = contents(plain, ipu)["stash"], contents(again, ipu)["stash"]
        # What each layer makes is kept for each micro-batch in flight, or what enters the stage alone. And one
        # activation leaves the stage, one gradient comes and one goes.
        assert before >= layers // 4 * flight * activation
        assert after <= (flight + 3) * activation
    assert [m.ipu for m in again.getReport().ipu_memory] == [0, 1, 2, 3]
    stashes = [contents(plain, ipu)["stash"] for ipu in range(4)]
    assert stashes == sorted(stashes, reverse=True)


def test_optimizer_state_off_chip_leaves_the_chip() -> None:
    off = popart.TensorLocationSettings(popart.TensorStorage.OffChip)
    off_chip = session(
        network(), replicated(1, 4, optimizerStateTensorLocationSettings=off), optimizer=adam()
    )
    assert contents(off_chip).get("optimizer_state", 0) < 0.001 * contents(on_chip())["optimizer_state"]
    tiles = [made.getReport().fullest().memory.max_tile_bytes for made in (on_chip(), off_chip)]
    assert tiles[1] < tiles[0]


def test_sharded_state_is_one_part_of_as_many_as_there_are_replicas() -> None:
    location = popart.TensorLocation(popart.TensorStorage.OnChip, popart.ReplicatedTensorSharding.On)
    cut = popart.TensorLocationSettings(location)
    whole = session(network(), replicated(4, 4), 4, adam())
    cuts = {"optimizerStateTensorLocationSettings": cut, "accumulatorTensorLocationSettings": cut}
    part = session(network(), replicated(4, 4, **cuts), 4, adam())
    assert contents(part)["optimizer_state"] == pytest.approx(
        contents(whole)["optimizer_state"] / 4, rel=1e-3
    )
    assert 4 * contents(part)["accumulators"] == contents(whole)["accumulators"]
