"""``podrun health``: each kind of failure is named with its place, its victims and a command; exit codes; JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from podrun.core.documents import load_schema
from podrun.core.errors import ServiceError
from podrun.core.ipu_states import IpuErrorState, MachineState
from podrun.core.telemetry import AttachedProcess, IpuReport, MachineReport
from podrun.faults import Struck, parse_fault
from podrun.monitor.commands.health import CANNOT_TELL, health_verb
from podrun.monitor.devices import Device, View
from podrun.monitor.pod_health import HealthProblem, Severity, problems_of
from podrun.partition.state.values import IpuofConfig, PartitionInfo, PartitionState
from tests.partition.conftest import Pod

SCHEMA = load_schema("podrun.monitor", "health.schema.json")


def run_health(*words: str) -> Result:
    return CliRunner().invoke(health_verb, words, standalone_mode=False)


def as_json(done: Result) -> dict[str, object]:
    document = json.loads(done.stdout)
    jsonschema.validate(document, SCHEMA)
    health: dict[str, object] = document["health"]
    return health


def problems(done: Result) -> list[dict[str, object]]:
    listed = as_json(done)["problems"]
    assert isinstance(listed, list)
    return listed


def test_a_healthy_pod_has_no_problem(pod: Pod) -> None:
    pod.active("p", 8)
    done = run_health()
    assert done.return_value == 0
    assert done.stdout.splitlines() == [
        f"127.0.0.1:{pod.port}: healthy",
        "  4 machines, 1 partition with 8 IPUs, 8 IPUs free, 0 waiting",
    ]
    assert problems(run_health("--format", "json")) == []


def test_a_pod_without_partitions_is_healthy(pod: Pod) -> None:
    assert problems(run_health("--format", "json")) == []


def test_an_ipu_in_error_is_named_with_who_is_hit_and_the_reset(pod: Pod) -> None:
    pod.active("p", 8)
    pod.pool.machine("ipum1", "p").process = AttachedProcess(4711, "justina", "python", 1.0)
    pod.pool.machine("ipum2", "p").ipu_errors[0] = IpuErrorState.TILE_PARITY
    done = run_health("--format", "json")
    assert done.return_value == 1
    (problem,) = problems(done)
    assert (
        problem["severity"],
        problem["what"],
        problem["partition"],
        problem["agent"],
        problem["ipus"],
    ) == (
        "broken",
        "tile parity error",
        "p",
        "ipum2",
        [4],
    )
    assert problem["hit"] == ["4711 python (justina)"]
    text = run_health().stdout
    assert "broken    partition p, ipum2, IPU 4: tile parity error" in text
    assert "hits 4711 python (justina)" in text


def test_a_partition_in_error_is_told_with_its_reset(pod: Pod) -> None:
    pod.active("p", 4)
    pod.client.power_cycle_agent("ipum1")
    done = run_health("--format", "json")
    assert done.return_value == 1
    assert any(problem["partition"] == "p" for problem in problems(done))
    assert "vipu reset partition p" in json.dumps(problems(done))


def test_a_cordoned_machine_needs_attention_and_fails_only_when_strict(pod: Pod) -> None:
    pod.client.set_maintenance("ipum3", reason="fan")
    done = run_health("--format", "json")
    assert done.return_value == 0
    (problem,) = problems(done)
    assert (problem["severity"], problem["agent"]) == ("attention", "ipum3")
    assert "fan" in str(problem["what"])
    assert run_health("--strict").return_value == 1


def test_without_a_service_it_says_so_and_ends_with_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    done = run_health("--format", "json", "--api-host", "127.0.0.1", "--api-port", "1")
    assert done.return_value == CANNOT_TELL
    jsonschema.validate(json.loads(done.stdout), SCHEMA)
    assert "podrun health: error: " in done.stderr


def view_of(reports: Sequence[MachineReport], state: PartitionState = PartitionState.ACTIVE) -> View:
    info = PartitionInfo("p", "c", "a", 4 * len(reports), state)
    devices = tuple(
        Device(ipu.partition_ipu, "10.1.0.1", 3 - ipu.ipu, report, ipu)
        for report in reports
        for ipu in report.ipus
    )
    return View(info, IpuofConfig("p", state, (), {}), tuple(reports), devices, active=True)


def machine(index: int, state: MachineState = MachineState.UP, **options: object) -> MachineReport:
    clocks = options.pop("clocks", (1330.0,) * 4)
    assert isinstance(clocks, tuple)
    ipus = tuple(IpuReport(4 * index + i, i, clock_mhz=clock) for i, clock in enumerate(clocks))
    return MachineReport(f"ipum{index + 1}", state, machine_index=index, ipus=ipus, **options)  # type: ignore[arg-type]


def test_a_silent_machine_is_one_problem_since_its_last_answer() -> None:
    (problem,) = problems_of(
        [view_of([machine(0), machine(1, MachineState.NO_ANSWER, stale_seconds=12.5)])], [], 1000.0
    )
    assert (problem.agent, problem.ipus, problem.since_s) == ("ipum2", (), 987.5)
    assert problem.severity is Severity.BROKEN
    assert problem.remedy == "vipu-admin restart agent ipum2, then vipu reset partition p"


def test_a_throttled_ipu_needs_attention_since_its_fault_struck() -> None:
    slow = machine(
        1,
        clocks=(1330.0, 665.0, 1330.0, 1330.0),
        struck_faults=(Struck(parse_fault("ipu:5@batch=3:slow"), "", 3, 90.0),),
    )
    assert problems_of([view_of([machine(0), slow])], [], 100.0) == (
        HealthProblem(
            Severity.ATTENTION,
            "clock 665 MHz, others 1330 MHz",
            "p",
            "ipum2",
            (5,),
            90.0,
            (),
            "vipu-admin drain agent ipum2, then vipu reset partition p",
        ),
    )


def test_machines_on_their_way_into_a_partition_are_no_problem() -> None:
    ipus = tuple(IpuReport(i, i, error_state=IpuErrorState.NOT_READY) for i in range(4))
    report = MachineReport("ipum1", ipus=ipus)
    assert problems_of([view_of([report], PartitionState.PROVISIONING)], [], 0.0) == ()


def test_a_watch_says_once_which_of_several_services_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter((ServiceError("nobody answers"), ServiceError("nobody answers"), KeyboardInterrupt()))

    def connect(*_: object, say: Callable[[str], None]) -> None:
        say("note: asking one of 2 services of yours")
        raise next(looks)

    monkeypatch.setattr("podrun.monitor.devices.connect_monitor", connect)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    done = run_health("--watch")
    assert done.stdout.count("begins") == 1
    assert done.stderr.count("note: asking") == 1
