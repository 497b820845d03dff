"""A reset of the partition at any moment of a job: its owners get an error, and the next job finds nothing of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import ApplicationRuntimeError, IpusTakenError, PodrunError, TakenBy
from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.machine_context import MachinePlace
from podrun.device.xla.pieces import PieceCache
from podrun.faults import hint_in_launch, parse_fault
from podrun.faults.fault_errors import SUPERVISED

from .conftest import request, together
from .programs import data, first_weights, linear

pytestmark = pytest.mark.usefixtures("no_threads_left")
POD = IpuRange(0, 8)
DEADLINE = 60.0
"""Seconds in which every owner of a job that a reset ended has to get the error."""


def reset(machines: InProcessMachines) -> None:
    """What the partition service does to each machine."""
    for machine in machines.machines:
        machine.move(replace(machine.place))
        machine.reset_links()


def train(connection: PortConnection, owned: IpuRange, batches: int = 3) -> np.ndarray:
    """Load, send weights, and run: the losses."""
    executable = linear(8)
    connection.load(executable)
    connection.write_variables(first_weights())
    inputs = {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, 1).items()}
    return np.concatenate([connection.run(1, inputs).anchors["loss"] for _ in range(batches)])


def owners_of_launch(
    machines: InProcessMachines, launch: str, count: int = 2
) -> list[tuple[PortConnection, IpuRange]]:
    share, found = 8 // count, []
    for index in range(count):
        connection, owned = machines.connect(threaded=True), IpuRange(index * share, share)
        asked: AttachRequest = replace(request(POD, owned), launch=launch)
        assert connection.try_attach(asked) is None
        found.append((connection, owned))
    return found


def results_of_a_clean_job(machines: InProcessMachines) -> list[Any]:
    found = owners_of_launch(machines, "next")
    results = together([partial(train, c, o) for c, o in found], timeout=2 * DEADLINE)
    for connection, _ in found:
        connection.close()
    return results


class Moment:
    """Runs ``act`` in the thread that reaches a place for the ``number``-th time."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left, self._act, self._lock = number, act, threading.Lock()
        self.came = False

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            now = self._left == 0
        if now:
            self.came = True
            self._act()


@pytest.fixture(scope="module")
def wanted(pieces: PieceCache) -> list[np.ndarray]:
    """The losses of a job that nothing disturbs."""
    results = results_of_a_clean_job(InProcessMachines(8, pieces))
    assert all(isinstance(result, np.ndarray) for result in results), results
    return results


