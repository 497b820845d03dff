"""After a kill or a power cut at any byte, or any damage to a file, the last good checkpoint exists and is found."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.checkpoint import CheckpointError, Checkpoints, DamagedCheckpointError
from podrun.checkpoint.checkpoints import OneInstance, share_of
from podrun.checkpoint.folder import Part, PartHeader, parse_name, part_chunks, read_part
from podrun.checkpoint.values import encode_values
from tests.checkpoint.crash_disk import CrashDisk, Killed

HOME = Path("/checkpoints")


class Program:
    """A program with two tensors whose values tell their batch."""

    def __init__(self, batch: int = -1) -> None:
        self.batch = batch

    def _checkpoint_state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return {
            "w": np.full(3, self.batch, np.float32),
            "b": np.array(self.batch, np.int64),
        }, {"seed": self.batch}

    def _restore_checkpoint(self, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        assert tensors["w"].tolist() == [tensors["b"]] * 3 == [values["seed"]] * 3
        self.batch = int(tensors["b"])


class TwoInstances:
    """Instances that run one after the other in one thread; ``gather`` assumes that the others have equal values."""

    def __init__(self, index: int) -> None:
        self.index, self.count = index, 2

    def gather(self, number: int) -> list[int]:
        return [number, number]


def opened(disk: CrashDisk, instance: int = 0, count: int = 1, keep: int = 2) -> Checkpoints:
    group = OneInstance() if count == 1 else TwoInstances(instance)
    return Checkpoints(HOME, keep=keep, instances=group, disk=disk, environ={})


def save(disk: CrashDisk, batches: list[int], count: int = 1, keep: int = 2) -> None:
    """Save checkpoints in a run that resumes from the existing ones; in the calling thread, instance by instance."""
    each = [opened(disk, k, count, keep) for k in range(count)]
    for checkpoints in each:
        checkpoints.resume(Program())
    for batch in batches:
        for checkpoints in each:
            part = Program(batch)
            tensors, values = part._checkpoint_state()
            k = checkpoints._instances.index
            tree, own = encode_values({"program": values, "state": {"batch": batch}})
            mine = {name: tensors[name] for name in share_of(tensors, k, count)}
            checkpoints._folder.put(Part(PartHeader(batch, k, count, "r", tree), mine, own), keep)


def resumed(disk: CrashDisk, count: int = 1, *, fallback: bool = False) -> int | None:
    found = set()
    for k in range(count):
        program = Program()
        there = opened(disk, k, count).resume(program, fallback=fallback)
        if there is not None:
            assert there.batch == program.batch == there.state["batch"]
        found.add(None if there is None else there.batch)
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_byte_leaves_the_last_good_checkpoint(every: int, count: int, keep: int) -> None:
    before = CrashDisk()
    save(before, [5, 10], count, keep)
    trial = CrashDisk(dict(before.files), _settled=dict(before.files))
    save(trial, [15], count, keep)
    total = trial.done
    assert total > 500  # Each byte is a point.
    ends = set()
    # Near the end the new one is whole.
    for stop in sorted({*range(0, total, every), *range(total - 20, total)}):
        disk = CrashDisk(dict(before.files), stop, _settled=dict(before.files))
        with pytest.raises(Killed):
            save(disk, [15], count, keep)
        disk.stop = None
        for state in (disk, *disk.after_power_cut()):
            batch = resumed(CrashDisk(dict(state.files), _settled=dict(state.files)), count)
            assert batch in (10, 15)
            ends.add(batch)
    assert ends == {10, 15}


def test_every_truncation_and_every_flipped_byte_is_found_and_named() -> None:
    disk = CrashDisk()
    save(disk, [5, 10])
    newest = max(disk.files)
    good = disk.files[newest]
    damages = [good[:n] for n in range(len(good))] + [good + b"x"]
    damages += [good[:n] + bytes([good[n] ^ 1 << n % 8]) + good[n + 1 :] for n in range(len(good))]
    for damaged in damages:
        disk.files = {**disk.files, newest: damaged}
        with pytest.raises(DamagedCheckpointError, match=newest):
            opened(disk).resume(Program())
    assert len(damages) > 1000


def test_the_one_before_a_damaged_one_is_taken_where_asked_and_training_goes_on_from_it() -> None:
    disk = CrashDisk()
    save(disk, [5, 10])
    newest = max(disk.files)
    disk.files[newest] = disk.files[newest][:-1]
    assert resumed(disk, fallback=True) == 5
    assert newest not in disk.files
    assert f"{newest}.set-aside" in disk.files
    save(disk, [10])
    assert resumed(disk) == 10


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_any_other_file_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="name-of-file"):
        read_part(io.BytesIO(data), len(data), "name-of-file")


def test_a_header_of_right_digest_and_wrong_content_is_refused() -> None:
    import hashlib
    import json

    from podrun.checkpoint.folder import MAGIC

    good = {"version": 1, "batch": 0, "part": 0, "parts": 1, "run": "", "state": None, "arrays": []}
    array = {"name": "w", "dtype": "float32", "shape": [1 << 40], "sha256": ""}
    wrong: list[Any] = [
        [],
        {},
        *({**good, key: value} for key, value in {"version": 2, "batch": -1, "part": 1, "run": 5}.items()),
        *({**good, "arrays": [array | change]} for change in ({}, {"dtype": "object"}, {"shape": [-1]})),
        {**good, "arrays": [array | {"shape": 4}]},
    ]
    for content in wrong:
        text = json.dumps(content).encode()
        data = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
        with pytest.raises(DamagedCheckpointError, match="a-file"):
            read_part(io.BytesIO(data), len(data), "a-file")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["float32", "int8", "bool", "bfloat16"]), st.lists(st.integers(0, 3))))
)
def test_parts_come_back_as_they_were_written(kinds: list[tuple[str, list[int]]]) -> None:
    from podrun.core.executable import numpy_dtype

    arrays = {
        f"t{n}": np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(numpy_dtype(dtype))
        for n, (dtype, shape) in enumerate(kinds)
        if len(shape) < 5
    }
    part = Part(PartHeader(7, 0, 1, "run", {"a": 1}), arrays, list(arrays.values()))
    data = b"".join(bytes(piece) for piece in part_chunks(part))
    read = read_part(io.BytesIO(data), len(data), "f")
    assert read.header == part.header
    assert list(read.shared) == list(arrays)
    for ours, theirs in zip(
        [*part.shared.values(), *part.own], [*read.shared.values(), *read.own], strict=True
    ):
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


def test_the_last_ones_stay_and_no_part_is_removed_before_others_are_whole() -> None:
    disk = CrashDisk()
    save(disk, [1, 2, 3, 4], count=2, keep=2)
    # Instance 0 wrote its part of batch 4 first, when that of instance 1 was not there.
    left = [(2, 0), (3, 0), (3, 1), (4, 0), (4, 1)]
    assert sorted(disk.files) == [f"batch-{batch:012d}.part-{k}-of-2" for batch, k in left]
    # Instance 0 is ahead: its newer part alone is no checkpoint and pushes none out.
    alone = opened(disk, 0, 2)
    alone.resume(Program())
    alone.save(Program(5), 5, {"batch": 5}, wait=True)
    assert resumed(disk, 2) == 4


def test_parts_of_different_runs_are_no_checkpoint() -> None:
    disk = CrashDisk()
    for k, run in ((0, "a"), (1, "b")):
        group = Checkpoints(
            HOME, instances=TwoInstances(k), disk=disk, environ={"PODRUN_LAUNCH_ID": run}, fresh=True
        )
        group._folder.put(Part(PartHeader(1, k, 2, run, None), {}, []), 2)
    with pytest.raises(DamagedCheckpointError, match="different runs"):
        opened(disk, 0, 2).resume(Program())


def test_misuse_is_refused_with_the_way_out() -> None:
    disk = CrashDisk()
    save(disk, [5])
    with pytest.raises(CheckpointError, match="earlier run, up to batch 5") as refusal:
        opened(disk).save(Program(1), 1)
    assert refusal.value.hint is not None
    assert "resume()" in refusal.value.hint
    with pytest.raises(CheckpointError, match="saved by 1 instances; this run has 2"):
        opened(disk, 0, 2).resume(Program())
    with pytest.raises(CheckpointError, match="keep=0"):
        opened(disk, keep=0)
    checkpoints = opened(disk)
    assert checkpoints.resume(Program()) is not None
    with pytest.raises(CheckpointError, match="Batch 4 comes before batch 5"):
        checkpoints.save(Program(4), 4)
    with pytest.raises(CheckpointError, match=r"state\['f'\] is a function"):
        checkpoints.save(Program(6), 6, {"f": save})
    fresh = Checkpoints(HOME, instances=OneInstance(), disk=disk, environ={}, fresh=True)
    assert fresh.resume(Program()) is None
    fresh.save(Program(0), 0, {"batch": 0}, wait=True)
    assert resumed(disk) == 0


class FullDisk(CrashDisk):
    """No byte can be written."""

    def write(self, path: Path, data: Any) -> None:
        raise OSError(28, "No space left on device", str(path))


def test_a_full_disk_is_an_error_of_the_next_call_and_spoils_nothing() -> None:
    disk = CrashDisk()
    save(disk, [5])
    full = FullDisk(disk.files)
    checkpoints = opened(full)
    checkpoints.resume(Program())
    checkpoints.save(Program(6), 6)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        checkpoints.wait()
    assert resumed(full) == 5
    full.write = disk.write  # type: ignore[method-assign]
    checkpoints.save(Program(6), 6, {"batch": 6}, wait=True)


def test_names_of_other_files_are_passed_over() -> None:
    for name in (
        "batch-1.part-0-of-1",
        "batch-000000000001.part-1-of-1",
        "batch-000000000001.part-0-of-1.draft",
        "x",
    ):
        assert parse_name(name) is None
