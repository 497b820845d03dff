"""Host processes that share a machine or a program: exclusive, together, with errors that name who is in the way or
missing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest

from podrun.core.errors import ApplicationRuntimeError, ErrorCode, PoplarError, UnknownRuntimeError
from podrun.core.layout import IpuRange
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.host.remote import process_start
from podrun.device.xla.pieces import PieceCache

from .conftest import load_all, owners, request, together
from .programs import data, first_weights, linear

pytestmark = pytest.mark.usefixtures("no_threads_left")
POD = IpuRange(0, 8)


@pytest.mark.parametrize("pid", [os.getpid(), 1])
def test_when_a_process_started(pid: int) -> None:
    """As psutil tells it; the kernel's time of boot may move by a second while the clock is set."""
    assert process_start(pid) == pytest.approx(psutil.Process(pid).create_time(), abs=2)


def test_when_a_process_started_that_is_none() -> None:
    assert process_start(2**31 - 1) == 0


def both(twin: InProcessMachines, count: int = 2) -> list[tuple[PortConnection, IpuRange]]:
    return owners(lambda: twin.connect(threaded=True), 8, count)


def raised(result: Any, kind: type[PoplarError] = ApplicationRuntimeError) -> str:
    assert isinstance(result, kind), repr(result)
    return result.message


def close(connections: list[tuple[PortConnection, IpuRange]]) -> None:
    for connection, _ in connections:
        connection.close()


def test_ipus_are_exclusive_and_the_holder_is_named(pieces: PieceCache) -> None:
    twin = InProcessMachines(8, pieces)
    first, second = twin.connect(), twin.connect()
    assert first.try_attach(request(IpuRange(0, 4), pid=77)) is None
    refusal = second.try_attach(request(POD, IpuRange(0, 8)))
    assert refusal is not None
    assert "IPUs 0-3 attached by process 77 (train.py, user tester)" in refusal
    assert second.try_attach(request(IpuRange(4, 4))) is None, "a refused attach leaves nothing taken"
    first.detach()
    first.detach()
    assert first.try_attach(request(IpuRange(2, 2))) is None
    first.close()
    second.close()


def test_two_programs_share_a_machine(pieces: PieceCache) -> None:
    twin = InProcessMachines(4, pieces)
    connections = [twin.connect(), twin.connect()]
    for connection, job in zip(connections, (IpuRange(0, 2), IpuRange(2, 2)), strict=True):
        assert connection.try_attach(request(job)) is None
        connection.load(linear(2))
        connection.write_variables(first_weights())
    losses = [c.run(1, data(linear(2), 1)).anchors["loss"] for c in connections]
    np.testing.assert_array_equal(losses[0], losses[1])
    connections[0].close()
    connections[1].run(1, data(linear(2), 1))
    connections[1].close()


@pytest.mark.parametrize(
    ("job", "owned", "message"),
    [
        (IpuRange(0, 4), IpuRange(2, 4), "cannot attach IPUs 2-5 of a job on IPUs 0-3"),
        (IpuRange(2, 4), IpuRange(2, 4), "neither fits in one machine nor fills machines"),
        (IpuRange(0, 16), IpuRange(0, 16), "are not all in the partition, which has IPUs 0-7"),
        (IpuRange(0, 16), IpuRange(0, 8), "cannot attach IPUs 0-7 of a job on IPUs 0-15"),
    ],
)
def test_ranges_that_cannot_be(pieces: PieceCache, job: IpuRange, owned: IpuRange, message: str) -> None:
    with pytest.raises(ApplicationRuntimeError, match=message):
        InProcessMachines(8, pieces).connect().try_attach(request(job, owned))


def test_overlapping_jobs_are_refused(pieces: PieceCache) -> None:
    twin = InProcessMachines(8, pieces)
    first, second = twin.connect(), twin.connect()
    assert first.try_attach(request(POD, IpuRange(0, 2))) is None
    refusal = second.try_attach(request(IpuRange(2, 2)))
    assert refusal is not None
    assert "belong to the job of" in refusal
    first.close()


@pytest.mark.parametrize("count", [2, 4])
def test_owners_have_to_write_equal_weights(pieces: PieceCache, count: int) -> None:
    executable, twin = linear(8), InProcessMachines(8, pieces)
    connections = both(twin, count)

    def work(connection: PortConnection, owned: IpuRange) -> None:
        connection.load(executable)
        connection.write_variables(first_weights(seed=owned.first))
        inputs = {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, 1).items()}
        connection.run(1, inputs)

    for result in together([partial(work, c, o) for c, o in connections]):
        assert "wrote different" in raised(result)
    close(connections)


def test_a_second_try_with_equal_weights_helps(pieces: PieceCache) -> None:
    """Differences that machines notice alike before they start leave the program loaded."""
    executable, twin = linear(8), InProcessMachines(8, pieces)
    connections = both(twin)

    def work(connection: PortConnection, owned: IpuRange) -> None:
        inputs = {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, 1).items()}
        connection.load(executable)
        connection.write_variables(first_weights(seed=owned.first))
        with pytest.raises(ApplicationRuntimeError, match="wrote different weights"):
            connection.run(1, inputs)
        connection.write_variables(first_weights())
        connection.run(1, inputs)

    assert together([partial(work, c, o) for c, o in connections]) == [None, None]
    close(connections)


