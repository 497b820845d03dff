"""What a launch that runs leaves for monitors in its scratch folders: the last lines of its output, and its events.

The files are readable by their user alone, as the folders are, and go with the launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from podrun.record.events import read_parts
from podrun.record.goodput import goodput_of

TAIL = "output-tail"
"""The file of the last lines; those before them are in a second one, whose name ends in ``.before``."""
TAIL_BYTES = 32 << 10
SHOWN_LINES = 40
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
"""What programs colour their lines with; on another terminal it would move the cursor."""


class OutputTail:
    """Keeps the last lines of a launch in a folder: one to two times `TAIL_BYTES`. On a full disk it stops."""

    def __init__(self, folder: Path) -> None:
        self._path, self._size = folder / TAIL, 0
        self._file = self._path.open("ab", buffering=0)

    def add(self, lines: bytes) -> str:
        """Take whole lines. Returns why nothing more is kept, if that is so for the first time; else nothing."""
        if self._file.closed:
            return ""
        try:
            if self._size + len(lines) > TAIL_BYTES:
                self._file.close()
                self._path.replace(self._path.with_name(f"{TAIL}.before"))
                self._file, self._size = self._path.open("ab", buffering=0), 0
            self._file.write(lines[-TAIL_BYTES:])
            self._size += len(lines)
        except OSError as error:
            self.close()
            return f"podrun top shows no more output of this launch: {error.strerror}"
        return ""

    def close(self) -> None:
        """Close the file; output that comes later is not kept. Idempotent."""
        self._file.close()


def output_tail(folders: Iterable[str]) -> list[str]:
    """The last lines that a running launch printed, from its folders; empty if it keeps none."""
    for folder in map(Path, folders):
        text = b"".join(_bytes(folder / name) for name in (f"{TAIL}.before", TAIL))
        if text:
            lines = _ESCAPES.sub("", text.decode(errors="replace")).splitlines()[-SHOWN_LINES:]
            return ["".join(letter if letter.isprintable() else " " for letter in line) for line in lines]
    return []


def goodput_so_far(folders: Iterable[str]) -> str:
    """The goodput of a running launch in a sentence; empty if it is not recorded or has run nothing."""
    for folder in map(Path, folders):
        if any(folder.glob("launch.*.jsonl")):
            goodput = goodput_of(read_parts(folder))
            return "" if goodput is None else goodput.text
    return ""


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # The launch has ended, or turns its files.
        return b""
