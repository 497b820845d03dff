"""Faults without an error of their own: their effects on results, modelled time, processes and answers."""

from __future__ import annotations

import signal
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from podrun.compiler.compile import compile_program
from podrun.core.errors import (
    ApplicationRuntimeError,
    ErrorCause,
    GraphMemoryAllocationError,
    RecoverableRuntimeError,
    StreamMemoryAllocationError,
    UnrecoverableRuntimeError,
    UsageError,
)
from podrun.core.layout import IpuRange
from podrun.core.telemetry import MachineReport
from podrun.device.health import LastingFaults, flip_bit, instances_here, signal_process
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.host.ports import LocalPort, Site
from podrun.device.machine import Machine
from podrun.device.machine_context import MachinePlace
from podrun.device.program.digests import held_by_ipu
from podrun.device.program.fabric import LocalFabric
from podrun.device.strikes import strike_error
from podrun.device.xla.pieces import PieceCache
from podrun.faults import Strike, parse_fault, parse_faults
from tests.compiler.test_sharding import chain
from tests.device.pods import machine_report

from .conftest import owners, request, together
from .programs import data, first_weights, linear

pytestmark = pytest.mark.usefixtures("no_threads_left")
POD, POD4 = IpuRange(0, 8), IpuRange(0, 4)


def run(pieces: PieceCache, fault: str, batches: int = 4, count: int = 1) -> tuple[Any, list[Any]]:
    """The machines, and the result of each owner: losses, or the error."""
    machines = InProcessMachines(8, pieces)
    for machine in machines.machines:
        machine.plan_faults(parse_faults(fault))
    connections = owners(lambda: machines.connect(threaded=True), 8, count)

    def work(connection: Any, owned: IpuRange) -> Any:
        executable = linear(8)
        connection.load(executable)
        connection.write_variables(first_weights())
        inputs = {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, 1).items()}
        losses = [connection.run(1, inputs).anchors["loss"] for _ in range(batches)]
        return np.concatenate(losses), connection.read_variables(["w"])["w"]

    results = together([partial(work, c, o) for c, o in connections])
    for connection, _ in connections:
        connection.close()
    return machines, results


@pytest.fixture(scope="module")
def undisturbed(pieces: PieceCache) -> Any:
    return run(pieces, "")[1][0]


def test_a_flipped_bit_changes_results_and_nothing_else(pieces: PieceCache, undisturbed: Any) -> None:
    machines, (corrupted,) = run(pieces, "ipu:1@batch=2:corrupt,tensor=w,element=3,bit=30")
    np.testing.assert_array_equal(corrupted[0][:2], undisturbed[0][:2])
    assert not np.array_equal(corrupted[0][2:], undisturbed[0][2:])
    report = machine_report(machines.machines[0], MachineReport("a"))
    assert not any(ipu.has_error for ipu in report.ipus)
    assert report.planned_faults == ()
    (struck,) = report.struck_faults
    assert (struck.fault.text, struck.batch) == ("ipu:1@batch=2:corrupt,bit=30,element=3,tensor=w", 2)


def test_a_replica_whose_memory_changed_has_a_copy_of_its_own(pieces: PieceCache) -> None:
    machines, executable = InProcessMachines(8, pieces), linear(8, sliced=False)
    connection = machines.connect(threaded=True)
    assert connection.try_attach(request(POD)) is None
    connection.load(executable)
    connection.write_variables(first_weights())
    given = data(executable, 4)

    def digests(*faults: str) -> list[int]:
        for machine in machines.machines:
            machine.plan_faults(parse_faults(" ".join(faults)))
        connection.run(1, {name: value[:1] for name, value in given.items()})
        rows = connection.read_digests()
        assert [ipu for ipu, _ in rows] == list(range(8))
        return [digest for _, digest in rows]

    def odd(found: list[int]) -> list[int]:
        return [ipu for ipu, digest in enumerate(found) if found.count(digest) == 1]

    assert len(set(digests())) == 1
    assert odd(digests("ipu:5@batch=+0:corrupt,tensor=w,bit=20")) == [5]
    assert odd(digests("ipu:4@batch=+0:corrupt,tensor=b,bit=21", "ipu:0@batch=+0:corrupt,tensor=b")) == [
        0,
        4,
        5,
    ]
    seen = connection.read_variables(["b"])["b"]
    assert odd(digests()) == [0, 4, 5]
    connection.write_variables(first_weights() | {"b": seen})
    assert len(set(digests())) == 1, "what the host writes reaches all copies"
    connection.close()


def test_a_variable_is_flipped_only_on_an_ipu_that_holds_it(pieces: PieceCache) -> None:
    program = chain([0, 1], ipus=2, replicas=4, accumulation_factor=1)
    executable, machines = compile_program(program), InProcessMachines(8, pieces)
    connection = machines.connect(threaded=True)
    assert connection.try_attach(request(POD)) is None
    held = held_by_ipu(executable)
    assert all(held)
    machines.machines[1].plan_faults(parse_faults(f"ipu:6@batch=1:corrupt,tensor={held[1][0]}"))
    with pytest.raises(ApplicationRuntimeError, match=f"'{held[1][0]}' does not lie on IPU 6") as refused:
        connection.load(executable)
    assert refused.value.hint == "On that machine it lies on: IPU 5, IPU 7."
    connection.close()


