"""Replica groups and collectives inside of models: the same bits for any number of host processes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from podrun.compiler.compile import compile_program
from podrun.core.layout import IpuRange
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.xla.pieces import PieceCache
from tests.compiler.programs import Momentum
from tests.compiler.test_exchange import GROUPS, SHAPE, start, trained
from tests.compiler.test_groups import ORTHOGONAL, group_of, grouped

from .conftest import owners, together

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.mark.parametrize("counts", [(1, 4), pytest.param((1, 2, 8), marks=pytest.mark.slow)])
def test_instances_share_groups_and_collectives(pieces: PieceCache, counts: tuple[int, ...]) -> None:
    program = trained(8, 2, GROUPS["consecutive"](8), Momentum())
    program = grouped(program, {"b": group_of(ORTHOGONAL, 8)})
    program = replace(program, anchors=program.anchors[:1])
    executable = compile_program(program)
    weights = start()
    weights["b"] = np.random.default_rng(6).normal(size=(4, *weights["b"].shape)).astype(np.float32)
    x = np.random.default_rng(7).normal(size=(2, 2, 8, *SHAPE)).astype(np.float32)

    def work(connection: PortConnection, owned: IpuRange) -> dict[str, Any]:
        connection.load(executable)
        connection.write_variables(weights)
        result = connection.run(2, {"x": np.ascontiguousarray(x[:, :, owned.first : owned.stop])})
        read = connection.read_variables(executable.variables)
        return {"loss": np.array(result.anchors["loss"])} | {n: np.array(v) for n, v in read.items()}

    by_count = []
    for count in counts:
        twin = InProcessMachines(8, pieces)
        connections = owners(lambda twin=twin: twin.connect(threaded=True), 8, count)  # type: ignore[misc]
        found = together([partial(work, c, o) for c, o in connections])
        for connection, _ in connections:
            connection.close()
        for result in found:
            assert isinstance(result, dict), repr(result)
            for name in ("a", "b"):
                np.testing.assert_array_equal(result[name], found[0][name])  # type: ignore[index]
        losses = np.concatenate([result["loss"] for result in found], axis=2)  # type: ignore[index]
        by_count.append([losses, *(found[0][name] for name in sorted(executable.variables))])  # type: ignore[index]
    for other in by_count[1:]:
        for first, second in zip(by_count[0], other, strict=True):
            np.testing.assert_array_equal(first, second)
    assert by_count[0][0].shape[2] == 8
