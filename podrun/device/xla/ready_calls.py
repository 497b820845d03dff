"""Notes beside compiled pieces: with its note, a piece is called without reading and lowering its StableHLO again.

XLA's cache finds compiled code by the text of the lowered and rewritten piece, so each process made that text before it
could look: half of the time until the pieces of BERT-base are there. A note says what making the text would tell, and
which of XLA's entries holds the code, with its digest. It is kept under the piece's key, which covers all that decides
the text, and under a digest of the code that makes the text (`CODE`): with another podrun, jaxlib or native module a
note is not there.

A piece has no note if its StableHLO has custom calls, which need libraries in the process and are looked at before they
are called, or if oneDNN should compute it but could not be loaded.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

import podrun
from podrun.core.documents import write_whole
from podrun.core.executable import numpy_dtype
from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.convolutions import PACKAGE
from podrun.private_apis import installed_version

_SHOWN = 16
"""Digits of `CODE` in the name of a note."""
ArrayKind = tuple[tuple[int, ...], str]
"""Shape and dtype."""


@dataclass(frozen=True, slots=True)
class CallNote:
    """What a process needs to know of a compiled piece.

    ``threads``: that compute it. ``in_place``: operands, by position, and the results that are written over them.
    ``placed``: results that may be written to memory of the caller's. ``library``: whether it calls oneDNN. ``entry``:
    the file that holds the code, and ``digest`` the SHA-256 of its contents. ``dense``: in place of code, the numbers
    of a training step that the C module computes (`podrun.device.xla.dense_programs`).
    """

    threads: int
    in_place: Mapping[int, int]
    operands: Sequence[ArrayKind]
    results: Sequence[ArrayKind]
    placed: frozenset[int]
    library: bool
    entry: str
    digest: str
    dense: Sequence[int] = ()


def write_note(folder: Path, key: str, note: CallNote) -> None:
    """Keep the note of a piece. Raises OSError where that cannot be done."""
    values = asdict(note) | {"in_place": sorted(note.in_place.items()), "placed": sorted(note.placed)}
    text = json.dumps(values)
    write_whole(f"{_sum(text)}\n{text}".encode(), _path(folder, key))


def read_note(folder: Path, key: str) -> tuple[CallNote, bytes] | None:
    """The note of a piece and the entry that it names, if any; None unless both are there as they were written."""
    try:
        checksum, _, text = _path(folder, key).read_text(encoding="utf-8").partition("\n")
        if checksum != _sum(text):
            return None
        values = json.loads(text)
        entry = b"" if values["dense"] else (folder / values["entry"]).read_bytes()
    except (OSError, ValueError):
        return None
    if not values["dense"] and hashlib.sha256(entry).hexdigest() != values["digest"]:
        return None
    note = CallNote(
        **values
        | {
            "in_place": dict(values["in_place"]),
            "placed": frozenset(values["placed"]),
            "operands": [(tuple(shape), dtype) for shape, dtype in values["operands"]],
            "results": [(tuple(shape), dtype) for shape, dtype in values["results"]],
        }
    )
    return note, entry


def remove_notes(folder: Path, key: str) -> None:
    """Remove the notes of a piece and their code, also those of other versions of podrun. Raises OSError."""
    for pattern in (f"{key}-*.call", f"{key}-*.code"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def code_file(key: str) -> str:
    """The name of a file with a piece's code, where that is not the entry of XLA's cache."""
    return f"{key}-{CODE[:_SHOWN]}.code"


def array_kinds(arrays: Sequence[object]) -> list[ArrayKind] | None:
    """Shapes and dtypes of what has both; None if a name does not say the dtype."""
    kinds: list[ArrayKind] = []
    for array in arrays:
        shape, dtype = getattr(array, "shape", ()), np.dtype(getattr(array, "dtype", object))
        try:
            if numpy_dtype(dtype.name) != dtype:
                return None
        except (TypeError, ValueError):
            return None
        kinds.append((tuple(map(int, shape)), dtype.name))
    return kinds


def code_digest() -> str:
    """A digest of the code that makes a compiled piece of StableHLO: of this folder with its native module, of the
    modules for JAX's private names, and of the versions of podrun, jaxlib and oneDNN."""
    here = Path(__file__).parent
    versions = [podrun.__version__, *map(installed_version, ("jaxlib", PACKAGE))]
    digest = hashlib.sha256(" ".join(versions).encode())
    files = [*sorted(here.glob("*.py")), *sorted(here.glob("*.so"))]
    private = here.parent.parent / "private_apis"
    for path in (
        *files,
        private / "__init__.py",
        *sorted(private.glob("jax*.py")),
        private / "xla_executables.py",
    ):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


CODE = code_digest()
"""Of the code that this process runs: files that change later are another process's."""


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}-{CODE[:_SHOWN]}.call"


def _sum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