@pytest.mark.parametrize(
    "fault",
    [
        "ipu:1@batch=1:corrected-parity",
        "ipu:5@batch=1:stream-stall,seconds=0",
        "machine:1@batch=1:paused,seconds=0",
        "machine:1@batch=1:heartbeats-dropped,seconds=9",
    ],
)
def test_what_only_takes_time_leaves_results_alone(pieces: PieceCache, undisturbed: Any, fault: str) -> None:
    machines, (result,) = run(pieces, fault)
    np.testing.assert_array_equal(result[0], undisturbed[0])
    assert [len(machine.struck_faults()) for machine in machines.machines].count(1) == 1


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("ipu:5@during=load:soft-error", RecoverableRuntimeError),
        ("ipu:1@during=read:tile-parity", RecoverableRuntimeError),
        ("ipu:6@rate=1,seed=1:trap", ApplicationRuntimeError),
        ("ipu:5@during=load:out-of-memory", GraphMemoryAllocationError),
        ("machine:1@during=load:out-of-memory", StreamMemoryAllocationError),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_all_instances_get_the_error(pieces: PieceCache, fault: str, kind: type, count: int) -> None:
    machines, results = run(pieces, fault, count=count)
    if "read" not in fault:  # Each instance reads for itself.
        assert [type(result) for result in results] == [kind] * count, results
    else:
        assert kind in [type(result) for result in results]
    assert all(machine.planned_faults() == () for machine in machines.machines)


def test_a_flapping_link_works_again_at_once_and_repeats(pieces: PieceCache) -> None:
    machines = InProcessMachines(8, pieces)
    for machine in machines.machines:
        machine.plan_faults(parse_faults("link:2-4@batch=1,repeat=2:flapping"))
    connection = machines.connect(threaded=True)
    assert connection.try_attach(request(POD)) is None
    for left in (1, 1, 0):
        connection.load(linear(8))
        connection.write_variables(first_weights())
        if left:
            with pytest.raises(RecoverableRuntimeError, match="went down in batch 1 and came up again"):
                connection.run(3, data(linear(8), 3))
        else:
            assert connection.run(3, data(linear(8), 3)).batches_done == 3
    connection.close()


def test_an_unknown_variable_is_refused_when_the_program_is_loaded(pieces: PieceCache) -> None:
    _, (result,) = run(pieces, "ipu:1@batch=2:corrupt,tensor=weights")
    assert isinstance(result, ApplicationRuntimeError)
    assert "the program has no variable 'weights'" in result.message


def test_lasting_faults_lengthen_modelled_time() -> None:
    step = {"seconds": 1.0, "cycles": 1.33e9, "seconds_by_cause": {"compute": 0.75, "all_reduce": 0.25}}
    executable: Any = type("E", (), {"tile_report": {"step": step}, "batches_per_pass": 1})()

    def extra(*texts: str) -> float:
        faults = LastingFaults()
        for text in texts:
            spec = parse_fault(text)
            faults.begin(Strike(spec, spec.batch))
        return round(faults.extra_seconds(executable, 0, 10), 9)

    assert extra() == 0
    assert extra("ipu:1@batch=3,for=4:slow,factor=1.01") == 0.03
    assert extra("ipu:1@batch=8:slow,factor=2") == 1.5
    assert extra("ipu:1@batch=0,for=1:throttled,mhz=665") == 0.75
    assert extra("link:2-3@batch=9:degraded,lanes=4") == 0.25
    assert extra("link:2-3@batch=9:degraded,error-rate=0.5") == 0.25
    assert extra("link:2-3@batch=9:degraded,lanes=4", "link:0-1@batch=9:degraded,lanes=2") == 0.75
    assert extra("ipu:1@batch=9:slow,factor=1.2", "ipu:2@batch=9:slow,factor=1.1") == 0.15, (
        "the slowest counts"
    )


def test_a_run_that_failed_counts_the_batches_that_it_did(pieces: PieceCache) -> None:
    machines = InProcessMachines(4, pieces)
    (machine,) = machines.machines
    machine.plan_faults(parse_faults("ipu:1@batch=5:tile-parity"))
    connection = machines.connect()
    assert connection.try_attach(request(IpuRange(0, 4))) is None
    connection.load(linear(4))
    connection.write_variables(first_weights())
    with pytest.raises(RecoverableRuntimeError, match="in batch 5") as caught:
        connection.run(8, data(linear(4), 8))
    assert machine.work().batches == 5
    assert caught.value.cause == ErrorCause(parse_fault("ipu:1@batch=5:tile-parity"), 5, (1,))
    connection.close()


