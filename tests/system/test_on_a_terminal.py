"""A launch on a terminal of 80 columns: its live line, of which nothing is left, and the lines of the first picture."""

from __future__ import annotations

import os
import re
import runpy
from html import unescape
from pathlib import Path

import pytest

from tests.conftest import BIN, ROOT

COLUMNS = 80
STYLE = re.compile(r"\x1b\[[0-9;]*m")
PICTURES = runpy.run_path(str(ROOT / "website" / "pictures.py"))


def screen(words: list[str], home: Path, kind: str) -> tuple[str, list[str]]:
    """What a launch writes, and the lines that stay on the screen, without their style."""
    environ = {
        **os.environ, "TERM": kind, "PODRUN_RUNTIME_DIR": str(home), "PODRUN_CACHE_DIR": str(home / "cache"),
    }  # fmt: skip
    written = PICTURES["on_terminal"]([str(BIN / "podrun"), *words], environ, COLUMNS)
    return written, [STYLE.sub("", line) for line in PICTURES["left_on_screen"](written)]


def shape(line: str) -> str:
    """A line without what differs from run to run: numbers, and the unit of a time."""
    return re.sub(r"\b(ns|us|ms|s)\b", "s", re.sub(r"[\d.,]*\d", "0", " ".join(line.split())))


@pytest.mark.slow
@pytest.mark.system
def test_a_launch_looks_as_in_the_picture(tmp_path: Path) -> None:
    written, shown = screen(PICTURES["RUN"], tmp_path, "xterm")
    assert re.search(r"\rpodrun: starting the POD: machine processes up \d of 4, \d+ s\x1b\[K", written)
    assert written.rfind("\rpodrun: ") < written.rfind("\r\x1b[K"), "the line is taken away"
    assert [line for line in shown if len(line) > COLUMNS or "starting the POD" in line] == []
    picture = (ROOT / "docs" / "pictures" / "run.svg").read_text(encoding="utf-8")
    drawn: dict[str, str] = {}
    for y, text in re.findall(r'<text [^>]*y="([\d.]+)"[^>]*clip-path[^>]*>([^<]*)</text>', picture):
        drawn[y] = drawn.get(y, "") + unescape(text).replace("\xa0", " ")
    command, *lines = [line for line in drawn.values() if line.strip()]
    assert command.strip() == "$ podrun " + " ".join(PICTURES["RUN"])
    assert sorted(map(shape, lines)) == sorted(map(shape, shown)), "make pictures draws it anew"


@pytest.mark.slow
@pytest.mark.system
def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    written, shown = screen(["--num-replicas", "4", "examples/first_run/train.py"], tmp_path, "dumb")
    assert "\r" not in written
    assert "\x1b" not in written
    assert any(line.startswith("podrun: done in ") for line in shown)
