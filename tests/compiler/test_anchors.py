"""Anchors: values, gradients and variables for each replica and micro-batch, and how they come back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.compiler.compile import CompileOptions, compile_program
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program, tap
from podrun.core.errors import UnimplementedError, UsageError
from podrun.core.executable import Retrieval, StoreStream, TensorSpec

from .oracle import train
from .programs import RATE, Momentum, Sgd, inputs_for, mlp, weights_for
from .reference_interpreter import Pod

TIGHT = CompileOptions(chunk_bytes=1)


def anchored(names: list[str], **more: object) -> Program:
    return mlp(anchors=[AnchorSpec(name) for name in names], **more)


def run(
    program: Program, batches: int = 2, options: CompileOptions | None = None
) -> tuple[Pod, dict[str, np.ndarray]]:
    pod = Pod(compile_program(program, options=options))
    pod.write_variables(weights_for(program))
    return pod, pod.run(batches, inputs_for(program, batches))


def test_gradients_of_weights_activations_and_inputs_are_per_replica_and_micro_batch() -> None:
    names = ["Gradient___w0", "Gradient___h0", "Gradient___x"]
    program = anchored(names, replicas=8, accumulation_factor=3)
    _, found = run(program, batches=1)
    weights, inputs = weights_for(program), inputs_for(program, 1)

    @jax.jit
    @jax.grad
    def slope(h0: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.nn.relu(h0) @ weights["w1"] + weights["b1"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))

    for micro in range(3):
        for replica in range(8):
            x, y = inputs["x"][0, micro, replica], inputs["y"][0, micro, replica]
            of_h0 = slope(x @ weights["w0"] + weights["b0"], y)
            expected = {
                "Gradient___w0": x.T @ of_h0,
                "Gradient___h0": of_h0,
                "Gradient___x": of_h0 @ weights["w0"].T,
            }
            for name, value in expected.items():
                np.testing.assert_allclose(
                    found[name][micro, replica], value, rtol=1e-4, atol=1e-6, err_msg=name
                )


@pytest.mark.slow
def test_anchoring_gradients_leaves_the_training_alone() -> None:
    plain, _ = run(mlp(replicas=8, accumulation_factor=2))
    watched, _ = run(anchored(["Gradient___w0", "Gradient___h0", "w1"], replicas=8, accumulation_factor=2))
    for name in ("w0", "b0", "w1", "b1"):
        np.testing.assert_allclose(
            plain.read_variable(name), watched.read_variable(name), rtol=1e-5, atol=1e-6
        )


def test_a_tapped_identity_has_a_gradient_of_its_own() -> None:
    """y = identity(x); loss = sum(y) + 2 sum(x): the gradient of y is 1, that of x is 3."""

    def forward(p: dict, inputs: dict, key: object) -> dict:
        x = tap("x1", inputs["x"] * p["w"])
        y = tap("y", x)
        return {"x1": x, "y": y, "loss": jnp.sum(y) + 2 * jnp.sum(x)}

    program = Program(
        name="identity",
        forward=forward,
        parameters={"w": ParameterSpec(TensorSpec("w", "float32", ()), True)},
        inputs={"x": InputSpec(TensorSpec("x", "float32", (2,)))},
        anchors=(AnchorSpec("Gradient___x1"), AnchorSpec("Gradient___y")),
        loss="loss",
        update=Sgd(),
    )
    _, found = run(program, batches=1)
    np.testing.assert_array_equal(found["Gradient___x1"].ravel(), [3, 3])
    np.testing.assert_array_equal(found["Gradient___y"].ravel(), [1, 1])


def test_variables_show_what_the_micro_batch_used_and_updated_what_came_of_it() -> None:
    names = ["w0", "Accl___w0", "UpdatedVar___w0"]
    program = anchored(names, replicas=2, update=Momentum())
    pod, found = run(program, batches=3)
    assert found["w0"].shape == (3, 2, 6, 5)
    np.testing.assert_array_equal(found["w0"][0, 0], weights_for(program)["w0"])
    np.testing.assert_array_equal(found["UpdatedVar___w0"][:-1], found["w0"][1:])
    np.testing.assert_array_equal(found["UpdatedVar___w0"][-1, 0], pod.read_variable("w0"))
    step = np.float32(0.1) * pod.read_variable("Accl___w0")
    np.testing.assert_allclose(found["w0"][-1, 0] - step, pod.read_variable("w0"), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(found["Accl___w0"][0], np.zeros((2, 6, 5)))


def test_anchored_optimizer_state_is_whole_on_every_machine() -> None:
    program = anchored(["Accl___w0"], replicas=8, update=Momentum())
    pod, found = run(program, batches=3)
    assert not pod.executable.arenas["state.0.Accl___"].sliced
    one = Pod(compile_program(anchored([], replicas=8, update=Momentum())))
    one.write_variables(weights_for(program))
    one.run(2, {name: values[:2] for name, values in inputs_for(program, 3).items()})
    for replica in range(8):
        np.testing.assert_allclose(found["Accl___w0"][2, replica], one.read_variable("Accl___w0"), rtol=1e-5)


def test_streamed_scalars_can_be_anchored() -> None:
    _, found = run(anchored([RATE], replicas=2))
    np.testing.assert_array_equal(found[RATE], np.full((2, 2), 0.1, np.float32))


@pytest.mark.parametrize("options", [None, TIGHT], ids=["one chunk", "single micro-batches"])
@pytest.mark.sample(2)
def test_each_retrieval_gives_its_part_of_all_values(options: CompileOptions | None) -> None:
    anchors = [AnchorSpec("loss"), AnchorSpec("h0", Retrieval.FINAL), AnchorSpec("h1", Retrieval.SUM)]
    program = mlp(
        replicas=2, accumulation_factor=4, anchors=[*anchors, AnchorSpec("logits", Retrieval.EVERY_N, 2)]
    )
    everything = anchored(["loss", "h0", "h1", "logits"], replicas=2, accumulation_factor=4)
    _, found = run(program, options=options)
    _, all_of = run(everything, options=options)
    np.testing.assert_array_equal(found["loss"], all_of["loss"])
    np.testing.assert_array_equal(found["h0"], all_of["h0"][-1])
    np.testing.assert_allclose(found["h1"], all_of["h1"].sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["logits"], all_of["logits"][1::2])


def test_final_stores_only_what_can_be_last() -> None:
    program = mlp(accumulation_factor=4, anchors=[AnchorSpec("h0", Retrieval.FINAL), AnchorSpec("h1")])
    executable = compile_program(program, options=TIGHT)
    stores = [i for i in executable.instructions[0] if isinstance(i, StoreStream)]
    assert [(s.stream, s.first) for s in stores if s.stream == "h0"] == [("h0", 3)]
    assert [s.first for s in stores if s.stream == "h1"] == [0, 1, 2, 3]


def test_inference_gives_forward_values() -> None:
    program = mlp(loss=None, anchors=[AnchorSpec("logits")], replicas=8)
    pod, found = run(program)
    weights, inputs = weights_for(program), inputs_for(program, 2)
    hidden = np.maximum(inputs["x"][:, 0] @ weights["w0"] + weights["b0"], 0)
    np.testing.assert_allclose(found["logits"], hidden @ weights["w1"] + weights["b1"], rtol=1e-5, atol=1e-5)
    assert not pod.executable.training
    assert set(pod.executable.arenas) == {"constants.float32"}


def test_anchoring_a_loss_equals_the_plain_program() -> None:
    program = mlp(replicas=4)
    _, found = run(program)
    expected = train(program, weights_for(program), inputs_for(program, 2))
    np.testing.assert_allclose(found["loss"], expected.losses, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("anchor", "kind", "message"),
    [
        (AnchorSpec("logit"), UsageError, "no tensor of the program is called 'logit'"),
        (AnchorSpec("Gradient___y"), UsageError, "the loss does not depend on 'y'"),
        (AnchorSpec("Gradient___nothing"), UsageError, "'nothing'"),
        (AnchorSpec("UpdatedVar___h0"), UsageError, "no weight"),
        (AnchorSpec("h0", Retrieval.EVERY_N, 0), UsageError, "period 0"),
        (AnchorSpec("FinalReducedGradient___h0"), UsageError, "no weight"),
        (AnchorSpec("GlobalNorm___0"), UsageError, "nothing is clipped"),
        (AnchorSpec("x"), UnimplementedError, "'x'"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_anchors_that_cannot_come_back_are_refused(
    anchor: AnchorSpec, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        compile_program(mlp(anchors=[anchor]))
    assert not hasattr(caught.value, "__notes__")
    if anchor.name == "logit":
        assert "logits" in str(caught.value.hint)


def test_an_anchor_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="anchored twice: loss"):
        compile_program(anchored(["loss", "loss"]))


def test_updated_weights_of_accumulating_programs_come_back_once_a_batch() -> None:
    with pytest.raises(UnimplementedError, match="only FINAL"):
        compile_program(anchored(["UpdatedVar___w0"], accumulation_factor=2))
    program = mlp(anchors=[AnchorSpec("UpdatedVar___w0", Retrieval.FINAL)], accumulation_factor=2)
    pod, found = run(program)
    np.testing.assert_array_equal(found["UpdatedVar___w0"][0], pod.read_variable("w0"))
