"""The Executable's file: what goes in comes out, equal bytes for equal values, and nothing hostile gets through."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.core import executable_file
from podrun.core.errors import ConfigError
from podrun.core.executable import (
    EXECUTABLE_VERSION,
    INSTRUCTION_TYPES,
    AllGather,
    AllReduce,
    Arena,
    ArenaMember,
    Computation,
    Compute,
    Copy,
    Executable,
    Instruction,
    LoadStream,
    Receive,
    ReduceScatter,
    Reduction,
    Retrieval,
    Send,
    StoreStream,
    Stream,
    StreamDirection,
    Sync,
    SyncScope,
    TensorSpec,
    Variable,
    VariableRole,
)
from podrun.core.layout import Layout
from tests.conftest import CHARACTERS
from tests.sampling import examples

SPEC = TensorSpec("x", "float32", (2, 3))
EXECUTABLE = Executable(
    name="träin",
    layout=Layout(8, 2, 4, 2),
    accumulation_factor=3,
    training=True,
    streams={
        "x": Stream(SPEC, StreamDirection.TO_DEVICE, broadcast=True),
        "y": Stream(TensorSpec("y", "bfloat16", ()), StreamDirection.TO_HOST, False, Retrieval.EVERY_N, 2),
    },
    variables={
        "w": Variable(TensorSpec("w", "float16", (4,)), VariableRole.WEIGHT, None, "weights"),
        "m": Variable(TensorSpec("m", "float32", ()), VariableRole.WEIGHT, 0.5, None, per_replica=True),
    },
    arenas={
        "weights": Arena("weights", "float16", 256, (ArenaMember("w", 0, (4,)),), shared=False, sliced=True)
    },
    computations={
        "a": Computation("a", b"\x00\x01binary", ("x", "w"), ("y",), ("x",)),
        "empty": Computation("empty", b"", (), ()),
    },
    instructions=(
        (
            Sync(SyncScope.HOST),
            LoadStream("x", "in:x", 0, 3),
            Compute("a"),
            ReduceScatter("weights"),
            AllReduce("weights", Reduction.MAX),
            AllGather("weights"),
            StoreStream("y", "y", 0, 3),
            Send("y", 1, 7),
            Copy("y", "y#0"),
        ),
        (Receive("y", 0, 7),),
    ),
    target="gc200",
    tile_report={"step": {"cycles": 12, "seconds": 1.5e-6}, "none": None, "list": [1, "two", True]},
    metadata={"b": {"d": 1, "c": 2}, "a": []},
)
DATA = executable_file.dumps(EXECUTABLE)

names = st.text(CHARACTERS, min_size=1, max_size=8)
counts = st.integers(0, 1 << 20)
dtypes = st.sampled_from(["float32", "float16", "int32", "bool", "bfloat16", "float8_e4m3fn", "uint8"])
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs = st.builds(TensorSpec, names, dtypes, shapes)
reductions = st.sampled_from(Reduction)
instructions: st.SearchStrategy[Instruction] = st.one_of(
    st.builds(LoadStream, names, names, counts, counts),
    st.builds(StoreStream, names, names, counts, counts),
    st.builds(Compute, names),
    st.builds(ReduceScatter, names, reductions),
    st.builds(AllReduce, names, reductions),
    st.builds(AllGather, names),
    st.builds(Sync, st.sampled_from(SyncScope)),
    st.builds(Send, names, counts, counts),
    st.builds(Receive, names, counts, counts),
    st.builds(Copy, names, names),
)
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


def table(values: st.SearchStrategy[Any], name: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(values, max_size=3, unique_by=name).map(
        lambda items: {name(item): item for item in items}
    )


executables = st.builds(
    Executable,
    name=names,
    layout=st.builds(Layout, counts, counts, counts, counts),
    accumulation_factor=counts,
    training=st.booleans(),
    streams=table(
        st.builds(
            Stream, specs, st.sampled_from(StreamDirection), st.booleans(), st.sampled_from(Retrieval), counts
        ),
        lambda stream: stream.spec.name,
    ),
    variables=table(
        st.builds(
            Variable,
            specs,
            st.sampled_from(VariableRole),
            st.none() | st.floats(allow_nan=False, width=32),
            st.none() | names,
            st.booleans(),
            st.none() | st.integers(0, 9),
            st.lists(st.integers(0, 9), max_size=3).map(tuple),
        ),
        lambda variable: variable.spec.name,
    ),
    arenas=table(
        st.builds(
            Arena,
            names,
            dtypes,
            counts,
            st.lists(st.builds(ArenaMember, names, counts, shapes), max_size=2).map(tuple),
            st.booleans(),
        ),
        lambda arena: arena.name,
    ),
    computations=table(
        st.builds(
            Computation,
            names,
            st.binary(max_size=40),
            st.lists(names, max_size=2).map(tuple),
            st.lists(names, max_size=2).map(tuple),
            st.lists(names, max_size=1).map(tuple),
        ),
        lambda computation: computation.name,
    ),
    instructions=st.lists(st.lists(instructions, max_size=4).map(tuple), max_size=2).map(tuple),
    target=st.sampled_from(["gc200", "bow"]),
    tile_report=st.dictionaries(names, plain_json, max_size=2),
    metadata=st.dictionaries(names, plain_json, max_size=2),
)


def test_round_trip_with_every_instruction() -> None:
    assert {type(i).__name__ for ipu in EXECUTABLE.instructions for i in ipu} == set(INSTRUCTION_TYPES)
    again = executable_file.loads(DATA)
    assert again == EXECUTABLE
    assert executable_file.dumps(again) == DATA


@settings(max_examples=examples(60), deadline=None)
@given(executables)
def test_what_goes_in_comes_out(executable: Executable) -> None:
    data = executable_file.dumps(executable)
    assert executable_file.loads(data) == executable
    assert executable_file.dumps(executable_file.loads(data)) == data


def test_a_program_that_differs_has_other_bytes() -> None:
    assert executable_file.dumps(replace(EXECUTABLE, accumulation_factor=2)) != DATA


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "program.popef"
    executable_file.write_executable(EXECUTABLE, path)
    assert executable_file.read_executable(path) == EXECUTABLE
    with pytest.raises(FileNotFoundError):
        executable_file.write_executable(EXECUTABLE, tmp_path / "missing" / "program.popef")
    with pytest.raises(FileNotFoundError):
        executable_file.read_executable(tmp_path / "none")
    assert [p.name for p in tmp_path.iterdir()] == ["program.popef"]


@given(position=st.integers(0, len(DATA) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_found(position: int, flip: int) -> None:
    data = bytearray(DATA)
    data[position] ^= flip
    with pytest.raises(ConfigError):
        executable_file.loads(bytes(data))


@given(length=st.integers(0, len(DATA) - 1))
def test_any_shortening_is_found(length: int) -> None:
    with pytest.raises(ConfigError):
        executable_file.loads(DATA[:length], where="cache/x.popef")


@pytest.mark.parametrize("version", [99, 0])
def test_unknown_formats_are_refused_by_number(version: int) -> None:
    data = bytearray(DATA)
    struct.pack_into("<I", data, 8, version)
    with pytest.raises(ConfigError, match=f"format {version}; this podrun reads 1 to {EXECUTABLE_VERSION}"):
        executable_file.loads(bytes(data))


@given(st.binary(max_size=200))
def test_noise_is_no_executable(noise: bytes) -> None:
    with pytest.raises(ConfigError):
        executable_file.loads(noise)


def forged(text: bytes, *, blobs: bytes = b"", length: int | None = None) -> bytes:
    """A file with a valid checksum around any header: what an attacker would send."""
    length = len(text) if length is None else length
    body = struct.pack("<8sIQ", b"PODRUNEX", EXECUTABLE_VERSION, length) + text + blobs
    return body + hashlib.sha256(body).digest()


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The example's file with a changed header."""
    _, _, length = struct.unpack_from("<8sIQ", DATA)
    header = json.loads(DATA[20 : 20 + length])
    change(header)
    return forged(json.dumps(header).encode(), blobs=DATA[20 + length : -32])


