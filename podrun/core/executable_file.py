"""The file that holds an Executable: one file, self-checking, equal bytes for equal Executables.

Layout, little-endian::

    8 bytes   b"PODRUNEX"
    u32       format version (`podrun.core.executable.EXECUTABLE_VERSION`)
    u64       length of the header
    header    UTF-8 JSON: everything but the StableHLO bytes, which it names by offset and length
    blobs     the StableHLO of every Computation, one after the other
    32 bytes  SHA-256 of all that comes before

It is data only: reading it evaluates and unpickles nothing, every field is checked against the types of
`podrun.core.executable`, and no more memory is taken than the file has. What its pieces compute is code all the same:
`podrun.device.xla.custom_calls` says what they may call, and `podrun.device.xla.vetting` reads pieces that this user's
podrun has not exported in a process of their own first. Reading raises `podrun.core.errors.ConfigError` that names what
is wrong.

**Own pieces.** A piece is StableHLO, which native code reads: bytes that were changed by mistake or by intent can end
the process that reads them. Pieces that podrun exported are read as they are; all others are first read by a process of
their own. A piece is known by the SHA-256 of its bytes, in this process and, as an empty file, in the user's cache
directory, so that a program from a cache or a file on disk is known in the next process too.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import os
import struct
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from podrun.core.documents import write_whole
from podrun.core.environment import environment, podrun_cache_directory
from podrun.core.errors import ConfigError
from podrun.core.executable import (
    EXECUTABLE_VERSION,
    INSTRUCTION_TYPES,
    Arena,
    Computation,
    Executable,
    Instruction,
    Stream,
    Variable,
)
from podrun.core.layout import Layout

MAGIC = b"PODRUNEX"
_PREFIX = struct.Struct("<8sIQ")
_DIGEST_BYTES = 32

T = TypeVar("T")
FieldReader = Callable[[Any], Any]


def dumps(executable: Executable) -> bytes:
    """The bytes of the file. Equal Executables give equal bytes, on any host."""
    blobs: list[bytes] = []
    offset = 0
    computations = []
    for item in executable.computations.values():
        computations.append(
            {
                "name": item.name,
                "inputs": item.inputs,
                "outputs": item.outputs,
                "donated": item.donated,
                "offset": offset,
                "bytes": len(item.stablehlo),
            }
        )
        blobs.append(item.stablehlo)
        offset += len(item.stablehlo)
    header = {
        "name": executable.name,
        "target": executable.target,
        "layout": _plain(executable.layout),
        "accumulation_factor": executable.accumulation_factor,
        "training": executable.training,
        "streams": [_plain(stream) for stream in executable.streams.values()],
        "variables": [_variable_to_plain(variable) for variable in executable.variables.values()],
        "arenas": [_plain(arena) for arena in executable.arenas.values()],
        "computations": computations,
        "instructions": [
            [{"op": type(i).__name__, **_plain(i)} for i in ipu] for ipu in executable.instructions
        ],
        # A report shows what the tile model says in its order; what the front end adds has no order of its own.
        "tile_report": _json(executable.tile_report, list),
        "metadata": _json(executable.metadata, sorted),
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    body = b"".join([_PREFIX.pack(MAGIC, EXECUTABLE_VERSION, len(text)), text, *blobs])
    return body + hashlib.sha256(body).digest()


def description(executable: Executable) -> dict[str, Any]:
    """Everything in the file except the pieces' code, as plain JSON values."""
    return _split(dumps(executable), "the executable")[0]


def loads(data: bytes, *, where: str = "the received bytes") -> Executable:
    """The Executable in ``data``; ``where`` names its origin in errors.

    Raises ConfigError for bytes that are not an Executable, are damaged or cut short, or are of a newer podrun.
    """
    try:
        header, blobs = _split(data, where)
        return _decode(header, blobs)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not an Executable podrun can read: {type(error).__name__}: {error}",
            hint="Compile the program again; delete the file if it lies in an executable cache.",
        ) from error


