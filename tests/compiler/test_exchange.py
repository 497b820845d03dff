"""Collectives inside a model: within a machine and over several, forward and backward, against NumPy."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podrun.compiler import extra_state
from podrun.compiler.compile import CompileOptions, compile_program, model_program
from podrun.compiler.model_collectives import Combination, all_gather, all_reduce, reduce_scatter
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program, tap
from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.executable import AllGather, TensorSpec
from podrun.core.layout import GroupKind, replica_groups

from .oracle import advanced
from .programs import Momentum, Sgd
from .reference_interpreter import Pod
from .test_on_machines import on_machines

SHAPE = (3, 5)
GROUPS = {
    "all": lambda replicas: replica_groups(replicas, GroupKind.ALL),
    "consecutive": lambda replicas: replica_groups(replicas, GroupKind.CONSECUTIVE, 2),
    "orthogonal": lambda replicas: replica_groups(replicas, GroupKind.ORTHOGONAL, 2),
    "none": lambda replicas: replica_groups(replicas, GroupKind.NONE),
}


def forward_only(
    function: Callable[[Any], Any], replicas: int, dtype: str = "float32", **more: Any
) -> Program:
    """``y = function(x)`` for every replica."""
    return Program(
        name="collective",
        forward=lambda p, inputs, key: {"y": function(inputs["x"])},
        parameters={},
        inputs={"x": InputSpec(TensorSpec("x", dtype, SHAPE), **more)},
        anchors=(AnchorSpec("y"),),
        replicas=replicas,
    )


def run(program: Program, x: np.ndarray) -> np.ndarray:
    return np.array(Pod(compile_program(program)).run(1, {"x": x})["y"])[0]


def data(replicas: int, dtype: str = "float32") -> np.ndarray:
    generator = np.random.default_rng(9)
    values = generator.normal(size=(1, 1, replicas, *SHAPE)) * 3
    return (values.round() if np.dtype(dtype).kind in "iub" else values).astype(dtype)


def combined(values: np.ndarray, operator: Combination) -> np.ndarray:
    """The combination of the members' values ``[members, ...]`` by NumPy."""
    wide = values.astype(np.float32) if values.dtype == np.float16 else values
    match operator:
        case Combination.ADD:
            found = np.add.accumulate(wide)[-1]
        case Combination.MEAN:
            found = np.add.accumulate(wide)[-1] / len(wide)
        case Combination.MUL:
            found = np.multiply.accumulate(wide)[-1]
        case Combination.MIN:
            found = wide.min(0)
        case Combination.MAX:
            found = wide.max(0)
        case Combination.LOGICAL_AND:
            found = (wide != 0).all(0)
        case Combination.LOGICAL_OR:
            found = (wide != 0).any(0)
        case Combination.SQUARE_ADD:
            found = np.add.accumulate(wide * wide)[-1]
        case _:
            raise AssertionError(operator)
    return np.asarray(found).astype(values.dtype)


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("replicas", [4, 8])
@pytest.mark.sample(2)
def test_all_reduce_sums_in_order_of_replicas(kind: str, replicas: int) -> None:
    groups = GROUPS[kind](replicas)
    x = data(replicas)
    found = run(forward_only(lambda v: all_reduce(v, Combination.ADD, groups), replicas), x)
    for group in groups:
        for r in group:
            np.testing.assert_array_equal(found[r], combined(x[0, 0, list(group)], Combination.ADD))


@pytest.mark.parametrize("operator", list(Combination))
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.sample(4)
def test_every_operator_of_a_reduction_combines_the_values_of_its_group(
    operator: Combination, dtype: str
) -> None:
    replicas, groups = 8, replica_groups(8, GroupKind.ORTHOGONAL, 4)
    x = data(replicas, dtype)
    program = forward_only(lambda v: all_reduce(v, operator, groups), replicas, dtype)
    if operator is Combination.MEAN and dtype == "int32":
        with pytest.raises(UsageError, match="cannot combine values of type int32 with MEAN"):
            compile_program(program)
        return
    found = run(program, x)
    assert found.dtype == x.dtype
    for group in groups:
        for r in group:
            expected = (
                x[0, 0, r] if operator is Combination.LOCAL else combined(x[0, 0, list(group)], operator)
            )
            np.testing.assert_array_equal(found[r], expected)


