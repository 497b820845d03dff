"""Running statistics: replaced after each micro-batch, by each replica for itself; the host sees replica
0's. (Those of groups: test_groups.py.)"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.compiler.compile import compile_program
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program, tap
from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.executable import Compute, TensorSpec

from .programs import Sgd, inputs_for
from .reference_interpreter import Pod


def normalised(places: tuple[int, int] | None = None, **more: Any) -> Program:
    """A scaled batch norm; ``mean`` is a running mean: 0.9 old + 0.1 batch. ``places``: the IPU that replaces it, and
    one that also reads it: the other stage of a pipeline.
    """

    def at(stage: int) -> Any:
        return jax.named_scope(f"ipu:{places[stage]}/stage:{stage}") if places else contextlib.nullcontext()

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        x = inputs["x"]
        with at(0):
            batch_mean = jnp.mean(x, axis=0)
            running = tap("running", 0.9 * p["mean"] + 0.1 * batch_mean)
        with at(1):
            loss = jnp.sum((x - batch_mean) * p["gamma"] ** 2)
            return {"running": running, "loss": loss, "late": p["mean"] * 2}

    return Program(
        name="normalised",
        forward=forward,
        parameters={
            "gamma": ParameterSpec(TensorSpec("gamma", "float32", (3,)), True),
            "mean": ParameterSpec(TensorSpec("mean", "float32", (3,)), False),
        },
        inputs={"x": InputSpec(TensorSpec("x", "float32", (4, 3)))},
        anchors=(AnchorSpec("mean"), AnchorSpec("running"), AnchorSpec("late")),
        loss="loss",
        update=Sgd(),
        state_updates={"mean": "running"},
        **more,
    )


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (2, 3), (8, 2)])
def test_each_replica_follows_its_own_data(replicas: int, accumulation: int) -> None:
    program = normalised(replicas=replicas, accumulation_factor=accumulation)
    pod = Pod(compile_program(program))
    start = np.array([1, 2, 3], np.float32)
    pod.write_variables({"gamma": np.ones(3, np.float32), "mean": start})
    inputs = inputs_for(program, 2)
    found = pod.run(2, inputs)
    now = np.tile(start, (replicas, 1))
    for step in range(2 * accumulation):
        batch, micro = divmod(step, accumulation)
        np.testing.assert_allclose(found["mean"][step], now, rtol=1e-5)
        np.testing.assert_allclose(found["late"][step], 2 * now, rtol=1e-5)
        now = 0.9 * now + 0.1 * inputs["x"][batch, micro].mean(axis=1)
        np.testing.assert_allclose(found["running"][step], now, rtol=1e-5)
    np.testing.assert_allclose(pod.read_variable("mean"), now[0], rtol=1e-5)
    assert pod.executable.variables["mean"].per_replica


@pytest.mark.parametrize("places", [(0, 1), (1, 0), (0, 4), (4, 0)], ids=str)
def test_who_else_reads_a_state_sees_it_as_it_was_before_the_micro_batch(places: tuple[int, int]) -> None:
    """On whatever IPU and machine, before or after the one that replaces it."""
    alone = normalised(accumulation_factor=3)
    apart = normalised(places, accumulation_factor=3, ipus_per_replica=8 if 4 in places else 2)
    found = []
    for program in (alone, apart):
        pod = Pod(compile_program(program))
        pod.write_variables({"gamma": np.ones(3, np.float32), "mean": np.array([1, 2, 3], np.float32)})
        found.append(pod.run(2, inputs_for(program, 2)) | {"at the end": pod.read_variable("mean")})
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-6, err_msg=name)


def test_a_state_is_in_one_stage_of_a_pipeline() -> None:
    program = normalised((0, 1), accumulation_factor=3, pipelined=True, ipus_per_replica=2)
    with pytest.raises(UnsupportedError, match=r"'mean' is replaced in one stage .* \(on IPU 0\)") as caught:
        compile_program(program)
    assert "one pipeline stage" in str(caught.value.hint)


def test_micro_batches_run_one_by_one() -> None:
    executable = compile_program(normalised(accumulation_factor=3))
    runs = [i.computation for i in executable.instructions[0] if isinstance(i, Compute)]
    assert runs == ["clear", *["micro_batches.1"] * 3, "update.0"]


def test_wrong_updates_are_refused() -> None:
    program = normalised()
    with pytest.raises(UsageError, match=r"'loss' \(float32\[\]\) cannot replace 'mean' \(float32\[3\]\)"):
        compile_program(replace(program, state_updates={"mean": "loss"}))
    with pytest.raises(UsageError, match="both trained and replaced"):
        compile_program(replace(program, state_updates={"gamma": "running"}))
    with pytest.raises(UsageError, match="'mena'") as caught:
        compile_program(replace(program, state_updates={"mena": "running"}))
    assert "'mean'" in str(caught.value.hint)
