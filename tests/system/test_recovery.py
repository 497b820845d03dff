"""A program that recovers by itself from an error of each class loses nothing: its losses are those without any."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from podrun.partition.client.partition_calls import SERVER_PATIENCE_S
from podrun.partition.host.discovery import Registry
from podrun.partition.host.ipuof_files import remove_dead
from podrun.record.events import read_record
from podrun.record.incidents import incidents_of
from tests.conftest import LEAK_SECONDS, Commands, tagged, wait_until
from tests.system.conftest import PARTITION, START_SECONDS, _listens

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "recovery" / "train.py"
pytestmark = [pytest.mark.system, pytest.mark.slow]
RESET = f"$ vipu reset partition {PARTITION}"
CYCLE = [f"$ vipu-admin power-cycle agent ipum{n}" for n in (1, 2, 3, 4)]
FAULTS = {
    "ipu:5@batch=17:tile-parity": ["recoverable_runtime_error IPU_RESET"],
    "ipu:1@batch=12:overflow": ["application_runtime_error -"],
    "link:2-3@batch=17:down": ["recoverable_runtime_error PARTITION_RESET", RESET],
    "machine:1@batch=17:power": ["recoverable_runtime_error FULL_RESET", *CYCLE, RESET],
    "ipu:1@batch=12:unknown": ["unknown_runtime_error -", *CYCLE, RESET],
    "machine:1@batch=17:lost": [
        *("unrecoverable_runtime_error -", "$ gc-monitor --json", "$ vipu-admin restart agent ipum2", RESET)
    ],
    "machine:0@batch=17:unrecoverable": [
        *("unrecoverable_runtime_error -", "$ gc-monitor --json", "$ vipu-admin restart agent ipum1", RESET)
    ],
}


def run(
    pod: Commands, home: Path, *options: str, program: tuple[str, ...] = (), instances: int = 1
) -> list[str]:
    """What the program says."""
    words = ("podrun", "--num-replicas=16", f"--num-instances={instances}", "--vipu-partition", PARTITION)
    done = pod.run(*words, *options, PROGRAM, "--checkpoints", home, *program)
    assert done.returncode == 0, done.stdout + done.stderr
    return [re.sub(r" --generation=\d+$", "", line) for line in tagged(done.stdout, instances - 1)]


def test_losses_after_recovery_are_those_without_an_error(pod: Commands, tmp_path: Path) -> None:
    (losses,) = run(pod, tmp_path / "none")
    assert len(losses.split()) == 31
    for number, (fault, done) in enumerate(FAULTS.items()):
        assert run(pod, tmp_path / str(number), "--fault", fault) == [*done, losses], fault


def test_instances_that_each_recover_by_themselves_do_not_hinder_each_other(
    pod: Commands, tmp_path: Path
) -> None:
    (losses,) = run(pod, tmp_path / "none", instances=2)
    for number, (fault, done) in enumerate(FAULTS.items()):
        said = run(pod, tmp_path / str(number), "--fault", fault, instances=2)
        assert said[-1] == losses, (fault, said)
        assert said[0] == done[0], (fault, said)


def test_two_instances_go_on_where_an_earlier_launch_ended(pod: Commands, tmp_path: Path) -> None:
    (whole,) = run(pod, tmp_path / "whole", instances=2)
    (half,) = run(pod, tmp_path / "parts", program=("--batches=15",), instances=2)
    (rest,) = run(pod, tmp_path / "parts", instances=2)
    assert half.split() == whole.split()[:16]
    assert rest == whole
    names = {path.name for path in (tmp_path / "parts").iterdir()}
    assert {f"batch-{batch:012d}.part-{k}-of-2" for batch in (25, 30) for k in (0, 1)} <= names
    assert len(names) <= 5  # Instance 0 removes its part of an older one when the others have written theirs.


@pytest.mark.parametrize("instances", [1, 2])
def test_a_launch_that_is_started_again_loses_nothing(pod: Commands, tmp_path: Path, instances: int) -> None:
    program = PROGRAM.with_name("supervised.py")
    words = ("podrun", "--num-replicas=16", f"--num-instances={instances}", "--vipu-partition", PARTITION)
    losses = tagged(pod.run(*words, program, "--checkpoints", tmp_path / "undisturbed").stdout, 0)[-1]
    assert len(losses.split()) == 31
    faults = ["--fault=machine:1@batch=17:lost", "--fault=ipu:2@batch=9:tile-parity", "--max-restarts=3"]
    done = pod.run(*words, *faults, program, "--checkpoints", tmp_path / "disturbed")
    assert done.returncode == 0, done.stdout + done.stderr
    for instance in range(instances):
        said = tagged(done.stdout, instance)
        assert [line for line in said if line.startswith("start")] == [
            "start 0 from batch 0",
            "start 1 from batch 5",
            "start 2 from batch 20",
        ]
        assert said[-1] == losses or instance > 0
    assert "replace the machine of ipum2" in done.stderr


def test_a_crash_loop_ends_with_a_verdict_and_the_exit_code_of_the_program(pod: Commands) -> None:
    words = ("podrun", "--offline-mode=yes", "--max-restarts=9", "python3", "-c", "raise SystemExit(7)")
    done = pod.run(*words)
    assert done.returncode == 7
    assert "podrun: not started again: crash loop: the last 3 attempts ended alike" in done.stderr
    assert done.stderr.count("instance 0 ended with exit code 7 after 0 batches") == 5, done.stderr


def test_a_launch_goes_on_with_spare_machines_and_loses_nothing(commands: Commands, tmp_path: Path) -> None:
    program = PROGRAM.with_name("supervised.py")
    words = ("podrun", "--cluster=pod16", "--num-replicas=8", "--max-restarts=2")
    losses = tagged(commands.run(*words, program, "--checkpoints", tmp_path / "undisturbed").stdout, 0)[-1]
    fault = "--fault=machine:1@batch=17:lost"
    done = commands.run(*words, fault, program, "--checkpoints", tmp_path / "disturbed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"partition podrun-\d+ was created anew on other machines", done.stderr)
    assert "replace" not in done.stderr
    said = tagged(done.stdout, 0)
    assert [line for line in said if line.startswith("start")] == [
        "start 0 from batch 0",
        "start 1 from batch 15",
    ]
    assert said[-1] == losses


def test_a_launch_goes_on_with_fewer_replicas_where_the_policy_allows(
    commands: Commands, tmp_path: Path
) -> None:
    policy = tmp_path / "elastic.yaml"
    policy.write_text("version: 1\nmax-restarts: 2\nafter: {machine-lost: [spare, fewer-replicas]}\n")
    words = ("podrun", "--cluster=pod16", "--num-replicas=16", "--restart-policy", policy)
    done = commands.run(
        *words,
        "--fault=machine:1@batch=17:lost",
        PROGRAM.with_name("supervised.py"),
        "--checkpoints",
        tmp_path / "c",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not possible: the POD has no spare machine" in done.stderr
    assert "8 replicas instead of 16" in done.stderr
    assert "8 replicas, 1 instance, 2 machines" in done.stderr
    said = tagged(done.stdout, 0)
    assert "start 1 from batch 15" in said
    assert len(said[-1].split()) == 31


@pytest.mark.parametrize(("front_end", "replicas", "instances"), [("popart", 8, 2), ("poptorch", 1, 1)])
def test_a_session_goes_on_in_place_after_ipu_reset(
    commands: Commands, front_end: str, replicas: int, instances: int
) -> None:
    if front_end == "poptorch":
        pytest.importorskip("torch")
    words = ("podrun", f"--num-replicas={replicas}", f"--num-instances={instances}")
    program = (Path(__file__).parent / "programs" / "reload.py", front_end)
    undisturbed = commands.run(*words, *program)
    faults = ("--fault=ipu:0@batch=3:tile-parity", "--fault=ipu:0@batch=1:soft-error")
    done = commands.run(*words, *faults, *program)
    assert done.returncode == 0, done.stdout + done.stderr
    for instance in range(instances):
        (losses,) = tagged(undisturbed.stdout, instance)
        assert tagged(done.stdout, instance) == ["IPU_RESET", "IPU_RESET", losses]


def test_a_server_that_ends_in_a_recovery_ends_the_launch_with_a_record(
    commands: Commands, tmp_path: Path
) -> None:
    server = commands.start("vipu-server", "--cluster=pod16", "--port=0", "--no-state")
    wait_until(lambda: _listens(commands), START_SECONDS, "vipu-server starts")
    assert commands.run("vipu", "create", "partition", "q", "--size=4").returncode == 0
    record = tmp_path / "record"
    done = commands.run(
        *("podrun", "--vipu-partition=q", "--num-replicas=4", "--max-restarts=1", "--record", record),
        *("--fault=link:2-3@batch=7:down", "--fault=service:vipu@during=ResetPartition:killed"),
        *(PROGRAM.with_name("supervised.py"), "--checkpoints", tmp_path / "c"),
        timeout=SERVER_PATIENCE_S * 4 + 60,
    )
    assert server.wait(LEAK_SECONDS) == -signal.SIGKILL
    assert len(Registry(commands.runtime).sweep()) == 1, "the next service or launch clears up after it"
    remove_dead(commands.home / ".ipuof.conf.d")  # As the next service does.
    assert done.returncode == 1, done.stderr
    assert "podrun: not started again: the recovery failed: no V-IPU server answers at" in done.stderr
    found = incidents_of(read_record(record))
    assert [incident.faults for incident in found] == [
        ("link:2-3@batch=7:down",),
        ("service:vipu@during=ResetPartition:killed",),
    ]
    assert "not started again: the recovery failed" in found[0].action