def test_forging_a_good_file_works() -> None:
    assert executable_file.loads(changed(lambda h: None)) == EXECUTABLE


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("layout"),
        lambda h: h["layout"].update(machines="4"),
        lambda h: h["layout"].update(replicas=True),
        lambda h: h["streams"].append(h["streams"][0]),
        lambda h: h["streams"][0].update(direction="sideways"),
        lambda h: h["streams"][0]["spec"].update(shape="ab"),
        lambda h: h["variables"][0].update(role="boss"),
        lambda h: h["variables"][0].update(initial="zero"),
        lambda h: h["variables"][0].update(arena=3),
        lambda h: h["variables"][0].pop("initial"),
        lambda h: h["variables"][0]["spec"].update(shape=[1.5]),
        lambda h: h["computations"][0].update(offset=10**6),
        lambda h: h["computations"][0].update(offset=-1),
        lambda h: h["computations"][0].update(bytes=1 << 60),
        lambda h: h["computations"][0].update(inputs=[1]),
        lambda h: h["instructions"][0][0].update(op="System"),
        lambda h: h["instructions"][0][0].update(scope="world"),
        lambda h: h["instructions"][0][1].update(first=[0]),
        lambda h: h["instructions"][0][1].update(other=1),
        lambda h: h["instructions"][0].append({"op": "Compute"}),
        lambda h: h["instructions"][0].append({"op": "Compute", "computation": ["c"]}),
        lambda h: h.update(instructions=7),
        lambda h: h.update(metadata=[]),
        lambda h: h.update(name=None),
    ],
)
def test_forged_headers_are_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(ConfigError, match="not an Executable"):
        executable_file.loads(changed(change))


@pytest.mark.parametrize("text", [b"[]", b"null", b"{", b"[" * 5000, b'{"name": NaN}', b"\xff\xfe"])
def test_hostile_json_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError):
        executable_file.loads(forged(text))


def test_a_header_longer_than_the_file_is_refused() -> None:
    with pytest.raises(ConfigError):
        executable_file.loads(forged(b"{}", length=1 << 62))
