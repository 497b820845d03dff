"""The command as a user types it, without IPUs: quick, since neither Ray nor machines start."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import BIN, Commands, marked_processes, script, tagged, wait_until
from tests.copies import run_command

pytestmark = pytest.mark.system

OFFLINE = ("podrun", "--offline-mode=yes")
WAITING = """
import os, sys, time
print("here", flush=True)
time.sleep(60)
"""


def test_tags_layout_and_exit_code(commands: Commands, tmp_path: Path) -> None:
    script(tmp_path, "import os\nprint(os.environ['POPDIST_REPLICA_INDEX_OFFSET'])\n")
    done = run_command(
        commands, *OFFLINE, "--num-replicas=8", "--num-instances", "4", "--print-topology=yes", "train.py"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" ====")
    assert [tagged(done.stdout, i) for i in range(4)] == [["0"], ["2"], ["4"], ["6"]]
    assert re.search(r"^podrun: done in [\d.]+ s: 8 replicas, 4 instances$", done.stderr, re.MULTILINE)


def test_quiet_prints_nothing_of_its_own(commands: Commands) -> None:
    done = run_command(commands, *OFFLINE, "--quiet", "echo", "hello")
    assert (done.stdout, done.stderr, done.returncode) == ("[1,0]<stdout>:hello\n", "", 0)


def test_verbose_lines_have_poprun_s_form(commands: Commands) -> None:
    done = run_command(commands, *OFFLINE, "-vv", "true")
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    logged = [line.split(" ", 4) for line in lines if " POPRUN [" in line]
    assert logged
    for stamp, pid, _, level, _ in logged:
        time.strptime(stamp[:8], "%H:%M:%S")
        assert stamp[8] == "."
        assert pid.isdecimal()
        assert level in ("[I]", "[D]")
    assert "poprun topology" in done.stdout


def test_the_first_failing_instance_decides_and_is_heard_last(commands: Commands, tmp_path: Path) -> None:
    script(
        tmp_path,
        "import os, sys, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '2':\n"
        "    try:\n"
        "        {}['a']\n"
        "    except KeyError as error:\n"
        "        raise RuntimeError('boom') from error\n"
        "print('others', flush=True)\n"
        "time.sleep(600)\n",
    )
    before = time.monotonic()
    done = run_command(commands, *OFFLINE, "--num-replicas=4", "--num-instances=4", "train.py")
    assert done.returncode == 1
    assert time.monotonic() - before < 120
    assert done.stderr.splitlines()[-1] == "[1,2]<stderr>:RuntimeError: boom"
    last = done.stderr[
        done.stderr.index("podrun: instance 2 ended with exit code 1; the others were ended") :
    ]
    assert "KeyError: 'a'" in last
    assert "direct cause" in last


def test_a_failure_without_a_traceback_is_heard_last_too(commands: Commands, tmp_path: Path) -> None:
    script(tmp_path, "x = (\n")
    done = run_command(commands, *OFFLINE, "--num-replicas=2", "--num-instances=2", "train.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("<stderr>:SyntaxError: '(' was never closed")
    alone = run_command(commands, *OFFLINE, "train.py")
    assert alone.stderr.splitlines()[-1] == "[1,0]<stderr>:SyntaxError: '(' was never closed"


def test_a_lone_instances_traceback_is_not_repeated(commands: Commands, tmp_path: Path) -> None:
    script(tmp_path, "raise ValueError('once')\n")
    done = run_command(commands, *OFFLINE, "train.py")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: once") == 1
    assert done.stderr.splitlines()[-1] == "[1,0]<stderr>:ValueError: once"


@pytest.mark.parametrize(
    ("words", "code"), [(("sh", "-c", "exit 42"), 42), (("sh", "-c", "kill -9 $$"), 137)]
)
def test_podrun_ends_with_the_exit_code_of_the_program(
    commands: Commands, words: tuple[str, ...], code: int
) -> None:
    done = run_command(commands, *OFFLINE, *words)
    assert done.returncode == code
    assert "ended with" in done.stderr


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            ("--num-replicas=10", "--num-instances=4", "true"),
            "10 replicas cannot be divided",
            "--num-instances 2 or 5",
        ),
        (("--num-replicas=12", "true"), "need 12 IPUs", "--num-replicas 8"),
        (("--num-replicas=32", "--cluster=pod16", "true"), "needs 32 IPUs; pod16 has 16", "--cluster pod64"),
        (("--cluster=pod17", "true"), "unknown cluster 'pod17'", "Did you mean pod16?"),
        (("--cluster=./none.yaml", "true"), "there is no cluster file", "pod16"),
        (("--num-replica-count=3", "true"), "unknown option", "--num-replicas?"),
        (("--vipu-partition=a", "--vipu-partition=b", "true"), "given twice", "--vipu-partition=b"),
        (("nowhere.py",), "there is no script nowhere.py", "relative to where podrun runs"),
        ((), "no program to run", "train.py"),
        (("--fault", "ipu:5@batch=17:meltdown", "true"), "has no fault 'meltdown'", "podrun faults kinds"),
        (("--dry-run", "--fault", "foo", "true"), "fault 'foo' is not of the form", "tile-parity"),
        (("--dry-run", "--fault", "machine:1@batch=1:lost", "true"), "no machine 1", "count from 0"),
        (("--fault", "ipu:5@batch=17:tile-parity", "--num-replicas=4", "true"), "no IPU 5", "count from 0"),
        (("--sync-type", "ST_NONE", "true"), "unknown sync type", "pod-native-default"),
    ],
)
@pytest.mark.sample(3)
def test_wrong_command_lines_are_refused_with_a_hint(
    commands: Commands, words: tuple[str, ...], message: str, hint: str
) -> None:
    done = run_command(commands, "podrun", *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("podrun: error: ")
    assert message in done.stderr
    assert "\nhint: " in done.stderr
    assert hint in done.stderr
    assert done.stdout == ""


def test_dry_run_starts_nothing(commands: Commands) -> None:
    done = run_command(
        commands, "podrun", "--num-replicas=16", "--num-instances=2", "--dry-run", "sh", "-c", "touch started"
    )
    assert done.returncode == 0, done.stderr
    assert "POPDIST_REPLICA_INDEX_OFFSET=8" in done.stdout
    assert "run       sh -c 'touch started'" in done.stdout
    assert "pod16, 16 IPUs" in done.stdout
    assert not (commands.home / "started").exists()


def test_config_goes_out_and_comes_in(commands: Commands) -> None:
    first = run_command(
        commands, *OFFLINE, "--num-replicas=4", "--num-instances=2", "--export-config", "c.yaml", "true"
    )
    assert first.returncode == 0, first.stderr
    again = run_command(commands, "podrun", "--import-config", "c.yaml", "--num-instances=4", "echo", "hi")
    assert again.returncode == 0, again.stderr
    assert tagged(again.stdout, 3) == ["hi"]
    refused = run_command(commands, *OFFLINE, "--export-config", "c.yaml", "true")
    assert refused.returncode == 2
    assert "--overwrite-config=yes" in refused.stderr


def test_output_files_exports_and_directory(commands: Commands) -> None:
    (commands.home / "inside").mkdir()
    done = run_command(
        commands,
        *OFFLINE,
        "--mpi-global-args=--output-filename out --mca btl tcp",
        "--mpi-local-args=-x MINE=1 -wdir inside",
        *("sh", "-c", "echo $MINE; pwd"),
    )
    assert done.returncode == 0
    assert tagged(done.stdout, 0) == ["1", str(commands.home / "inside")]
    assert (commands.home / "out/1/rank.0/stdout").read_text().startswith("1\n")
    assert done.stderr.count("--mca") == 1


def test_input_reaches_the_first_instance_only(commands: Commands) -> None:
    done = commands.run(*OFFLINE, "--num-replicas=2", "--num-instances=2", "cat", stdin="hello\n")
    assert done.returncode == 0
    assert tagged(done.stdout, 0) == ["hello"]
    assert tagged(done.stdout, 1) == []


def test_a_script_that_wants_ipus_offline_is_refused(commands: Commands, tmp_path: Path) -> None:
    script(tmp_path, "import os\nfrom podrun.device.host.connecting import connect\nconnect(os.environ)\n")
    done = run_command(commands, *OFFLINE, "train.py")
    assert done.returncode == 1
    assert "launched without IPUs" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_everything(commands: Commands, tmp_path: Path, number: int) -> None:
    script(tmp_path, WAITING)
    process = commands.start(*OFFLINE, "--num-replicas=2", "--num-instances=2", "train.py")
    assert process.stdout is not None
    assert process.stdout.readline().endswith(":here\n")
    assert process.stdout.readline().endswith(":here\n")
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 128 + number


def test_kill_9_of_podrun_takes_the_instances_with_it(commands: Commands, tmp_path: Path) -> None:
    script(tmp_path, "import subprocess, sys\nsubprocess.Popen(['sleep', '60'])\n" + WAITING)
    process = commands.start(*OFFLINE, "--num-replicas=2", "--num-instances=2", "train.py")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    assert len(commands.processes()) >= 5
    process.kill()
    process.communicate(timeout=120)
    commands.wait_until_gone()
    scratch = list(commands.scratch.glob("podrun-*"))
    assert scratch == []
    assert list(commands.runtime.glob("*.json"))
    assert commands.run(*OFFLINE, "true").returncode == 0
    assert not list(commands.runtime.glob("*.json"))


def test_the_next_command_sweeps_what_even_the_guardian_could_not(commands: Commands, tmp_path: Path) -> None:
    """kill -9 of podrun and of its guardian at the same time: a grandchild and the cache directory remain."""
    script(
        tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)\n" + WAITING
    )
    process = commands.start(*OFFLINE, "train.py")
    assert process.stdout is not None
    process.stdout.readline()
    guardian = next(pid for pid, words in commands.processes().items() if "guardian.py" in words)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(guardian, signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=120)
    wait_until(lambda: set(commands.processes().values()) == {"sleep 60"}, 60, "only the grandchild is left")
    assert list(commands.scratch.glob("podrun-scratch-*"))
    assert commands.run(*OFFLINE, "true").returncode == 0
    assert marked_processes(commands.mark) == {}
    assert not list(commands.scratch.glob("podrun-scratch-*"))


def test_a_reader_that_goes_away_does_not_hang_podrun(commands: Commands) -> None:
    done = commands.run("sh", "-c", "podrun --offline-mode=1 --quiet seq 1 200000 | head -1; echo done")
    assert done.stdout == "[1,0]<stdout>:1\ndone\n"


def test_help_and_version(commands: Commands) -> None:
    shown = commands.run("podrun", "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith("Usage: podrun [options] program")
    assert commands.run("podrun", "--version").stdout.startswith("podrun ")
    assert '"jax": ' in commands.run("podrun", "--version", "--version-format=full-json").stdout


def test_progress_has_colour_on_a_terminal_and_none_in_a_pipe(commands: Commands) -> None:
    here, there = pty.openpty()
    process = subprocess.Popen(
        [str(BIN / "podrun"), *OFFLINE[1:], "true"],
        env=commands.environment({"TERM": "xterm"}),
        stdin=subprocess.DEVNULL,
        stderr=there,
    )
    os.close(there)
    assert process.wait(60) == 0
    shown = os.read(here, 4096).decode()
    os.close(here)
    assert "\x1b[" in shown
    assert "1 replica, 1 instance" in shown
    plain = commands.run(*OFFLINE, "true")
    assert "\x1b[" not in plain.stderr
    assert re.fullmatch(r"podrun: done in [\d.]+ s: 1 replica, 1 instance\n", plain.stderr)


def test_a_signal_that_is_ignored_outside_stays_ignored(commands: Commands) -> None:
    words = "trap '' HUP; podrun --offline-mode=1 sh -c 'kill -HUP $PPID; sleep 0.2; echo alive'"
    done = commands.run("sh", "-c", words)
    assert done.returncode == 0
    assert tagged(done.stdout, 0) == ["alive"]
