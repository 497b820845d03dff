"""Models over several IPUs: the pieces together are the whole, and pipelined equals sequential to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.compiler import extra_state
from podrun.compiler.compile import compile_program
from podrun.compiler.program import (
    AnchorSpec,
    InputSpec,
    ParameterSpec,
    PipelineOrder,
    Program,
    tap,
)
from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.executable import Compute, Copy, LoadStream, Reduction, Retrieval, Send, TensorSpec

from .oracle import advanced, train
from .programs import Adam, Clipped, Momentum, NormScaled, Sgd, compiled, inputs_for, weights_for
from .reference_interpreter import Pod

ANCHORS = (
    AnchorSpec("loss"),
    AnchorSpec("h1", Retrieval.FINAL),
    AnchorSpec("Gradient___w0"),
    AnchorSpec("Gradient___h1"),
    AnchorSpec("w2"),
    AnchorSpec("UpdatedVar___w1", Retrieval.FINAL),
)

SPANNED = (*ANCHORS[:4], AnchorSpec("w1"), AnchorSpec("Gradient___x"), AnchorSpec("h0"))


def chain(
    places: list[int],
    *,
    stages: bool = True,
    tied: bool = False,
    dropout: bool = False,
    skip: bool = False,
    ipus: int | None = None,
    **more: Any,
) -> Program:
    """Dense layers 5-5, layer *i* on IPU ``places[i]`` and in stage *i*; cross entropy with the last.

    ``tied``: the last layer uses the first one's weight. ``skip``: the last layer also reads the first one's
    output.
    """
    layers = len(places)
    weight = {i: "w0" if tied and i == layers - 1 else f"w{i}" for i in range(layers)}

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        x = inputs["x"]
        for i, place in enumerate(places):
            with jax.named_scope(f"ipu:{place}"), jax.named_scope(f"stage:{i}" if stages else "layer"):
                if dropout:
                    x = x * jax.random.bernoulli(jax.random.fold_in(key, i), 0.75, x.shape)
                if skip and i == layers - 1:
                    x = x + values["h0"]
                x = values[f"h{i}"] = tap(f"h{i}", jnp.tanh(x @ p[weight[i]] + p[f"b{i}"]))
                if i == layers - 1:
                    chosen = jax.nn.one_hot(inputs["y"], 5)
                    values["loss"] = -jnp.mean(jnp.sum(jax.nn.log_softmax(x) * chosen, axis=-1))
        return values

    names = sorted(set(weight.values()))
    parameters = {n: ParameterSpec(TensorSpec(n, "float32", (5, 5)), True) for n in names}
    parameters |= {f"b{i}": ParameterSpec(TensorSpec(f"b{i}", "float32", (5,)), True) for i in range(layers)}
    fields: dict[str, Any] = {"loss": "loss", "update": Sgd(), "anchors": (AnchorSpec("loss"),)} | more
    return Program(
        name="chain",
        forward=forward,
        parameters=parameters,
        inputs={
            "x": InputSpec(TensorSpec("x", "float32", (4, 5))),
            "y": InputSpec(TensorSpec("y", "int32", (4,))),
        },
        ipus_per_replica=ipus or 1 << (max(places)).bit_length(),
        **fields,
    )


def slow(options: dict[str, Any] | tuple[Any, ...]) -> Any:
    """Options, or one set of parameters, that only the long test run tries."""
    values = options if isinstance(options, tuple) else (options,)
    return pytest.param(*values, marks=pytest.mark.slow)


def run(program: Program, batches: int = 2) -> tuple[Pod, dict[str, np.ndarray]]:
    pod = Pod(compiled(program))
    pod.write_variables(weights_for(program))
    return pod, pod.run(batches, inputs_for(program, batches))


def assert_same_bits(one: Program, other: Program) -> None:
    (pod, anchors), (other_pod, other_anchors) = run(one), run(other)
    for name, value in anchors.items():
        np.testing.assert_array_equal(other_anchors[name], value, err_msg=name)
    assert set(pod.executable.variables) == set(other_pod.executable.variables)
    for name in pod.executable.variables:
        np.testing.assert_array_equal(other_pod.read_variable(name), pod.read_variable(name), err_msg=name)


@pytest.mark.parametrize("pipelined", [False, True], ids=["sharded", "pipelined"])
@pytest.mark.parametrize(
    "options",
    [
        {"places": [0, 1, 2], "tied": True, "replicas": 2},
        {"places": [0, 1, 2], "skip": True, "dropout": True},
        slow({"places": [0, 1, 2, 3], "replicas": 2}),
        slow({"places": [0, 0, 1]}),
        slow({"places": [0, 1, 0, 1]}),
        slow({"places": [0, 1], "replicas": 4, "update": Momentum()}),
        slow({"places": [0, 1], "update": Adam()}),
        slow({"places": [0, 1], "update": NormScaled()}),
    ],
    ids=str,
)
@pytest.mark.sample(4)
def test_training_equals_the_plain_program(options: dict[str, Any], pipelined: bool) -> None:
    program = chain(**options, accumulation_factor=5, pipelined=pipelined)
    pod, anchors = run(program)
    expected = train(program, weights_for(program), inputs_for(program, 2))
    np.testing.assert_allclose(anchors["loss"], expected.losses, rtol=1e-5, atol=1e-6)
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(pod.read_variable(name), weight, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("accumulation", "dropout", "reduction"),
    [
        (3, False, Reduction.MEAN),
        slow((3, True, Reduction.MEAN)),
        slow((2, False, Reduction.SUM)),
        slow((9, True, Reduction.SUM)),
    ],
)
def test_pipelined_equals_sequential_to_the_bit(
    accumulation: int, dropout: bool, reduction: Reduction
) -> None:
    """Also where accumulators are running means, which must not be read before the micro-batch before is in them."""
    program = chain(
        [0, 1, 2],
        dropout=dropout,
        reduction=reduction,
        accumulation_factor=accumulation,
        replicas=2,
        anchors=ANCHORS,
        update=Momentum(),
    )
    assert_same_bits(program, replace(program, pipelined=True))


@pytest.mark.parametrize(
    ("accumulation", "places"), [slow((1, [0, 1, 2, 3])), (7, [0, 1, 2, 3]), (5, [0, 1, 0])]
)
@pytest.mark.sample(2)
@pytest.mark.slow
def test_interleaved_equals_grouped_to_the_bit(accumulation: int, places: list[int]) -> None:
    more: dict[str, Any] = {"accumulation_factor": accumulation, "pipelined": True, "anchors": ANCHORS}
    reduction = Reduction.MEAN if accumulation == 7 else Reduction.SUM
    program = chain(places, dropout=True, update=Momentum(), reduction=reduction, **more)
    assert_same_bits(program, replace(program, pipeline_schedule=PipelineOrder.INTERLEAVED))


def test_interleaved_takes_turns_and_keeps_half_of_the_stash() -> None:
    found = {}
    for schedule in PipelineOrder:
        program = chain([0, 1, 2, 3], accumulation_factor=8, pipelined=True, pipeline_schedule=schedule)
        executable = compile_program(program)
        first = [i.computation for i in executable.instructions[0] if isinstance(i, Compute)][1:-1]
        rings = {
            i.destination for i in executable.instructions[0] if isinstance(i, Copy) and "#" in i.destination
        }
        found[schedule] = (first, 1 + max(int(slot.split("#")[1]) for slot in rings))
    forward, backward = "segment.0", "segment.6"
    order, ring = found[PipelineOrder.INTERLEAVED]
    assert order == [forward] * 4 + [backward, forward] * 4 + [backward] * 4
    assert (ring, found[PipelineOrder.GROUPED][1]) == (4, 7)


@pytest.mark.parametrize(
    ("places", "tied", "replicas", "ipus"),
    [
        ([0, 1, 2], False, 4, 4),
        ([0, 1, 0], True, 1, 2),
        slow(([0, 1, 2], False, 1, 4)),
        slow(([0, 1, 0, 1], False, 2, 2)),
        slow(([0, 1, 2, 0], True, 2, 4)),
        ([0, 1, 4], False, 2, 8),
        slow(([0, 1, 4, 1], False, 2, 8)),
    ],
    ids=str,
)
@pytest.mark.sample(3)
def test_weights_that_change_while_micro_batches_are_in_flight(
    places: list[int], tied: bool, replicas: int, ipus: int
) -> None:
    """Against a simulation in NumPy, cycle by cycle."""
    batches, rate = 2 * len(places) + 1, 0.1
    program = chain(
        places,
        tied=tied,
        pipelined=True,
        updates_each_micro_batch=True,
        accumulation_factor=batches,
        replicas=replicas,
        ipus=ipus,
        anchors=(AnchorSpec("loss"), AnchorSpec("UpdatedVar___w1", Retrieval.FINAL)),
    )
    pod, anchors = run(program, batches=2)
    weights = {n: np.float64(v) for n, v in weights_for(program).items()}
    data = inputs_for(program, 2)
    for run_ in range(2):
        losses = _in_flight(weights, {n: v[run_] for n, v in data.items()}, len(places), rate, tied)
        np.testing.assert_allclose(anchors["loss"][run_ * batches : (run_ + 1) * batches], losses, rtol=1e-5)
    for name, value in weights.items():
        np.testing.assert_allclose(pod.read_variable(name), value, rtol=1e-4, atol=2e-6, err_msg=name)
    np.testing.assert_array_equal(anchors["UpdatedVar___w1"][0], pod.read_variable("w1"))


def _in_flight(
    weights: dict[str, np.ndarray], data: Mapping[str, np.ndarray], stages: int, rate: float, tied: bool
) -> np.ndarray:
    """Losses ``[micro-batch, replica]`` of a pipeline of dense layers that changes ``weights`` as it goes.

    In cycle *t* stage *s* goes forward with micro-batch ``t - s``; then, the last stage first, backward with
    ``t - 2 * (stages - 1) + s``, and changes its weights at once; activations are kept, weights are not. A weight that
    two stages share changes when the first of them has gone backward, by what both found for that micro-batch.
    """
    total, last = len(data["x"]), stages - 1
    inputs: dict[tuple[int, int], np.ndarray] = {(0, m): np.float64(data["x"][m]) for m in range(total)}
    outputs: dict[tuple[int, int], np.ndarray] = {}
    wanted: dict[tuple[int, int], np.ndarray] = {}
    shared: dict[int, np.ndarray] = {}
    losses = np.zeros(data["y"].shape[:2])
    names = [f"w{0 if tied and stage == last else stage}" for stage in range(stages)]
    for cycle in range(total + 2 * last):
        for stage in range(stages):
            forward = cycle - stage
            if 0 <= forward < total:
                h = np.tanh(inputs[stage, forward] @ weights[names[stage]] + weights[f"b{stage}"])
                outputs[stage, forward] = inputs[stage + 1, forward] = h
                if stage == last:
                    chosen = np.eye(h.shape[-1])[data["y"][forward]]
                    p = np.exp(h) / np.exp(h).sum(-1, keepdims=True)
                    losses[forward] = -np.log((p * chosen).sum(-1)).mean(-1)
                    wanted[stage, forward] = (p - chosen) / h.shape[-2]
        for stage in reversed(range(stages)):
            w, b, backward = weights[names[stage]], weights[f"b{stage}"], cycle - 2 * last + stage
            if 0 <= backward < total:
                h = outputs[stage, backward]
                z = wanted[stage, backward] * (1 - h * h)
                wanted[stage - 1, backward] = z @ w.T
                gradient = np.einsum("rni,rnj->ij", inputs[stage, backward], z)
                if tied and stage == last:
                    shared[backward] = gradient
                else:
                    gradient += shared.get(backward, 0) if tied and stage == 0 else 0
                    weights[names[stage]] = w - rate * gradient
                weights[f"b{stage}"] = b - rate * z.sum((0, 1))
    return losses


@pytest.mark.slow
def test_stages_need_not_be_named_for_the_same_bits() -> None:
    plain = chain([0, 1, 2], stages=False, accumulation_factor=4, anchors=ANCHORS)
    named = chain([0, 1, 2], accumulation_factor=4, anchors=ANCHORS)
    assert_same_bits(plain, named)
    assert_same_bits(plain, replace(named, pipelined=True))
    assert_same_bits(plain, replace(plain, pipelined=True))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.sample(2)
def test_sharded_work_is_the_pipelined_work(replicas: int) -> None:
    """Equation for equation: a running mean reads its accumulator with the backward work, where XLA fuses both."""
    options: dict[str, Any] = {"accumulation_factor": 5, "reduction": Reduction.MEAN, "replicas": replicas}
    sharded = compile_program(chain([0, 1, 2], ipus=4, stages=False, **options)).computations
    pipelined = compile_program(chain([0, 1, 2], ipus=4, pipelined=True, **options)).computations
    assert {n: c.outputs for n, c in sharded.items()} == {n: c.outputs for n, c in pipelined.items()}
    assert {n: c.stablehlo for n, c in sharded.items()} == {n: c.stablehlo for n, c in pipelined.items()}


def test_inference_in_a_pipeline() -> None:
    more: dict[str, Any] = {"loss": None, "update": None, "anchors": (AnchorSpec("h2"), AnchorSpec("h0"))}
    program = chain([0, 1, 2], accumulation_factor=3, **more)
    pipelined = replace(program, pipelined=True)
    assert_same_bits(program, pipelined)
    _, found = run(pipelined, batches=1)
    x, weights = inputs_for(program, 1)["x"], weights_for(program)
    for i in range(3):
        x = np.tanh(x @ weights[f"w{i}"] + weights[f"b{i}"])
    np.testing.assert_allclose(found["h2"], x[0], rtol=1e-5, atol=1e-6)


def test_work_lies_on_its_ipu_and_backward_with_forward() -> None:
    executable = compile_program(chain([0, 1, 2], accumulation_factor=2))
    runs = [[i.computation for i in work if isinstance(i, Compute)] for work in executable.instructions]
    one = [["segment.0", "segment.4"], ["segment.1", "segment.3"], ["segment.2"], []]
    expected = [work * 2 for work in one]
    for ipu in range(3):
        expected[ipu] = [f"clear.{ipu}", *expected[ipu], f"update.{ipu}"]
    assert runs == expected
    homes = {v.spec.name: v.arena for v in executable.variables.values()}
    assert homes["w0"] == homes["b0"] == "weights.0"
    assert homes["w2"] == "weights.2"
    loads = [{i.stream for i in work if isinstance(i, LoadStream)} for work in executable.instructions]
    assert loads == [{"x"}, set(), {"y"}, set()]


def test_the_pipeline_fills_runs_full_and_flushes() -> None:
    executable = compile_program(chain([0, 1, 2], accumulation_factor=6, pipelined=True))
    first = [i.computation for i in executable.instructions[0] if isinstance(i, Compute)][1:-1]
    # Forward of five micro-batches before the first gradient is back; then one backward, one forward.
    forward, backward = "segment.0", "segment.4"
    assert first == [forward] * 4 + [backward, forward] * 2 + [backward] * 4
    last = [i.computation for i in executable.instructions[2] if isinstance(i, Compute)][1:-1]
    assert last == ["segment.2"] * 6
    slots = {
        i.destination for i in executable.instructions[0] if isinstance(i, Copy) and "#" in i.destination
    }
    assert {int(slot.split("#")[1]) for slot in slots} == set(range(5))


def test_only_activations_and_their_gradients_travel() -> None:
    executable = compile_program(chain([0, 1], accumulation_factor=2))
    for ipu, work in enumerate(executable.instructions):
        sends = [i for i in work if isinstance(i, Send)]
        assert len(sends) == 2  # One tensor for each of two micro-batches.
        assert {i.peer for i in sends} == {1 - ipu}


def test_refused_pipelines() -> None:
    with pytest.raises(UsageError, match="more than one IPU"):
        compile_program(chain([0], stages=False, pipelined=True, accumulation_factor=2))
    early: dict[str, Any] = {"updates_each_micro_batch": True, "accumulation_factor": 5}
    with pytest.raises(UsageError, match="more than one IPU"):
        compile_program(chain([0], stages=False, pipelined=True, **early))
    with pytest.raises(UsageError, match="only a pipelined program"):
        compile_program(chain([0, 1], **early))
    with pytest.raises(UnsupportedError, match="'w0' is read on IPUs 0, 1"):
        compile_program(chain([0, 1], tied=True, pipelined=True, **early))
    with pytest.raises(UnsupportedError, match="all weights at once"):
        compile_program(chain([0, 1], pipelined=True, update=Clipped(), **early))
    with pytest.raises(UsageError, match="no work in stage 0"):
        compile_program(
            replace(
                _placed(["stage:1", "stage:2"]), pipelined=True, accumulation_factor=2, ipus_per_replica=4
            )
        )
    with pytest.raises(UsageError, match="reads the result of a later stage"):
        compile_program(
            replace(
                _placed(["stage:1", "stage:0"]), pipelined=True, accumulation_factor=2, ipus_per_replica=2
            )
        )
    with pytest.raises(UsageError, match="stage 0 lies on IPU 0 and on IPU 1"):
        compile_program(replace(_placed(["ipu:0/stage:0", "ipu:1/stage:0"]), ipus_per_replica=2))


def _placed(scopes: list[str]) -> Program:
    """A product with w0 in the first scope, one with w1 and the loss in the second."""

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        with jax.named_scope(scopes[0]):
            x = inputs["x"] @ p["w0"]
        with jax.named_scope(scopes[1]):
            return {"loss": jnp.sum(x @ p["w1"])}

    plain = chain([0, 1])
    inputs = {"x": plain.inputs["x"]}
    parameters = {n: plain.parameters[n] for n in ("w0", "w1")}
    return replace(plain, forward=forward, inputs=inputs, parameters=parameters)


def test_a_seed_moves_on_with_each_micro_batch() -> None:
    program = chain([0, 1], dropout=True, accumulation_factor=3, pipelined=True)
    pod, _ = run(program, batches=2)
    np.testing.assert_array_equal(
        pod.read_variable(extra_state.SEED_VARIABLE), extra_state.seed_words(advanced(0, 6))
    )


@pytest.mark.parametrize("pipelined", [False, True], ids=["sharded", "pipelined"])
@pytest.mark.parametrize(
    "options",
    [
        {"tied": True, "replicas": 2, "update": Momentum()},
        slow({"replicas": 3, "dropout": True}),
        slow({"skip": True}),
        slow({"update": Adam(), "replicas": 2}),
        slow({"update": NormScaled(), "replicas": 2}),
        {"update": Clipped(), "replicas": 2},
    ],
    ids=str,
)
@pytest.mark.sample(3)
@pytest.mark.slow
def test_replicas_over_several_machines_give_the_same_bits(options: dict[str, Any], pipelined: bool) -> None:
    """The same three stages on IPUs 0, 1, 2 of one machine and on three of two, then four, machines."""
    more: dict[str, Any] = {**options, "accumulation_factor": 6, "pipelined": pipelined, "anchors": SPANNED}
    (pod, anchors) = run(chain([0, 1, 2], **more))
    for places, ipus, machines in (([0, 4, 5], 8, 2), ([1, 6, 12], 16, 4)):
        other, other_anchors = run(chain(places, ipus=ipus, **more))
        assert other.executable.layout.machines_per_replica == machines
        assert other.executable.layout.machines == machines * options.get("replicas", 1)
        for name, value in anchors.items():
            np.testing.assert_array_equal(other_anchors[name], value, err_msg=name)
        for name in pod.executable.variables:
            np.testing.assert_array_equal(other.read_variable(name), pod.read_variable(name), err_msg=name)


@pytest.mark.slow
def test_replicas_over_two_or_four_machines_give_the_bits_of_one() -> None:
    """The least of the many cases above: two other layouts, one micro-batch, no pipeline."""
    options: dict[str, Any] = {
        "replicas": 2,
        "update": Momentum(),
        "accumulation_factor": 1,
        "anchors": SPANNED,
    }
    one, anchors = run(chain([0, 1, 2], **options))
    for places, ipus, machines in (([0, 4, 5], 8, 2), ([1, 6, 12], 16, 4)):
        other, other_anchors = run(chain(places, ipus=ipus, **options))
        assert other.executable.layout.machines_per_replica == machines
        for name, value in anchors.items():
            np.testing.assert_array_equal(other_anchors[name], value, err_msg=name)
        for name in one.executable.variables:
            np.testing.assert_array_equal(other.read_variable(name), one.read_variable(name), err_msg=name)


def test_machines_of_a_replica_hold_only_their_weights() -> None:
    executable = compile_program(chain([0, 4, 5], ipus=8, accumulation_factor=2))
    positions = {m.name: a.position for a in executable.arenas.values() for m in a.members}
    assert {n: p for n, p in positions.items() if n.startswith("w")} == {"w0": 0, "w1": 1, "w2": 1}
    sizes = {a.size for a in executable.arenas.values()}
    assert sizes == {128}  # One replica, so one holder of each: w and b, each at a multiple of 64.


@pytest.mark.parametrize("pipelined", [False, True], ids=["sharded", "pipelined"])
@pytest.mark.sample(2)
def test_one_update_of_all_weights_together(pipelined: bool) -> None:
    program = chain([0, 1], replicas=4, accumulation_factor=2, update=Clipped(), pipelined=pipelined)
    pod, found = run(program, batches=1)
    assert found["loss"].shape == (2, 4)
    each = train(program, weights_for(program), inputs_for(program, 1)).gradients
    total = {n: sum(g[n] for micro in each for g in micro) for n in program.parameters}
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in total.values()))
    assert norm > 1
    for name, start in weights_for(program).items():
        np.testing.assert_allclose(
            pod.read_variable(name), start - 0.1 * total[name] / norm, rtol=1e-4, atol=1e-6
        )
