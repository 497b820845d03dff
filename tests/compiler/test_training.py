"""Training steps equal a plain program's, over layouts, rules and models; and gradients equal finite
differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.compiler.compile import CompileOptions, compile_program
from podrun.compiler.program import AnchorSpec, Program

from .oracle import train
from .programs import Adam, Momentum, NormScaled, Sgd, compiled, convolution, inputs_for, mlp, weights_for
from .reference_interpreter import Pod

BATCHES = 3


def run(
    program: Program, options: CompileOptions | None = None, batches: int = BATCHES
) -> tuple[Pod, dict[str, Any]]:
    pod = Pod(compiled(program) if options is None else compile_program(program, options=options))
    pod.write_variables(weights_for(program))
    return pod, pod.run(batches, inputs_for(program, batches))


def assert_equal_training(program: Program, options: CompileOptions | None = None) -> Pod:
    pod, anchors = run(program, options)
    expected = train(program, weights_for(program), inputs_for(program, BATCHES))
    np.testing.assert_allclose(anchors["loss"], expected.losses, rtol=2e-6, atol=1e-6)
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(pod.read_variable(name), weight, rtol=1e-5, atol=2e-6, err_msg=name)
    for weight, states in expected.states.items():
        for prefix, state in states.items():
            actual = pod.read_variable(prefix + weight)
            np.testing.assert_allclose(actual, state, rtol=1e-4, atol=1e-6, err_msg=prefix + weight)
    return pod


@pytest.mark.parametrize(
    "update", [Sgd(), Sgd(own_group=frozenset({"w1"})), Momentum(), Adam(), NormScaled()], ids=str
)
@pytest.mark.parametrize("replicas", [8, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.sample(3)
def test_every_update_rule_trains_as_the_reference(update: Any, replicas: int) -> None:
    assert_equal_training(mlp(replicas=replicas, accumulation_factor=2, update=update))


@pytest.mark.parametrize(("replicas", "ipus"), [(1, 1), (3, 1), (2, 4), (16, 1)])
@pytest.mark.sample(6)
def test_every_layout_of_replicas_trains_as_the_reference(replicas: int, ipus: int) -> None:
    pod = assert_equal_training(mlp(replicas=replicas, ipus_per_replica=ipus))
    assert pod.executable.layout.machines == max(1, replicas * ipus // 4)


@pytest.mark.parametrize("accumulation", [5, 6])
@pytest.mark.sample(2)
def test_accumulation_in_chunks(accumulation: int) -> None:
    program = mlp(replicas=2, accumulation_factor=accumulation)
    whole = compile_program(program)
    assert next(iter(whole.computations)) == f"micro_batches.{accumulation}"
    tight = CompileOptions(chunk_bytes=2000)
    assert "clear" in assert_equal_training(program, tight).executable.computations


def test_a_convolution_trains_as_the_reference() -> None:
    assert_equal_training(convolution(replicas=8, accumulation_factor=2))


def test_loss_scaling_multiplies_gradients_and_leaves_the_loss() -> None:
    anchors = (AnchorSpec("loss"), AnchorSpec("Gradient___w0"))
    program = mlp(replicas=2, loss_scaling=8.0, anchors=anchors)
    _, found = run(program)
    expected = train(program, weights_for(program), inputs_for(program, BATCHES))
    np.testing.assert_allclose(found["loss"], expected.losses, rtol=2e-6, atol=1e-6)
    gradients = [[g["w0"] for g in each] for each in expected.gradients]
    np.testing.assert_allclose(found["Gradient___w0"], gradients, rtol=1e-5, atol=1e-6)
    plain = train(mlp(replicas=2), weights_for(program), inputs_for(program, BATCHES))
    np.testing.assert_allclose(
        found["Gradient___w0"][0, 0], 8 * plain.gradients[0][0]["w0"], rtol=1e-5, atol=1e-6
    )


def test_streamed_loss_scaling() -> None:
    constant = mlp(loss_scaling=4.0, anchors=(AnchorSpec("Gradient___w0"),))
    streamed = mlp(loss_scaling="lossScaling_FLOAT", anchors=(AnchorSpec("Gradient___w0"),))
    _, expected = run(constant)
    pod = Pod(compile_program(streamed))
    assert pod.executable.variables["lossScaling_FLOAT"].initial is None
    pod.write_variables({**weights_for(streamed), "lossScaling_FLOAT": np.float32(4)})
    found = pod.run(BATCHES, inputs_for(streamed, BATCHES))
    np.testing.assert_array_equal(found["Gradient___w0"], expected["Gradient___w0"])


def test_half_precision_weights_accumulate_in_the_declared_type() -> None:
    program = mlp(dtype="float16", replicas=4, accumulation_factor=2, update=Sgd(accumulate_in="float32"))
    executable = compiled(program)
    assert {a.name: a.dtype for a in executable.arenas.values()} == {
        "weights.0": "float16",
        "gradients.0": "float32",
    }
    pod, anchors = run(program)
    expected = train(program, weights_for(program), inputs_for(program, BATCHES))
    np.testing.assert_allclose(
        anchors["loss"].astype(float), expected.losses.astype(float), rtol=1e-2, atol=1e-2
    )
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(
            pod.read_variable(name).astype(float), weight.astype(float), rtol=2e-2, atol=1e-2
        )


def test_gradients_equal_finite_differences() -> None:
    """Central differences of the loss in float64 NumPy: shares no line with JAX's differentiation."""
    program = mlp(replicas=2, anchors=(AnchorSpec("Gradient___w0"), AnchorSpec("Gradient___b1")))
    _, found = run(program, batches=1)
    weights, inputs = weights_for(program), inputs_for(program, 1)

    def loss(replica: int, changed: dict[str, np.ndarray]) -> float:
        p = {n: v.astype(np.float64) for n, v in weights.items()} | changed
        hidden = np.maximum(inputs["x"][0, 0, replica].astype(np.float64) @ p["w0"] + p["b0"], 0)
        logits = hidden @ p["w1"] + p["b1"]
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        labels = inputs["y"][0, 0, replica]
        return float(-logs[np.arange(len(labels)), labels].mean())

    for name in ("w0", "b1"):
        for replica in range(2):
            base = weights[name].astype(np.float64)
            expected = np.zeros_like(base)
            for index in np.ndindex(base.shape):
                step = np.zeros_like(base)
                step[index] = 1e-6
                up, down = loss(replica, {name: base + step}), loss(replica, {name: base - step})
                expected[index] = (up - down) / 2e-6
            np.testing.assert_allclose(
                found[f"Gradient___{name}"][0, replica], expected, rtol=1e-4, atol=1e-6
            )


