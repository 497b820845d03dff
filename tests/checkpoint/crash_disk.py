"""A disk in memory that stops a program at any byte or call, and the states that it may be in after a power cut."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO


class Killed(BaseException):
    """The program is killed here."""


@dataclass
class CrashDisk:
    """A disk in memory. ``stop``: work that is done before the program is killed; a call is one unit, and so is each
    byte written.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    stop: int | None = None
    done: int = 0
    _settled: dict[str, bytes] = field(default_factory=dict)
    _pending: list[tuple[str, str, str]] = field(default_factory=list)

    def _work(self) -> None:
        if self.stop is not None and self.done >= self.stop:
            raise Killed
        self.done += 1

    def names(self, folder: Path) -> list[str]:
        return list(self.files)

    def write(self, path: Path, data: Iterable[bytes | memoryview]) -> None:
        self.files[path.name] = b""
        whole = b"".join(bytes(piece) for piece in data)
        room = len(whole) if self.stop is None else max(0, self.stop - self.done)
        self.files[path.name] = whole[:room]
        self.done += min(room, len(whole))
        self._work()

    def rename(self, old: Path, new: Path) -> None:
        self._work()
        self.files[new.name] = self.files.pop(old.name)
        self._pending.append(("rename", old.name, new.name))

    def remove(self, path: Path) -> None:
        self._work()
        if self.files.pop(path.name, None) is not None:
            self._pending.append(("remove", path.name, ""))

    def settle(self, folder: Path) -> None:
        self._work()
        self._settled, self._pending = dict(self.files), []

    def read(self, path: Path) -> tuple[BinaryIO, int]:
        if path.name not in self.files:
            raise FileNotFoundError(2, "No such file", str(path))
        data = self.files[path.name]
        return io.BytesIO(data), len(data)

    def after_power_cut(self) -> Iterator[CrashDisk]:
        """Every state that the disk may be in: any of the changes of names since the last settle may be lost.

        The bytes of files that have been written to the end are there, as the write waited for them.
        """
        contents = {**self._settled, **self.files}
        for kept in itertools.product((False, True), repeat=len(self._pending)):
            files = dict(self._settled)
            for keep, (kind, old, new) in zip(kept, self._pending, strict=True):
                if keep and kind == "rename":
                    files.pop(old, None)
                    files[new] = contents[new]
                elif keep:
                    files.pop(old, None)
            yield CrashDisk(files=files, _settled=dict(files))
