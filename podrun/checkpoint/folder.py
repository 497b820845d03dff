"""The folder of a run's checkpoints: names of files, which checkpoints are whole, and writes that a kill cannot spoil.

A checkpoint is the files ``batch-B.part-I-of-N`` for I from 0 to N - 1. A file gets its name by a rename, after its
bytes have reached the disk; so a file of that name is whole, and a checkpoint is whole if all its files are there. No
instance has to hear of another while it writes.

One part is what one instance writes: `MAGIC`, the header's length (8 bytes, little-endian), the header's SHA-256, the
header (JSON), and then the arrays one after the other without gaps. The header has each array's name, type, shape and
SHA-256, so that the digests cover every byte. A reader believes no size before it has compared it with the file's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from podrun.checkpoint.values import DTYPES, CheckpointError, DamagedCheckpointError
from podrun.core.documents import parse_json
from podrun.core.errors import ConfigError
from podrun.core.executable import Array, numpy_dtype
from podrun.core.quick_dataclass import dataclass
from podrun.faults import ProgramFaults

MAGIC = b"podrun checkpoint 1\n"
LARGEST_HEADER = 1 << 28
_PREFIX = len(MAGIC) + 8 + 32
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PartHeader:
    """The header of a part.

    ``batch``: batches done. ``part`` of ``parts``: the instance that wrote it. ``run``: marks the parts of one run.
    ``state``: the JSON tree of the values of this instance alone.
    """

    batch: int
    part: int
    parts: int
    run: str
    state: object


@dataclass(frozen=True, slots=True)
class Part:
    """A part's header and arrays. ``shared`` are tensors of the program by name, ``own`` those of the state."""

    header: PartHeader
    shared: Mapping[str, Array]
    own: Sequence[Array]


def part_chunks(part: Part) -> Iterator[bytes | memoryview]:
    """The bytes of a part's file, in order."""
    named = [*part.shared.items(), *((None, array) for array in part.own)]
    plain = [(name, np.ascontiguousarray(array)) for name, array in named]
    views = [array.reshape(-1).view(np.uint8).data for _, array in plain]
    entries = [
        {
            "name": name,
            "dtype": str(array.dtype),
            "shape": list(named[n][1].shape),
            "sha256": hashlib.sha256(views[n]).hexdigest(),
        }
        for n, (name, array) in enumerate(plain)
    ]
    head = part.header
    header = json.dumps(
        {
            "version": 1,
            "batch": head.batch,
            "part": head.part,
            "parts": head.parts,
            "run": head.run,
            "state": head.state,
            "arrays": entries,
        },
        allow_nan=False,
    ).encode()
    yield MAGIC + len(header).to_bytes(8, "little") + hashlib.sha256(header).digest()
    yield header
    yield from views


def read_part(file: BinaryIO, size: int, name: str, *, arrays: bool = True) -> Part:
    """The part in a file of ``size`` bytes, verified; without ``arrays`` the header alone.

    Raises DamagedCheckpointError that names the file and what is wrong with it.
    """
    reader = _Reader(file, size, name)
    entries, header = reader.header()
    shared: dict[str, Array] = {}
    own: list[Array] = []
    for entry in entries if arrays else ():
        array = reader.array(entry)
        if entry["name"] is None:
            own.append(array)
        else:
            shared[entry["name"]] = array
    if arrays and reader.place != size:
        raise reader.damaged(f"it has {size - reader.place} bytes too many")
    return Part(header, shared, own)


class _Reader:
    """Reads a part's file front to back."""

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self._file, self._size, self._name = file, size, name
        self.place = 0

    def damaged(self, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"The checkpoint {self._name} is damaged: {what}.",
            hint="resume(session, fallback=True) takes the one before it.",
        )

    def header(self) -> tuple[list[dict[str, Any]], PartHeader]:
        """The header, and the entries of its arrays."""
        prefix = self._take(min(_PREFIX, self._size))
        if len(prefix) < _PREFIX:
            raise self.damaged(f"it ends after {self._size} bytes")
        if not prefix.startswith(MAGIC):
            raise self.damaged("it does not begin as a checkpoint does")
        length = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + 8], "little")
        if length > min(LARGEST_HEADER, self._size - _PREFIX):
            raise self.damaged(f"its header of {length} bytes goes beyond its end")
        text = self._take(length)
        if hashlib.sha256(text).digest() != prefix[-_DIGEST_BYTES:]:
            raise self.damaged("its header has a wrong digest")
        try:
            raw = parse_json(text.decode(), self._name)
            entries = raw["arrays"]
            header = PartHeader(raw["batch"], raw["part"], raw["parts"], raw["run"], raw["state"])
            right = (
                raw["version"] == 1
                and all(type(n) is int and n >= 0 for n in (header.batch, header.part, header.parts))
                and header.part < header.parts
                and isinstance(header.run, str)
                and all(_is_entry(entry) for entry in entries)
            )
        except (ConfigError, ValueError, KeyError, TypeError) as error:
            raise self.damaged(f"its header cannot be read ({error})") from error
        if not right:
            raise self.damaged("its header has unknown or missing entries")
        return entries, header

    def array(self, entry: dict[str, Any]) -> Array:
        """The next array."""
        dtype, shape = numpy_dtype(entry["dtype"]), tuple(entry["shape"])
        nbytes = math.prod(shape) * dtype.itemsize
        what = "the state" if entry["name"] is None else repr(entry["name"])
        if nbytes > self._size - self.place:
            raise self.damaged(f"it ends within {what}")
        data = bytearray(nbytes)
        if self._file.readinto(data) != nbytes:  # type: ignore[attr-defined]
            raise self.damaged(f"it ends within {what}")
        self.place += nbytes
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise self.damaged(f"{what} has a wrong digest")
        return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        self.place += len(data)
        if len(data) != count:
            raise self.damaged(f"it ends after {self.place} bytes")
        return data


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and (entry["name"] is None or isinstance(entry["name"], str))
        and entry["dtype"] in DTYPES
        and isinstance(entry["sha256"], str)
        and isinstance(entry["shape"], list)
        and all(type(n) is int and 0 <= n < 1 << 48 for n in entry["shape"])
    )


