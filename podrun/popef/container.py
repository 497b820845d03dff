"""The sections of a PopEF file, and the checks before anything of a file is used.

Layout, little-endian::

    8 bytes   b"PODPOPEF"
    u32       version of the layout
    u32       length of the table
    table     UTF-8 JSON: a list of sections, each {kind, name, offset, bytes, sha256, info}
    32 bytes  SHA-256 of all that comes before
    sections  each from a multiple of 64 bytes on, zeros between them

The layout is podrun's own, because the SDK's is not published; names and meaning of the metadata are the SDK's. A file
is mapped into memory, never read as a whole. The table is checked first (its digest, that sections lie in the file, in
order and apart), then the digest of each section over the mapped bytes: a file that is cut short, damaged or made to
deceive is refused before an array is made of it. Nothing in it is unpickled or evaluated.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import podrun
from podrun.core.errors import ConfigError
from podrun.core.quick_dataclass import dataclass
from podrun.popef.metadata import typed

MAGIC = b"PODPOPEF"
VERSION = 1
ALIGNMENT = 64
PACKAGE = f"podrun {podrun.__version__}"
"""The release that writes files; the counterpart of the SDK's package hash."""
LONGEST_TABLE = 256 << 20
MOST_SECTIONS = 1 << 20
MOST_EXPANSION = 1032
"""The most that zlib can expand one byte to."""
KINDS = ("metadata", "executable", "tensor", "feed", "opaque")
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 32

Part = bytes | memoryview


@dataclass(frozen=True, slots=True)
class FileSection:
    """One part of a file. ``info``: plain JSON; for executables ``compressed`` and ``rawBytes``, for tensors their
    form."""

    kind: str
    name: str
    offset: int
    size: int
    sha256: str
    info: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The section's entry in the table."""
        return {
            "kind": self.kind,
            "name": self.name,
            "offset": self.offset,
            "bytes": self.size,
            "sha256": self.sha256,
            "info": dict(self.info),
        }

    @staticmethod
    def from_json(item: object, where: str) -> FileSection:
        """The value of an entry. ValueError for one that is none."""
        entry = typed(item, dict, where)
        section = FileSection(
            typed(entry.get("kind"), str, f"{where}.kind"),
            typed(entry.get("name"), str, f"{where}.name"),
            typed(entry.get("offset"), int, f"{where}.offset"),
            typed(entry.get("bytes"), int, f"{where}.bytes"),
            typed(entry.get("sha256"), str, f"{where}.sha256"),
            typed(entry.get("info"), dict, f"{where}.info"),
        )
        if section.kind not in KINDS:
            raise ValueError(f"{where}.kind {section.kind!r} is not known")
        return section

    @property
    def label(self) -> str:
        """The section's kind and name, for messages."""
        return f"{self.kind} {self.name!r}"