def write_executable(executable: Executable, path: str | os.PathLike[str]) -> None:
    """Write the file so that a reader sees either all of it or nothing."""
    write_whole(dumps(executable), path)


def read_executable(path: str | os.PathLike[str]) -> Executable:
    """The Executable in the file at ``path``. Raises ConfigError as `loads` does, and FileNotFoundError if there is no
    file.
    """
    return loads(Path(path).read_bytes(), where=os.fspath(path))


# --- Writing ------------------------------------------------------------------------------------------------


_AS_IT_IS = frozenset((type(None), bool, int, float, str))


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass; None for another type."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


def _plain(value: object) -> Any:
    """A dataclass as a dict in field order, enums as their values, tuples as lists."""
    kind: type = type(value)
    if kind in _AS_IT_IS:  # Most values are: looking further takes most of the time.
        return value
    if (names := _field_names(kind)) is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _variable_to_plain(variable: Variable) -> dict[str, Any]:
    initial = None if variable.initial is None else float(variable.initial)
    plain = {**_plain(variable), "initial": initial}
    if not variable.rows:
        del plain["rows"]
    return plain


def _json(value: object, order: Callable[[Iterable[str]], list[str]]) -> Any:
    """Plain JSON data with the keys of every mapping in an order; raises TypeError for anything else."""
    if type(value) in _AS_IT_IS:
        return value
    if isinstance(value, Mapping):
        texts = {str(key): item for key, item in value.items()}
        return {key: _json(texts[key], order) for key in order(texts)}
    if isinstance(value, list | tuple):
        return [_json(item, order) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"metadata and tile reports hold plain JSON values, not {type(value).__name__}")


# --- Reading ------------------------------------------------------------------------------------------------


def _split(data: bytes, where: str) -> tuple[dict[str, Any], memoryview]:
    """The header and the blobs. Raises ConfigError unless length, version and digest are right."""
    if len(data) < _PREFIX.size + _DIGEST_BYTES or not data.startswith(MAGIC):
        raise ConfigError(
            f"{where} is not an Executable: it does not start with {MAGIC.decode()!r}",
            hint="Name a compiled program, such as the executable.popef or profile.json of a report.",
        )
    _, version, length = _PREFIX.unpack_from(data)
    if not 1 <= version <= EXECUTABLE_VERSION:
        raise ConfigError(
            f"{where} has Executable format {version}; this podrun reads 1 to {EXECUTABLE_VERSION}",
            hint="Compile the program again with this version, or install the newer podrun.",
        )
    view = memoryview(data)
    body, digest = view[:-_DIGEST_BYTES], bytes(view[-_DIGEST_BYTES:])
    if hashlib.sha256(body).digest() != digest or _PREFIX.size + length > len(body):
        raise ConfigError(
            f"{where} is damaged or cut short: its checksum is wrong",
            hint="Compile the program again; delete the file if it lies in an executable cache.",
        )
    header = json.loads(bytes(body[_PREFIX.size : _PREFIX.size + length]))
    if not isinstance(header, dict):
        raise TypeError("the header is not an object")
    return header, body[_PREFIX.size + length :]


def _decode(header: dict[str, Any], blobs: memoryview) -> Executable:
    if sum(_typed(item["bytes"], int) for item in header["computations"]) > len(blobs):
        raise ValueError("its Computations share bytes")
    return Executable(
        name=_typed(header["name"], str),
        layout=_checked(Layout, header["layout"]),
        accumulation_factor=_typed(header["accumulation_factor"], int),
        training=_typed(header["training"], bool),
        streams=_by_name(header["streams"], partial(_checked, Stream), lambda stream: stream.spec.name),
        variables=_by_name(
            header["variables"], partial(_checked, Variable), lambda variable: variable.spec.name
        ),
        arenas=_by_name(header["arenas"], partial(_checked, Arena), lambda arena: arena.name),
        computations=_by_name(
            header["computations"],
            lambda item: _computation(item, blobs),
            lambda computation: computation.name,
        ),
        instructions=tuple(tuple(_instruction(item) for item in ipu) for ipu in header["instructions"]),
        target=_typed(header["target"], str),
        tile_report=_typed(header["tile_report"], dict),
        metadata=_typed(header["metadata"], dict),
    )


