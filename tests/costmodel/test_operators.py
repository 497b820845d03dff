"""Operators of the front end priced in the library's form: how traces are replaced, and which traces stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import onnx
import pytest

from podrun import models
from podrun.core.executable import numpy_dtype
from podrun.costmodel.cost import cost_jaxpr
from podrun.costmodel.equations import FlatJaxpr
from podrun.costmodel.flatten import flatten_jaxpr
from podrun.costmodel.operator_runs import place_of
from podrun.costmodel.schedule import make_schedule
from podrun.costmodel.settings import PlanOptions
from podrun.costmodel.target import GC200
from podrun.models.catalogue import Built, finished, lstm_network
from podrun.models.network import Network
from podrun.onnx_models.lowering import lower
from podrun.popart.building.builder import Builder


def traced(built: Built, *, train: bool) -> Any:
    """The jaxpr of a built network's forward, or of its gradient."""
    lowered = lower(onnx.load_from_string(built.model), training=train)
    given = {n: jax.ShapeDtypeStruct(s.shape, numpy_dtype(s.dtype)) for n, s in lowered.inputs.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    weights = {n: given[n] for n in built.weights if n in given}
    rest = {n: s for n, s in given.items() if n not in weights}

    def forward(weights: Any, rest: Any, key: Any) -> Any:
        return lowered.forward({}, {**weights, **rest}, key)[built.output]

    def loss(weights: Any, rest: Any, key: Any) -> Any:
        return jnp.sum(forward(weights, rest, key))

    return jax.make_jaxpr(jax.grad(loss) if train else forward)(weights, rest, key)


def primitives(flat: FlatJaxpr, kind: str) -> Counter[str]:
    """Primitives of the equations that stand in operators of one kind."""
    found: Counter[str] = Counter()
    for equation in flat.equations:
        place = place_of(equation.scope)
        if place is not None and place.kind == kind:
            found[equation.primitive] += 1
    return found


@pytest.fixture(scope="module")
def resnet() -> FlatJaxpr:
    return flatten_jaxpr(traced(models.build("resnet18", batch=2, size=64, train=True), train=True))


def test_convolutions_are_three_products_each(resnet: FlatJaxpr) -> None:
    # Twenty convolutions; the first has no gradient of its input.
    found = primitives(resnet, "Conv")
    assert found["product"] == 3 * 20 - 1
    assert set(found) <= {"product", "add_any"}


def test_nothing_large_is_wider_than_a_half(resnet: FlatJaxpr) -> None:
    wide = [
        (e.primitive, e.scope)
        for e in resnet.equations
        for t in e.results
        if t.dtype == "float32" and t.size > 1000 and place_of(e.scope)
    ]
    assert wide == []


def test_a_normalisation_keeps_nothing_of_its_inputs_size(resnet: FlatJaxpr) -> None:
    """Its gradient whitens the input again; the trace itself keeps two or three."""
    norms = [e for e in resnet.equations if "BatchNorm" in e.scope]
    made = {n: e for e in norms if "transpose(" not in e.scope for n in e.outputs}
    kept = {n for e in norms if "transpose(" in e.scope for n in e.inputs if n in made}
    assert len(kept) == 2 * 20  # Mean with power, and deviation.
    assert all(resnet.tensors[n].size <= 512 for n in kept)


@pytest.mark.parametrize(("norm", "passes"), [("batch", 2), ("group", 4)])
def test_a_normalisation_takes_the_librarys_passes(norm: str, passes: int) -> None:
    """``poplin/Norms.cpp``: both statistics by one reduction, a pass over all values for each vector. The gradient
    whitens (2), scales, weighs, copies, corrects (4), scales, and weighs again for the parameters."""
    net = Network(Builder(), models.Declared("float16"), train=True, norm=norm)
    x = net.input("x", (4, 32, 8, 8))
    y = net.normalise(x, "norm")
    lowered = lower(onnx.load_from_string(finished(net, (x,), y).model), training=True)
    given = {n: jax.ShapeDtypeStruct(s.shape, numpy_dtype(s.dtype)) for n, s in lowered.inputs.items()}
    pulled = jax.grad(lambda g: jnp.sum(lowered.forward({}, g, jax.random.key(0))[y] ** 2))
    flat = flatten_jaxpr(jax.make_jaxpr(pulled)(given))
    steps = make_schedule(GC200, flat, PlanOptions())
    for backward, sums, large in ((False, 1, passes), (True, 2, 10)):
        mine = [s for s in steps if "Normalization" in s.scope and ("transpose(" in s.scope) is backward]
        assert sum(s.primitive == "reduce_sum" for s in mine) == sums
        whole = [
            s for s in mine if s.primitive == "chain" and max(flat.tensors[n].size for n in s.writes) == 8192
        ]
        assert len(whole) == large


def test_pools_and_nonlinearities_are_one_vertex_each_way(resnet: FlatJaxpr) -> None:
    assert primitives(resnet, "MaxPool") == {"reduce_window_max": 1, "select_and_scatter_add": 1}
    relu = primitives(resnet, "Relu")
    assert relu["relu"] == relu["nonlinear_grad"] == 17
    assert "select_n" not in relu


def test_every_value_that_is_read_is_made(resnet: FlatJaxpr) -> None:
    made = {*resnet.arguments, *resnet.constants}
    for equation in resnet.equations:
        assert all(n is None or n in made for n in equation.inputs), equation
        made.update(equation.outputs)
    assert set(resnet.results) <= made


def test_depthwise_convolutions_are_products_of_many_groups() -> None:
    flat = flatten_jaxpr(traced(models.build("mobilenet_v1", batch=1, size=64), train=False))
    groups = [e.params["groups"] for e in flat.equations if e.primitive == "product"]
    assert groups.count(1) == 14
    assert sum(1 for g in groups if g > 1) == 13
    assert set(primitives(flat, "Conv")) == {"product"}


def test_a_recurrent_loop_runs_in_halves() -> None:
    report = cost_jaxpr(traced(lstm_network(32, 5, 1, 512), train=True), "gc200")
    single = cost_jaxpr(
        traced(lstm_network(32, 5, 1, 512, weights=models.Declared("float32")), train=True), "gc200"
    )
    flat = flatten_jaxpr(traced(lstm_network(4, 5, 1, 64), train=True))
    bodies = [body for e in flat.equations for body in e.bodies]
    assert bodies
    assert not [t for body in bodies for e in body.equations for t in e.results if t.dtype == "float32"]
    assert report["step"]["cycles"] < single["step"]["cycles"]


RECURRENT = [
    ("lstm", 4, "forward"),
    ("gru", 3, "forward"),
    ("rnn", 1, "forward"),
    ("gru", 3, "bidirectional"),
]


@pytest.mark.parametrize(("kind", "gates", "direction"), RECURRENT)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.sample(2)
def test_recurrent_operators_do_everything_a_step_at_a_time(
    kind: str, gates: int, direction: str, train: bool
) -> None:
    """One product of input and state with all gates' weights a step; in training its gradient, and one that
    is added to the weights' gradient.
    """
    steps, batch, inputs, hidden = 6, 8, 48, 32
    ways = 2 if direction == "bidirectional" else 1
    net = Network(Builder(), models.Declared("float16"), train=train)
    x = net.input("x", (steps, batch, inputs))
    w = net.weight("w", (ways, gates * hidden, inputs))
    r = net.weight("r", (ways, gates * hidden, hidden))
    operator = getattr(net.builder.aiOnnx, kind)
    y = str(operator([x, w, r], 2, direction=direction, hidden_size=hidden)[0])
    flat = flatten_jaxpr(traced(finished(net, (x,), y), train=train))
    loops = [e for e in flat.equations if e.primitive == "scan"]
    assert len(loops) == ways * (3 if train else 1)
    assert {e.params["length"] for e in loops} == {steps}
    products = [b.params for e in loops for b in e.bodies[0].equations if b.primitive == "product"]
    sizes = {(p["m"], p["k"], p["n"]) for p in products}
    wide, every = inputs + hidden, gates * hidden
    forward, backward = (every, wide, batch), (wide, every, batch)
    expected = {forward, backward, (max(every, wide), batch, min(every, wide))} if train else {forward}
    assert sizes == expected
    assert "dot_general" not in {e.primitive for e in flat.equations}


def test_training_an_lstm_keeps_what_the_library_keeps() -> None:
    """Six values and the output of each step, not what the derivative of each equation would read."""
    flat = flatten_jaxpr(traced(lstm_network(4, 5, 1, 64), train=True))
    forward = next(e for e in flat.equations if e.primitive == "scan")
    assert max(t.size for t in forward.results) == 6 * 5 * 4 * 64


def test_memory_of_a_recurrent_loop_does_not_grow_with_its_steps_beyond_what_it_keeps() -> None:
    def temporary(steps: int) -> int:
        report = cost_jaxpr(traced(lstm_network(16, steps, 1, 256), train=True), "gc200")
        return int(report["memory"]["temporary_bytes"])

    assert temporary(40) == temporary(10)


def test_an_explicit_cast_keeps_its_type() -> None:
    net = Network(Builder(), models.Declared("float16"))
    x = net.input("x", (64, 64))
    wide = str(net.builder.aiOnnx.cast([x], "FLOAT"))
    y = net.matmul(wide, wide)
    flat = flatten_jaxpr(traced(finished(net, (x,), y), train=False))
    (product,) = [e for e in flat.equations if e.primitive == "dot_general"]
    assert {t.dtype for t in (*product.operands, *product.results)} == {"float32"}


def test_a_trace_without_operators_is_left_alone() -> None:
    def step(x: Any) -> Any:
        return jnp.sum(x.astype(jnp.float32) * 2.0)

    flat = flatten_jaxpr(jax.make_jaxpr(step)(jnp.ones((8, 8), jnp.float16)))
    assert [e.primitive for e in flat.equations][:2] == ["convert_element_type", "mul"]
    assert flat.equations[1].results[0].dtype == "float32"


def test_places_are_read_from_wrapped_scopes() -> None:
    place = place_of("transpose(jvp(layer0/attention/softmax/Softmax:0/2))")
    assert place is not None
    assert (place.label, place.kind, place.backward) == (
        "layer0/attention/softmax/Softmax:0/2",
        "Softmax",
        True,
    )
    forward = place_of("jvp(ipu:1/stage0/Conv:0)")
    assert forward is not None
    assert (forward.kind, forward.backward) == ("Conv", False)
    assert place_of("embedding/sum") is None


def test_products_in_a_loop_keep_to_the_loops_share_of_memory() -> None:
    def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    def looped(x: jax.Array, ws: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return jax.lax.scan(turn, x, ws)[0]

    flat = flatten_jaxpr(jax.make_jaxpr(looped)(jnp.zeros((256, 512)), jnp.zeros((3, 512, 512))))
    most = {
        share: max(
            step.plan.temporary_bytes
            for step in make_schedule(GC200, flat, PlanOptions(proportions=(("layer", share),)))
        )
        for share in (0.6, 0.001)
    }
    assert most[0.001] < most[0.6]