def test_monitors_see_the_clock_of_a_throttled_ipu(pieces: PieceCache) -> None:
    machines = InProcessMachines(4, pieces)
    (machine,) = machines.machines

    def clocks() -> list[float | None]:
        report = machine_report(machine, MachineReport("ipum1", target="gc200"))
        return [ipu.clock_mhz for ipu in report.ipus]

    machine.plan_faults(parse_faults("ipu:1@batch=1,for=2:throttled,mhz=665"))
    connection = machines.connect()
    assert connection.try_attach(request(IpuRange(0, 4))) is None
    connection.load(linear(4))
    connection.write_variables(first_weights())
    assert clocks() == [1330.0] * 4
    connection.run(2, data(linear(4), 2))
    assert clocks() == [1330.0, 665.0, 1330.0, 1330.0]
    connection.run(1, data(linear(4), 1))
    assert clocks() == [1330.0] * 4
    connection.close()


def test_a_network_that_delays_holds_both_machines_up_for_so_long(pieces: PieceCache) -> None:
    slept: list[float] = []
    machines = InProcessMachines(8, pieces)
    for machine in machines.machines:
        machine._context.sleep = slept.append
        machine.plan_faults(parse_faults("network:0-1@batch=1,repeat=2,every=1:delayed,seconds=2.5"))
    connection = machines.connect(threaded=True)
    assert connection.try_attach(request(POD)) is None
    connection.load(linear(8))
    connection.write_variables(first_weights())
    assert connection.run(4, data(linear(8), 4)).batches_done == 4
    connection.close()
    assert slept == [2.5] * 4


def test_a_machine_whose_heartbeats_are_dropped_works_on_and_answers_later(pieces: PieceCache) -> None:
    now = [1000.0]
    fabric = LocalFabric()
    machine = Machine(
        MachinePlace("p", 0, 0, 4, ("a:1",)),
        fabric,
        pieces,
        wall_clock=lambda: now[0],
        claim=lambda spec: True,
    )
    machine.plan_faults(parse_faults("machine:0@batch=1:heartbeats-dropped,seconds=5"))
    connection = PortConnection(
        [Site(0, "a:1", POD4)], lambda site, count: LocalPort(site, machine, threaded=False)
    )
    assert connection.try_attach(request(POD4)) is None
    connection.load(linear(4))
    connection.write_variables(first_weights())
    assert machine.answers
    assert connection.run(3, data(linear(4), 3)).batches_done == 3
    assert not machine.answers
    now[0] += 5
    assert machine.answers
    connection.close()


def test_only_the_first_machine_of_a_host_that_joined_can_lose_it(pieces: PieceCache) -> None:
    places = [MachinePlace("p", k, 4 * k, 4, ("a:1", "a:2", "b:1", "b:2")) for k in range(4)]
    assert [place.leads_host for place in places] == [0, None, 1, None]
    lost: list[str] = []
    machines = [
        Machine(place, LocalFabric(), pieces, on_host_lost=partial(lost.append, "b") if k >= 2 else None)
        for k, place in enumerate(places)
    ]
    faults = parse_faults("host:1@batch=0:lost")
    for machine in machines:
        machine.plan_faults(faults)
    assert [len(machine.planned_faults()) for machine in machines] == [0, 0, 1, 0]
    with pytest.raises(UsageError, match="the partition has no host 2, only 0 to 1"):
        machines[0].plan_faults(parse_faults("host:2@batch=0:lost"))
    with pytest.raises(UsageError, match="that host runs the partition service"):
        machines[0].plan_faults(parse_faults("host:0@batch=0:lost"))
    error = strike_error(machines[2]._context, Strike(faults[0], 0))
    assert isinstance(error, UnrecoverableRuntimeError)
    assert lost == ["b"]


def test_bits_and_elements_that_there_are_not() -> None:
    value = np.zeros((2, 3), np.float32)
    flip_bit(value, parse_fault("ipu:0@batch=0:corrupt,tensor=w,element=4,bit=31"))
    assert np.signbit(value[1, 1])
    for text in ("element=6", "bit=32"):
        with pytest.raises(UsageError, match="has elements 0 to 5 of 32 bits"):
            flip_bit(value, parse_fault(f"ipu:0@batch=0:corrupt,tensor=w,{text}"))


def test_host_processes_are_killed_and_stopped() -> None:
    done, continued = [], threading.Event()

    def kill(pid: int, number: int) -> None:
        done.append((pid, number))
        if number == signal.SIGCONT:
            continued.set()

    signal_process(7, "", parse_fault("instance:0@batch=1:killed"), kill)
    signal_process(7, "elsewhere", parse_fault("instance:0@batch=1:killed"), kill)
    signal_process(8, "", parse_fault("instance:0@batch=1:hung,seconds=0.01"), kill)
    assert continued.wait(60)
    assert done == [(7, signal.SIGKILL), (8, signal.SIGSTOP), (8, signal.SIGCONT)]
    for thread in threading.enumerate():
        if thread.name == "podrun-fault-hung":
            thread.join(60)
    assert instances_here(4, 4, [(0, 4), (4, 4), (8, 4)]) == {1: 1}
    assert instances_here(0, 4, [(2, 2), (0, 2)]) == {1: 0, 0: 1}