@pytest.mark.parametrize("count", [2, 4])
def test_owners_have_to_run_equally_many_batches(pieces: PieceCache, count: int) -> None:
    executable, twin = linear(8), InProcessMachines(8, pieces)
    connections = both(twin, count)

    def work(connection: PortConnection, owned: IpuRange) -> None:
        connection.load(executable)
        connection.write_variables(first_weights())
        batches = 1 + owned.first % 4 // 2 if count == 4 else 1 + owned.first // 4
        inputs = {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, batches).items()}
        connection.run(batches, inputs)

    for result in together([partial(work, c, o) for c, o in connections]):
        assert "number of batches" in raised(result)
    close(connections)


@pytest.mark.parametrize("count", [2, 4])
def test_owners_have_to_load_the_same_program(pieces: PieceCache, count: int) -> None:
    twin = InProcessMachines(8, pieces)
    connections = both(twin, count)
    programs = [linear(8, accumulation=1 + index % 2) for index in range(count)]
    results = together([partial(c.load, p) for (c, _), p in zip(connections, programs, strict=True)])
    for result in results:
        assert "different programs" in raised(result)
    close(connections)


@pytest.mark.parametrize(("count", "absent"), [(2, 1), (4, 1), (4, 2)])
def test_a_missing_owner_is_named_within_the_deadline(pieces: PieceCache, count: int, absent: int) -> None:
    executable, twin = linear(8), InProcessMachines(8, pieces, grace=0.3)
    connections = both(twin, count)
    load_all(connections, executable, 0.5)
    for connection, _ in connections:
        connection.write_variables(first_weights())

    def run(connection: PortConnection, owned: IpuRange) -> None:
        connection.run(1, {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, 1).items()})

    present = [pair for index, pair in enumerate(connections) if index != absent]
    for result in together([partial(run, c, o) for c, o in present]):
        message = raised(result, UnknownRuntimeError)
        assert "still waiting for host sync after" in message
        assert "did not run" in message or "machine 1" in message
        assert isinstance(result, UnknownRuntimeError)
        assert result.code is ErrorCode.HOST_SYNC_TIMEOUT
    close(connections)


def test_ipus_that_nobody_attached_are_named(pieces: PieceCache) -> None:
    connection = InProcessMachines(4, pieces).connect()
    connection.host_sync_timeout = 0.2
    assert connection.try_attach(request(IpuRange(0, 4), IpuRange(0, 3))) is None
    with pytest.raises(UnknownRuntimeError, match="no process attached IPU 3"):
        connection.load(linear(4))
    connection.close()


def test_an_owner_that_leaves_ends_the_run_of_the_others(pieces: PieceCache) -> None:
    executable, twin = linear(4), InProcessMachines(4, pieces)
    connections = owners(lambda: twin.connect(threaded=True), 4, 2)
    assert together([partial(c.load, executable) for c, _ in connections]) == [None, None]
    for connection, _ in connections:
        connection.write_variables(first_weights())
    (stays, owned), (leaves, _) = connections
    inputs = {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, 1).items()}
    running = threading.Event()
    machine = twin.machines[0]
    wait_for: Callable[..., bool] = machine._context.changed.wait_for

    def noticed(*arguments: Any) -> bool:
        running.set()
        return wait_for(*arguments)

    machine._context.changed.wait_for = noticed  # type: ignore[method-assign]
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(together([lambda: stays.run(1, inputs)])))
    thread.start()
    assert running.wait(60)
    leaves.close()
    thread.join(60)
    assert "which held IPUs 2-3 of this program, detached" in raised(results[0])
    assert stays.read_variables(["rate"]) == {"rate": np.float32(0.01)}, (
        "what is on the IPUs can still be read"
    )
    stays.close()


def test_a_machine_whose_owners_left_is_not_called_lost(pieces: PieceCache) -> None:
    executable, twin = linear(8), InProcessMachines(8, pieces)
    connections = both(twin)
    assert together([partial(c.load, executable) for c, _ in connections]) == [None, None]
    connections[1][0].close()
    stays, owned = connections[0]
    stays.write_variables(first_weights())
    result = together(
        [lambda: stays.run(1, {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, 1).items()})]
    )
    assert "the host processes of machine 1" in raised(result[0])
    stays.close()


def test_loading_again_begins_again(pieces: PieceCache) -> None:
    executable, twin = linear(8), InProcessMachines(8, pieces)
    connections = both(twin)

    def work(connection: PortConnection, owned: IpuRange) -> list[np.ndarray]:
        losses = []
        inputs = {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, 1).items()}
        for _ in range(3):
            connection.load(executable)
            connection.write_variables(first_weights())
            result = connection.run(1, inputs)
            assert result.batches_done == 1
            losses.append(result.anchors["loss"])
        return losses

    for losses in together([partial(work, c, o) for c, o in connections]):
        assert isinstance(losses, list), losses
        np.testing.assert_array_equal(losses[0], losses[2])
    close(connections)


def test_a_machine_keeps_a_read_only_array_as_it_is_and_copies_any_other(pieces: PieceCache) -> None:
    """Weights of a session are read-only: a network's need not be there twice until it runs."""
    machines = InProcessMachines(4, pieces)
    connection = machines.connect()
    assert connection.try_attach(request(IpuRange(0, 4))) is None
    connection.load(linear(4))
    (machine,) = machines.machines
    (owner,) = machine._owners
    weights = first_weights()["w"]
    view = weights.view()
    view.flags.writeable = False  # Its memory can still be written.
    for value in (weights, view):
        connection.write_variables({"w": value})
        assert not np.shares_memory(machine.read(owner, ["w"])["w"], weights)
    weights.flags.writeable = False
    connection.write_variables({"w": weights})
    assert machine.read(owner, ["w"])["w"] is weights
    connection.close()
