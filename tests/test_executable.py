"""The Executable's file: what goes in comes out, equal bytes for equal values, and nothing hostile gets
through.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun import executable_file
from podrun.errors import ConfigError
from podrun.executable import (
    EXECUTABLE_VERSION,
    AllGather,
    AllReduce,
    Arena,
    ArenaMember,
    Computation,
    Compute,
    Executable,
    Instruction,
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
    numpy_dtype,
)

names = st.text(min_size=1, max_size=8)
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


def small() -> Executable:
    return Executable(
        name="small",
        layout=Layout(4, 1, 1, 4),
        accumulation_factor=1,
        training=False,
        streams={"x": Stream(TensorSpec("x", "float32", (2,)), StreamDirection.TO_DEVICE)},
        variables={},
        arenas={},
        computations={"c": Computation("c", b"stablehlo", ("x",), ("y",))},
        instructions=((LoadStream("x", "x", 0, 1), Compute("c"), Sync(SyncScope.ALL)),),
        target="gc200",
    )


@settings(max_examples=60, deadline=None)
@given(executables)
def test_what_goes_in_comes_out(executable: Executable) -> None:
    data = executable_file.dumps(executable)
    assert executable_file.loads(data) == executable
    assert executable_file.dumps(executable_file.loads(data)) == data


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "program.podex"
    executable_file.write(small(), path)
    assert executable_file.read(path) == small()
    assert [p.name for p in tmp_path.iterdir()] == ["program.podex"]
    with pytest.raises(FileNotFoundError):
        executable_file.read(tmp_path / "none")


def test_a_program_that_differs_has_other_bytes() -> None:
    other = replace(small(), accumulation_factor=2)
    assert executable_file.dumps(other) != executable_file.dumps(small())


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damage_is_noticed(data: st.DataObject) -> None:
    good = executable_file.dumps(small())
    if data.draw(st.booleans()):
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        place = data.draw(st.integers(0, len(good) - 1))
        bad = good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :]
    with pytest.raises(ConfigError):
        executable_file.loads(bad)


@given(st.binary(max_size=200))
def test_noise_is_no_executable(noise: bytes) -> None:
    with pytest.raises(ConfigError):
        executable_file.loads(noise)


def forged(
    header: Any, *, version: int = EXECUTABLE_VERSION, blobs: bytes = b"", length: int | None = None
) -> bytes:
    """A file with a right checksum around anything."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = struct.pack("<8sIQ", b"PODRUNEX", version, len(text) if length is None else length) + text + blobs
    return body + hashlib.sha256(body).digest()


def header() -> dict[str, Any]:
    data = executable_file.dumps(small())
    _, _, length = struct.unpack_from("<8sIQ", data)
    parsed: dict[str, Any] = json.loads(data[20 : 20 + length])
    return parsed


def test_a_newer_format_is_refused_by_its_number() -> None:
    with pytest.raises(
        ConfigError, match=f"format {EXECUTABLE_VERSION + 1}; this podrun reads up to {EXECUTABLE_VERSION}"
    ):
        executable_file.loads(forged(header(), version=EXECUTABLE_VERSION + 1, blobs=b"stablehlo"))


def test_forging_a_good_file_works() -> None:
    assert executable_file.loads(forged(header(), blobs=b"stablehlo")) == small()


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("layout"),
        lambda h: h["layout"].update(replicas="4"),
        lambda h: h["layout"].update(replicas=True),
        lambda h: h["streams"].append(h["streams"][0]),
        lambda h: h["streams"][0].update(direction="sideways"),
        lambda h: h["streams"][0]["spec"].update(shape="ab"),
        lambda h: h["computations"][0].update(offset=-1),
        lambda h: h["computations"][0].update(bytes=1 << 60),
        lambda h: h["computations"][0].update(inputs=[1]),
        lambda h: h["instructions"][0].append({"op": "Explode"}),
        lambda h: h["instructions"][0].append({"op": "Compute"}),
        lambda h: h["instructions"][0].append({"op": "Compute", "computation": ["c"]}),
        lambda h: h["instructions"][0].append({"op": "Compute", "computation": "c", "more": 1}),
        lambda h: h["instructions"][0].append({"op": "Sync", "scope": "galaxy"}),
        lambda h: h.update(instructions=7),
        lambda h: h.update(metadata=[]),
        lambda h: h.update(name=None),
        lambda h: h.update(
            variables=[{"spec": {"name": "v", "dtype": "float32", "shape": []}, "role": "weight", "x": 1}]
        ),
        lambda h: h.update(
            variables=[{"spec": {"name": "v", "dtype": "f4", "shape": []}, "role": "weight", "initial": "0"}]
        ),
    ],
)
def test_hostile_headers_are_refused(change: Any) -> None:
    bad = header()
    change(bad)
    with pytest.raises(ConfigError):
        executable_file.loads(forged(bad, blobs=b"stablehlo"))


@pytest.mark.parametrize("text", [b"[]", b"null", b"{", b"[" * 5000, b'{"name": NaN}', b"\xff\xfe"])
def test_hostile_json_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError):
        executable_file.loads(forged(text))


def test_a_header_longer_than_the_file_is_refused() -> None:
    with pytest.raises(ConfigError):
        executable_file.loads(forged(header(), length=1 << 62))


def test_small_floats_have_numpy_dtypes() -> None:
    assert numpy_dtype("bfloat16").itemsize == 2
    assert numpy_dtype("float8_e4m3fn").itemsize == 1
    assert numpy_dtype("float32") == np.float32
    assert TensorSpec("x", "float16", (2, 3)).nbytes == 12
    assert TensorSpec("x", "float16", ()).size == 1
