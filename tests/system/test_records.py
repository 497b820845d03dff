"""A launch that recovers, recorded and replayed: the same events, and the same incidents to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from podrun.record.events import read_record
from podrun.record.incidents import incidents_of
from tests.conftest import Commands
from tests.system.conftest import PARTITION
from tests.system.ray_hosts import ray_cluster

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recovery" / "supervised.py"
pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_a_replay_gives_the_same_incidents_to_the_byte(pod: Commands, tmp_path: Path) -> None:
    record, again, fresh = tmp_path / "record", tmp_path / "again", tmp_path / "fresh"
    fresh.mkdir()
    options = ("--num-replicas=16", "--num-instances=2", "--max-restarts=2", "--vipu-partition", PARTITION)
    fault = "link:2-3@batch=17:down"
    done = pod.run(
        "podrun", *options, "--record", record, "--fault", fault, EXAMPLE, "--checkpoints", "c", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "podrun: incident-1-" in done.stderr
    assert "podrun: goodput: " in done.stderr
    replayed = pod.run("podrun", "replay", record, "--record", again, "--directory", fresh)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "replay: the same 1 incident\n" in replayed.stdout
    names = [path.with_name(f"{path.name}.incidents.json") for path in (record, again)]
    assert names[0].read_bytes() == names[1].read_bytes()
    (incident,) = json.loads(names[0].read_text())["incidents"]
    assert (incident["faults"], incident["cost"]) == (
        [fault],
        {"lost_batches": 2, "stalled_seconds": 0.0},
    )
    assert "resumed from batch 15" in incident["action"]
    goodput = json.loads(record.with_name("record.goodput.json").read_text())
    parts = [
        goodput[f"{name}_seconds"] for name in ("useful", "recomputed", "detecting", "recovering", "waiting")
    ]
    assert sum(parts) == pytest.approx(goodput["total_seconds"])
    assert (goodput["batches"], goodput["recomputed_batches"]) == (30, 2)
    assert read_record(record).events == read_record(again).events
    compared = pod.run("podrun", "diff", record, again)
    assert compared.returncode == 0, compared.stdout


def test_a_plan_is_shrunk_by_launching(pod: Commands, tmp_path: Path) -> None:
    record, fresh = tmp_path / "record", tmp_path / "fresh"
    fresh.mkdir()
    faults = ("ipu:1@batch=2:trap", "ipu:0@batch=3:overflow")
    done = pod.run(
        *(
            "podrun",
            "--num-replicas=16",
            "--max-restarts=1",
            "--vipu-partition",
            PARTITION,
            "--record",
            record,
        ),
        *(word for fault in faults for word in ("--fault", fault)),
        *(EXAMPLE, "--checkpoints", "c"),
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    shrunk = pod.run("podrun", "shrink", record, "--directory", fresh)
    assert shrunk.returncode == 0, shrunk.stdout + shrunk.stderr
    assert "has 2 of 2 faults: --fault ipu:1@batch=2:trap:optional --fault ipu:0@batch=3" in shrunk.stdout
    assert len(list(fresh.iterdir())) == 4  # both, none, and each of them


def test_a_replay_on_two_hosts_gives_the_same_control_events_and_incidents() -> None:
    faults = (
        "link:2-3@batch=7:down",
        "machine:3@batch=17:lost",
        "service:vipu@during=ResetPartition:slow,seconds=0.2",
        "service:vipu@during=CreatePartition:answer-lost",
        "network:1-2@batch=3:delayed,seconds=0.1",
    )
    with ray_cluster() as cluster:
        record, again, fresh = cluster.home / "record", cluster.home / "again", cluster.home / "fresh"
        fresh.mkdir()
        done = cluster.run(
            *("podrun", f"--ray-address={cluster.address}", "--num-replicas=16", "--max-restarts=3"),
            *("--record", record),
            *(word for fault in faults for word in ("--fault", fault)),
            *(EXAMPLE, "--checkpoints", "c"),
        )
        assert done.returncode == 0, done.stderr
        assert f"its process at {cluster.hosts[1].address}" in done.stdout + done.stderr
        replayed = cluster.run("podrun", "replay", record, "--record", again, "--directory", fresh)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert "replay: the same 5 incidents\n" in replayed.stdout
        names = [path.with_name(f"{path.name}.incidents.json") for path in (record, again)]
        assert names[0].read_bytes() == names[1].read_bytes()
        before, after = read_record(record), read_record(again)
    assert before.events == after.events
    incidents = json.loads(json.dumps([incident.plain for incident in incidents_of(before)]))
    assert sorted(fault for incident in incidents for fault in incident["faults"]) == sorted(faults)
    did = [event.data["did"] for event in before.events if event.kind == "control"]
    assert did.count("machine lost") == 1
    assert did.count("partition reset") + did.count("partition created") >= 2
    assert any("service: machine lost ipum4" in incident["evidence"] for incident in incidents)
