"""A launch on a terminal of 80 columns: a live line while there is something to wait for, and nothing of it is left."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.conftest import ROOT

COLUMNS = 80
SECONDS = 180


def on_terminal(words: list[str], environ: dict[str, str]) -> str:
    """What a command writes to a terminal that is its standard output and error."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    running = subprocess.Popen(
        words, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = bytearray()
    with open(ours, "rb", buffering=0) as terminal:
        try:
            while piece := terminal.read(65536):
                written += piece
        except OSError:  # Nobody has the terminal any more (EIO).
            pass
    assert running.wait(SECONDS) == 0, written.decode(errors="replace")
    return written.decode().replace("\r\n", "\n")


@pytest.mark.system
@pytest.mark.parametrize("kind", ["xterm", pytest.param("dumb", marks=pytest.mark.slow)])
def test_a_launch_says_what_it_waits_for(kind: str, tmp_path: Path) -> None:
    environ = {
        **{name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")},
        "TERM": kind, "PODRUN_RUNTIME_DIR": str(tmp_path), "PODRUN_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip
    podrun = str(Path(sys.executable).parent / "podrun")
    written = on_terminal([podrun, "--num-replicas", "4", "examples/first_run/train.py"], environ)
    if kind == "dumb":
        assert "\r" not in written
        assert "\x1b" not in written
    else:
        assert re.search(r"\rpodrun: starting the POD: machine processes up 0 of 1, \d+ s\x1b\[K", written)
        assert written.count("\r\x1b[K") >= 1, "the line is taken away"
        assert written.rfind("\rpodrun: ") < written.rfind("\r\x1b[K")
    left = [line.rpartition("\x1b[K")[2] for line in written.split("\n")]
    shown = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in left]
    assert [line for line in shown if len(line) > COLUMNS or "\r" in line] == []
    assert not any("starting the POD" in line for line in shown)
    assert shown[0].startswith("podrun: 4 replicas, 1 instance; partition podrun-")
    assert any(line.startswith("podrun: done in ") for line in shown)
