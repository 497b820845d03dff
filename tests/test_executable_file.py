"""The Executable's file: what is written is read, and nothing else is."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun import executable_file
from podrun.errors import ConfigError
from podrun.executable import (
    INSTRUCTION_TYPES,
    AllGather,
    AllReduce,
    Arena,
    ArenaMember,
    Computation,
    Compute,
    Copy,
    Executable,
    Layout,
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


def test_round_trip_with_every_instruction() -> None:
    assert {type(i).__name__ for ipu in EXECUTABLE.instructions for i in ipu} == set(INSTRUCTION_TYPES)
    again = executable_file.loads(DATA)
    assert again == EXECUTABLE
    assert executable_file.dumps(again) == DATA


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "program.popef"
    executable_file.write(EXECUTABLE, path)
    assert executable_file.read(path) == EXECUTABLE
    with pytest.raises(FileNotFoundError):
        executable_file.write(EXECUTABLE, tmp_path / "missing" / "program.popef")
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


def test_newer_formats_are_refused_by_number() -> None:
    data = bytearray(DATA)
    struct.pack_into("<I", data, 8, 99)
    with pytest.raises(ConfigError, match="format 99"):
        executable_file.loads(bytes(data))


def _forged(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A file with a valid checksum around a changed header: what an attacker would send."""
    _, version, length = struct.unpack_from("<8sIQ", DATA)
    header = json.loads(DATA[20 : 20 + length])
    change(header)
    text = json.dumps(header).encode()
    body = struct.pack("<8sIQ", b"PODRUNEX", version, len(text)) + text + DATA[20 + length : -32]
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("layout"),
        lambda h: h["layout"].update(machines="4"),
        lambda h: h["computations"][0].update(offset=10**6),
        lambda h: h["computations"][0].update(offset=-1),
        lambda h: h["instructions"][0][0].update(op="System"),
        lambda h: h["instructions"][0][0].update(scope="world"),
        lambda h: h["instructions"][0][1].update(first=[0]),
        lambda h: h["instructions"][0][1].update(other=1),
        lambda h: h["streams"].append(h["streams"][0]),
        lambda h: h["variables"][0].update(role="boss"),
        lambda h: h["variables"][0].update(initial="zero"),
        lambda h: h["variables"][0].update(arena=3),
        lambda h: h["variables"][0]["spec"].update(shape=[1.5]),
        lambda h: h.update(metadata=[]),
    ],
)
def test_forged_headers_are_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(ConfigError, match="not an Executable"):
        executable_file.loads(_forged(change))
