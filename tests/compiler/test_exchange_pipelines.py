"""Collectives inside of models of several IPUs: sharded, pipelined, and of replicas that span machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.compiler.compile import compile_program, model_program
from podrun.compiler.model_collectives import Combination, all_reduce
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program, tap
from podrun.core.executable import AllGather, Send, TensorSpec

from .programs import Momentum
from .reference_interpreter import Pod
from .test_exchange import GROUPS, SHAPE, data, run
from .test_on_machines import on_machines


def test_collectives_of_replicas_of_several_ipus_on_one_machine() -> None:
    def forward(p: Any, inputs: Any, key: Any) -> dict[str, Any]:
        with jax.named_scope("ipu:0"):
            h = inputs["x"] * 2
        with jax.named_scope("ipu:1"):
            return {"y": all_reduce(h, Combination.ADD, ((0, 1),)) + 1}

    def program(replicas: int) -> Program:
        return Program(
            name="two",
            forward=forward,
            parameters={},
            inputs={"x": InputSpec(TensorSpec("x", "float32", SHAPE))},
            anchors=(AnchorSpec("y"),),
            replicas=replicas,
            ipus_per_replica=2,
        )

    x = data(2)
    np.testing.assert_array_equal(run(program(2), x)[0], (x[0, 0] * 2).sum(0) + 1)


def staged(pipelined: bool, replicas: int, groups: Any) -> Program:
    """Four layers on two IPUs; results of the second and the third are averaged over replicas."""

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        x = inputs["x"]
        values: dict[str, Any] = {}
        for i in range(4):
            with jax.named_scope(f"ipu:{i % 2}"), jax.named_scope(f"stage:{i}"):
                x = x * jax.random.bernoulli(jax.random.fold_in(key, i), 0.75, x.shape)
                x = values[f"h{i}"] = tap(f"h{i}", jnp.tanh(x @ p[f"w{i}"]))
                if i in (1, 2):
                    x = tap(f"m{i}", all_reduce(x, Combination.MEAN, groups) + 0.5 * x)
                if i == 3:
                    values["loss"] = jnp.sum(x * inputs["x"][0, 0])
        return values

    return Program(
        name="staged",
        forward=forward,
        parameters={f"w{i}": ParameterSpec(TensorSpec(f"w{i}", "float32", (5, 5)), True) for i in range(4)},
        inputs={"x": InputSpec(TensorSpec("x", "float32", SHAPE))},
        anchors=(AnchorSpec("loss"), AnchorSpec("Gradient___h0")),
        replicas=replicas,
        ipus_per_replica=2,
        accumulation_factor=8,
        loss="loss",
        update=Momentum(),
        uses_random=True,
        pipelined=pipelined,
    )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 8])
def test_collectives_in_pipelines(replicas: int) -> None:
    """Pipelined is sequential to the bit, and on machines too; against one IPU to rounding."""
    groups = GROUPS["all" if replicas == 2 else "orthogonal"](replicas)
    generator = np.random.default_rng(4)
    weights = {f"w{i}": generator.normal(size=(5, 5)).astype(np.float32) for i in range(4)}
    x = generator.normal(size=(2, 8, replicas, *SHAPE)).astype(np.float32)
    flat = replace(staged(False, replicas, groups), ipus_per_replica=1)
    plain = flat.forward

    def unplaced(p: Any, inputs: Any, key: Any) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "named_scope", lambda name: nullcontext())
            return plain(p, inputs, key)

    found = []
    for program in (
        staged(False, replicas, groups),
        staged(True, replicas, groups),
        replace(flat, forward=unplaced),
    ):
        executable = compile_program(program)
        pod = Pod(executable, as_machines=program.pipelined)
        pod.write_variables(weights)
        anchors = pod.run(2, {"x": x})
        found.append([np.array(anchors[n]) for n in anchors] + [pod.read_variable(n) for n in weights])
        if program.pipelined:
            given, variables = on_machines(executable, program, 2, weights, {"x": x})
            np.testing.assert_array_equal(given["loss"].reshape(np.shape(anchors["loss"])), anchors["loss"])
            for name in weights:
                np.testing.assert_array_equal(variables[name], pod.read_variable(name))
    for sequential, pipelined, alone in zip(*found, strict=True):
        np.testing.assert_allclose(sequential, alone, rtol=5e-4, atol=5e-5)
        np.testing.assert_allclose(pipelined, sequential, rtol=5e-4, atol=5e-5)


@pytest.mark.slow
def test_pipelined_is_sequential_to_the_bit() -> None:
    groups = GROUPS["consecutive"](8)
    generator = np.random.default_rng(4)
    weights = {f"w{i}": generator.normal(size=(5, 5)).astype(np.float32) for i in range(4)}
    x = generator.normal(size=(1, 8, 8, *SHAPE)).astype(np.float32)
    found = []
    for pipelined in (False, True):
        pod = Pod(compile_program(staged(pipelined, 8, groups)))
        pod.write_variables(weights)
        anchors = pod.run(1, {"x": x})
        found.append([np.array(anchors[n]) for n in anchors] + [pod.read_variable(n) for n in weights])
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first, second)


def spanning(replicas: int, places: Sequence[int], ipus: int, pipelined: bool = True) -> Program:
    """A layer on each of ``places``; its result is averaged over replicas."""
    groups = GROUPS["all"](replicas)

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        x = inputs["x"]
        for i, place in enumerate(places):
            with jax.named_scope(f"ipu:{place}"), jax.named_scope(f"stage:{i}"):
                x = jnp.tanh(x @ p[f"w{i}"])
                x = all_reduce(x, Combination.MEAN, groups) + 0.5 * x
                if i == len(places) - 1:
                    return {"loss": jnp.sum(x * inputs["x"][0, 0])}
        raise AssertionError

    return Program(
        name="spanning",
        forward=forward,
        parameters={
            f"w{i}": ParameterSpec(TensorSpec(f"w{i}", "float32", (5, 5)), True) for i in range(len(places))
        },
        inputs={"x": InputSpec(TensorSpec("x", "float32", SHAPE))},
        anchors=(AnchorSpec("loss"),),
        replicas=replicas,
        ipus_per_replica=ipus,
        accumulation_factor=4,
        loss="loss",
        update=Momentum(),
        pipelined=pipelined,
    )


@pytest.mark.parametrize(
    ("pipelined", "small", "large"),
    [
        pytest.param(True, (0, 1), (1, 6), marks=pytest.mark.slow),
        pytest.param(False, (0, 1), (1, 6), marks=pytest.mark.slow),
        (True, (0, 1, 2), (1, 3, 6)),
        pytest.param(True, (0, 1, 2, 3), (0, 1, 4, 6), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_collectives_of_replicas_that_span_machines(
    pipelined: bool, small: tuple[int, ...], large: tuple[int, ...]
) -> None:
    """Each IPU of a replica exchanges data with its counterparts, several on one machine too; the bits are those of the
    reference.
    """
    depth = 2 * len(small)
    generator = np.random.default_rng(4)
    weights = {f"w{i}": generator.normal(size=(5, 5)).astype(np.float32) for i in range(len(small))}
    x = generator.normal(size=(2, depth, 2, *SHAPE)).astype(np.float32)
    found = []
    for places, ipus in ((small, 1 << max(small).bit_length()), (large, 8)):
        program = replace(spanning(2, places, ipus, pipelined), accumulation_factor=depth)
        executable = compile_program(program)
        pod = Pod(executable, as_machines=True)
        pod.write_variables(weights)
        anchors = pod.run(2, {"x": x})
        given, variables = on_machines(executable, program, 2, weights, {"x": x})
        np.testing.assert_array_equal(given["loss"].reshape(np.shape(anchors["loss"])), anchors["loss"])
        found.append([np.array(anchors["loss"]), *(variables[n] for n in weights)])
        for name in weights:
            np.testing.assert_array_equal(variables[name], pod.read_variable(name))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_machines_meet_in_one_order() -> None:
    """A message goes from each collective to the next one that another IPU of the machine has."""
    executable = compile_program(spanning(2, (1, 3, 6), 8))
    ordering = [
        (ipu, work[k - 1], instruction)
        for ipu, work in enumerate(executable.instructions)
        for k, instruction in enumerate(work)
        if isinstance(instruction, Send) and instruction.buffer.startswith("arena:exchange")
    ]
    assert ordering
    for ipu, before, instruction in ordering:
        assert before == AllGather(instruction.buffer.removeprefix("arena:"))
        assert (ipu, instruction.peer) in {(1, 3), (3, 1)}
    met = [
        w
        for w in executable.instructions
        if any(isinstance(i, AllGather) and "exchange" in i.arena for i in w)
    ]
    assert len(met) == 3


@pytest.mark.slow
def test_updates_in_flight_of_replicas_that_span_machines() -> None:
    """Two IPUs of a machine reduce gradients while messages are under way."""
    places = (0, 1, 4)
    program = replace(spanning(2, places, 8), updates_each_micro_batch=True, accumulation_factor=9)
    generator = np.random.default_rng(4)
    weights = {f"w{i}": generator.normal(size=(5, 5)).astype(np.float32) for i in range(len(places))}
    x = generator.normal(size=(2, 9, 2, *SHAPE)).astype(np.float32)
    executable = compile_program(program)
    pod = Pod(executable, as_machines=True)
    pod.write_variables(weights)
    anchors = pod.run(2, {"x": x})
    given, variables = on_machines(executable, program, 2, weights, {"x": x})
    np.testing.assert_array_equal(given["loss"].reshape(np.shape(anchors["loss"])), anchors["loss"])
    for name in weights:
        np.testing.assert_array_equal(variables[name], pod.read_variable(name))


def test_stages_have_their_collectives_side_by_side() -> None:
    """In modelled time: in turn, the collectives of all stages add up; a pipeline's cycle is as long as its slowest
    stage.
    """
    causes = []
    for pipelined in (False, True):
        program = replace(spanning(2, (0, 1), 2, pipelined), accumulation_factor=32)
        step = model_program(program)["step"]
        assert step["seconds"] == pytest.approx(sum(step["seconds_by_cause"].values()))
        causes.append(step["seconds_by_cause"]["collectives"])
    in_turn, overlapped = causes
    # Stage 0 has one forward and one backward, stage 1 both in one piece: 2 of 4 in a cycle that both are in.
    assert 0.5 * in_turn < overlapped < 0.6 * in_turn