@dataclass(frozen=True, slots=True)
class NewSection:
    """A section that is to be written. ``parts``: its bytes, one after the other."""

    kind: str
    name: str
    parts: Sequence[Part]
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many bytes the section takes."""
        return sum(len(part) for part in self.parts)


class MappedFile:
    """A checked file in memory. ``label`` names it in messages. Arrays over it keep the mapping."""

    def __init__(self, data: memoryview, label: str) -> None:
        self._data, self.label = data, label
        self.sections = tuple(_table(data, label))
        for section in self.sections:
            self._check(section)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> MappedFile:
        """Map and check a file. ConfigError for one that does not exist, cannot be read or is none."""
        label = os.fspath(path)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < _PREFIX.size + _DIGEST_BYTES:
                    raise _foreign(label, file.read(8))
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"{label} cannot be read: {reason}", hint=f"Look for it: ls -l {label}"
            ) from error
        return MappedFile(memoryview(mapped), label)

    def data(self, section: FileSection) -> memoryview:
        """The bytes of a section as they lie in the file, read-only."""
        return self._data[section.offset : section.offset + section.size]

    def unpacked(self, section: FileSection) -> Part:
        """The bytes of a section, expanded if they are compressed."""
        data = self.data(section)
        if not section.info.get("compressed"):
            return data
        size = section.info.get("rawBytes")
        if not isinstance(size, int) or not 0 <= size <= MOST_EXPANSION * len(data) + ALIGNMENT:
            raise self._damaged(f"{section.label} states {size} bytes, which {len(data)} cannot hold")
        expander = zlib.decompressobj()
        try:
            raw = expander.decompress(data, size + 1)
        except zlib.error as error:
            raise self._damaged(f"{section.label}: {error}") from error
        if len(raw) != size or not expander.eof:
            raise self._damaged(f"{section.label} does not hold the {size} bytes that it states")
        return raw

    def _check(self, section: FileSection) -> None:
        if hashlib.sha256(self.data(section)).hexdigest() != section.sha256:
            raise self._damaged(f"the checksum of {section.label} is wrong")

    def _damaged(self, why: str) -> ConfigError:
        return damaged(self.label, why)


def damaged(label: str, why: str) -> ConfigError:
    """The error for a file that is not what its writer wrote."""
    return ConfigError(f"{label} is damaged: {why}", hint="Compile or copy the model again.")


def _foreign(label: str, begin: bytes) -> ConfigError:
    if begin.startswith(b"PODRUNEX"):
        return ConfigError(
            f"{label} is a bare Executable, without weights and metadata", hint="Compile the model again."
        )
    return ConfigError(
        f"{label} is not a PopEF file of podrun: it does not start with {MAGIC.decode()!r}",
        hint="Files of the SDK hold code of real IPUs: compile the model again with poprt or compileAndExport.",
    )


def _table(data: memoryview, label: str) -> Iterable[FileSection]:
    """The sections of a file. ConfigError unless the table is whole and every section lies in the file."""
    if bytes(data[: len(MAGIC)]) != MAGIC or len(data) < _PREFIX.size + _DIGEST_BYTES:
        raise _foreign(label, bytes(data[:8]))
    _, version, length = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise ConfigError(
            f"{label} has PopEF layout {version}; this podrun reads {VERSION}",
            hint="Compile the model again with this version.",
        )
    end = _PREFIX.size + length
    if length > LONGEST_TABLE or end + _DIGEST_BYTES > len(data):
        raise damaged(label, "it is cut short, or its table is longer than the file")
    if hashlib.sha256(data[:end]).digest() != bytes(data[end : end + _DIGEST_BYTES]):
        raise damaged(label, "the checksum of its table is wrong")
    try:
        entries = typed(json.loads(bytes(data[_PREFIX.size : end])), list, "the table")
        if len(entries) > MOST_SECTIONS:
            raise ValueError(f"the table has {len(entries)} sections")
        sections = [FileSection.from_json(entry, f"section {i}") for i, entry in enumerate(entries)]
        _check_places(sections, end + _DIGEST_BYTES, len(data))
    except (ValueError, RecursionError) as error:
        raise damaged(label, str(error)) from error
    return sections


def _check_places(sections: Sequence[FileSection], begin: int, end: int) -> None:
    """ValueError unless sections lie in order, apart, and fill the file to its end."""
    names: set[tuple[str, str]] = set()
    for section in sections:
        if section.offset < begin or section.size < 0 or section.offset + section.size > end:
            raise ValueError(f"{section.label} lies outside the file, or shares bytes with another section")
        if section.offset % ALIGNMENT:
            raise ValueError(f"{section.label} is not aligned")
        if (section.kind, section.name) in names:
            raise ValueError(f"{section.label} occurs twice")
        names.add((section.kind, section.name))
        begin = section.offset + section.size
    if begin != end:
        raise ValueError("bytes follow the last section")


def file_parts(sections: Sequence[NewSection]) -> Iterator[Part]:
    """The bytes of a PopEF file with these sections: its head first, then each section, to be written in that order."""
    table = _new_table(sections)
    head = _PREFIX.pack(MAGIC, VERSION, len(table)) + table
    head += hashlib.sha256(head).digest()
    yield head
    size = len(head)
    for section in sections:
        gap = -size % ALIGNMENT
        yield bytes(gap)
        yield from section.parts
        size += gap + section.size


def write_sections(path: str | os.PathLike[str], sections: Sequence[NewSection]) -> None:
    """Write a file so that a reader sees all of it or nothing. ConfigError if the disk refuses."""
    target = Path(path)
    parts = file_parts(sections)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror or error}", hint=f"df -h {target.parent}"
        ) from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _new_table(sections: Sequence[NewSection]) -> bytes:
    """The table of a file; offsets depend on its length, which depends on theirs, until they agree."""
    digests = [_digest(section.parts) for section in sections]
    length = 0
    while True:
        place, entries = _PREFIX.size + length + _DIGEST_BYTES, []
        for section, digest in zip(sections, digests, strict=True):
            place += -place % ALIGNMENT
            entry = FileSection(section.kind, section.name, place, section.size, digest, section.info)
            entries.append(entry.to_json())
            place += section.size
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            return text.ljust(length)
        length = len(text)


def _digest(parts: Sequence[Part]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