@pytest.mark.parametrize("place", ["claim", "publish", "join", "ask"])
@pytest.mark.parametrize("number", [1, 2, 5, 40])
@pytest.mark.sample(2)
def test_a_reset_at_any_moment_spares_the_next_job(
    pieces: PieceCache, wanted: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    machines = InProcessMachines(8, pieces, grace=0.5)
    moment = Moment(number, lambda: reset(machines))
    machine = machines.machines[0]
    if place == "ask":  # between two instructions
        ask = machine._context.faults.ask
        monkeypatch.setattr(machine._context.faults, "ask", lambda *a: (moment(), ask(*a))[1])
    elif place == "publish":  # the group is made, and not yet on offer
        create = "podrun.device.job.create"
        from podrun.device import job as jobs

        made = jobs.create
        monkeypatch.setattr(create, lambda *a, **k: (made(*a, **k), moment())[0])
    else:
        claim = machines.machines[1]._context.fabric.claim

        def claims(*arguments: Any) -> Any:
            if place == "claim":
                moment()
            token = claim(*arguments)
            if place == "join":
                moment()
            return token

        monkeypatch.setattr(machines.machines[1]._context.fabric, "claim", claims)
    found = owners_of_launch(machines, "first")
    begin = time.monotonic()
    results = together([partial(train, c, o, 6) for c, o in found], timeout=2 * DEADLINE)
    took = time.monotonic() - begin
    if moment.came:
        assert took < DEADLINE
        assert all(isinstance(result, ApplicationRuntimeError) for result in results), results
        assert any(isinstance(result, IpusTakenError) for result in results)
    for connection, _ in found:
        connection.close()
    monkeypatch.undo()
    assert not machines.machines[0].offers.jobs()
    clean = results_of_a_clean_job(machines)
    assert [np.array_equal(a, b) for a, b in zip(clean, wanted, strict=True)] == [True, True], clean


def test_a_claim_that_waits_ends_with_its_job(pieces: PieceCache) -> None:
    machines = InProcessMachines(8, pieces)
    connection = machines.connect(threaded=True)
    assert connection.try_attach(request(POD, IpuRange(4, 4))) is None
    other = threading.Timer(0.2, machines.machines[1].reset_links)
    other.start()
    begin = time.monotonic()
    with pytest.raises(IpusTakenError, match="the partition was reset"):
        connection.load(linear(8))
    assert time.monotonic() - begin < DEADLINE
    assert not connection.holds_ipus
    other.join()
    connection.close()


@pytest.mark.parametrize(
    ("taken_by", "message", "hint"),
    [
        (TakenBy.REMOVAL, "the partition was removed", "vipu create partition"),
        (TakenBy.MOVE, "the partition was moved to other machines", "where it is now"),
        (TakenBy.POWER_CYCLE, "the machine was power-cycled", "Attach to the device again"),
    ],
)
def test_a_process_reads_what_took_its_ipus(
    pieces: PieceCache, taken_by: TakenBy, message: str, hint: str
) -> None:
    machines = InProcessMachines(4, pieces)
    connection = machines.connect()
    assert connection.try_attach(request(IpuRange(0, 4))) is None
    machines.machines[0].power_cycle(taken_by)
    with pytest.raises(IpusTakenError, match=message) as caught:
        connection.load(linear(4))
    assert caught.value.hint is not None
    assert hint in caught.value.hint
    in_launch = str(hint_in_launch(caught.value, {SUPERVISED: "1"}))
    assert "podrun --max-restarts" not in in_launch
    assert in_launch.startswith("podrun recovers by itself") == (taken_by is TakenBy.MOVE)
    connection.close()


@pytest.mark.parametrize("taken_by", [TakenBy.REMOVAL, TakenBy.MOVE, TakenBy.POWER_CYCLE])
def test_a_machine_that_leaves_its_partition_forgets_it(pieces: PieceCache, taken_by: TakenBy) -> None:
    """It may come back to it, or serve another one of that name: of somebody else."""
    machines = InProcessMachines(8, pieces)
    machine = machines.machines[0]
    connection = machines.connect(threaded=True)
    assert connection.try_attach(request(POD)) is None
    train(connection, POD)
    machine.plan_faults([parse_fault("ipu:0@batch=3:tile-parity")])
    machine.power_cycle(taken_by)
    machine.move(machine.place)
    stays = taken_by is TakenBy.POWER_CYCLE
    assert (machine.work().batches > 0, bool(machine.planned_faults())) == (stays, stays)
    connection.close()


def test_a_device_that_was_taken_away_can_be_attached_again(pieces: PieceCache) -> None:
    machines = InProcessMachines(8, pieces)
    connection = machines.connect(threaded=True)
    assert connection.try_attach(request(POD)) is None
    losses = train(connection, POD)
    reset(machines)
    with pytest.raises(IpusTakenError) as caught:
        train(connection, POD)
    assert caught.value.hint is not None
    assert "Attach to the device again" in caught.value.hint
    assert not connection.holds_ipus
    assert connection.try_attach(request(POD)) is None
    np.testing.assert_array_equal(train(connection, POD), losses)
    connection.close()


def test_a_machine_that_moves_forgets_its_offers(pieces: PieceCache) -> None:
    machines = InProcessMachines(8, pieces)
    connection = machines.connect(threaded=True)
    assert connection.try_attach(request(POD)) is None
    connection.load(linear(8))
    assert machines.machines[0].offers.jobs()
    machines.machines[0].move(MachinePlace("other", 0, 0, 4, ("in process", "in process")))
    assert not machines.machines[0].offers.jobs()
    with pytest.raises(PodrunError):
        connection.run(1, data(linear(8), 1))
    connection.close()
