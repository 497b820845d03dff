"""Long preparations say how far they are; quick ones say nothing."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from pathlib import Path

import pytest

from podrun.core.errors import UsageError
from podrun.core.terminal import (
    Preparation,
    above_status,
    fitted,
    following,
    live,
    note_moment,
    report_step,
    reported_steps,
    reporting,
)
from podrun.launcher.status import LaunchStatus


class Screen(io.StringIO):
    """A stream that tells when something is written."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal, self.written = terminal, threading.Event()

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        size = super().write(text)
        self.written.set()
        return size


def test_what_is_quick_says_nothing() -> None:
    for terminal in (False, True):
        screen = Screen(terminal=terminal)
        with reporting("preparing 'x'", screen, log_after=600.0, terminal_after=600.0):
            assert list(reported_steps("piece", [1, 2])) == [1, 2]
        assert screen.getvalue() == ""


def test_a_log_gets_one_line_with_the_step_and_seconds() -> None:
    screen = Screen(terminal=False)
    with reporting("preparing 'x'", screen, log_after=0.01):
        for number in reported_steps("compiling piece", [1, 2, 3]):
            if number == 2:
                assert screen.written.wait(60)
    (line,) = screen.getvalue().splitlines()
    assert line.startswith("podrun: preparing 'x': compiling piece ")
    assert re.search(r" of 3, \d+ s so far", line)


def test_a_terminal_gets_a_line_that_is_written_over_and_taken_away() -> None:
    screen = Screen(terminal=True)
    with reporting("preparing 'x'", screen, terminal_after=0.01):
        report_step("loading")
        assert screen.written.wait(60)
    assert re.match(r"\rpodrun: preparing 'x': loading, \d+ s", screen.getvalue())
    assert screen.getvalue().endswith("\r\x1b[K")
    assert "\n" not in screen.getvalue()


def test_one_preparation_inside_another_is_a_step_of_it() -> None:
    outer, inner = Screen(terminal=False), Screen(terminal=False)
    with reporting("outer", outer, log_after=0.01), reporting("inner", inner, log_after=0.0):
        assert outer.written.wait(60)
    assert inner.getvalue() == ""
    with reporting("next", inner, log_after=0.0):
        assert inner.written.wait(60)


def test_the_line_names_the_step_its_number_and_the_seconds() -> None:
    now = iter([10.0, 42.4])
    made = Preparation("preparing 'training'", lambda: next(now), "compiling piece", 12, 40)
    assert made.text() == "podrun: preparing 'training': compiling piece 12 of 40, 32 s"


def test_a_line_fits_the_terminal() -> None:
    assert fitted("podrun: short", 80) == "podrun: short"
    assert fitted("word " * 30, 80) == ("word " * 30)[:76] + "..."
    assert len(fitted("x" * 80, 80)) == 79
    assert fitted("two\nlines", 80) == "two lines"


def test_what_is_printed_meanwhile_stands_above_the_line() -> None:
    screen = Screen(terminal=True)
    with reporting("preparing 'x'", screen, terminal_after=0.0):
        assert screen.written.wait(60)
        with above_status():
            before = screen.getvalue()
            screen.write("a whole line\n")
            after = screen.getvalue()[len(before) :]
    assert before.endswith("\r\x1b[K")
    assert after == "a whole line\n"
    assert screen.getvalue().endswith(("\r\x1b[K", "a whole line\n"))


def test_neither_a_pipe_nor_a_dumb_terminal_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert live(Screen(terminal=True))
    assert not live(Screen(terminal=False))
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen(terminal=True)
    assert not live(screen)
    with reporting("starting the POD", screen, log_after=None, terminal_after=0.0):
        assert [thread.name for thread in threading.enumerate()].count("podrun-progress") == 0
    assert screen.getvalue() == ""


def test_another_process_reports_into_a_file_that_a_launch_follows(tmp_path: Path) -> None:
    file, screen = tmp_path / "progress", Screen(terminal=True)
    log = Screen(terminal=False)
    with reporting("preparing 'training'", log, file=file), following(file, screen):
        report_step("compiling piece", 12, 40)
        assert screen.written.wait(60)
        while "piece 12 of 40" not in screen.getvalue():
            screen.written.clear()
            assert screen.written.wait(60)
    assert "\rpodrun: preparing 'training': compiling piece 12 of 40, " in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")
    assert log.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_gone_is_not_followed(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    file.write_text("podrun: preparing")
    long_ago = time.time() - 60
    os.utime(file, (long_ago, long_ago))
    screen = Screen(terminal=True)
    with following(file, screen):
        pass
    assert screen.getvalue() == ""


def test_the_line_of_a_launch_goes_from_the_pod_to_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(terminal=True)
    status = LaunchStatus(screen, {})
    status.starting()
    report_step("machine processes up", 2, 4)
    variables = status.environment(lambda: str(tmp_path))
    file = Path(variables["PODRUN_PROGRESS_FILE"])
    assert screen.written.wait(60)
    assert screen.getvalue().startswith("\rpodrun: starting the POD: machine processes up 2 of 4, ")
    status.started()
    assert screen.getvalue().endswith("\r\x1b[K")
    screen.written.clear()
    with reporting("preparing 'training'", Screen(terminal=False), file=file):
        assert screen.written.wait(60)
    status.end()
    status.end()
    status.starting()
    assert "podrun: preparing 'training': " in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")


def test_a_launch_without_a_terminal_has_no_line() -> None:
    for output, environ in (
        (Screen(terminal=False), {}),
        (Screen(terminal=True), {"PODRUN_PROGRESS": "off"}),
    ):
        status = LaunchStatus(output, environ)
        status.starting()
        assert status.environment(lambda: "nowhere") == {}
        status.end()
        assert output.getvalue() == ""


def test_steps_are_written_down_with_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "moments"
    monkeypatch.setenv("PODRUN_MOMENTS", str(file))
    begin = time.time()
    with reporting("preparing", io.StringIO()):
        for _ in reported_steps("compiling piece", [1, 2, 3]):
            pass
    note_moment("attaching")
    lines = [line.split(" ", 3) for line in file.read_text().splitlines()]
    assert [name for *_, name in lines] == ["preparing", "compiling piece", "attaching"]
    assert {int(pid) for _, pid, _, _ in lines} == {os.getpid()}
    assert all(begin - 0.001 <= float(at) <= time.time() + 0.001 for at, *_ in lines)
    used = [float(seconds) for _, _, seconds, _ in lines]
    assert used == sorted(used)
    assert used[0] > 0
    monkeypatch.setenv("PODRUN_MOMENTS", str(tmp_path))
    with pytest.raises(UsageError, match=r"PODRUN_MOMENTS: .* cannot be written"):
        note_moment("attaching")
