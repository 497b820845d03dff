"""Executables of XLA's for the CPU, without what only a compiler reads.

An executable that jaxlib writes holds machine code, the list of its calls, where its buffers lie, and the whole program
after optimisation. A process that reads it builds that program again: of a BERT's pieces three quarters of their
operations, and more than half of the time to read them, are the insides of fusions, for which there is machine code.
`reduced_executable` leaves these insides out: a fusion becomes an opaque operation with the same operands and the same
shape. The code, the calls, the buffers and the operations outside of fusions stay, so the numbers do too.

Fusions of XLA's libraries (``kCustom``) stay as they are, since their insides are read again when they are loaded.

The format is that of protocol buffers: ``xla/pjrt/proto`` around ``xla/service/cpu/executable.proto`` around
``xla/service/hlo.proto``, of the release in `TESTED`. Executables of others are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from podrun.private_apis import find_name, installed_version

TESTED = ("0.10.2",)
"""Releases of jaxlib whose executables may be reduced."""
WORTH_REDUCING = 1 << 16
"""Bytes of an executable from which on it is reduced; a smaller one is read in a few milliseconds."""

_ENTRIES = "jax._src.compilation_cache"
Field = tuple[int, int, int | bytes]
"""Number, wire type, value."""

_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
"""Bytes of a field of a wire type of fixed length."""
_MODULE = (1, 1, 1)
"""From an executable with its options: executable, module with its configuration, module."""
_COMPUTATIONS, _INSTRUCTIONS, _COMPUTATION_ID = 3, 2, 5
_OPCODE, _METADATA, _FUSION_KIND, _TARGET, _CALLED = 2, 7, 11, 28, 38
_KEPT_OF_FUSION = frozenset({1, 3, 35, 36, 37})
"""Of an instruction: name, shape, id, operands, and what must run before it."""
_COMPILED = frozenset({b"kLoop", b"kInput", b"kOutput"})
"""Fusions that are machine code."""
_CONTROL = frozenset({b"while", b"call", b"conditional"})
"""Operations whose computations are lists of calls of their own."""


def reduced_executable(executable: bytes) -> bytes | None:
    """An executable that computes the same and is read faster; None if it is not worth it, or if this jaxlib's are not
    known."""
    if len(executable) < WORTH_REDUCING or installed_version("jaxlib") not in TESTED:
        return None
    try:
        length, start = _varint(executable, 0)
        body = _replaced([*_fields(executable[start + length :])], _MODULE, _without_insides)
        return executable[: start + length] + _written(body)
    except (
        ValueError,
        IndexError,
        KeyError,
        StopIteration,
    ):  # Another format than that of the releases above.
        return None


def reduced_entry(entry: bytes) -> bytes | None:
    """`reduced_executable` for an entry of XLA's cache; None also if JAX cannot read it, or its functions for entries
    are gone."""
    names = ("decompress_executable", "extract_executable_and_time", "combine_executable_and_time")
    functions = [find_name(f"{_ENTRIES}.{name}") for name in (*names, "compress_executable")]
    if None in functions:
        return None
    decompress, extract, combine, compress = functions
    try:
        executable, seconds = extract(decompress(entry))
    except Exception:  # Whatever the library raises that decompresses: there are several.
        return None
    smaller = reduced_executable(executable)
    return None if smaller is None else bytes(compress(combine(smaller, seconds)))


def is_whole_entry(entry: bytes) -> bool:
    """Whether JAX can decompress an entry of its cache: on a full disk it leaves a part of one, and never writes over
    it. True also if JAX's function for that is gone."""
    decompress = find_name(f"{_ENTRIES}.decompress_executable")
    try:
        return decompress is None or bool(decompress(entry))
    except Exception:  # As above.
        return False