def _typed(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"expected {kind.__name__}, found {value!r}")
    return value


def _checked(kind: Any, value: Any) -> Any:
    """A value of the header in the form that a field's type asks for, see `_reader`."""
    return _reader(kind)(value)


@cache
def _reader(kind: Any) -> FieldReader:
    """What brings a value of the header into the form of a type: a dataclass from an object, a tuple from a list, an
    enum from its member's value. It raises TypeError, KeyError or ValueError for a value that does not fit.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_reader(kind)
    if get_origin(kind) is tuple:
        item = _reader(get_args(kind)[0])
        return lambda value: tuple([item(part) for part in value])
    if get_origin(kind) is types.UnionType:  # T | None
        present = _reader(get_args(kind)[0])
        return lambda value: None if value is None else present(value)
    if issubclass(kind, enum.Enum):
        return lambda value: kind(value)
    return lambda value: value if type(value) is kind else _typed(value, kind)


def _dataclass_reader(kind: Any) -> FieldReader:
    readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
    needed = readers.keys() - {"rows"}  # Written only for variables that have them.

    def read(value: Any) -> Any:
        if missing := needed - value.keys():
            raise KeyError(min(missing))
        return kind(**{name: readers[name](part) for name, part in value.items()})

    return read


def _by_name(items: list[Any], decode: Callable[[Any], T], name: Callable[[T], str]) -> dict[str, T]:
    decoded = [decode(item) for item in items]
    table = {name(item): item for item in decoded}
    if len(table) != len(decoded):
        raise ValueError("a name occurs twice in one table")
    return table


def _computation(item: Mapping[str, Any], blobs: memoryview) -> Computation:
    offset, count = _typed(item["offset"], int), _typed(item["bytes"], int)
    if offset < 0 or count < 0 or offset + count > len(blobs):
        raise ValueError(f"Computation {item['name']!r} lies outside the file")
    return Computation(
        name=_typed(item["name"], str),
        stablehlo=bytes(blobs[offset : offset + count]),
        **{part: _checked(tuple[str, ...], item[part]) for part in ("inputs", "outputs", "donated")},
    )


def _instruction(item: Mapping[str, Any]) -> Instruction:
    values = {key: value for key, value in item.items() if key != "op"}
    instruction: Instruction = _checked(INSTRUCTION_TYPES[_typed(item["op"], str)], values)
    return instruction


FOLDER = "own-pieces"
_known: set[bytes] = set()


def _digest(stablehlo: bytes) -> bytes:
    return hashlib.sha256(stablehlo).digest()


def remember(stablehlo: bytes) -> None:
    """Let this process read the piece without vetting."""
    _known.add(_digest(stablehlo))


def note_exported_piece(stablehlo: bytes, environ: Mapping[str, str] | None = None) -> None:
    """Record that podrun exported the piece: this process and later ones of this user may read it without vetting."""
    digest = _digest(stablehlo)
    if digest in _known:
        return
    _known.add(digest)
    path = _file(digest, environ)
    if path is not None:
        with contextlib.suppress(OSError):  # A cache that cannot be written only costs another vetting later.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)


def is_own(stablehlo: bytes, environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process may read the piece without vetting."""
    digest = _digest(stablehlo)
    if digest in _known:
        return True
    path = _file(digest, environ)
    if path is None or not path.exists():
        return False
    _known.add(digest)
    return True


def are_own(pieces: Iterable[bytes]) -> bool:
    """Whether this process may read all of these pieces without vetting."""
    return all(map(is_own, pieces))


def _file(digest: bytes, environ: Mapping[str, str] | None) -> Path | None:
    base = podrun_cache_directory(environment(environ))
    return None if base is None else base / FOLDER / digest.hex()
