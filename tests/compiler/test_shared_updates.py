"""Updates of state that all replicas share: machines share the work by slices, with the numbers of whole updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.compiler.compile import compile_program
from podrun.compiler.model_collectives import Combination, all_reduce
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program, tap
from podrun.core.executable import (
    AllReduce,
    Compute,
    Executable,
    ReduceScatter,
    StoreStream,
    TensorSpec,
    VariableRole,
)

from .programs import inputs_for
from .reference_interpreter import Pod
from .test_on_machines import on_machines

Values = Mapping[str, Any]
Update = Callable[[Values, Any, str], dict[str, Any]]
"""``update(values, gradient, weight) -> new values``; slots of the weight w are called w.m and w.v."""
REPLICAS = 8
SHAPES = {"a": (3, 4), "b": (4,), "c": (5, 4)}
SPECS = {
    name + suffix: TensorSpec(name + suffix, "float32", shape)
    for name, shape in SHAPES.items()
    for suffix in ("", ".m", ".v")
}
SCALARS = {name: TensorSpec(name, "float32", ()) for name in ("power1", "power2", "rate", "steps")}


def module(value: Any) -> Any:
    """The library of an array."""
    return np if isinstance(value, np.ndarray | np.generic) else jnp


def descent(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    return {w: values[w] - 0.125 * gradient}


def scheduled(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    """The rate falls with the number of steps, which every step changes."""
    rate = values["rate"] / (1 + values["steps"])
    return {w: values[w] - rate * gradient, "steps": values["steps"] + 1}


def momentum(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    moving = values[w + ".m"] * 0.9 + gradient
    return {w: values[w] - values["rate"] * moving, w + ".m": moving}


def adam(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    """As TensorFlow has it: powers of the decays are variables, which a step changes after its updates."""
    sqrt = module(gradient).sqrt
    alpha = values["rate"] * sqrt(1 - values["power2"]) / (1 - values["power1"])
    first = values[w + ".m"] + (gradient - values[w + ".m"]) * (1 - 0.9)
    second = values[w + ".v"] + (gradient * gradient - values[w + ".v"]) * (1 - 0.99)
    new = values[w] - first * alpha / (sqrt(second) + 1e-6)
    powers = {"power1": values["power1"] * 0.9, "power2": values["power2"] * 0.99}
    return {w: new, w + ".m": first, w + ".v": second, **powers}


def loss(p: Values, x: Any) -> Any:
    return jnp.sum(jnp.square(x @ p["a"] + p["b"])) + jnp.sum(jnp.square(p["c"])) * x.sum()


def step(
    update: Update,
    *,
    more: Callable[[Values, Values], Values] = lambda new, mean: {},
    replicas: int = REPLICAS,
    ipus_per_replica: int = 1,
) -> Program:
    """A step of all weights along the mean of all replicas' gradients. ``more``: values of the step besides."""
    everyone = (tuple(range(replicas)),)
    probe = {name: np.full(1, 0.5) for name in (*SPECS, *SCALARS)}
    written = set(update(probe, np.zeros(1), "a"))
    changed = {n for n in written if n in SCALARS}
    changed |= {w + n[1:] for w in SHAPES for n in written if n not in SCALARS}

    def forward(p: Values, inputs: Values, key: Any) -> dict[str, Any]:
        gradients = jax.grad(lambda weights: loss(weights, inputs["x"]))({n: p[n] for n in SHAPES})
        mean = {n: all_reduce(tap(f"d{n}", g), Combination.MEAN, everyone) for n, g in gradients.items()}
        new: dict[str, Any] = {}
        for name in SHAPES:
            new |= update(p, mean[name], name)
        values = {f"new {name}": new[name] for name in changed}
        return {**values, "out": inputs["x"] @ p["a"], **more(new, mean)}

    specs = SPECS | SCALARS
    return Program(
        name="step",
        forward=forward,
        parameters={name: ParameterSpec(spec, False) for name, spec in specs.items()},
        inputs={"x": InputSpec(TensorSpec("x", "float32", (2, 3)))},
        anchors=(
            AnchorSpec("out"),
            *(AnchorSpec(name) for name in more(probe, probe)),
        ),
        replicas=replicas,
        ipus_per_replica=ipus_per_replica,
        state_updates={name: f"new {name}" for name in changed},
        shared_state=frozenset(changed),
    )


