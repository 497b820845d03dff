"""One part of a checkpoint as a file: what one instance writes, and how a reader knows that every byte is as written.

The file is `MAGIC`, the header's length (8 bytes, little-endian), the header's SHA-256, the header (JSON), and then the
arrays one after the other without gaps. The header has each array's name, type, shape and SHA-256, so that the digests
cover every byte. A reader believes no size before it has compared it with the file's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from podrun.checkpoint.values import DTYPES, Array, DamagedCheckpointError
from podrun.core.executable import numpy_dtype

MAGIC = b"podrun checkpoint 1\n"
LARGEST_HEADER = 1 << 28
_PREFIX = len(MAGIC) + 8 + 32
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PartHeader:
    """What a part says about itself.

    ``batch``: batches done. ``part`` of ``parts``: the instance that wrote it. ``run``: marks the parts of one run.
    ``state``: the JSON tree of what belongs to this instance alone.
    """

    batch: int
    part: int
    parts: int
    run: str
    state: Any


@dataclass(frozen=True, slots=True)
class Part:
    """A part's header and arrays. ``shared`` are tensors of the program by name, ``own`` those of the state."""

    header: PartHeader
    shared: Mapping[str, Array]
    own: Sequence[Array]


def chunks(part: Part) -> Iterator[bytes | memoryview]:
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
            raise self.damaged("its header has another digest")
        try:
            raw = json.loads(text)
            entries = raw["arrays"]
            header = PartHeader(raw["batch"], raw["part"], raw["parts"], raw["run"], raw["state"])
            right = (
                raw["version"] == 1
                and all(type(n) is int and n >= 0 for n in (header.batch, header.part, header.parts))
                and header.part < header.parts
                and isinstance(header.run, str)
                and all(_is_entry(entry) for entry in entries)
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.damaged(f"its header cannot be read ({error})") from error
        if not right:
            raise self.damaged("its header says what no header says")
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
            raise self.damaged(f"{what} has another digest")
        return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        self.place += len(data)
        if len(data) != count:
            raise self.damaged(f"it ends after {self.place} bytes")
        return data


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and (entry["name"] is None or isinstance(entry["name"], str))
        and entry["dtype"] in DTYPES
        and isinstance(entry["sha256"], str)
        and isinstance(entry["shape"], list)
        and all(type(n) is int and 0 <= n < 1 << 48 for n in entry["shape"])
    )