_NAME = re.compile(r"batch-(\d{12,18})\.part-(\d{1,6})-of-(\d{1,6})", re.ASCII)
_DRAFT = ".draft"
_ASIDE = ".set-aside"


class Disk(Protocol):
    """The operations of a file system that a folder of checkpoints needs. Every call may raise OSError."""

    def names(self, folder: Path) -> list[str]:
        """Names of the files in a folder; makes the folder."""

    def write(self, path: Path, data: Iterable[bytes | memoryview]) -> None:
        """Make a file. Returns when its bytes are on the disk."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in one step; replaces a file of that name."""

    def remove(self, path: Path) -> None:
        """Remove a file. No error if it does not exist."""

    def settle(self, folder: Path) -> None:
        """Write the names in a folder to the disk."""

    def read(self, path: Path) -> tuple[BinaryIO, int]:
        """An open file and its size in bytes."""


class LocalDisk:
    """The file system of this host. ``faults``: faults that may strike a write."""

    def __init__(self, faults: ProgramFaults | None = None) -> None:
        self._faults = faults

    def names(self, folder: Path) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        return os.listdir(folder)

    def write(self, path: Path, data: Iterable[bytes | memoryview]) -> None:
        with path.open("wb") as file:
            for piece in data if self._faults is None else self._faults.through_write(data):
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
    part_name = PartName(int(match[1]), int(match[3]), int(match[2]))
    return part_name if part_name.part < part_name.parts and str(part_name) == name else None


def whole_checkpoints(present: Iterable[PartName]) -> list[tuple[int, int]]:
    """The checkpoints whose parts are all there, newest first: the batch and the number of parts."""
    counts: dict[tuple[int, int], int] = {}
    for name in set(present):
        counts[name.batch, name.parts] = counts.get((name.batch, name.parts), 0) + 1
    return sorted((key for key, count in counts.items() if count == key[1]), reverse=True)


def outdated(present: Sequence[PartName], part: int, parts: int, keep: int) -> list[PartName]:
    """The files that instance ``part`` of ``parts`` may remove, so that the last ``keep`` checkpoints stay.

    An instance removes its own files; instance 0 also removes those of a run with another number of instances.
    """
    kept = whole_checkpoints(present)[:keep]
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
        return [part_name for name in names if (part_name := parse_name(name)) is not None]

    def put(self, part: Part, keep: int) -> None:
        """Write this instance's part of a checkpoint, then remove outdated parts.

        Raises CheckpointError if it cannot be written; earlier checkpoints are then unchanged.
        """
        name = str(PartName(part.header.batch, self._parts, self._part))
        draft = self.path / (name + _DRAFT)
        with self._explained("written"):
            try:
                self._disk.write(draft, part_chunks(part))
                self._disk.rename(draft, self.path / name)
            except OSError:
                self._disk.remove(draft)
                raise
            self._disk.settle(self.path)
        old = outdated(self.present(), self._part, self._parts, keep)
        with self._explained("cleared"):
            for old_name in old:
                self._disk.remove(self.path / str(old_name))

    def get(self, batch: int, parts: int) -> list[Part]:
        """All parts of a checkpoint, verified. Raises DamagedCheckpointError that names a file."""
        parts_read = []
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
            parts_read.append(part)
        if len({part.header.run for part in parts_read}) > 1:
            raise DamagedCheckpointError(
                f"The checkpoint of batch {batch} in {self.path} is damaged: its parts come from different runs.",
                hint="resume(session, fallback=True) takes the one before it.",
            )
        return parts_read

    def clear_beyond(self, batch: int) -> None:
        """Rename this instance's parts of later batches to ``.set-aside`` and remove its drafts: they do not belong to
        a run that resumes at ``batch``.
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