class _Computation:
    """A computation of a module: its fields and, decoded, its instructions."""

    def __init__(self, data: bytes) -> None:
        self.fields = [*_fields(data)]
        self.number = next(_numbers(self.fields, _COMPUTATION_ID))
        self.instructions = [[*_fields(_data(v))] for number, _, v in self.fields if number == _INSTRUCTIONS]
        self.callers: set[bytes] = set()
        """Opcodes of the instructions that call it; none for the entry."""

    def listed(self, instruction: Sequence[Field]) -> bool:
        """Whether the list of calls has an instruction as one call of compiled code: a fusion that is no library's, not
        inside another fusion."""
        compiled = (
            _first(instruction, _OPCODE) == b"fusion" and _first(instruction, _FUSION_KIND) in _COMPILED
        )
        return compiled and self.callers <= _CONTROL

    def calls(self, instruction: Sequence[Field]) -> Iterator[int]:
        """Numbers of the computations that have to stay for an instruction."""
        return iter(()) if self.listed(instruction) else _numbers(instruction, _CALLED)

    def written(self) -> bytes:
        """The module as protobuf bytes; compiled fusions are opaque operations without their insides."""
        instructions = iter(self.instructions)
        return _written(
            (number, wire, _written(self._shown(next(instructions))) if number == _INSTRUCTIONS else value)
            for number, wire, value in self.fields
        )

    def _shown(self, instruction: Sequence[Field]) -> list[Field]:
        if not self.listed(instruction):
            return [field for field in instruction if field[0] != _METADATA]
        kept = [field for field in instruction if field[0] in _KEPT_OF_FUSION]
        return [*kept, (_OPCODE, _BYTES, b"custom-call"), (_TARGET, _BYTES, b"compiled")]


def _without_insides(module: bytes) -> bytes:
    """A module in which only those computations are left that something other than a compiled fusion calls: also what
    is called inside of one, whose buffers have places as all others."""
    fields = [*_fields(module)]
    computations = [_Computation(_data(value)) for number, _, value in fields if number == _COMPUTATIONS]
    by_number = {c.number: c for c in computations}
    for computation in computations:
        for instruction in computation.instructions:
            for called in _numbers(instruction, _CALLED):
                by_number[called].callers.add(_first(instruction, _OPCODE))
    kept = {number for c in computations for i in c.instructions for number in c.calls(i)}
    kept |= {c.number for c in computations if not c.callers}
    following = iter(computations)
    written: list[Field] = []
    for number, wire, value in fields:
        if number != _COMPUTATIONS:
            written.append((number, wire, value))
        elif (computation := next(following)).number in kept:
            written.append((number, wire, computation.written()))
    return _written(written)


# --- Protocol buffers -------------------------------------------------------------------------------------------------


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of variable length, and the place after it."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7


def _fields(data: bytes) -> Iterator[Field]:
    """The fields of a message. ValueError or IndexError for what is none."""
    place, end = 0, len(data)
    while place < end:
        key, place = _varint(data, place)
        wire = key & 7
        if wire == _VARINT:
            number, place = _varint(data, place)
            yield key >> 3, wire, number
            continue
        if wire == _BYTES:
            length, place = _varint(data, place)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise ValueError(f"a field of type {wire}")
        if place + length > end:
            raise ValueError("a message ends within a field")
        yield key >> 3, wire, data[place : place + length]
        place += length


def _written(fields: Iterable[Field]) -> bytes:
    """The bytes of a message with such fields."""
    out = bytearray()
    for number, wire, value in fields:
        out += _as_varint(number << 3 | wire)
        if isinstance(value, int):
            out += _as_varint(value)
        else:
            out += (_as_varint(len(value)) if wire == _BYTES else b"") + value
    return bytes(out)


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _data(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError(f"{value} where a message is to be")
    return value


def _first(fields: Iterable[Field], number: int) -> bytes:
    """The bytes of the first field of a number; none without one."""
    return next((_data(value) for n, _, value in fields if n == number), b"")


def _numbers(fields: Iterable[Field], number: int) -> Iterator[int]:
    """The numbers in all fields of a number, packed or not."""
    for n, _, value in fields:
        if n != number:
            continue
        if isinstance(value, int):
            yield value
            continue
        place = 0
        while place < len(value):
            one, place = _varint(value, place)
            yield one


def _replaced(fields: Sequence[Field], path: Sequence[int], change: Callable[[bytes], bytes]) -> list[Field]:
    """The fields, with a change of the message at a path of numbers."""
    first, rest = path[0], path[1:]

    def changed(data: bytes) -> bytes:
        return _written(_replaced([*_fields(data)], rest, change)) if rest else change(data)

    return [(n, wire, changed(_data(value)) if n == first else value) for n, wire, value in fields]
