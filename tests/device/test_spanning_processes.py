"""Replicas over machines that are processes: the bits of one machine, tensors shared or sent; a machine lost."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.compiler.compile import compile_program
from podrun.core.errors import UnrecoverableRuntimeError
from podrun.core.layout import IpuRange
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.xla.pieces import PieceCache
from tests.compiler.programs import Momentum, weights_for
from tests.compiler.test_sharding import chain

from .conftest import owners, together
from .pods import processes
from .test_spanning import ANCHORS, SEEN, assert_same, inputs_of, outcome

pytestmark = pytest.mark.system


@pytest.mark.slow
def test_stages_in_processes_give_the_bits_of_one_machine_and_hear_of_a_lost_one(
    tmp_path: Path, pieces: PieceCache
) -> None:
    """Two replicas of two machines each, two instances; then machine 3 is lost: machine 0 has no group with it."""
    options: dict[str, Any] = {
        "replicas": 2,
        "accumulation_factor": 5,
        "pipelined": True,
        "dropout": True,
        "update": Momentum(),
        "anchors": ANCHORS,
    }
    wide, alone = chain([0, 5, 7, 2], ipus=8, **options), chain([0, 1, 2, 3], ipus=4, **options)
    executable = compile_program(wide)
    with processes(4, tmp_path) as pod:
        expected = outcome(InProcessMachines(8, pieces).connect, alone, compile_program(alone))
        assert_same(outcome(pod.connect, wide, executable, instances=2), expected)
        assert_same(outcome(lambda: pod.connect(shared=False), wide, executable), expected)
        for control in pod.controls:
            control.inject(["machine:3@batch=20:lost"])
        connections = owners(pod.connect, 16, 2)

        def train(connection: PortConnection, owned: IpuRange) -> Any:
            connection.load(executable)
            connection.write_variables(weights_for(wide))
            for _ in range(50):
                begin = time.monotonic()
                try:
                    connection.run(1, inputs_of(wide, 1, owned))
                except UnrecoverableRuntimeError as error:
                    return error.message, time.monotonic() - begin
            return None

        results = together([partial(train, c, o) for c, o in connections])
        for connection, _ in connections:
            connection.close()
        for message, seconds in results:  # type: ignore[misc]
            assert "machine 3 of the partition" in message
            assert pod.endpoints[3] in message
            assert seconds < 60
    assert pod.processes[3].returncode == -9


@pytest.mark.slow
def test_inference_over_processes(tmp_path: Path, pieces: PieceCache) -> None:
    """Activations only, one way: machines run ahead of each other."""
    options: dict[str, Any] = {"accumulation_factor": 4, "pipelined": True, "loss": None, "update": None}
    wide = chain([0, 4, 8, 12], ipus=16, anchors=SEEN, **options)
    alone = chain([0, 1, 2, 3], ipus=4, anchors=SEEN, **options)
    with processes(4, tmp_path) as pod:
        found = outcome(pod.connect, wide, compile_program(wide))
        assert_same(found, outcome(InProcessMachines(4, pieces).connect, alone, compile_program(alone)))
        assert np.isfinite(found[0][0]["loss"]).all()