@pytest.mark.parametrize("replicas", [4, 16])
def test_reduce_scatter_and_all_gather(replicas: int) -> None:
    groups = replica_groups(replicas, GroupKind.CONSECUTIVE, 4)
    x = data(replicas)
    scattered = run(forward_only(lambda v: reduce_scatter(v, Combination.MAX, groups), replicas), x)
    gathered = run(forward_only(lambda v: all_gather(v, groups), replicas), x)
    assert scattered.shape == (replicas, 4)  # 15 elements in 4 parts, padded to 16
    assert gathered.shape == (replicas, 60)
    for group in groups:
        members = x[0, 0, list(group)]
        whole = np.append(members.max(0).reshape(-1), 0).reshape(4, 4)
        for k, r in enumerate(group):
            np.testing.assert_array_equal(scattered[r], whole[k])
            np.testing.assert_array_equal(gathered[r], members.reshape(-1))


def test_what_all_replicas_have_alike_is_counted_once_for_each() -> None:
    program = forward_only(lambda v: all_reduce(v, Combination.ADD, GROUPS["all"](8)), 8, broadcast=True)
    x = data(1)[:, :, 0]
    expected = np.add.accumulate(np.broadcast_to(x[0, 0], (8, *SHAPE)))[-1]
    np.testing.assert_array_equal(run(program, x), np.broadcast_to(expected, (8, *SHAPE)))


def trained(replicas: int, accumulation: int, groups: Any, update: Any = None) -> Program:
    """Two layers whose values in between are summed, gathered and scattered over replicas; losses differ by replica."""

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        h = tap("h", jnp.tanh(inputs["x"] @ p["a"]))
        s = tap("s", all_reduce(h, Combination.MEAN, groups))
        m = all_reduce(h * h, Combination.MUL, groups)
        g = all_gather(h[0], groups)
        part = reduce_scatter(s * jnp.sin(h), Combination.ADD, groups)
        second = all_reduce(jnp.tanh(s @ p["b"]), Combination.ADD, groups)
        weight = inputs["x"][0, 0]
        loss = jnp.sum(part**2) + weight * jnp.sum(second) + jnp.sum(g) * weight + jnp.sum(m)
        return {"h": h, "s": s, "loss": loss}

    return Program(
        name="trained",
        forward=forward,
        parameters={
            "a": ParameterSpec(TensorSpec("a", "float32", (5, 4)), True),
            "b": ParameterSpec(TensorSpec("b", "float32", (4, 2)), True),
        },
        inputs={"x": InputSpec(TensorSpec("x", "float32", SHAPE))},
        anchors=(AnchorSpec("loss"), AnchorSpec("Gradient___h"), AnchorSpec("Gradient___a")),
        replicas=replicas,
        accumulation_factor=accumulation,
        loss="loss",
        update=update or Sgd(),
    )


def start() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(2)
    return {n: generator.normal(size=s).astype(np.float32) * 0.4 for n, s in (("a", (5, 4)), ("b", (4, 2)))}


def plain_loss(weights: Mapping[str, Any], x: Any, groups: Any) -> Any:
    """The sum of the losses of all replicas, ``x [replicas, ...]``, written without collectives."""
    h = [jnp.tanh(x[r] @ weights["a"]) for r in range(len(x))]
    total = 0.0
    for group in groups:
        size = len(group)
        s = sum(h[r] for r in group) / size
        m = jnp.prod(jnp.stack([h[r] * h[r] for r in group]), axis=0)
        scattered = sum(s * jnp.sin(h[r]) for r in group).reshape(-1)
        second = size * jnp.tanh(s @ weights["b"])
        gathered = sum(jnp.sum(h[r][0]) for r in group)
        total += jnp.sum(scattered**2)
        for r in group:
            total += x[r][0, 0] * (jnp.sum(second) + gathered) + jnp.sum(m)
    return total


