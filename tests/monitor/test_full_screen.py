"""The other screen of a terminal: what fits is shown, a new size is heeded, and the old screen comes back."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import Iterator

import pytest

from podrun.monitor.full_screen import FullScreen, fills_a_screen


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The user's side and the program's side of a terminal of 40 columns and 6 rows."""
    ours, theirs = pty.openpty()
    resize(theirs, 6, 40)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def shown(terminal: int) -> list[str]:
    """The lines drawn last, without what moves the cursor."""
    text = ""
    while not text.endswith("\x1b[J"):  # A terminal may hand over in pieces.
        text += os.read(terminal, 1 << 16).decode()
    text = text.rpartition("\x1b[H")[2]
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text).replace("\r", "").split("\n")


def test_text_takes_the_place_of_the_text_before(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    before = signal.getsignal(signal.SIGWINCH)
    with open(theirs, "w", closefd=False) as stream, FullScreen(stream, now=lambda: 3661.0) as screen:
        screen.show("first\nsecond")
        assert shown(ours) == ["first", "second", "01:01:01 UTC. Ctrl-C ends it."]
        screen.show("\n".join(f"line {n} " + "x" * 60 for n in range(20)))
        lines = shown(ours)
        assert len(lines) == 6
        assert all(len(line) <= 40 for line in lines)
        assert lines[-1] == "01:01:01 UTC. Ctrl-C ends it. 15 more lines"[:40]
        resize(theirs, 12, 100)
        signal.raise_signal(signal.SIGWINCH)
        lines = shown(ours)
        assert len(lines) == 12
        assert lines[-1] == "01:01:01 UTC. Ctrl-C ends it. 9 more lines: podrun top."
    assert os.read(ours, 100).endswith(b"\x1b[?1049l")
    assert signal.getsignal(signal.SIGWINCH) == before


def test_a_dumb_terminal_and_a_pipe_are_not_filled(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(terminal[1], "w", closefd=False) as stream, open(os.devnull, "w") as other:
        monkeypatch.setenv("TERM", "xterm")
        assert fills_a_screen(stream)
        assert not fills_a_screen(other)
        monkeypatch.setenv("TERM", "dumb")
        assert not fills_a_screen(stream)
