"""Scripts that end badly, and commands that are ended: nothing stays behind, and the partition stays
usable."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from podrun.partition.host.discovery import Registry
from tests.conftest import Commands, tagged, wait_until
from tests.copies import run_command
from tests.system.conftest import PARTITION, PROGRAMS

pytestmark = pytest.mark.system

SMALL = PROGRAMS / "small.py"
RUN = ("podrun", "--num-replicas=16", "--num-instances=2", "--vipu-partition", PARTITION)


def until_stepping(process: object) -> None:
    stdout = process.stdout  # type: ignore[attr-defined]
    while "stepping" not in (line := stdout.readline()):
        assert line, process.communicate()  # type: ignore[attr-defined]


def detached(pod: Commands) -> bool:
    shown = run_command(pod, "gc-monitor")
    assert shown.returncode == 0, shown.stderr
    return "small.py" not in shown.stdout


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise-before", 1, "ValueError: ends raise-before"),
        pytest.param("exit-before", 9, "instance 1 ended with exit code 9", marks=pytest.mark.slow),
        pytest.param("raise-during", 1, "ValueError: ends raise-during", marks=pytest.mark.slow),
        pytest.param("kill-during", 137, "instance 1 ended with signal SIGKILL", marks=pytest.mark.slow),
        pytest.param("exit-after", 9, "instance 1 ended with exit code 9", marks=pytest.mark.slow),
    ],
)
def test_scripts_that_end_badly(pod: Commands, how: str, code: int, said: str) -> None:
    before = time.monotonic()
    done = run_command(pod, *RUN, SMALL, "5" if how == "exit-after" else "100000", how)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert time.monotonic() - before < 150
    wait_until(lambda: detached(pod), 60, "the machines notice that the processes are gone")


@pytest.mark.slow  # By default `podrun stop` ends such a launch (`test_running_launch.py`).
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_stepping(pod: Commands, number: signal.Signals, code: int) -> None:
    process = pod.start(*RUN, SMALL, "1000000")
    until_stepping(process)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert f"{number.name}: all instances were ended" in err
    wait_until(lambda: detached(pod), 60, "the machines notice that the processes are gone")


def test_what_services_keep_on_disk_is_the_users_alone(pod: Commands) -> None:
    """Ray opens its own directory, with the sockets in it, to everybody: ours around it is closed."""
    found = [Path(d) for entry in Registry(pod.runtime).entries() for d in entry.directories]
    assert found
    assert {oct(directory.stat().st_mode & 0o777) for directory in [pod.runtime, *found]} == {"0o700"}


def test_partition_rules(pod: Commands) -> None:
    misfit = run_command(pod, "podrun", "--num-replicas=8", SMALL)
    assert misfit.returncode == 2
    assert f"partition {PARTITION} has 16 IPUs; the run needs 8" in misfit.stderr
    assert "--update-partition=yes" in misfit.stderr
    full = run_command(pod, "podrun", "--num-replicas=8", "--vipu-partition=other", SMALL)
    assert full.returncode == 2
    assert PARTITION in full.stderr
    large = run_command(pod, "podrun", "--num-replicas=32", SMALL)
    assert large.returncode == 2
    assert "needs 32 IPUs; pod16 has 16" in large.stderr
    pod64 = run_command(pod, "podrun", "--num-replicas=32", "--cluster=pod64", "--dry-run", SMALL)
    assert pod64.returncode == 0, pod64.stderr
    assert "podrun starts one for the run" in pod64.stdout


@pytest.mark.slow
def test_update_creates_the_partition_anew_and_remove_takes_only_what_podrun_made(pod: Commands) -> None:
    kept = pod.run(
        "podrun", "--num-replicas=8", "--update-partition=yes", "--remove-partition=no", SMALL, "3"
    )
    assert kept.returncode == 0, kept.stderr
    assert " 8 " in pod.run("vipu", "list", "partitions").stdout
    own = pod.run("podrun", "--num-replicas=8", "--vipu-partition=mine", SMALL, "3")
    assert own.returncode == 0, own.stderr
    listed = pod.run("vipu", "list", "partitions").stdout
    assert "mine" not in listed
    assert PARTITION in listed
    again = pod.run(*RUN, "--update-partition=yes", "--remove-partition=no", SMALL, "3")
    assert again.returncode == 0, again.stderr


def test_a_port_that_is_taken(commands: Commands, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_command(commands, "podrun", f"--vipu-server-port={port}", "true")
    assert done.returncode == 2, done.stderr
    assert str(port) in done.stderr
    assert "taken" in done.stderr


def test_a_server_that_is_named_must_answer(commands: Commands) -> None:
    done = run_command(commands, "podrun", "--vipu-server-host=127.0.0.1", "--vipu-server-port=1", "true")
    assert done.returncode == 1
    assert "no V-IPU server answers at 127.0.0.1:1" in done.stderr


def test_cold_run_under_nohup_seen_by_the_monitor_and_everything_is_gone(
    commands: Commands, tmp_path: Path
) -> None:
    """A terminal that closes sends SIGHUP to all its processes: under nohup the run goes on, with everything that it
    started.
    """
    enough = tmp_path / "enough"
    process = commands.start("nohup", "podrun", "--num-replicas=4", SMALL, "1000000", f"until:{enough}")
    until_stepping(process)
    for pid in {process.pid, *commands.processes()}:
        os.kill(pid, signal.SIGHUP)
    seen = run_command(commands, "gc-monitor", "--json")
    enough.touch()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout.count('"PID"') == 4
    steps, done = tagged(out, 0)[-2:]
    assert done == "done"
    assert "1 machine" in err
    assert f"emulation: {steps.removesuffix(' steps')} batches" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_cold_run_ended(commands: Commands, number: int) -> None:
    process = commands.start("podrun", "--num-replicas=4", "--num-instances=2", SMALL, "1000000")
    until_stepping(process)
    before = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=120)
    commands.wait_until_gone()
    assert time.monotonic() - before < 60
    if number == signal.SIGKILL:
        assert commands.run("podrun", "--offline-mode=1", "true").returncode == 0
    else:
        assert process.returncode == 130


@pytest.mark.slow
def test_ctrl_c_while_machines_start(commands: Commands) -> None:
    process = commands.start("podrun", "-v", "--num-replicas=16", SMALL)
    assert process.stderr is not None
    while "creating partition" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