LAYOUTS = st.fixed_dictionaries(
    {
        "layout": st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (12, 1), (4, 2), (2, 4)]),
        "accumulation": st.integers(1, 6),
        "budget": st.sampled_from([1, 4000, 1 << 20]),
        "sizes": st.lists(st.integers(1, 7), min_size=2, max_size=4),
        "batch": st.integers(1, 5),
        "update": st.sampled_from([Sgd(), Momentum()]),
    }
)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(drawn=LAYOUTS)
@pytest.mark.slow
def test_generated_layouts(drawn: dict[str, Any]) -> None:
    replicas, ipus = drawn["layout"]
    program = mlp(
        sizes=(*drawn["sizes"], 3),
        batch=drawn["batch"],
        update=drawn["update"],
        replicas=replicas,
        ipus_per_replica=ipus,
        accumulation_factor=drawn["accumulation"],
    )
    assert_equal_training(program, CompileOptions(chunk_bytes=drawn["budget"]))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(drawn=LAYOUTS)
def test_many_generated_layouts(drawn: dict[str, Any]) -> None:
    test_generated_layouts.hypothesis.inner_test(drawn)


def test_folding_gives_one_matrix_product_for_all_replicas() -> None:
    """16 replicas x 32 of 784-512-512-10 on four machines: 3 products forward, 3 + 2 backward, no batch
    axis."""
    program = mlp(sizes=(784, 512, 512, 10), batch=32, replicas=16)
    text = jax.export.deserialize(
        bytearray(compile_program(program).computations["micro_batches.1"].stablehlo)
    ).mlir_module()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 8
    assert not any("batching_dims" in line for line in products)


def test_a_loss_of_one_element_may_have_axes() -> None:
    program = mlp(replicas=2)

    def forward(p: Any, inputs: Any, key: Any) -> dict[str, Any]:
        values = program.forward(p, inputs, key)
        return values | {"loss": values["loss"].reshape(1, 1)}

    pod, _ = run(replace(program, forward=forward))
    expected, _ = run(program)
    for name in program.parameters:
        np.testing.assert_array_equal(pod.read_variable(name), expected.read_variable(name))
