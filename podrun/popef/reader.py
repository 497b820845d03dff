"""Reads PopEF files: a file is checked as a whole and mapped, and its parts are views of it.

reader = PopefReader().parseFile("model.popef")
reader.metadata()[0].inputs()
weights = {tensor.name: tensor.data() for tensor in reader.tensors()}     # memory-mapped, read-only
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

import numpy as np

from podrun.core import executable_file
from podrun.core.errors import ConfigError
from podrun.core.executable import Executable
from podrun.core.quick_dataclass import dataclass
from podrun.popef.container import MAGIC, FileSection, MappedFile, NewSection, damaged, file_parts
from podrun.popef.metadata import PopefMetadata, PopefTensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file. ``info``: its form."""

    name: str
    info: PopefTensor
    file: MappedFile
    section: FileSection

    def data(self) -> np.ndarray:
        """The value: a read-only view of the mapped file."""
        flat = np.frombuffer(self.file.data(self.section), self.info.dataType.numpy_dtype)
        return flat.reshape(self.info.shape)


@dataclass(frozen=True, slots=True)
class StoredExecutable:
    """An executable of a file."""

    name: str
    file: MappedFile
    section: FileSection

    def executable(self) -> bytes:
        """The bytes of the executable."""
        return bytes(self.file.unpacked(self.section))

    def program(self) -> Executable:
        """The program itself. ConfigError if the bytes are none."""
        return executable_file.loads(self.executable(), where=f"{self.file.label}, executable {self.name!r}")


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """Bytes of a front end. ``executable``: the one that they belong to."""

    name: str
    executable: str
    file: MappedFile
    section: FileSection

    def data(self) -> bytes:
        """The blob's bytes."""
        return bytes(self.file.data(self.section))


class PopefReader:
    """Reads PopEF files, whose parts are views of the mapped files. Several files may be parsed; their parts come in
    order.
    """

    def __init__(self) -> None:
        self._files: list[MappedFile] = []
        self._metadata: list[PopefMetadata] = []
        self._tensors: list[StoredTensor] = []
        self._feeds: list[StoredTensor] = []

    def parseFile(self, path: str | os.PathLike[str]) -> PopefReader:
        """Check and map a file; returns this reader. ConfigError that names the file and what is wrong with it."""
        return self._take(MappedFile.open(path))

    def parseBytes(self, data: bytes, name: str = "the received bytes") -> PopefReader:
        """`parseFile` for the bytes of a file."""
        return self._take(MappedFile(memoryview(data), name))

    def metadata(self) -> list[PopefMetadata]:
        """The metadata of all executables."""
        return list(self._metadata)

    def executables(self) -> list[StoredExecutable]:
        """The executables of all files that were read."""
        return [StoredExecutable(s.name, f, s) for f, s in self._sections("executable")]

    def tensors(self) -> list[StoredTensor]:
        """The values of tensors of all files that were read."""
        return list(self._tensors)

    def feeds(self) -> list[StoredTensor]:
        """The input data of all files that were read."""
        return list(self._feeds)

    def opaqueBlobs(self) -> list[StoredBlob]:
        """All bytes of front ends."""
        return [
            StoredBlob(s.name.partition("/")[2], s.name.partition("/")[0], f, s)
            for f, s in self._sections("opaque")
        ]

    def blob(self, name: str) -> bytes | None:
        """The first opaque blob of that name, or None."""
        return next((blob.data() for blob in self.opaqueBlobs() if blob.name == name), None)

    def _sections(self, kind: str) -> Iterator[tuple[MappedFile, FileSection]]:
        return ((f, s) for f in self._files for s in f.sections if s.kind == kind)

    def _take(self, file: MappedFile) -> PopefReader:
        metadata: list[PopefMetadata] = []
        tensors: list[StoredTensor] = []
        feeds: list[StoredTensor] = []
        try:
            for section in file.sections:
                if section.kind == "metadata":
                    metadata.append(PopefMetadata.from_json(json.loads(bytes(file.data(section)))))
                elif section.kind in ("tensor", "feed"):
                    (tensors if section.kind == "tensor" else feeds).append(_tensor(file, section))
            _check_executables(file, metadata)
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:
            raise damaged(file.label, str(error)) from error
        self._files.append(file)
        self._metadata += metadata
        self._tensors += tensors
        self._feeds += feeds
        return self


def _is_bare(path: str | os.PathLike[str]) -> bool:
    """Whether a file is an executable without a container; False for one that cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(executable_file.MAGIC)) == executable_file.MAGIC
    return False


class AnyProgramReader(PopefReader):
    """`PopefReader` that also takes a bare executable, as an executable cache holds: a file with one executable and no
    metadata.
    """

    def parseFile(self, path: str | os.PathLike[str]) -> PopefReader:
        """Check and map a file; returns this reader. ConfigError that names the file and what is wrong with it."""
        if not _is_bare(path):
            return super().parseFile(path)
        program = executable_file.read_executable(path)
        section = NewSection("executable", program.name, [executable_file.dumps(program)])
        return self.parseBytes(b"".join(file_parts([section])), os.fspath(path))


def _tensor(file: MappedFile, section: FileSection) -> StoredTensor:
    form = PopefTensor.from_json(section.info.get("tensorInfo"), section.label)
    if form.sizeInBytes != section.size:
        raise ValueError(f"{section.label} has {section.size} bytes; its form needs {form.sizeInBytes}")
    return StoredTensor(section.name, form, file, section)


def _check_executables(file: MappedFile, metadata: list[PopefMetadata]) -> None:
    """ValueError unless metadata describe an executable of the file."""
    names = {section.name for section in file.sections if section.kind == "executable"}
    for item in metadata:
        if item.executable not in names:
            raise ValueError(f"its metadata describe an executable {item.executable!r} that it does not hold")


def is_popef(path: str | os.PathLike[str]) -> bool:
    """True iff the file begins as PopEF files of podrun do."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_program(path: str | os.PathLike[str]) -> Executable:
    """The program in a PopEF file, or in a bare file of `podrun.core.executable_file`. ConfigError for a file that is
    neither, or holds several programs.
    """
    if not is_popef(path):
        return executable_file.read_executable(path)
    programs = PopefReader().parseFile(path).executables()
    if len(programs) != 1:
        raise ConfigError(f"{os.fspath(path)} holds {len(programs)} programs, not one")
    return programs[0].program()
