"""Faults on machines: the right error in every instance, the right state afterwards, and what clears it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.compiler.compile import compile_program
from podrun.compiler.program import AnchorSpec
from podrun.core.errors import (
    ApplicationRuntimeError,
    ErrorCode,
    PoplarError,
    RecoverableRuntimeError,
    RecoveryAction,
    UnknownRuntimeError,
    UnrecoverableRuntimeError,
    UsageError,
)
from podrun.core.event_record import EVENT_PATH, read_event_record
from podrun.core.executable import BATCHES_PER_PASS, FLOATING_POINT_EXCEPTIONS
from podrun.core.layout import IpuRange
from podrun.core.telemetry import MachineReport
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.host.connecting import connect
from podrun.device.xla.pieces import PieceCache
from podrun.faults import parse_faults
from tests.compiler.programs import inputs_for, weights_for
from tests.compiler.test_sharding import chain
from tests.device.pods import machine_report

from .conftest import owners, request, together
from .programs import data, first_weights, linear

pytestmark = pytest.mark.usefixtures("no_threads_left")
POD, POD4 = IpuRange(0, 8), IpuRange(0, 4)


def fail(
    pieces: PieceCache, fault: str, count: int = 2
) -> tuple[InProcessMachines, list[PortConnection], list[Any]]:
    """Train on two machines with ``count`` owners until the fault strikes in the second run of two batches."""
    executable, twin = linear(8), InProcessMachines(8, pieces)
    for machine in twin.machines:
        machine.plan_faults(parse_faults(fault))
    connections = owners(lambda: twin.connect(threaded=True), 8, count)

    def work(connection: PortConnection, owned: IpuRange) -> float:
        connection.load(executable)
        connection.write_variables(first_weights())
        inputs = {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, 2).items()}
        assert connection.run(2, inputs).batches_done == 2
        begin = time.monotonic()
        try:
            connection.run(2, inputs)
        except PoplarError as error:
            error.took = time.monotonic() - begin  # type: ignore[attr-defined]
            raise
        return time.monotonic() - begin

    results = together([partial(work, c, o) for c, o in connections])
    return twin, [c for c, _ in connections], results


def reload_and_run(connections: list[PortConnection]) -> list[Any]:
    executable = linear(8)
    share = 8 // len(connections)

    def work(connection: PortConnection, first: int) -> int:
        connection.load(executable)
        connection.write_variables(first_weights())
        inputs = {n: a[:, :, first : first + share] for n, a in data(executable, 1).items()}
        return connection.run(1, inputs).batches_done

    return together([partial(work, c, i * share) for i, c in enumerate(connections)])


CASES = [
    ("ipu:5@batch=3:tile-parity", RecoverableRuntimeError, ErrorCode.MEMORY_ERROR, RecoveryAction.IPU_RESET),
    (
        "ipu:1@batch=2,instruction=6:soft-error",
        RecoverableRuntimeError,
        ErrorCode.IPUSOFTERR,
        RecoveryAction.IPU_RESET,
    ),
    ("ipu:7@batch=3:tile-exception", ApplicationRuntimeError, ErrorCode.INVALID_ADDRESS, None),
    ("ipu:0@batch=2:divide-by-zero", ApplicationRuntimeError, ErrorCode.FLOATING_POINT_DIVIDE_BY_ZERO, None),
    ("link:2-3@batch=3:down", RecoverableRuntimeError, ErrorCode.LINK_DOWN, RecoveryAction.PARTITION_RESET),
    ("link:2-4@batch=3:down", RecoverableRuntimeError, ErrorCode.LINK_DOWN, RecoveryAction.PARTITION_RESET),
    ("machine:1@batch=2:power", RecoverableRuntimeError, ErrorCode.UNKNOWN, RecoveryAction.FULL_RESET),
    ("machine:0@batch=2:unrecoverable", UnrecoverableRuntimeError, ErrorCode.UNKNOWN, None),
    ("ipu:4@batch=3:unknown", UnknownRuntimeError, ErrorCode.UNKNOWN, None),
    ("network:0-1@batch=3:partitioned", UnknownRuntimeError, ErrorCode.HOST_SYNC_TIMEOUT, None),
    ("machine:0@batch=3:connection-lost", UnrecoverableRuntimeError, ErrorCode.HOST_LINK_DOWN, None),
    ("machine:1@batch=3:gateway-lost", UnrecoverableRuntimeError, ErrorCode.HOST_LINK_DOWN, None),
    ("machine:1@batch=3:lost", UnrecoverableRuntimeError, ErrorCode.HOST_LINK_DOWN, None),
]


def test_a_program_leaves_its_last_error_for_monitors(
    pieces: PieceCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EVENT_PATH, str(tmp_path))
    _, connections, _ = fail(pieces, "link:2-4@batch=3:down", 1)
    connections[0].close()
    found = read_event_record(tmp_path)
    assert (found["severity"], found["pid"]) == ("error", str(os.getpid()))
    assert (found["attached ipus"], found["specific ipus"]) == ("0, 1, 2, 3, 4, 5, 6, 7", "2, 4")
    assert (found["attached ipu hosts"], found["partition"]) == ("", "")
    assert found["description"].startswith(
        "recoverable_runtime_error: IPU-Link between IPU 2 and IPU 4 went down"
    )
    assert found["description"].endswith("(recovery action: PARTITION_RESET)")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("fault", "kind", "code", "action"), CASES)
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.sample(2)
def test_every_instance_gets_the_same_error_soon(
    pieces: PieceCache,
    fault: str,
    kind: type[PoplarError],
    code: ErrorCode,
    action: RecoveryAction | None,
    count: int,
) -> None:
    _, connections, results = fail(pieces, fault, count)
    for result in results:
        assert type(result) is kind, repr(result)
        assert result.code is code
        assert getattr(result, "recovery_action", None) is action
        assert result.message == results[0].message or "lost" in fault
        assert result.hint
        assert result.took < 60
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(
    ("value", "code"),
    [(1e30, ErrorCode.FLOATING_POINT_OVERFLOW), (np.nan, ErrorCode.FLOATING_POINT_INVALID_OPERATION)],
)
def test_floating_point_exceptions_stop_all_instances_if_the_program_asks(
    pieces: PieceCache, value: float, code: ErrorCode
) -> None:
    plain = linear(8)
    asking = replace(plain, metadata={**plain.metadata, FLOATING_POINT_EXCEPTIONS: True})
    losses: dict[bool, list[Any]] = {}
    for executable in (plain, asking):
        twin = InProcessMachines(8, pieces)
        connections = owners(lambda: twin.connect(threaded=True), 8, 2)  # noqa: B023 - called at once
        given = {name: array.copy() for name, array in data(executable, 3).items()}
        given["x"][2, 0, 5] = value

        def work(connection: PortConnection, owned: IpuRange) -> Any:
            connection.load(executable)  # noqa: B023 - called at once
            connection.write_variables(first_weights())
            mine = {n: a[:, :, owned.first : owned.stop] for n, a in given.items()}  # noqa: B023
            before = connection.run(2, {n: a[:2] for n, a in mine.items()}).anchors["loss"]
            connection.run(1, {n: a[2:] for n, a in mine.items()})
            return before

        results = together([partial(work, c, o) for c, o in connections])
        losses[executable is asking] = results
        states = [
            ipu.error_state for m in twin.machines for ipu in machine_report(m, MachineReport("a")).ipus
        ]
        for connection, _ in connections:
            connection.close()
    assert not any(isinstance(result, Exception) for result in losses[False])
    for error in losses[True]:
        assert isinstance(error, ApplicationRuntimeError), error
        assert error.code is code
        assert error.message == losses[True][0].message
        assert error.message.startswith("Tiles in excepted state: IPU 4: TEXCPT_FP_")
        assert "in batch 2" in error.message
    assert [state for state in states if state != "no errors"] == [
        f"floating-point exception ({'invalid operation' if np.isnan(value) else 'overflow'})"
    ]


def try_all(twin: InProcessMachines, pid: int | None = None) -> str | None:
    """Attach to the whole pod; the reason if that is refused."""
    connection = twin.connect()
    refusal = connection.try_attach(request(POD, pid=pid))
    connection.close()
    return refusal


@pytest.mark.parametrize("fault", ["ipu:5@batch=3:tile-parity", "ipu:5@batch=3:tile-exception"])
def test_loading_again_resets_an_ipu(pieces: PieceCache, fault: str) -> None:
    twin, connections, _ = fail(pieces, fault)
    state = machine_report(twin.machines[1], MachineReport("a")).ipus[1]
    assert state.error_state.startswith("tile")
    assert state.recovery_action is RecoveryAction.IPU_RESET
    with pytest.raises(PoplarError, match=r"IPU 5"):
        connections[1].run(1, {n: a[:, :, 4:] for n, a in data(linear(8), 1).items()})
    assert reload_and_run(connections) == [1, 1], "batches count anew, and the fault has struck"
    assert not machine_report(twin.machines[1], MachineReport("a")).ipus[1].has_error
    for connection in connections:
        connection.close()


def test_an_ipu_in_error_is_not_given_away_before_its_reset(pieces: PieceCache) -> None:
    twin, connections, _ = fail(pieces, "ipu:5@batch=3:tile-parity")
    for connection in connections:
        connection.close()
    refusal = try_all(twin, pid=4711)
    assert refusal is not None
    assert "IPUs 4-7 cannot be used (IPU_RESET needed): Memory parity error" in refusal
    assert refusal.endswith("Start the program again: its machines are in its own process.")
    twin.machines[1].reset_ipus([4])
    assert try_all(twin, pid=4711) is not None, "another IPU's reset does not help"
    twin.machines[1].reset_ipus([5])
    assert try_all(twin, pid=4711) is None


def test_a_process_that_still_holds_the_ipus_is_told_that_and_not_to_reset_them(pieces: PieceCache) -> None:
    twin, connections, _ = fail(pieces, "ipu:5@batch=3:tile-parity")
    refusal = twin.connect().try_attach(request(POD))
    assert refusal is not None
    assert "attached by process" in refusal
    assert "reset" not in refusal
    for connection in connections:
        connection.close()


def test_who_met_an_error_may_attach_again_and_load(pieces: PieceCache) -> None:
    """As programs do that close everything before they load again; another process has to reset the IPU."""
    twin, connections, _ = fail(pieces, "ipu:5@batch=3:tile-parity")
    for connection in connections:
        connection.close()
    again = twin.connect()
    assert again.try_attach(request(POD)) is None
    again.load(linear(8))
    assert not machine_report(twin.machines[1], MachineReport("a")).ipus[1].has_error
    again.close()
    assert try_all(twin, pid=4711) is None


def test_a_link_that_is_down_stays_down_until_the_partition_is_reset(pieces: PieceCache) -> None:
    twin, connections, _ = fail(pieces, "link:2-4@batch=3:down")
    ends = [machine_report(machine, MachineReport("a")).ipus for machine in twin.machines]
    assert ends[0][2].links_down == (4,)
    assert ends[1][0].links_down == (2,)
    results = reload_and_run(connections)
    assert [type(r) for r in results] == [RecoverableRuntimeError] * 2, "loading again does not help"
    for connection in connections:
        connection.close()
    for machine in twin.machines:
        machine.reset_ipus(machine.place.range)
    refusal = try_all(twin)
    assert refusal is not None
    assert "PARTITION_RESET" in refusal
    for machine in twin.machines:
        machine.reset_links()
    assert try_all(twin) is None


@pytest.mark.parametrize("fault", ["machine:1@batch=2:power", "ipu:4@batch=3:unknown"])
def test_only_a_power_cycle_clears_what_asks_for_it(pieces: PieceCache, fault: str) -> None:
    twin, connections, _ = fail(pieces, fault)
    for connection in connections:
        connection.close()
    machine = twin.machines[1]
    machine.reset_ipus(machine.place.range)
    machine.reset_links()
    assert try_all(twin) is not None
    machine.power_cycle()
    assert try_all(twin) is None


@pytest.mark.parametrize("fault", ["machine:1@batch=3:lost", "machine:1@batch=3:unrecoverable"])
def test_nothing_brings_a_failed_machine_back(pieces: PieceCache, fault: str) -> None:
    twin, connections, _ = fail(pieces, fault)
    for connection in connections:
        connection.close()
    machine = twin.machines[1]
    machine.reset_ipus(machine.place.range)
    machine.reset_links()
    machine.power_cycle()
    refusal = try_all(twin)
    assert refusal is not None
    assert "machine 1" in refusal or "IPU-M2000 1" in refusal


def test_a_reset_takes_the_program_away(pieces: PieceCache) -> None:
    twin, executable = InProcessMachines(4, pieces), linear(4)
    connection = twin.connect()
    assert connection.try_attach(request(IpuRange(0, 4))) is None
    connection.load(executable)
    connection.write_variables(first_weights())
    connection.run(1, data(executable, 1))
    twin.machines[0].reset_ipus([2])
    with pytest.raises(ApplicationRuntimeError, match="IPU 2 was reset"):
        connection.run(1, data(executable, 1))
    connection.load(executable)
    twin.machines[0].reset_links()
    with pytest.raises(ApplicationRuntimeError, match="the partition was reset"):
        connection.load(executable)
    connection.close()


def test_a_standalone_script_takes_faults_from_its_environment(pieces: PieceCache, tmp_path: Any) -> None:
    environ = {"PODRUN_FAULTS": "ipu:1@batch=1:overflow", "PODRUN_CACHE_DIR": str(tmp_path)}
    connection = connect(environ, standalone_ipus=2)
    assert connection.try_attach(request(IpuRange(0, 2))) is None
    connection.load(linear(2))
    connection.write_variables(first_weights())
    with pytest.raises(
        ApplicationRuntimeError, match="Tiles in excepted state: IPU 1: TEXCPT_FP_OFLO in batch 1"
    ):
        connection.run(2, data(linear(2), 2))
    connection.close()


def test_telemetry_says_who_holds_what(pieces: PieceCache) -> None:
    now = [1000.0]
    twin, executable = InProcessMachines(4, pieces), linear(2)
    machine = twin.machines[0]
    machine._context.clock = lambda: now[0]
    connection = twin.connect()
    assert connection.try_attach(request(IpuRange(0, 2), pid=4711)) is None
    connection.load(executable)
    connection.write_variables(first_weights())
    connection.run(3, data(executable, 3))
    now[0] += 2.0
    report = machine_report(machine, MachineReport("agent0", target="bow"))
    assert MachineReport.from_json_dict(report.to_json_dict()) == report
    first, free = report.ipus[0], report.ipus[3]
    assert first.process is not None
    assert (first.process.pid, first.process.user, first.process.command) == (4711, "tester", "train.py")
    assert first.batches_done == 3
    assert first.clock_mhz == 1850.0
    assert first.utilisation_percent is not None
    assert free.process is None
    assert free.batches_done == 0
    assert np.isfinite(first.utilisation_session_percent or 0)
    connection.close()
    assert machine_report(machine, MachineReport("agent0")).ipus[0].process is None


def test_a_pipeline_that_overlaps_batches_counts_each_of_them(pieces: PieceCache) -> None:
    program = chain(
        [0, 1, 2],
        ipus=4,
        replicas=1,
        accumulation_factor=4,
        pipelined=True,
        loss=None,
        update=None,
        anchors=(AnchorSpec("h2"),),
        metadata={BATCHES_PER_PASS: 4, "samples_per_micro_batch": 3},
    )
    executable, twin = compile_program(program), InProcessMachines(4, pieces)
    machine = twin.machines[0]
    machine.plan_faults(parse_faults("ipu:1@batch=6:trap"))
    connection = twin.connect()
    assert connection.try_attach(request(POD4)) is None
    connection.load(executable)
    connection.write_variables(weights_for(program))
    assert connection.run(1, inputs_for(program, 1)).batches_done == 4
    report = machine_report(machine, MachineReport("a"))
    assert (report.batches_done, report.samples_done) == (4, 12)
    with pytest.raises(ApplicationRuntimeError, match="IPU 1: TEXCPT_DBG_TRAP in batch 6"):
        connection.run(1, inputs_for(program, 1))
    connection.close()


def train(twin: InProcessMachines, batches: int, *, pid: int) -> None:
    """Another process trains on four IPUs, and ends."""
    executable, connection = linear(4), twin.connect()
    assert connection.try_attach(request(POD4, pid=pid)) is None
    connection.load(executable)
    connection.write_variables(first_weights())
    try:
        connection.run(batches, data(executable, batches))
    finally:
        connection.close()


def test_a_fault_that_did_not_strike_its_job_does_not_strike_the_next(pieces: PieceCache) -> None:
    twin = InProcessMachines(4, pieces)
    machine = twin.machines[0]
    machine.plan_faults(parse_faults("ipu:2@batch=5:trap"))
    train(twin, 3, pid=1)
    assert machine_report(machine, MachineReport("a")).planned_faults == parse_faults("ipu:2@batch=5:trap")
    train(twin, 7, pid=2)
    assert machine_report(machine, MachineReport("a")).planned_faults == ()
    machine.plan_faults(parse_faults("ipu:2@batch=5:trap:launch=another"))
    train(twin, 7, pid=3)


def test_a_batch_that_is_over_and_an_instruction_that_does_not_exist_are_refused(pieces: PieceCache) -> None:
    twin, executable = InProcessMachines(4, pieces), linear(4)
    connection, machine = twin.connect(), twin.machines[0]
    assert connection.try_attach(request(POD4)) is None
    connection.load(executable)
    connection.write_variables(first_weights())
    connection.run(3, data(executable, 3))
    with pytest.raises(UsageError, match="the program has done 3 batches, so that batch 2 is over"):
        machine.plan_faults(parse_faults("ipu:2@batch=2:trap"))
    with pytest.raises(UsageError, match="batch 3 has no instruction 9999"):
        machine.plan_faults(parse_faults("ipu:2@batch=3,instruction=9999:trap"))
    machine.plan_faults(parse_faults("ipu:2@batch=3:trap"))
    with pytest.raises(ApplicationRuntimeError, match="IPU 2: TEXCPT_DBG_TRAP in batch 3"):
        connection.run(1, data(executable, 1))
    connection.close()


def test_faults_of_the_environment_are_held_against_the_ipus(tmp_path: Any) -> None:
    environ = {"PODRUN_FAULTS": "ipu:4@batch=1:overflow", "PODRUN_CACHE_DIR": str(tmp_path)}
    with pytest.raises(UsageError, match="the partition has no IPU 4, only 0 to 3"):
        connect(environ, standalone_ipus=4)
