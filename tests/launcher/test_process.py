"""Child processes of one host, for real."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podrun.launcher.output import OutputChannel
from podrun.launcher.process import Command, Ended, InstanceEvent, Printed, ProcessRunner

pytestmark = pytest.mark.system


@pytest.fixture
def runner() -> Iterator[ProcessRunner]:
    runner = ProcessRunner()
    yield runner
    runner.close()


def run_all(runner: ProcessRunner, seconds: float = 60.0) -> list[InstanceEvent]:
    events: list[InstanceEvent] = []
    end = time.monotonic() + seconds
    while runner.running():
        assert time.monotonic() < end
        events += runner.poll(1.0)
    return events


def python(instance: int, code: str, directory: Path) -> Command:
    return Command(instance, (sys.executable, "-S", "-c", code), str(directory), {"PATH": os.environ["PATH"]})


def printed(events: list[InstanceEvent], instance: int, channel: OutputChannel) -> bytes:
    return b"".join(
        e.data for e in events if isinstance(e, Printed) and (e.instance, e.channel) == (instance, channel)
    )


def ends(events: list[InstanceEvent]) -> dict[int, Ended]:
    return {e.instance: e for e in events if isinstance(e, Ended)}


def test_output_and_exit_codes(runner: ProcessRunner, tmp_path: Path) -> None:
    runner.start(python(0, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)", tmp_path))
    runner.start(python(1, "print('x' * 300000)", tmp_path))
    events = run_all(runner)
    assert printed(events, 0, OutputChannel.STDOUT) == b"out\n"
    assert printed(events, 0, OutputChannel.STDERR) == b"err\n"
    assert printed(events, 1, OutputChannel.STDOUT) == b"x" * 300000 + b"\n"
    assert {i: e.code for i, e in ends(events).items()} == {0: 7, 1: 0}


def test_all_output_comes_before_the_end(runner: ProcessRunner, tmp_path: Path) -> None:
    runner.start(python(0, "import os; os.write(1, b'y' * 200000)", tmp_path))
    events = run_all(runner)
    assert isinstance(events[-1], Ended)
    assert len(printed(events, 0, OutputChannel.STDOUT)) == 200000


def test_an_instance_has_its_environment_and_directory(runner: ProcessRunner, tmp_path: Path) -> None:
    words = (
        sys.executable,
        "-S",
        "-c",
        "import os; print(os.getcwd(), os.environ['MINE'], os.getpgrp() == os.getpid())",
    )
    runner.start(Command(0, words, str(tmp_path), {"MINE": "yes"}))
    assert printed(run_all(runner), 0, OutputChannel.STDOUT).decode() == f"{tmp_path} yes True\n"


def test_signals_reach_the_whole_group_and_are_told_from_exit_codes(
    runner: ProcessRunner, tmp_path: Path
) -> None:
    code = (
        "import subprocess, sys, os\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()"
    )
    runner.start(python(0, code, tmp_path))
    events: list[InstanceEvent] = []
    while not printed(events, 0, OutputChannel.STDOUT):
        events += runner.poll(5.0)
    grandchild = int(printed(events, 0, OutputChannel.STDOUT))
    runner.signal(signal.SIGKILL)
    events += run_all(runner)
    assert ends(events)[0] == Ended(0, 137, signal.SIGKILL)
    assert _gone(grandchild)


def test_a_child_that_keeps_the_pipe_does_not_hold_up_the_end_and_goes_at_close(tmp_path: Path) -> None:
    runner = ProcessRunner()
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)"
    )
    runner.start(python(0, code, tmp_path))
    events = run_all(runner)
    grandchild = int(printed(events, 0, OutputChannel.STDOUT))
    assert ends(events)[0].code == 0
    assert not _gone(grandchild, 0)
    runner.close()
    assert _gone(grandchild)


def test_programs_that_cannot_be_executed(runner: ProcessRunner, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    runner.start(Command(0, ("no-such-program",), str(tmp_path), {"PATH": "/bin"}))
    runner.start(Command(1, ("./plain",), str(tmp_path), {"PATH": "/bin"}))
    events = run_all(runner)
    assert {i: e.code for i, e in ends(events).items()} == {0: 127, 1: 126}
    assert b"cannot run no-such-program: No such file" in printed(events, 0, OutputChannel.STDERR)
    with pytest.raises(FileNotFoundError):
        runner.start(Command(2, ("true",), str(tmp_path / "nowhere"), {}))


def test_input_is_handed_on(runner: ProcessRunner, tmp_path: Path) -> None:
    read, write = os.pipe()
    words = (sys.executable, "-S", "-c", "print(input()[::-1])")
    runner.start(Command(0, words, str(tmp_path), {}, stdin=read))
    runner.start(python(1, "import sys; print(repr(sys.stdin.read()))", tmp_path))
    os.write(write, b"abc\n")
    os.close(write)
    os.close(read)
    events = run_all(runner)
    assert printed(events, 0, OutputChannel.STDOUT) == b"cba\n"
    assert printed(events, 1, OutputChannel.STDOUT) == b"''\n"


def test_wake_ends_a_wait(runner: ProcessRunner) -> None:
    runner.wake()
    before = time.monotonic()
    assert runner.poll(120.0) == []
    assert time.monotonic() - before < 60


def _gone(pid: int, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while True:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except OSError:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