@pytest.mark.parametrize(
    ("kind", "replicas", "accumulation"),
    [("all", 4, 1), pytest.param("orthogonal", 8, 3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("budget", [1, pytest.param(1 << 27, marks=pytest.mark.slow)])
def test_gradients_go_through_collectives(kind: str, replicas: int, accumulation: int, budget: int) -> None:
    groups = GROUPS[kind](replicas)
    program = trained(replicas, accumulation, groups)
    x = np.random.default_rng(8).normal(size=(2, accumulation, replicas, *SHAPE)).astype(np.float32)
    pod = Pod(compile_program(program, options=CompileOptions(chunk_bytes=budget)))
    pod.write_variables(start())
    anchors = pod.run(2, {"x": x})
    weights = start()
    gradient = jax.jit(jax.grad(lambda weights, x: plain_loss(weights, x, groups)))
    for batch in range(2):
        gradients = [gradient(weights, x[batch, k]) for k in range(accumulation)]
        if batch == 0:
            each = np.array(anchors["Gradient___a"])[:accumulation].sum(1)
            np.testing.assert_allclose(each, [g["a"] for g in gradients], rtol=2e-4, atol=1e-5)
        weights = {n: w - np.float32(0.1) * sum(g[n] for g in gradients) for n, w in weights.items()}
    for name, expected in weights.items():
        np.testing.assert_allclose(pod.read_variable(name), expected, rtol=2e-4, atol=2e-5, err_msg=name)


def every_collective(value: Any) -> Any:
    """A sum over all replicas of what pairs have gathered and scattered again."""
    pairs = GROUPS["consecutive"](8)
    gathered = all_gather(jnp.tanh(value), pairs)
    scattered = reduce_scatter(gathered.reshape(-1), Combination.ADD, pairs)
    return all_reduce(jnp.sum(scattered) * value, Combination.ADD, GROUPS["all"](8))


def test_collectives_of_machines_equal_the_reference_to_the_bit() -> None:
    """The least of the cases below: forward alone, one budget."""
    program = forward_only(every_collective, 8)
    executable = compile_program(program, options=CompileOptions(chunk_bytes=1))
    gathers = [i for i in executable.instructions[0] if isinstance(i, AllGather) and "exchange" in i.arena]
    assert gathers
    x = {"x": data(8)}
    anchors, _ = on_machines(executable, program, 1, {}, x)
    expected = Pod(executable, as_machines=True).run(1, x)["y"]
    np.testing.assert_array_equal(anchors["y"].reshape(np.shape(expected)), expected)


@pytest.mark.parametrize("budget", [1, 1 << 27])
@pytest.mark.slow
def test_machines_equal_the_reference_to_the_bit(budget: int) -> None:
    program = trained(8, 2, GROUPS["consecutive"](8), Momentum())
    executable = compile_program(program, options=CompileOptions(chunk_bytes=budget))
    gathers = [i for i in executable.instructions[0] if isinstance(i, AllGather) and "exchange" in i.arena]
    assert gathers
    x = np.random.default_rng(8).normal(size=(2, 2, 8, *SHAPE)).astype(np.float32)
    anchors, variables = on_machines(executable, program, 2, start(), {"x": x})
    pod = Pod(executable, as_machines=True)
    pod.write_variables(start())
    for name, expected in pod.run(2, {"x": x}).items():
        np.testing.assert_array_equal(anchors[name].reshape(np.shape(expected)), expected, err_msg=name)
    for name, value in variables.items():
        np.testing.assert_array_equal(value, pod.read_variable(name), err_msg=name)


def test_random_numbers_are_the_same_around_an_all_gather() -> None:
    """Each part makes its keys again; the seed must advance behind the last of them."""

    def forward(p: Any, inputs: Any, key: Any) -> dict[str, Any]:
        noise = jax.random.normal(key, SHAPE)
        met = all_reduce(inputs["x"] + noise, Combination.ADD, GROUPS["all"](8))
        return {"y": met + jax.random.normal(jax.random.fold_in(key, 1), SHAPE) + noise}

    program = Program(
        name="random",
        forward=forward,
        parameters={},
        inputs={"x": InputSpec(TensorSpec("x", "float32", SHAPE))},
        anchors=(AnchorSpec("y"),),
        replicas=8,
        accumulation_factor=2,
        uses_random=True,
    )
    x = np.random.default_rng(8).normal(size=(1, 2, 8, *SHAPE)).astype(np.float32)
    pod = Pod(compile_program(program, options=CompileOptions(chunk_bytes=1)))
    found = np.array(pod.run(1, {"x": x})["y"])
    for micro in range(2):
        keys = [
            jax.random.wrap_key_data(
                jnp.array(extra_state.seed_words(advanced(0, micro) + r), jnp.uint32), impl="threefry2x32"
            )
            for r in range(8)
        ]
        with jax.threefry_partitionable(True):
            noise = np.stack([jax.random.normal(k, SHAPE) for k in keys])
            more = np.stack([jax.random.normal(jax.random.fold_in(k, 1), SHAPE) for k in keys])
        met = np.add.accumulate(x[0, micro] + noise)[-1]
        np.testing.assert_allclose(found[micro], met + more + noise, rtol=1e-5, atol=1e-5)


def test_large_groups_sum_in_the_same_order() -> None:
    replicas = 32
    x = data(replicas)
    for kind in (GroupKind.ALL, GroupKind.ORTHOGONAL):
        groups = replica_groups(replicas, kind, replicas)
        found = run(forward_only(lambda v, g=groups: all_reduce(v, Combination.ADD, g), replicas), x)
        np.testing.assert_array_equal(found[3], np.add.accumulate(x[0, 0])[-1])


@settings(max_examples=10, deadline=None)
@example(1, random.Random(1), Combination.LOGICAL_AND, "float32", (), 1, 1)
@given(
    replicas=st.sampled_from([1, 2, 4, 8, 12]),
    order=st.randoms(use_true_random=False),
    operator=st.sampled_from(list(Combination)),
    dtype=st.sampled_from(["float32", "float16", "int32"]),
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    accumulation=st.integers(1, 3),
    budget=st.sampled_from([1, 1 << 27]),
)
def test_generated_collectives(
    replicas: int,
    order: Any,
    operator: Combination,
    dtype: str,
    shape: tuple[int, ...],
    accumulation: int,
    budget: int,
) -> None:
    """Any groups, of any members in any order: sums go in the order of the group."""
    if operator is Combination.MEAN and dtype == "int32":
        dtype = "float32"
    size = order.choice([s for s in range(1, replicas + 1) if replicas % s == 0])
    members = order.sample(range(replicas), replicas)
    groups = tuple(tuple(members[i : i + size]) for i in range(0, replicas, size))
    program = Program(
        name="generated",
        forward=lambda p, inputs, key: {
            "y": all_reduce(inputs["x"], operator, groups),
            "z": reduce_scatter(inputs["x"], operator, groups),
            "g": all_gather(inputs["x"], groups),
        },
        parameters={},
        inputs={"x": InputSpec(TensorSpec("x", dtype, shape))},
        anchors=(AnchorSpec("y"), AnchorSpec("z"), AnchorSpec("g")),
        replicas=replicas,
        accumulation_factor=accumulation,
    )
    x = (np.random.default_rng(size).normal(size=(1, accumulation, replicas, *shape)) * 3).astype(dtype)
    pod = Pod(compile_program(program, options=CompileOptions(chunk_bytes=budget)))
    found = {n: np.array(v) for n, v in pod.run(1, {"x": x}).items()}
    # XLA multiplies by the reciprocal of a group's size
    close = functools.partial(np.testing.assert_array_max_ulp, maxulp=1)
    same = close if operator is Combination.MEAN else np.testing.assert_array_equal
    for k in range(accumulation):
        for group in groups:
            values = x[0, k, list(group)]
            for place, r in enumerate(group):
                alone = operator is Combination.LOCAL
                expected = x[0, k, r] if alone else combined(values, operator)
                same(found["y"][k, r], expected)
                part = -(-expected.size // size)
                padded = np.append(expected.reshape(-1), np.zeros(part * size - expected.size, dtype))
                same(found["z"][k, r], padded[place * part : (place + 1) * part])
                np.testing.assert_array_equal(found["g"][k, r], values.reshape(-1))


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        (((0, 1), (1, 2)), "not disjoint groups"),
        (((0, 1), (2,)), "not disjoint groups"),
        (((0, 1), (3, 4)), "not disjoint groups"),
        (((0, 1),), "groups of 2 replicas; the program has 4"),
    ],
)
def test_groups_that_cannot_be(groups: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        compile_program(forward_only(lambda v: all_reduce(v, Combination.ADD, groups), 4))


def looped(groups: Any) -> Callable[[Any], Any]:
    """A collective in a scan that carries, reads rows and stacks, and in a branch of a condition on data."""

    def step(carried: Any, row: Any) -> tuple[Any, Any]:
        met = all_reduce(carried + row, Combination.MEAN, groups)
        return jnp.tanh(met), met[:2]

    def function(x: Any) -> Any:
        last, stacked = jax.lax.scan(step, x[0], x, reverse=True)
        met = jax.lax.cond(
            x[0, 0] > 0, lambda v: all_reduce(v, Combination.ADD, groups), lambda v: v * 2, last
        )
        return jnp.concatenate([met, stacked.reshape(-1)])

    return function


@pytest.mark.parametrize("replicas", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_inside_loops_and_branches(replicas: int) -> None:
    groups = GROUPS["consecutive"](replicas)
    x = data(replicas)
    found = run(forward_only(looped(groups), replicas), x)
    rows, carried = x[0, 0], x[0, 0, :, 0].copy()
    stacked = np.zeros((replicas, SHAPE[0], 2), np.float32)
    for i in reversed(range(SHAPE[0])):
        for group in groups:
            met = combined((carried + rows[:, i])[list(group)], Combination.MEAN)
            carried[list(group)], stacked[list(group), i] = np.tanh(met), met[:2]
    for group in groups:
        total = carried[list(group)].sum(0)
        for r in group:
            expected = total if rows[r, 0, 0] > 0 else carried[r] * 2
            np.testing.assert_allclose(found[r], np.append(expected, stacked[r]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradients_go_through_collectives_in_loops() -> None:
    """Written out by JAX as by hand."""
    groups = GROUPS["all"](8)

    def program(unrolled: bool) -> Program:
        def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
            def step(h: Any, _: Any) -> tuple[Any, None]:
                return all_reduce(jnp.tanh(h @ p["a"]), Combination.MEAN, groups) + 0.5 * h, None

            h = inputs["x"]
            if unrolled:
                for _ in range(3):
                    h, _ = step(h, None)
            else:
                h, _ = jax.lax.scan(step, h, None, length=3)
            return {"loss": jnp.sum(h * inputs["x"])}

        return Program(
            name="looped",
            forward=forward,
            parameters={"a": ParameterSpec(TensorSpec("a", "float32", (5, 5)), True)},
            inputs={"x": InputSpec(TensorSpec("x", "float32", SHAPE))},
            anchors=(AnchorSpec("loss"),),
            replicas=8,
            loss="loss",
            update=Sgd(),
        )

    found = []
    for unrolled in (False, True):
        pod = Pod(compile_program(program(unrolled)))
        pod.write_variables({"a": np.eye(5, dtype=np.float32)})
        anchors = pod.run(1, {"x": data(8)})
        found.append((np.array(anchors["loss"]), pod.read_variable("a")))
    for scanned, unrolled in zip(*found, strict=True):
        np.testing.assert_array_equal(scanned, unrolled)


def test_loops_that_cannot_be_written_out() -> None:
    groups = GROUPS["all"](4)

    def open_ended(x: Any) -> Any:
        return jax.lax.while_loop(
            lambda v: jnp.sum(v) < 10, lambda v: all_reduce(v, Combination.ADD, groups) + 1, x
        )

    def long(x: Any) -> Any:
        return jax.lax.fori_loop(0, 5000, lambda i, v: all_reduce(v, Combination.MEAN, groups), x)

    with pytest.raises(UnsupportedError, match="inside of 'while': how often it runs is not known"):
        compile_program(forward_only(open_ended, 4))
    with pytest.raises(UnsupportedError, match="loop of 5000 iterations: at most 1024"):
        compile_program(forward_only(long, 4))


def test_collectives_take_modelled_time() -> None:
    groups = GROUPS["all"](16)
    causes = []
    for function in (lambda v: v + 1, lambda v: all_reduce(v, Combination.ADD, groups) + 1):
        report = model_program(forward_only(function, 16))
        causes.append(report["step"]["seconds_by_cause"])
    assert causes[0].get("collectives", 0.0) == 0.0
    assert causes[1]["collectives"] > 1e-6
