"""What would start when (`vipu explain --if`), and a POD written down as the start of a simulation (`vipu capture`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.command_line import run_command
from podrun.core.errors import ConfigError, DeniedError, UsageError
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.commands.get import asked_for
from podrun.partition.commands.vipu import vipu_command
from podrun.partition.state import events as ev
from podrun.partition.state.accounts import Account, Role
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.capture import capture_json, read_capture
from podrun.partition.state.explanations import explain_request
from podrun.partition.state.records import Reservation
from podrun.partition.state.values import Requirements
from podrun.simulate.commands.simulate import simulate_verb

from .conftest import Pod

NOW = 1_700_000_000.0


def busy_pod() -> Allocator:
    """8 IPUs for 100 s, 4 without a limit, a request for 8 with a limit of 50 s, and a reservation later."""
    core = Allocator(load_cluster("pod16"))
    core.now = NOW
    for name, size, limit in (("left", 8, 100.0), ("stays", 4, 0.0)):
        core.handle(ev.CreatePartition(Requirements(name, size, limit_s=limit, owner=0), NOW))
        core.handle(ev.OperationSucceeded(name, core.partitions[name].operation))
    core.handle(ev.Enqueue(Requirements("waits", 8, limit_s=50.0, owner=0), 0, NOW))
    core.handle(ev.CreateReservation(Reservation("later", ("ipum4",), NOW + 500, NOW + 600), NOW))
    return core


def test_a_request_that_nobody_made_is_planned_behind_those_that_wait() -> None:
    core = busy_pod()
    before = capture_json(core, NOW)
    now = explain_request(core, core.possible(Requirements("x", 4, limit_s=60.0), core.asker))
    assert (now.starts, now.explanation.latest, len(now.ipus)) == (True, NOW, 4)
    late = explain_request(core, core.possible(Requirements("x", 8, limit_s=60.0), core.asker))
    assert (late.starts, late.explanation.latest) == (False, NOW + 150)
    assert late.explanation.ahead == ("waits",)
    first = explain_request(core, core.possible(Requirements("x", 8, limit_s=60.0), core.asker), 5)
    assert (first.explanation.latest, first.explanation.ahead) == (NOW + 100, ())
    assert first.explanation.blockers == ("left",)
    unknown = explain_request(core, core.possible(Requirements("x", 16), core.asker))
    assert unknown.explanation.latest is None
    assert capture_json(core, NOW) == before


def test_the_plan_is_what_happens(pod16: Pod) -> None:
    for number, size in enumerate((8, 4, 2)):
        planned = pod16.client.plan_partition(Requirements("x", size))
        pod16.active(f"p{number}", size)
        assert planned.starts
        assert planned.agents == pod16.client.get_partition(f"p{number}").agents


def vipu(pod: Pod, line: str) -> int:
    return run_command(vipu_command, ["-H", "127.0.0.1", "--api-port", str(pod.port), *line.split()])


def test_the_command_says_when_and_where(pod16: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod16.active("p", 16, limit_s=7200.0)
    assert vipu(pod16, "explain --if size=4,limit=2h") == 0
    text = capsys.readouterr().out
    assert "in 7200 s" in text
    assert "allocation" in text
    assert vipu(pod16, "--format json explain --if size=4,limit=2h,priority=-1") == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["starts"], plan["starts_in_s"], plan["blockers"], plan["priority"]) == (
        False,
        7200.0,
        ["p"],
        -1,
    )
    assert len(plan["ipus"]) == 4
    for line, words in (
        ("explain", "what is to be explained"),
        ("explain p --if size=4", "what is to be explained"),
        ("explain --if size=32", "larger than pod16"),
        ("explain --if size=3", "power of two"),
        ("explain --if size=4,allocation=gone", "no allocation 'gone'"),
    ):
        assert vipu(pod16, line) == 2
        assert words in capsys.readouterr().err, line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("limit=2h", "has a size"),
        ("size=4,colour=red", "'colour=red'"),
        ("size=4,limit=soon", "'soon'"),
        ("size=four", "size is 'four', not a whole number"),
    ],
)
def test_what_describes_no_request_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked_for(text)


def test_a_capture_is_read_as_it_was(tmp_path: Path) -> None:
    core = busy_pod()
    core.handle(ev.SetMaintenance("ipum4", False, NOW, 0.0, "fan"))
    path = tmp_path / "pod.json"
    path.write_text(capture_json(core, NOW))
    there = read_capture(path)
    assert (there.taken, there.pod.agents, there.pod.allocations) == (NOW, core.cluster.agents, ())
    again = Allocator(
        there.pod,
        allocations=there.state.allocations,
        partitions=there.state.partitions,
        lost=there.state.lost,
        plans=there.state.plans,
    )
    again.validate_state()
    assert capture_json(again, NOW) == path.read_text()
    shifted = there.since_capture().state
    assert [p.ends for p in shifted.partitions] == [100.0, 0.0]
    assert [(r.start, r.end) for r in shifted.plans.reservations] == [(500.0, 600.0)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema_version=9), "schema_version"),
        (lambda d: d.update(partitions=3), "partitions is no list"),
        (lambda d: d["partitions"][0][1].update(size="all"), "partition left: size"),
        (lambda d: d["partitions"][1][1]["slices"].clear(), "partition stays|hold"),
        (lambda d: d.update(pod={"name": 3}), "pod.name"),
    ],
)
def test_a_damaged_capture_is_refused(tmp_path: Path, change: object, words: str) -> None:
    document = json.loads(capture_json(busy_pod(), NOW))
    change(document)  # type: ignore[operator]
    path = tmp_path / "pod.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=words):
        read_capture(path)


def test_a_simulation_goes_on_from_a_captured_pod(
    pod16: Pod, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod16.active("p", 16, limit_s=100.0)
    pod16.client.create_partition(Requirements("q", 8, limit_s=50.0), wait=True)
    path, jobs, figures = tmp_path / "pod.json", tmp_path / "jobs.csv", tmp_path / "f.json"
    assert vipu(pod16, f"capture {path}") == 0
    assert "1 partition, 1 queued request, 0 reservations." in capsys.readouterr().out
    jobs.write_text("submit_s,run_s,size\n5000,10,8\n5010,10,16\n")
    words = [str(jobs), "--start", str(path), "--json", str(figures)]
    assert run_command(simulate_verb, words) == 0, capsys.readouterr().err
    told = json.loads(figures.read_text())
    # q and the first job start when p ends, after 100 s; the second job when q ends, after 150 s.
    assert (told["jobs"], told["policy"], told["pod"]) == (3, "podrun", "pod16")
    assert told["mean_wait_s"] == pytest.approx((100 + 100 + 140) / 3)
    assert run_command(simulate_verb, ["--start", str(path)]) == 0
    assert run_command(simulate_verb, ["--start", str(path), "--pod", "pod16"]) == 2
    assert "says which POD it is" in capsys.readouterr().err
    pod16.client.remove_partition("q")
    assert vipu(pod16, f"capture {path}") == 0
    assert run_command(simulate_verb, ["--start", str(path)]) == 2
    said = capsys.readouterr().err
    assert "nothing waits in the captured POD" in said
    assert f"podrun simulate JOBS --start {path}" in said


def test_only_who_sees_the_whole_pod_captures_it(make_pod: Callable[..., Pod]) -> None:
    pod = make_pod(secure=True)
    accounts = pod.desk.accounts
    assert accounts is not None
    name = pod.cluster.allocations[0].name if pod.cluster.allocations else "alloc"
    key = accounts.create(Account("alice", Role.USER, (name,)))
    with (
        VipuClient("127.0.0.1", pod.port, timeout=60, account=("alice", key)) as client,
        pytest.raises(DeniedError, match="whole POD"),
    ):
        client.capture()
