"""Replica groups: weights with a value for each group of replicas, against a plain loop over replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.compiler.compile import CompileOptions, compile_program, model_program
from podrun.compiler.program import AnchorSpec, Program
from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.executable import Retrieval

from .programs import Adam, Clipped, Momentum, NormScaled, Sgd, inputs_for, mlp
from .reference_interpreter import Pod
from .test_on_machines import on_machines
from .test_sharding import chain
from .test_state_updates import normalised

CONSECUTIVE, ORTHOGONAL, NONE = "consecutive", "orthogonal", "none"


def group_of(kind: str, replicas: int, size: int = 2) -> tuple[int, ...]:
    """The group of each replica, from the groups' definition."""
    if kind == NONE:
        return tuple(range(replicas))
    apart = replicas // size
    return tuple(r // size if kind == CONSECUTIVE else r % apart for r in range(replicas))


def grouped(program: Program, groups: Mapping[str, tuple[int, ...]]) -> Program:
    """The program with groups for some parameters."""
    chosen = {
        n: replace(item, group_of=groups[n]) if n in groups else item
        for n, item in program.parameters.items()
    }
    return replace(program, parameters=chosen)


def values_for(program: Program) -> dict[str, np.ndarray]:
    """Different values for each group."""
    generator = np.random.default_rng(5)
    return {
        name: (
            generator.normal(size=(*((max(i.group_of) + 1,) if i.group_of else ()), *i.spec.shape)) * 0.5
        ).astype(i.spec.dtype)
        for name, i in sorted(program.parameters.items())
    }


def plain_training(program: Program, start: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Weights after training: every replica by itself, gradients summed over those that share a value."""
    rule, loss = program.update, program.loss
    assert rule is not None
    assert loss is not None

    def seen(name: str, replica: int) -> int:
        item = program.parameters[name].group_of
        return item[replica] if item else 0

    specs = {n: item.spec for n, item in program.parameters.items()}
    own: dict[tuple[str, int], Any] = {}
    for name, item in program.parameters.items():
        for g in set(item.group_of) or {0}:
            own[name, g] = jnp.asarray(start[name][g] if item.group_of else start[name])
    states = {
        key: {p: jnp.full(s.shape, v, s.dtype) for p, (s, v) in rule.state(specs[key[0]]).items()}
        for key in own
    }

    @jax.jit
    def gradient(weights: Any, data: Any) -> Any:
        return jax.grad(lambda w: program.forward(w, data, None)[loss])(weights)

    for batch in range(len(inputs["x"])):
        total = {key: jnp.zeros(value.shape, jnp.float32) for key, value in own.items()}
        for micro in range(program.accumulation_factor):
            for r in range(program.replicas):
                data = {n: v[batch, micro, r] for n, v in inputs.items()}
                found = gradient({n: own[n, seen(n, r)] for n in specs}, data)
                total = {(n, g): t + found[n] if seen(n, r) == g else t for (n, g), t in total.items()}
        scalars = {n: jnp.float32(v) for w in specs for n, v in rule.scalars(w).items()}
        if isinstance(rule, Clipped):
            for g in {g for _, g in own}:
                names = [n for n, k in own if k == g]
                new, _ = rule.apply_joint(
                    {n: own[n, g] for n in names}, {n: total[n, g] for n in names}, {}, scalars
                )
                own |= {(n, g): w for n, w in new.items()}
        else:
            for key in own:
                own[key], states[key] = rule.apply(key[0], own[key], total[key], states[key], scalars)
    return {
        n: np.stack([np.asarray(own[n, g]) for g in sorted(set(i.group_of))])
        if i.group_of
        else np.asarray(own[n, 0])
        for n, i in program.parameters.items()
    }


@pytest.mark.parametrize("kind", [CONSECUTIVE, ORTHOGONAL, NONE])
@pytest.mark.parametrize(
    ("replicas", "accumulation"),
    [(4, 3), (8, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 1), (16, 1)))],
)
@pytest.mark.sample(10)
def test_groups_train_apart(kind: str, replicas: int, accumulation: int) -> None:
    groups = {"w0": group_of(kind, replicas), "b1": group_of(CONSECUTIVE, replicas, replicas // 2)}
    program = grouped(mlp(replicas=replicas, accumulation_factor=accumulation, update=Momentum()), groups)
    start, inputs = values_for(program), inputs_for(program, 2)
    pod = Pod(compile_program(program))
    pod.write_variables(start)
    pod.run(2, inputs)
    expected = plain_training(program, start, inputs)
    for name in program.parameters:
        found = pod.read_variable(name)
        assert found.shape == start[name].shape
        np.testing.assert_allclose(found, expected[name], rtol=2e-5, atol=1e-6, err_msg=name)
    assert not np.array_equal(pod.read_variable("w0")[0], pod.read_variable("w0")[1])


@pytest.mark.parametrize(
    "rule", [Sgd(), Adam(), NormScaled(), Clipped()], ids=lambda rule: type(rule).__name__
)
@pytest.mark.sample(6)
def test_every_kind_of_rule_updates_each_group_by_itself(rule: Any) -> None:
    program = mlp(replicas=8, update=rule)
    program = grouped(program, dict.fromkeys(program.parameters, group_of(ORTHOGONAL, 8, 4)))
    start, inputs = values_for(program), inputs_for(program, 3)
    pod = Pod(compile_program(program))
    pod.write_variables(start)
    pod.run(3, inputs)
    expected = plain_training(program, start, inputs)
    for name in program.parameters:
        np.testing.assert_allclose(
            pod.read_variable(name), expected[name], rtol=5e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.slow
def test_a_group_trains_as_if_it_were_alone() -> None:
    whole = mlp(replicas=8, accumulation_factor=2, update=Momentum())
    whole = grouped(whole, dict.fromkeys(whole.parameters, group_of(CONSECUTIVE, 8, 4)))
    start, inputs = values_for(whole), inputs_for(whole, 2)
    pod = Pod(compile_program(whole))
    pod.write_variables(start)
    losses = pod.run(2, inputs)["loss"]
    alone = mlp(replicas=4, accumulation_factor=2, update=Momentum())
    for g in range(2):
        single = Pod(compile_program(alone))
        single.write_variables({n: v[g] for n, v in start.items()})
        part = {n: v[:, :, 4 * g : 4 * g + 4] for n, v in inputs.items()}
        np.testing.assert_allclose(
            np.array(losses)[:, 4 * g : 4 * g + 4], single.run(2, part)["loss"], rtol=1e-5
        )
        for name in alone.parameters:
            np.testing.assert_allclose(
                pod.read_variable(name)[g], single.read_variable(name), rtol=2e-5, atol=1e-6, err_msg=name
            )


def test_anchors_of_grouped_variables_are_what_each_replica_sees() -> None:
    anchors = [
        AnchorSpec("loss"),
        AnchorSpec("w0", Retrieval.FINAL),
        AnchorSpec("Accl___w0", Retrieval.FINAL),
        AnchorSpec("UpdatedVar___w0", Retrieval.FINAL),
        AnchorSpec("Gradient___w0"),
    ]
    groups = group_of(ORTHOGONAL, 8, 2)
    program = grouped(mlp(replicas=8, update=Momentum(), anchors=anchors), {"w0": groups})
    start, inputs = values_for(program), inputs_for(program, 1)
    pod = Pod(compile_program(program))
    pod.write_variables(start)
    found = pod.run(1, inputs)
    np.testing.assert_array_equal(found["w0"], start["w0"][list(groups)])
    np.testing.assert_array_equal(found["Accl___w0"], np.zeros_like(found["w0"]))
    np.testing.assert_array_equal(found["UpdatedVar___w0"], pod.read_variable("w0")[list(groups)])
    gradients = np.array(found["Gradient___w0"])[0]
    summed = np.stack([gradients[[r for r in range(8) if groups[r] == g]].sum(0) for g in range(4)])
    np.testing.assert_allclose(pod.read_variable("Accl___w0"), summed, rtol=1e-5, atol=1e-7)


def test_half_gradients_of_a_group_are_rounded_once() -> None:
    program = grouped(
        mlp(replicas=4, dtype="float16", update=Sgd(rate=1.0), anchors=[AnchorSpec("Gradient___w0")]),
        {"w0": group_of(CONSECUTIVE, 4, 4 // 2)},
    )
    start, inputs = values_for(program), inputs_for(program, 1)
    pod = Pod(compile_program(program))
    pod.write_variables(start)
    each = np.array(pod.run(1, inputs)["Gradient___w0"])[0].astype(np.float32)
    summed = np.stack([each[:2].sum(0), each[2:].sum(0)]).astype(np.float16)
    moved = (start["w0"].astype(np.float32) - pod.read_variable("w0").astype(np.float32)).astype(np.float16)
    np.testing.assert_allclose(moved, summed, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("budget", [1, 1 << 27])
@pytest.mark.slow
def test_machines_equal_the_reference_to_the_bit(budget: int) -> None:
    program = mlp(
        replicas=16, accumulation_factor=2, update=Adam(), anchors=[AnchorSpec("loss"), AnchorSpec("w0")]
    )
    program = grouped(program, {"w0": group_of(ORTHOGONAL, 16, 4), "w1": group_of(NONE, 16)})
    executable = compile_program(program, options=CompileOptions(chunk_bytes=budget))
    anchors, variables = on_machines(executable, program, 2, values_for(program))
    pod = Pod(executable, as_machines=True)
    pod.write_variables(values_for(program))
    for name, expected in pod.run(2, inputs_for(program, 2)).items():
        np.testing.assert_array_equal(anchors[name].reshape(np.shape(expected)), expected, err_msg=name)
    for name, value in variables.items():
        np.testing.assert_array_equal(value, pod.read_variable(name), err_msg=name)


def test_inference_uses_each_groups_constants() -> None:
    program = mlp(replicas=8, loss=None, anchors=[AnchorSpec("logits")])
    program = grouped(program, {"w0": group_of(NONE, 8)})
    start, inputs = values_for(program), inputs_for(program, 1)
    pod = Pod(compile_program(program))
    pod.write_variables(start)
    found = np.array(pod.run(1, inputs)["logits"])[0]
    for r in range(8):
        h = np.maximum(inputs["x"][0, 0, r] @ start["w0"][r] + start["b0"], 0)
        np.testing.assert_allclose(found[r], h @ start["w1"] + start["b1"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("places", "replicas"),
    [
        ([0, 1, 0, 1], 8),
        *(pytest.param(p, r, marks=pytest.mark.slow) for p, r in (([0, 1, 0, 1], 2), ([0, 1, 2, 3], 8))),
    ],
)
@pytest.mark.slow
def test_groups_over_pipelines(places: list[int], replicas: int) -> None:
    """Replicas of several IPUs, several to a machine and over machines: pipelined is sequential to the bit."""
    found = []
    for pipelined in (False, True):
        program = chain(
            places, replicas=replicas, accumulation_factor=8, update=Momentum(), pipelined=pipelined
        )
        groups = {
            "w1": group_of(NONE, replicas),
            "b3": group_of(CONSECUTIVE, replicas, max(1, replicas // 2)),
        }
        program = grouped(program, groups)
        start, inputs = values_for(program), inputs_for(program, 2)
        pod = Pod(compile_program(program))
        pod.write_variables(start)
        losses = pod.run(2, inputs)["loss"]
        found.append([np.array(losses), *(pod.read_variable(n) for n in sorted(program.parameters))])
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first, second)
    expected = plain_training(program, start, inputs)
    for name in program.parameters:
        np.testing.assert_allclose(
            pod.read_variable(name), expected[name], rtol=5e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.slow
def test_groups_of_replicas_that_span_machines() -> None:
    program = chain(list(range(8)), replicas=2, accumulation_factor=8, update=Momentum(), pipelined=True)
    program = grouped(program, {"w0": (0, 1), "w7": (0, 1)})
    start, inputs = values_for(program), inputs_for(program, 1)
    pod = Pod(compile_program(program))
    pod.write_variables(start)
    pod.run(1, inputs)
    expected = plain_training(program, start, inputs)
    for name in program.parameters:
        np.testing.assert_allclose(
            pod.read_variable(name), expected[name], rtol=5e-5, atol=1e-6, err_msg=name
        )


@settings(max_examples=8, deadline=None)
@given(
    shape=st.sampled_from([(4, 1), (4, 2), (8, 1), (16, 1), (2, 4)]),
    accumulation=st.integers(1, 3),
    kinds=st.tuples(*[st.sampled_from([CONSECUTIVE, ORTHOGONAL, NONE, "all"])] * 2),
    budget=st.sampled_from([1, 1 << 27]),
)
@pytest.mark.slow
def test_generated_layouts(
    shape: tuple[int, int], accumulation: int, kinds: tuple[str, str], budget: int
) -> None:
    replicas, ipus = shape
    program = mlp(
        replicas=replicas, ipus_per_replica=ipus, accumulation_factor=accumulation, update=Momentum()
    )
    size = 2 if replicas > 2 else 1
    groups = {n: group_of(k, replicas, size) for n, k in zip(("w0", "w1"), kinds, strict=True) if k != "all"}
    program = grouped(program, groups)
    start, inputs = values_for(program), inputs_for(program, 2)
    executable = compile_program(program, options=CompileOptions(chunk_bytes=budget))
    pod = Pod(executable, as_machines=True)
    pod.write_variables(start)
    pod.run(2, inputs)
    expected = plain_training(program, start, inputs)
    _, variables = on_machines(executable, program, 2, start)
    for name in program.parameters:
        found = pod.read_variable(name)
        np.testing.assert_allclose(found, expected[name], rtol=5e-5, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(variables[name], found, err_msg=name)


@pytest.mark.parametrize(
    ("places", "replicas", "rows"),
    [
        pytest.param(None, 8, (0, 1, 2, 3, 0, 1, 2, 3), marks=pytest.mark.slow),
        pytest.param(None, 4, (0, 0, 1, 1), marks=pytest.mark.slow),
        pytest.param((0, 1), 4, (0, 1, 2, 3), marks=pytest.mark.slow),
        ((0, 4), 2, (0, 1)),
    ],
    ids=["orthogonal", "consecutive", "sharded", "over machines"],
)
def test_running_statistics_of_groups_start_apart_and_show_their_first_replica(
    places: tuple[int, int] | None, replicas: int, rows: tuple[int, ...]
) -> None:
    ipus = max(places) // 4 * 4 + 4 if places and max(places) > 1 else max(places or (0,)) + 1
    program = normalised(places, replicas=replicas, accumulation_factor=2, ipus_per_replica=ipus)
    program = grouped(program, {"mean": rows})
    executable = compile_program(program)
    start = {"gamma": np.ones(3, np.float32)}
    start["mean"] = np.random.default_rng(5).normal(size=(max(rows) + 1, 3)).astype(np.float32)
    inputs = inputs_for(program, 2)
    pod = Pod(executable, as_machines=True)
    pod.write_variables(start)
    found = pod.run(2, inputs)
    now = start["mean"][list(rows)]
    for step in range(4):
        np.testing.assert_allclose(found["mean"][step], now, rtol=1e-5, atol=1e-6)
        now = 0.9 * now + 0.1 * inputs["x"].reshape(4, replicas, 4, 3)[step].mean(axis=1)
    shown = now[[rows.index(row) for row in range(max(rows) + 1)]]
    np.testing.assert_allclose(pod.read_variable("mean"), shown, rtol=1e-5, atol=1e-6)
    anchors, variables = on_machines(executable, program, 2, start)
    np.testing.assert_array_equal(variables["mean"], pod.read_variable("mean"))
    np.testing.assert_array_equal(anchors["mean"].reshape(np.shape(found["mean"])), found["mean"])


def test_a_smaller_group_reduces_faster() -> None:
    whole = mlp(sizes=(256, 512, 16), replicas=16, update=Momentum())
    apart = grouped(whole, dict.fromkeys(whole.parameters, group_of(CONSECUTIVE, 16, 4)))
    times = [model_program(p)["step"]["seconds_by_cause"]["all_reduce"] for p in (whole, apart)]
    assert 0 < times[1] < times[0]


def test_groups_that_do_not_divide_the_replicas_are_refused() -> None:
    program = mlp(replicas=4)
    for bad, match in (
        ((0, 1), "groups of 2 replicas; the program has 4"),
        ((0, 0, 0, 0), "one group"),
        ((0, 0, 0, 1), "equally large"),
        ((0, 0, 2, 2), "equally large"),
    ):
        with pytest.raises(UsageError, match=match):
            compile_program(grouped(program, {"w0": bad}))
    with pytest.raises(UsageError, match="equally large"):
        compile_program(grouped(normalised(replicas=4), {"mean": (0, 0, 0, 1)}))
    with pytest.raises(
        UnsupportedError, match="needs the same groups of replicas for all of them, and w0 have"
    ):
        compile_program(grouped(mlp(replicas=4, update=Clipped()), {"w0": (0, 0, 1, 1)}))
