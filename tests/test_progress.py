"""Long preparations say how far they are; quick ones say nothing."""

from __future__ import annotations

import io
import threading

from podrun.core.terminal import Preparation, at, counted, reporting


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
        with reporting("preparing 'x'", screen):
            assert list(counted("piece", [1, 2])) == [1, 2]
        assert screen.getvalue() == ""


def test_a_log_gets_one_line_with_the_step_and_seconds() -> None:
    screen = Screen(terminal=False)
    with reporting("preparing 'x'", screen, log_after=0.01):
        for number in counted("compiling piece", [1, 2, 3]):
            if number == 2:
                assert screen.written.wait(20)
    (line,) = screen.getvalue().splitlines()
    assert line.startswith("podrun: preparing 'x': compiling piece ")
    assert " of 3, 0 s so far" in line


def test_a_terminal_gets_a_line_that_is_written_over_and_taken_away() -> None:
    screen = Screen(terminal=True)
    with reporting("preparing 'x'", screen, terminal_after=0.01):
        at("loading")
        assert screen.written.wait(20)
    assert screen.getvalue().startswith("\rpodrun: preparing 'x': loading, 0 s")
    assert screen.getvalue().endswith("\r\x1b[K")
    assert "\n" not in screen.getvalue()


def test_one_preparation_inside_another_is_a_step_of_it() -> None:
    outer, inner = Screen(terminal=False), Screen(terminal=False)
    with reporting("outer", outer, log_after=0.01), reporting("inner", inner, log_after=0.0):
        assert outer.written.wait(20)
    assert inner.getvalue() == ""
    with reporting("next", inner, log_after=0.0):
        assert inner.written.wait(20)


def test_its_words() -> None:
    now = iter([10.0, 42.4])
    made = Preparation("preparing 'training'", lambda: next(now), "compiling piece", 12, 40)
    assert made.text() == "podrun: preparing 'training': compiling piece 12 of 40, 32 s"
