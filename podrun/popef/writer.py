"""Writes PopEF files: parts are handed over one by one, the file is there when the writer is closed.

    with PopefWriter("model.popef") as writer:
        writer.writeMetadata(metadata)
        writer.createExecutable("model").write(executable_bytes)
        writer.createTensorData("weight", info).write(array)

Until `close` nothing lies at the path; if the ``with`` block raises, nothing is written. The bytes of a part are not
copied when they can be shared, so an array must not change before the writer is closed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from types import TracebackType

import numpy as np

from podrun.core.errors import CallError, UsageError
from podrun.popef.container import MappedFile, NewSection, Part, write_sections
from podrun.popef.metadata import PopefMetadata, PopefTensor


class PartWriter:
    """Takes the bytes of one part of a file. ``form``: of a tensor, whose bytes are counted."""

    def __init__(
        self, kind: str, name: str, *, compress: bool = False, form: PopefTensor | None = None
    ) -> None:
        self.kind, self.name = kind, name
        self._compress, self._form = compress, form
        self._parts: list[Part] = []

    def write(self, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Add bytes, or the elements of an array in order of rows."""
        if isinstance(data, np.ndarray):
            flat = np.ascontiguousarray(data).reshape(-1)
            self._parts.append(flat.view(np.uint8).data)
        else:
            self._parts.append(memoryview(data).cast("B"))

    def section(self) -> NewSection:
        """The part as a section. UsageError for a tensor of another size than it states."""
        if self._form is not None:
            size = sum(map(len, self._parts))
            if size != self._form.sizeInBytes:
                raise UsageError(
                    f"{self.kind} {self.name!r} has {size} bytes; {self._form.dataType.name}"
                    f"{list(self._form.shape)} has {self._form.sizeInBytes}"
                )
            return NewSection(self.kind, self.name, self._parts, {"tensorInfo": self._form.to_json()})
        if not self._compress:
            return NewSection(self.kind, self.name, self._parts)
        raw = b"".join(self._parts)
        info = {"compressed": True, "rawBytes": len(raw)}
        return NewSection(self.kind, self.name, [zlib.compress(raw, 6)], info)


class PopefWriter:
    """Writes a PopEF file part by part; it is there when the writer is closed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._metadata: list[PopefMetadata] = []
        self._parts: list[PartWriter] = []
        self._open = True

    def writeMetadata(self, metadata: PopefMetadata) -> None:
        """Add metadata; a file has one for each of its executables."""
        self._metadata.append(metadata)

    def createExecutable(self, name: str, compress: bool = False) -> PartWriter:
        """A part for the bytes of an executable."""
        return self._added(PartWriter("executable", name, compress=compress))

    def createTensorData(self, name: str, info: PopefTensor) -> PartWriter:
        """A part for the value of a tensor, such as a weight."""
        return self._added(PartWriter("tensor", name, form=info))

    def createFeedData(self, name: str, info: PopefTensor) -> PartWriter:
        """A part for input data; ``info``: the form of all of them."""
        return self._added(PartWriter("feed", name, form=info))

    def createOpaqueBlob(self, name: str, executable: str = "") -> PartWriter:
        """A part for bytes whose meaning only a front end knows, which belong to an executable."""
        return self._added(PartWriter("opaque", f"{executable}/{name}"))

    def add_tensor(self, name: str, value: np.ndarray) -> None:
        """Add a tensor with its form. UsageError for a type that files do not hold."""
        try:
            form = PopefTensor.of(value)
        except ValueError as error:
            raise UsageError(
                f"tensor {name!r} has type {value.dtype}, which PopEF files do not hold"
            ) from error
        self.createTensorData(name, form).write(value)

    def close(self) -> None:
        """Write the file. ConfigError if the disk refuses. Idempotent."""
        if not self._open:
            return
        self._open = False
        metadata = [
            NewSection("metadata", item.executable, [json.dumps(item.to_json(), sort_keys=True).encode()])
            for item in self._metadata
        ]
        write_sections(self._path, [*metadata, *(part.section() for part in self._parts)])

    def _added(self, part: PartWriter) -> PartWriter:
        if not self._open:
            raise CallError("the writer is closed: make its parts before")
        if any((item.kind, item.name) == (part.kind, part.name) for item in self._parts):
            raise UsageError(f"the file has a {part.kind} {part.name!r} already")
        self._parts.append(part)
        return part

    def __enter__(self) -> PopefWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
        self._open = False


def write_with_blobs(
    data: bytes, blobs: Mapping[str, bytes], path: str | os.PathLike[str], *, executable: str
) -> None:
    """Write the file whose bytes are ``data`` with further opaque blobs, which belong to an executable."""
    file = MappedFile(memoryview(data), "the program")
    kept = [NewSection(s.kind, s.name, [file.data(s)], s.info) for s in file.sections]
    added = [NewSection("opaque", f"{executable}/{name}", [blob]) for name, blob in blobs.items()]
    write_sections(path, [*kept, *added])
