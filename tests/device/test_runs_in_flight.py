"""Runs that overlap: started before those before them are done, with the numbers of runs one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import ApplicationRuntimeError, PoplarError
from podrun.core.layout import IpuRange
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.service.doorbell import BLOCK_BYTES, Doorbell
from podrun.device.service.host_session import _slots
from podrun.device.xla.pieces import PieceCache
from podrun.protos import ipuof_pb2 as pb

from .conftest import request
from .pods import threads
from .programs import data, first_weights, linear

pytestmark = pytest.mark.usefixtures("no_threads_left")
SIZES = (1, 2, 2, 1, 1, 1, 2)
"""Batches of the runs: memory of another shape is bound while runs are in flight."""


@contextmanager
def connected(where: str, pieces: PieceCache, cache: Path) -> Iterator[PortConnection]:
    """A connection to four IPUs on one machine, or to eight on two."""
    if "in process" in where:
        yield InProcessMachines(4 if where == "in process" else 8, pieces).connect()
        return
    with threads(1 if "two" not in where else 2, cache) as pod:
        yield pod.connect(shared="shared" in where)


def losses(connection: PortConnection, depth: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The losses of runs with so many in flight, and the weights after them."""
    executable = linear(connection.total_ipus)
    assert connection.try_attach(request(IpuRange(0, connection.total_ipus))) is None
    connection.load(executable)
    connection.write_variables(first_weights())
    inputs, first, runs = data(executable, sum(SIZES)), 0, []
    for size in SIZES:
        part = {name: value[first : first + size] for name, value in inputs.items()}
        runs.append(connection.start(size, part, depth=depth))
        first += size
    results: list[Any] = [None] * len(runs)

    def wait(index: int) -> None:
        results[index] = runs[index].wait()

    waiting = [threading.Thread(target=wait, args=(index,), daemon=True) for index in (6, 2)]
    for thread in waiting:
        thread.start()
    for index in (0, 1, 3, 4, 5):
        wait(index)
    for thread in waiting:
        thread.join(60)
    assert [r.batches_done for r in results] == np.cumsum(SIZES).tolist()
    weights = connection.read_variables(["w", "b"])
    connection.close()
    return np.concatenate([result.anchors["loss"] for result in results]), weights


@pytest.mark.parametrize("where", ["in process", "two in process", "shared", "two shared", "inline"])
@pytest.mark.sample(3)
def test_overlapping_runs_have_the_bits_of_runs_in_turn(
    where: str, pieces: PieceCache, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    with connected(where, pieces, cache) as connection:
        wanted, weights = losses(connection, 1)
    for depth in (2, 4):
        with connected(where, pieces, cache) as connection:
            got, after = losses(connection, depth)
        np.testing.assert_array_equal(got, wanted)
        for name, value in weights.items():
            np.testing.assert_array_equal(after[name], value)


def test_an_error_stays_with_the_runs_in_flight(pieces: PieceCache) -> None:
    machines = InProcessMachines(4, pieces)
    machines.machines[0].plan_faults([])
    connection, executable = machines.connect(), linear(4)
    assert connection.try_attach(request(IpuRange(0, 4))) is None
    connection.load(executable)
    connection.write_variables(first_weights())
    inputs = data(executable, 1)
    with pytest.raises(ApplicationRuntimeError, match="3 runs in flight"):
        connection.start(1, inputs, depth=3)
    with pytest.raises(ApplicationRuntimeError, match="'y' was not given"):
        connection.start(1, {"x": inputs["x"]})
    machines.machines[0].abort(PoplarError("a cable is out"))
    first, second = connection.start(1, inputs), connection.start(1, inputs)
    for run in (second, first):
        with pytest.raises(PoplarError, match="cable"):
            run.wait()
    connection.load(executable)
    connection.write_variables(first_weights())
    left = connection.start(1, inputs)
    connection.close()
    with pytest.raises(ApplicationRuntimeError, match="released while the run was in flight"):
        left.wait()


def test_runs_are_counted_past_the_end_of_the_word() -> None:
    blocks = np.zeros(2 * BLOCK_BYTES, np.uint8)
    parts = [blocks[:BLOCK_BYTES], blocks[BLOCK_BYTES:]]
    host, machine = Doorbell(parts), Doorbell(parts)
    blocks[:8].view(np.uint32)[:] = 0xFFFFFFFE
    machine._heard = 0xFFFFFFFE
    numbers = [host.ring(), host.ring()]
    assert numbers == [0xFFFFFFFF, 0]
    assert not host.answered(numbers[0], 0.0)
    for text in ("first", "second"):
        assert machine.rung(0.0)
        machine.answer(text)
    assert not machine.rung(0.0)
    assert [host.answered(number, 0.0) for number in numbers] == [True, True]
    assert [host.result(number) for number in numbers] == ["first", "second"]


@pytest.mark.parametrize(("slots", "size"), [(3, BLOCK_BYTES), (128, BLOCK_BYTES), (2, 100), (4, 1 << 40)])
def test_slots_outside_their_memory_are_refused(slots: int, size: int) -> None:
    region = np.zeros(2 * BLOCK_BYTES, np.uint8)
    with pytest.raises(ApplicationRuntimeError, match="cannot be in"):
        _slots(pb.BindRequest(slots=slots, slot_bytes=size), region)
    assert len(_slots(pb.BindRequest(), region)) == 1
