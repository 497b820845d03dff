"""PopEF files: written, read, and refused when they are damaged, hostile or foreign."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.core.errors import CallError, ConfigError, PodrunError, UsageError
from podrun.popef import (
    AnchorDirection,
    ElementType,
    PopefAnchor,
    PopefMetadata,
    PopefReader,
    PopefTensor,
    PopefWriter,
    ProgramFlow,
)
from podrun.popef.container import ALIGNMENT, MAGIC, NewSection, write_sections
from podrun.popef.dump import dump_command
from podrun.popef.reader import read_program
from tests.test_executable_file import EXECUTABLE

F32 = PopefTensor(ElementType.F32, (2, 3))
METADATA = PopefMetadata(
    "net",
    (
        PopefAnchor("x", "h2d_x", F32, type=AnchorDirection.INPUT, programs=(1,)),
        PopefAnchor("y", "anchor_d2h_y", F32, type=AnchorDirection.OUTPUT, programs=(1,)),
        PopefAnchor("w", "h2d_w", F32, isPerReplica=False, type=AnchorDirection.BOTH, programs=(0, 2)),
    ),
    programsMap={0: "WeightsFromHost", 1: "Program", 2: "WeightsToHost"},
    programFlow=ProgramFlow((0,), (1,), (2,)),
    replicationFactor=2,
    numIpus=4,
    engineOptions={"target.hostSyncTimeout": "300"},
    deviceIterations=8,
)
WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
BLOB = bytes(range(256)) * 5


def written(path: Path, *, compress: bool = False) -> Path:
    from podrun.core import executable_file

    with PopefWriter(path) as writer:
        writer.writeMetadata(METADATA)
        writer.createExecutable("net", compress).write(executable_file.dumps(EXECUTABLE))
        writer.add_tensor("w", WEIGHT)
        writer.createFeedData("x", F32).write(WEIGHT)
        writer.createOpaqueBlob("popart", "net").write(BLOB)
    return path


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_gives_back_what_was_written(tmp_path: Path, compress: bool) -> None:
    path = written(tmp_path / "net.popef", compress=compress)
    reader = PopefReader().parseFile(path)
    assert reader.metadata() == [METADATA]
    assert [a.name for a in METADATA.inputs()] == ["x"]
    assert [a.name for a in METADATA.outputs()] == ["y"]
    assert read_program(path) == EXECUTABLE
    (weight,), (feed,), (blob,) = reader.tensors(), reader.feeds(), reader.opaqueBlobs()
    np.testing.assert_array_equal(weight.data(), WEIGHT)
    np.testing.assert_array_equal(feed.data(), WEIGHT)
    assert (blob.name, blob.executable, blob.data()) == ("popart", "net", BLOB)
    assert not weight.data().flags.writeable
    assert weight.data().ctypes.data % ALIGNMENT == 0
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", list(ElementType), ids=lambda kind: kind.name)
def test_every_element_type_keeps_its_bits(tmp_path: Path, kind: ElementType) -> None:
    bits = np.arange(16 * kind.numpy_dtype.itemsize, dtype=np.uint8) % (
        2 if kind is ElementType.BOOL else 251
    )
    value = bits.view(kind.numpy_dtype).reshape(4, 4)
    with PopefWriter(tmp_path / "t") as writer:
        writer.add_tensor("t", value)
    (tensor,) = PopefReader().parseFile(tmp_path / "t").tensors()
    assert tensor.data().tobytes() == value.tobytes()
    assert (tensor.info.dataType, tensor.info.shape) == (kind, (4, 4))


def test_weights_are_mapped_and_not_copied(tmp_path: Path) -> None:
    with PopefWriter(tmp_path / "big") as writer:
        writer.add_tensor("w", np.zeros(4 << 20, np.float32))
    tracemalloc.start()
    data = PopefReader().parseFile(tmp_path / "big").tensors()[0].data()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert data.nbytes == 16 << 20
    assert peak < 1 << 20


def test_equal_contents_are_equal_bytes(tmp_path: Path) -> None:
    assert written(tmp_path / "a").read_bytes() == written(tmp_path / "b").read_bytes()


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> None:
        with PopefWriter(tmp_path / "x") as writer:
            writer.add_tensor("w", WEIGHT)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        failing()
    with (
        pytest.raises(UsageError, match=r"has 24 bytes; F32\[3\] has 12"),
        PopefWriter(tmp_path / "x") as writer,
    ):
        writer.createTensorData("w", PopefTensor(ElementType.F32, (3,))).write(WEIGHT)
    with PopefWriter(tmp_path / "y") as writer:
        writer.createOpaqueBlob("a")
        with pytest.raises(UsageError, match="already"):
            writer.createOpaqueBlob("a")
        with pytest.raises(UsageError, match="type <U1"):
            writer.add_tensor("t", np.array(["a"]))
    with pytest.raises(CallError, match="closed"):
        writer.createOpaqueBlob("b")
    with pytest.raises(ConfigError, match="cannot be written"), PopefWriter(tmp_path / "no" / "x") as writer:
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["y"]


def test_a_full_disk_is_said_and_leaves_the_file_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    target = tmp_path / "x"
    target.write_bytes(b"before")
    real = tempfile.mkstemp

    def on_a_full_disk(**options: Any) -> tuple[int, str]:
        handle, path = real(**options)
        os.close(handle)
        return os.open("/dev/full", os.O_WRONLY), path

    monkeypatch.setattr("podrun.popef.container.tempfile.mkstemp", on_a_full_disk)
    with (
        pytest.raises(ConfigError, match="x cannot be written: No space left on device") as caught,
        PopefWriter(target) as writer,
    ):
        writer.add_tensor("w", WEIGHT)
    assert caught.value.hint == f"df -h {tmp_path}"
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"before"


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match=r"x cannot be written: .*directory"), PopefWriter(tmp_path / "x"):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


# --- Files that are not what they should be -----------------------------------------------------------------


def file_of(entries: Any, body: bytes = b"", version: int = 1) -> bytes:
    """A file with this table, whose checksums are right."""
    table = json.dumps(entries).encode()
    head = struct.pack("<8sII", MAGIC, version, len(table)) + table
    head += hashlib.sha256(head).digest()
    return head + bytes(-len(head) % ALIGNMENT) + body


def entry(**changes: Any) -> dict[str, Any]:
    """An entry for 64 bytes of zeros that follow a table of less than 512 bytes."""
    digest = hashlib.sha256(bytes(64)).hexdigest()
    form = {"tensorInfo": {"dataType": "F32", "shape": [16]}}
    plain = {"kind": "tensor", "name": "w", "offset": 320, "bytes": 64, "sha256": digest, "info": form}
    return plain | changes


HOSTILE = {
    "more than the file": (entry(bytes=1 << 40), "lies outside the file"),
    "before the file": (entry(offset=-64), "lies outside the file"),
    "over the table": (entry(offset=0), "shares bytes"),
    "unaligned": (entry(offset=321, bytes=63), "not aligned|shares bytes"),
    "a negative size": (entry(bytes=-1), "lies outside"),
    "a kind of its own": (entry(kind="code"), "'code' is not known"),
    "a number for a name": (entry(name=3), "name is int, not str"),
    "an enormous shape": (
        entry(info={"tensorInfo": {"dataType": "F32", "shape": [1 << 40, 1 << 40]}}),
        "more than",
    ),
    "a negative shape": (entry(info={"tensorInfo": {"dataType": "F32", "shape": [-4, -4]}}), "is no shape"),
    "an axis too many": (entry(info={"tensorInfo": {"dataType": "F32", "shape": [1] * 65}}), "is no shape"),
    "another shape": (entry(info={"tensorInfo": {"dataType": "F32", "shape": [4]}}), "its form needs 16"),
    "no type": (entry(info={"tensorInfo": {"dataType": "STRING", "shape": [16]}}), "no element type"),
    "no form": (entry(info={}), "NoneType, not dict"),
    "a wrong digest": (entry(sha256="0" * 64), "checksum of tensor 'w' is wrong"),
    "metadata of zeros": (entry(kind="metadata"), "damaged"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_tables_are_refused_by_name(case: str) -> None:
    wrong, message = HOSTILE[case]
    data = file_of([wrong])
    head = len(data)
    if wrong["offset"] == 320 and wrong["bytes"] == 64:  # An entry that is right but for one thing.
        wrong = wrong | {"offset": head if len(file_of([wrong | {"offset": head}])) == head else 320}
        data = file_of([wrong])
    with pytest.raises(ConfigError, match=message) as caught:
        PopefReader().parseBytes(data + bytes(64), "bad.popef")
    assert "bad.popef" in caught.value.message
    assert caught.value.hint


def test_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    for name, data, message in (
        ("empty", b"", "does not start with"),
        ("text", b"hello" * 40, "does not start with"),
        ("bare", b"PODRUNEX" + bytes(100), "without weights"),
        ("newer", file_of([], version=9), "layout 9"),
        ("list", file_of({"a": 1}), "the table is dict"),
        ("tail", file_of([], bytes(1)), "bytes follow"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            PopefReader().parseFile(tmp_path / name)
    with pytest.raises(ConfigError, match=r"absent cannot be read: No such file"):
        PopefReader().parseFile(tmp_path / "absent")


def test_a_bare_executable_is_a_file_with_it_alone(tmp_path: Path) -> None:
    """As an executable cache of TensorFlow holds; damaged ones are refused."""
    from podrun.compat import popef
    from podrun.core.executable_file import write_executable

    path = tmp_path / "net.poplar_exec"
    write_executable(EXECUTABLE, path)
    reader = popef.Reader()
    reader.parseFile(path)
    (stored,) = reader.executables()
    assert (stored.name, stored.program()) == (EXECUTABLE.name, EXECUTABLE)
    assert (reader.metadata(), reader.tensors(), reader.feeds(), reader.opaqueBlobs()) == ([], [], [], [])
    shown = CliRunner().invoke(dump_command, [str(path)], standalone_mode=False).output
    assert f"Executable {EXECUTABLE.name!r}" in shown
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="poplar_exec"):
        popef.Reader().parseFile(path)


def test_a_compressed_part_cannot_become_more_than_it_says(tmp_path: Path) -> None:
    import zlib

    bomb = zlib.compress(bytes(1 << 20))
    for size, message in ((1000, "does not hold the 1000"), (1 << 50, "cannot hold"), (-1, "cannot hold")):
        info = {"compressed": True, "rawBytes": size}
        write_sections(tmp_path / "bomb", [NewSection("executable", "net", [bomb], info)])
        with pytest.raises(ConfigError, match=message):
            PopefReader().parseFile(tmp_path / "bomb").executables()[0].executable()


def test_metadata_must_fit(tmp_path: Path) -> None:
    plain = METADATA.to_json()
    for changes, message in (
        ({"replicationFactor": 0}, "replicationFactor cannot be 0"),
        ({"numIpus": True}, "numIpus is bool"),
        ({"anchors": [plain["anchors"][0]] * 2}, "occurs twice"),
        ({"programsMap": {"0": "x"}}, "program 1 is not in programsMap"),
        ({"executable": "other"}, "'other' that it does not hold"),
        ({"engineOptions": {"a": 1}}, "engineOptions is int"),
    ):
        data = json.dumps(plain | changes).encode()
        write_sections(
            tmp_path / "m", [NewSection("metadata", "m", [data]), NewSection("executable", "net", [b""])]
        )
        with pytest.raises(ConfigError, match=message):
            PopefReader().parseFile(tmp_path / "m")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_change_of_a_byte_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.popef"
    whole = bytearray((path if path.exists() else written(path)).read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    kept = whole[place]
    whole[place] ^= data.draw(st.integers(1, 255))
    try:
        PopefReader().parseBytes(bytes(whole))
    except PodrunError:
        return
    # Only the zeros between sections carry nothing.
    assert kept == 0


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    for begin in (b"", MAGIC, MAGIC + struct.pack("<II", 1, 20)):
        with pytest.raises(PodrunError):
            PopefReader().parseBytes(begin + data)


def test_the_command_shows_a_file(tmp_path: Path) -> None:
    path = str(written(tmp_path / "net.popef"))
    text = CliRunner().invoke(dump_command, [path], standalone_mode=False).output
    assert "device iterations: 8" in text
    assert "input  x: F32[2, 3], handle h2d_x, per replica (Program)" in text
    assert "Tensor 'w': F32[2, 3]" in text
    brief = CliRunner().invoke(dump_command, ["-m", path], standalone_mode=False).output
    assert "Tensor" not in brief
    found = json.loads(CliRunner().invoke(dump_command, ["--json", path], standalone_mode=False).output)
    assert found["schema"] == "podrun-popef-1"
    assert found["metadata"][0]["numIpus"] == 4
    assert found["tensors"] == [{"name": "w", "dataType": "F32", "shape": [2, 3]}]
