"""The folder of a run's checkpoints: names of files, which checkpoints are whole, and writes that a kill cannot spoil.

A checkpoint is the files ``batch-B.part-I-of-N`` for I from 0 to N - 1. A file gets its name by a rename, after its
bytes have reached the disk; so a file of that name is whole, and a checkpoint is whole if all its files are there. No
instance has to hear of another while it writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from podrun.checkpoint.part_file import Part, chunks, read_part
from podrun.checkpoint.values import CheckpointError, DamagedCheckpointError

_NAME = re.compile(r"batch-(\d{12,18})\.part-(\d{1,6})-of-(\d{1,6})", re.ASCII)
_DRAFT = ".draft"
_ASIDE = ".set-aside"


class Disk(Protocol):
    """What a folder of checkpoints needs of a file system. Every call may raise OSError."""

    def names(self, folder: Path) -> list[str]:
        """Names of the files in a folder; makes the folder."""

    def write(self, path: Path, data: Iterable[bytes | memoryview]) -> None:
        """Make a file; returns when its bytes are on the disk."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in one step; what had that name is gone."""

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is no error."""

    def settle(self, folder: Path) -> None:
        """Returns when the names in a folder are on the disk."""

    def read(self, path: Path) -> tuple[BinaryIO, int]:
        """An open file and its size in bytes."""


class LocalDisk:
    """The file system of this host."""

    def names(self, folder: Path) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        return os.listdir(folder)

    def write(self, path: Path, data: Iterable[bytes | memoryview]) -> None:
        with path.open("wb") as file:
            for piece in data:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def settle(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(self, path: Path) -> tuple[BinaryIO, int]:
        file = path.open("rb")
        return file, os.fstat(file.fileno()).st_size


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    """The name of a part's file."""

    batch: int
    parts: int
    part: int

    def __str__(self) -> str:
        return f"batch-{self.batch:012d}.part-{self.part}-of-{self.parts}"


def parse_name(name: str) -> PartName | None:
    """The part that a file's name stands for, or None."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    found = PartName(int(match[1]), int(match[3]), int(match[2]))
    return found if found.part < found.parts and str(found) == name else None


def whole(present: Iterable[PartName]) -> list[tuple[int, int]]:
    """The checkpoints whose parts are all there, newest first: the batch and the number of parts."""
    found: dict[tuple[int, int], int] = {}
    for name in set(present):
        found[name.batch, name.parts] = found.get((name.batch, name.parts), 0) + 1
    return sorted((key for key, count in found.items() if count == key[1]), reverse=True)


def outdated(present: Sequence[PartName], part: int, parts: int, keep: int) -> list[PartName]:
    """The files that instance ``part`` of ``parts`` may remove, so that the last ``keep`` checkpoints stay.

    An instance removes its own files; instance 0 those too that a run with another number of instances left.
    """
    kept = whole(present)[:keep]
    if len(kept) < keep:
        return []
    oldest = min(batch for batch, _ in kept)
    return [name for name in present if name.batch < oldest and _is_for(name, part, parts)]


def beyond(present: Sequence[PartName], batch: int, part: int, parts: int) -> list[PartName]:
    """The files of batches after ``batch`` that instance ``part`` of ``parts`` may take away."""
    return [name for name in present if name.batch > batch and _is_for(name, part, parts)]


def _is_for(name: PartName, part: int, parts: int) -> bool:
    return name.part == part if name.parts == parts else part == 0


class Folder:
    """The files of checkpoints in ``path``, as instance ``part`` of ``parts`` sees them."""

    def __init__(self, path: Path, part: int, parts: int, disk: Disk) -> None:
        self.path, self._part, self._parts, self._disk = path, part, parts, disk

    def present(self) -> list[PartName]:
        """The parts that are there."""
        with self._explained("read"):
            names = self._disk.names(self.path)
        return [found for name in names if (found := parse_name(name)) is not None]

    def put(self, part: Part, keep: int) -> None:
        """Write this instance's part of a checkpoint, then remove what is outdated.

        Raises CheckpointError if it cannot be written; the checkpoints that were there still are.
        """
        name = str(PartName(part.header.batch, self._parts, self._part))
        draft = self.path / (name + _DRAFT)
        with self._explained("written"):
            try:
                self._disk.write(draft, chunks(part))
                self._disk.rename(draft, self.path / name)
            except OSError:
                self._disk.remove(draft)
                raise
            self._disk.settle(self.path)
        old = outdated(self.present(), self._part, self._parts, keep)
        with self._explained("cleared"):
            for each in old:
                self._disk.remove(self.path / str(each))

    def get(self, batch: int, parts: int) -> list[Part]:
        """All parts of a checkpoint, verified. Raises DamagedCheckpointError that names a file."""
        found = []
        for number in range(parts):
            path = self.path / str(PartName(batch, parts, number))
            with self._explained("read"):
                file, size = self._disk.read(path)
                with file:
                    part = read_part(file, size, str(path))
            head = part.header
            if (head.batch, head.part, head.parts) != (batch, number, parts):
                raise DamagedCheckpointError(
                    f"The checkpoint {path} is damaged: it says that it is part {head.part} of {head.parts} of batch "
                    f"{head.batch}.",
                    hint="resume(session, fallback=True) takes the one before it.",
                )
            found.append(part)
        if len({part.header.run for part in found}) > 1:
            raise DamagedCheckpointError(
                f"The checkpoint of batch {batch} in {self.path} is damaged: its parts come from different runs.",
                hint="resume(session, fallback=True) takes the one before it.",
            )
        return found

    def clear_beyond(self, batch: int) -> None:
        """Rename this instance's parts of later batches to ``.set-aside`` and remove its drafts: they do not belong to
        the run that goes on from ``batch``.
        """
        present = self.present()
        with self._explained("cleared"):
            for name in beyond(present, batch, self._part, self._parts):
                self._disk.rename(self.path / str(name), self.path / f"{name}{_ASIDE}")
            for text in self._disk.names(self.path):
                draft = parse_name(text.removesuffix(_DRAFT)) if text.endswith(_DRAFT) else None
                if draft is not None and _is_for(draft, self._part, self._parts):
                    self._disk.remove(self.path / text)
            self._disk.settle(self.path)

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise CheckpointError(
                f"Checkpoints in {self.path} cannot be {doing}: {error.strerror or error}{where}.",
                hint="The checkpoints that were written before are as they were.",
            ) from error
