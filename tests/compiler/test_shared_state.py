"""State that all replicas write alike: one copy on a machine, and one product over the samples of its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.compiler.collective_cuts import cut_at_exchanges
from podrun.compiler.compile import compile_program
from podrun.compiler.export import TracedPiece
from podrun.compiler.jaxprs import buffer
from podrun.compiler.model_collectives import Combination, all_reduce, total_p
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program, tap
from podrun.core.errors import UsageError
from podrun.core.executable import TensorSpec
from podrun.core.layout import Layout

from .programs import inputs_for
from .reference_interpreter import Pod
from .test_on_machines import on_machines

START = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "seen": np.zeros(3, np.float32)}


def step(replicas: int, dtype: str = "float32", **more: Any) -> Program:
    """Descent along the mean of all replicas' gradients, and a sum of each replica's own samples."""
    everyone = (tuple(range(replicas)),)

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        x = inputs["x"]
        gradient = jax.grad(lambda w: jnp.sum(jnp.square(x @ w)).astype(jnp.float32))(p["w"])
        mean = all_reduce(tap("gradient", gradient), Combination.MEAN, everyone)
        return {
            "new": p["w"] - 0.01 * mean,
            "seen": p["seen"] + x.sum(0).astype(jnp.float32),
            "out": x @ p["w"],
        }

    return Program(
        name="step",
        forward=forward,
        parameters={
            "w": ParameterSpec(TensorSpec("w", dtype, (3, 2)), False),
            "seen": ParameterSpec(TensorSpec("seen", "float32", (3,)), False),
        },
        inputs={"x": InputSpec(TensorSpec("x", dtype, (4, 3)))},
        anchors=(AnchorSpec("out"), AnchorSpec("w")),
        replicas=replicas,
        state_updates={"w": "new", "seen": "seen"},
        **more,
    )


@pytest.mark.parametrize(
    ("replicas", "dtype"), [(1, "float32"), (2, "float32"), (8, "float32"), (8, "float16")]
)
def test_one_copy_has_the_values_of_all(replicas: int, dtype: str) -> None:
    start = {name: value.astype(dtype if name == "w" else "float32") for name, value in START.items()}
    found = []
    for shared in (frozenset[str](), frozenset({"w"})):
        program = step(replicas, dtype, shared_state=shared)
        pod = Pod(compile_program(program))
        pod.write_variables(start)
        found.append(pod.run(2, inputs_for(program, 2)) | {n: pod.read_variable(n) for n in START})
        assert pod.executable.variables["w"].per_replica is not bool(shared)
    assert np.ptp(found[1]["w"] - start["w"]) > 0
    for name, value in found[0].items():
        np.testing.assert_allclose(
            found[1][name], value, rtol=2e-6 if dtype == "float32" else 2e-3, err_msg=name
        )


def test_machines_equal_the_reference_to_the_bit() -> None:
    program = step(8, shared_state=frozenset({"w"}))
    executable, x = compile_program(program), inputs_for(program, 3)
    anchors, variables = on_machines(executable, program, 3, START, x)
    pod = Pod(executable, as_machines=True)
    pod.write_variables(START)
    for name, expected in pod.run(3, x).items():
        np.testing.assert_array_equal(anchors[name].reshape(np.shape(expected)), expected, err_msg=name)
    np.testing.assert_array_equal(variables["w"], pod.read_variable("w"))


@pytest.mark.parametrize("turned", [False, True])
def test_products_are_summed_in_one(turned: bool) -> None:
    """Four replicas' products over 5 samples are one product over 20."""

    def products(a: Any, b: Any) -> Any:
        each = tap("gradient", jnp.einsum("rni,rnj->rji" if turned else "rni,rnj->rij", a, b))
        return total_p.bind(each, kind=None, groups=((0, 1, 2, 3),))

    shapes = [buffer((4, 5, n), "float32") for n in (3, 2)]
    piece = TracedPiece("piece", jax.make_jaxpr(products)(*shapes), ("a", "b"), ("sum",))
    closed = cut_at_exchanges(piece, Layout.of(4, 1)).pieces[0].jaxpr
    dots = [e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [len(e.params["dimension_numbers"][0][0]) for e in dots] == [2]
    a, b = (np.random.default_rng(n).normal(size=(4, 5, n)).astype(np.float32) for n in (3, 2))
    expected = np.einsum("rni,rnj->ij", a, b)
    (total,) = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, a, b)
    np.testing.assert_allclose(total, expected.T if turned else expected, rtol=1e-5, atol=1e-6)


def test_what_rounds_at_random_is_not_shared() -> None:
    program = step(2, shared_state=frozenset({"w"}), rounds_stochastically=True)
    with pytest.raises(UsageError, match="'w' is state that replicas share"):
        compile_program(program)
