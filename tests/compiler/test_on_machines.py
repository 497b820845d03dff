"""The emulated machines give the results of the reference interpreter, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from podrun.compiler.compile import CompileOptions, compile_program
from podrun.compiler.program import AnchorSpec, Program
from podrun.core.executable import Executable, Retrieval
from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest
from podrun.device.host.connecting import connect

from .programs import Adam, Momentum, NormScaled, inputs_for, mlp, weights_for
from .reference_interpreter import Pod
from .test_sharding import ANCHORS as PIPED
from .test_sharding import chain
from .test_state_updates import normalised

ANCHORS = [AnchorSpec("loss"), AnchorSpec("Gradient___w0"), AnchorSpec("w0", Retrieval.FINAL)]


def on_machines(
    executable: Executable,
    program: Program,
    batches: int,
    start: dict[str, Any] | None = None,
    inputs: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Anchors and variables after a run on machines inside this process."""
    whole = IpuRange(0, executable.layout.ipus)
    connection = connect({}, standalone_ipus=whole.count)
    try:
        assert (
            connection.try_attach(AttachRequest(whole, whole, pid=1, user="test", command="pytest")) is None
        )
        connection.load(executable)
        connection.write_variables(weights_for(program) if start is None else start)
        result = connection.run(batches, inputs or inputs_for(program, batches))
        return dict(result.anchors), connection.read_variables(executable.variables)
    finally:
        connection.close()


@pytest.mark.parametrize(
    "program",
    [
        mlp(replicas=16, accumulation_factor=2, update=Momentum(), anchors=ANCHORS),
        mlp(replicas=8, update=Adam()),
        mlp(replicas=8, update=NormScaled()),
        mlp(replicas=4, ipus_per_replica=2, accumulation_factor=5),
        normalised(replicas=8, accumulation_factor=2),
        pytest.param(
            chain([0, 1, 2, 3], replicas=2, accumulation_factor=3, dropout=True, update=Momentum()),
            marks=pytest.mark.slow,
        ),
        chain([0, 1, 0, 1], replicas=4, accumulation_factor=5, dropout=True, pipelined=True, anchors=PIPED),
    ],
    ids=["momentum", "adam", "whole weights", "two IPUs", "running statistics", "sharded", "pipelined"],
)
@pytest.mark.parametrize("budget", [1, pytest.param(1 << 27, marks=pytest.mark.slow)])
@pytest.mark.sample(5)
def test_machines_equal_the_reference(program: Program, budget: int) -> None:
    executable = compile_program(program, options=CompileOptions(chunk_bytes=budget))
    anchors, variables = on_machines(executable, program, batches=3)
    pod = Pod(executable, as_machines=True)
    pod.write_variables(weights_for(program))
    for name, expected in pod.run(3, inputs_for(program, 3)).items():
        np.testing.assert_array_equal(anchors[name].reshape(expected.shape), expected, err_msg=name)
    for name, value in variables.items():
        np.testing.assert_array_equal(value, pod.read_variable(name), err_msg=name)