def start() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    values = {
        name: draw.uniform(0.1, 1, spec.shape).astype(np.float32) for name, spec in (SPECS | SCALARS).items()
    }
    return values | {"power1": np.float32(0.9), "power2": np.float32(0.99), "steps": np.float32(2)}


def in_numpy(update: Update, x: np.ndarray, batches: int, replicas: int = REPLICAS) -> dict[str, np.ndarray]:
    """The variables after so many batches, in float64, with gradients by hand."""
    values: dict[str, Any] = {name: np.asarray(value, np.float64) for name, value in start().items()}
    for batch in range(batches):
        error = 2 * (x[batch, 0].astype(np.float64) @ values["a"] + values["b"])
        samples = x[batch, 0].astype(np.float64)
        mean = {
            "a": np.einsum("rni,rnj->ij", samples, error) / replicas,
            "b": error.sum((0, 1)) / replicas,
            "c": 2 * values["c"] * samples.sum() / replicas,
        }
        new: dict[str, Any] = {}
        for name in SHAPES:
            new |= update(values, mean[name], name)
        values |= new
    return values


def updates(executable: Executable) -> list[str]:
    return [i.arena for i in executable.instructions[0] if isinstance(i, ReduceScatter)]


def check_update(
    update: Update,
    arenas: list[str],
    *,
    batches: int = 2,
    replicas: int = REPLICAS,
    ipus_per_replica: int = 1,
) -> None:
    """Machines add up the gradients in these arenas, and train as NumPy does."""
    program = step(update, replicas=replicas, ipus_per_replica=ipus_per_replica)
    executable, x = compile_program(program), inputs_for(program, batches)
    assert updates(executable) == arenas
    _, variables = on_machines(executable, program, batches, start(), x)
    for name, expected in in_numpy(update, x["x"], batches, replicas).items():
        np.testing.assert_allclose(variables[name], expected, rtol=2e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("update", [descent, scheduled, momentum, adam])
@pytest.mark.sample(2)
def test_machines_update_slices(update: Update) -> None:
    program = step(update)
    executable, x = compile_program(program), inputs_for(program, 3)
    assert updates(executable) == ["gradients.0"]
    assert not any(isinstance(i, AllReduce) for i in executable.instructions[0])
    arenas = {executable.variables[name].arena for name in SHAPES}
    assert len(arenas) == 1
    assert executable.arenas[str(arenas.pop())].shared
    anchors, variables = on_machines(executable, program, 3, start(), x)
    pod = Pod(executable, as_machines=True)
    pod.write_variables(start())
    np.testing.assert_array_equal(anchors["out"][:, 0], pod.run(3, x)["out"])
    expected = in_numpy(update, x["x"], 3)
    for name in SPECS | SCALARS:
        np.testing.assert_array_equal(variables[name], pod.read_variable(name), err_msg=name)
        np.testing.assert_allclose(variables[name], expected[name], rtol=2e-5, atol=1e-5, err_msg=name)


def chosen(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    """JAX writes a choice as a call, whose other case is a number."""
    steep = module(gradient).where(gradient > 0.5, 0.5, gradient)
    return {w: values[w] - 0.125 * module(gradient).where(values[w] > 0, steep, 2 * steep)}


def limited(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    """A call with calls or conversions of its limits inside."""
    within = module(gradient).clip(gradient, -1, 1)
    moving = values[w + ".m"] * 0.9 + within
    return {w: values[w] - module(gradient).clip(moving, -0.25, 0.25), w + ".m": moving}


@jax.custom_jvp
def cube(x: Any) -> Any:
    """A function with a derivative of its own, as TensorFlow's powers."""
    return jnp.power(x, 3.0)


cube.defjvp(lambda x, slopes: (cube(*x), 3 * x[0] ** 2 * slopes[0]))


def cubed(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    return {w: values[w] - 0.125 * (gradient**3.0 if module(gradient) is np else cube(gradient))}


@jax.custom_jvp
def halved(x: Any, carrier: Any) -> Any:
    """A function with an argument for its slope alone, as TensorFlow's clips have."""
    return 0.5 * x


halved.defjvp(lambda x, slopes: (halved(*x), slopes[1]))


def unread(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    return {
        w: values[w] - 0.125 * (0.5 * gradient if module(gradient) is np else halved(gradient, 2 * gradient))
    }


@pytest.mark.parametrize("update", [chosen, limited, cubed, unread])
def test_what_jax_writes_as_calls_is_updated_by_slices(update: Update) -> None:
    check_update(update, ["gradients.0"])


def test_numbers_that_weights_compute_alike_are_one() -> None:
    executable = compile_program(step(adam))
    computed = [v for v in executable.variables.values() if v.role is VariableRole.COMPUTED]
    assert len(computed) == 1  # The rate with its corrections.
    assert len([c for c in executable.computations if c.startswith("update")]) == 1


def test_slots_that_nothing_else_reads_stay_with_their_machines() -> None:
    executable = compile_program(step(momentum))
    held = {name: executable.arenas[str(executable.variables[name].arena)] for name in ("a", "a.m")}
    assert (held["a"].sliced, held["a.m"].sliced) == (False, True)
    assert [member.offset for member in held["a"].members] == [
        member.offset for member in held["a.m"].members
    ]


def test_the_host_sees_the_weights_of_before_in_what_a_batch_gives() -> None:
    """Updates come after everything that a batch hands over."""
    work = compile_program(step(descent)).instructions[0]
    assert max(i for i, x in enumerate(work) if isinstance(x, StoreStream)) < min(
        i for i, x in enumerate(work) if isinstance(x, ReduceScatter)
    )
    assert isinstance(work[-2], Compute)


def test_updates_of_different_kinds_have_arenas_of_their_own() -> None:
    def mixed(values: Values, gradient: Any, w: str) -> dict[str, Any]:
        return {w: values[w] - (0.25 if w == "b" else 0.125) * gradient}

    check_update(mixed, ["gradients.0", "gradients.1"])


def test_a_slot_may_have_another_shape_than_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(values: Values, gradient: Any, w: str) -> dict[str, Any]:
        moving = values[w + ".m"] * 0.5 + gradient.reshape(values[w + ".m"].shape)
        return {w: values[w] - 0.25 * moving.reshape(gradient.shape), w + ".m": moving}

    for name, shape in SHAPES.items():
        slot = TensorSpec(name + ".m", "float32", (math.prod(shape),))
        monkeypatch.setitem(SPECS, slot.name, slot)
    check_update(flat, ["gradients.0"])


def test_values_that_are_read_again_and_again_are_looked_at_once() -> None:
    """Each line reads the one before twice: as many ways as 2 to the power of lines."""

    def nested(values: Values, gradient: Any, w: str) -> dict[str, Any]:
        value = gradient
        for _ in range(60):
            value = value * (0.5 - value)
        return {w: values[w] - 0.125 * value}

    assert updates(compile_program(step(nested))) == ["gradients.0"]


@pytest.mark.parametrize(("replicas", "ipus"), [(2, 4), (2, 8)])
def test_machines_with_one_replica_update_slices(replicas: int, ipus: int) -> None:
    """There the axis of replicas has one entry, of which nothing is cut."""
    check_update(momentum, ["gradients.0"], replicas=replicas, ipus_per_replica=ipus)


def test_a_number_may_be_the_end_of_a_long_chain() -> None:
    def slow(values: Values, gradient: Any, w: str) -> dict[str, Any]:
        rate = values["rate"]
        for _ in range(400):
            rate = rate * 0.999
        return {w: values[w] - rate * gradient}

    assert updates(compile_program(step(slow))) == ["gradients.0"]


def clipped(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    norm = module(gradient).sqrt((gradient * gradient).sum())
    return {w: values[w] - 0.125 * gradient / (1 + norm)}


def crossed(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    """The new value of an element reads another one's."""
    return {w: values[w][..., ::-1] - 0.125 * gradient}


@pytest.mark.parametrize("update", [clipped, crossed])
def test_what_is_no_arithmetic_on_each_element_is_updated_whole(update: Update) -> None:
    check_update(update, [])


def test_a_gradient_or_new_weight_that_something_else_reads_is_whole_everywhere() -> None:
    program = step(descent, more=lambda new, mean: {"seen": new["b"], "slope": mean["a"]})
    executable, x = compile_program(program), inputs_for(program, 2)
    assert [member.name for member in executable.arenas["gradients.0"].members] == ["gradient:c"]
    anchors, variables = on_machines(executable, program, 2, start(), x)
    expected = in_numpy(descent, x["x"], 2)
    for name in SHAPES:
        np.testing.assert_allclose(variables[name], expected[name], rtol=2e-5, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(anchors["seen"].reshape(2, REPLICAS, 4)[-1, 3], variables["b"])


def adagrad(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    """Divides by the root of a sum that is 0 in padding."""
    total = values[w + ".v"] + gradient * gradient
    return {w: values[w] - 0.125 * gradient / module(total).sqrt(total), w + ".v": total}


def powered(values: Values, gradient: Any, w: str) -> dict[str, Any]:
    """The power is negative or not as the rate is."""
    total = values[w + ".v"] + gradient * gradient
    return {w: values[w] - 0.125 * total ** -values["rate"], w + ".v": total}


@pytest.mark.parametrize("update", [adagrad, powered])
def test_padding_that_would_not_stay_finite_keeps_updates_whole(update: Update) -> None:
    """Tiles may stop at a NaN."""
    assert updates(compile_program(step(update))) == []


def test_an_update_may_choose_among_three() -> None:
    def graded(values: Values, gradient: Any, w: str) -> dict[str, Any]:
        cases = (gradient, 0.5 * gradient, 0 * gradient)
        if module(gradient) is np:
            return {w: values[w] - 0.125 * np.choose((values[w] > 0.3) * 1 + (values[w] > 0.6), cases)}
        which = (values[w] > 0.3).astype("int32") + (values[w] > 0.6).astype("int32")
        return {w: values[w] - 0.125 * jax.lax.select_n(which, *cases)}

    check_update(graded, ["gradients.0"], batches=1)


def test_a_statistic_that_no_step_reads_sums_what_each_batch_gives() -> None:
    """Nothing gathers it: a machine that went on to the next batch would overwrite what another one still adds up."""
    everyone = (tuple(range(REPLICAS)),)
    spec = TensorSpec("m", "float32", (3,))

    def forward(p: Values, inputs: Values, key: Any) -> dict[str, Any]:
        mean = all_reduce(tap("dm", inputs["x"].mean(0)), Combination.MEAN, everyone)
        return {"new m": p["m"] * 0.875 + mean * 0.125, "out": inputs["x"].sum()}

    program = Program(
        name="statistic",
        forward=forward,
        parameters={"m": ParameterSpec(spec, False)},
        inputs={"x": InputSpec(TensorSpec("x", "float32", (2, 3)))},
        anchors=(AnchorSpec("out"),),
        replicas=REPLICAS,
        state_updates={"m": "new m"},
        shared_state=frozenset({"m"}),
    )
    executable, x = compile_program(program), inputs_for(program, 50)
    assert executable.arenas[str(executable.variables["m"].arena)].sliced
    _, variables = on_machines(executable, program, 50, {"m": np.ones(3, np.float32)}, x)
    expected = np.ones(3)
    for batch in x["x"].astype(np.float64):
        expected = expected * 0.875 + batch.reshape(-1, 3).mean(0) * 0.125
    np.testing.assert_allclose(variables["m"], expected, rtol=2e-5, atol=1e-6)
