"""The records of a process that trains, and their contents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import podrun.popart as popart
from podrun.checkpoint import Checkpoints
from podrun.core.environment import environment
from podrun.faults import parse_fault
from podrun.popart.devices.device_manager import DeviceManager
from podrun.record.events import LaunchHeader, Record, TimedEvent, read_parts
from podrun.record.incidents import incidents_of
from podrun.record.recorder import FOLDER, EventRecorder, _of_this_process, array_digest, process_recorder
from podrun.record.strikes import with_faults

BATCHES = 6
FAULT = "ipu:1@batch=4:tile-parity"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for records; recorders of this process are closed afterwards."""
    yield tmp_path
    for path in [path for path in _of_this_process if path.startswith(str(tmp_path))]:
        _of_this_process.pop(path).close()


def train(environ: Mapping[str, str], checkpoints: Path) -> None:
    """Train on two replicas; go back to the checkpoint of batch 2 after an error."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 8]))
    w = builder.addInitializedInputTensor(np.ones((8, 2), np.float32), "w")
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)
    options = popart.SessionOptions()
    options.enableReplicatedGraphs, options.replicatedGraphCount = True, 2
    device = DeviceManager(environ=environ).acquireAvailableDevice(2)
    flow = popart.DataFlow(1, {loss: popart.AnchorReturnType("All")})
    session = popart.TrainingSession(
        builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), device, userOptions=options
    )
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    data = np.random.default_rng(0).standard_normal((BATCHES, 1, 2, 4, 8)).astype(np.float32)
    with Checkpoints(checkpoints, environ=environ) as kept:
        batch = 0
        while batch < BATCHES:
            try:
                session.run(popart.PyStepIO({x: data[batch]}, anchors))
            except popart.poplar_recoverable_runtime_error:
                resumed = kept.resume(session)
                assert resumed is not None
                batch = resumed.batch
                continue
            batch += 1
            if batch == 2:
                kept.save(session, batch)
    device.detach()


def recorded(home: Path, fault: str) -> list[TimedEvent]:
    home.mkdir()
    environ = {**environment(), FOLDER: str(home), "PODRUN_FAULTS": fault}
    train(environ, home / "checkpoints")
    return with_faults(read_parts(home), [parse_fault(fault)] if fault else [])


def test_a_run_is_written_down_and_twice_the_same(folder: Path) -> None:
    first, second = (recorded(folder / name, FAULT) for name in ("first", "second"))
    events = [timed.event for timed in first]
    assert events == [timed.event for timed in second]
    assert [timed.seconds for timed in first] != [timed.seconds for timed in second]
    kinds = [event.kind for event in events if event.kind != "read"]
    assert kinds == [
        *("attach", "load", "write", *["run", "ran"] * 2, "saving", *["run", "ran"] * 2),
        *("fault", "run", "error", "load", "write", "resumed", *["run", "ran"] * 4, "detach"),
    ]
    (incident,) = incidents_of(Record(LaunchHeader((), ""), tuple(events)))
    assert (incident.batch, incident.lost_batches, incident.faults) == (4, 2, (FAULT,))
    assert incident.component == "ipu 1"
    runs = [event for event in events if event.kind == "run"]
    assert runs[2].data["inputs"] == runs[5].data["inputs"]
    assert runs[2].data["inputs"] != runs[3].data["inputs"]
    ran = [event for event in events if event.kind == "ran"]
    assert ran[2].data["outputs"] == ran[4].data["outputs"]


def test_nothing_is_recorded_unless_asked_for(folder: Path) -> None:
    assert process_recorder({}) is None
    environ = {name: value for name, value in environment().items() if name != FOLDER}
    train(environ, folder / "checkpoints")
    assert {path.name for path in folder.iterdir()} == {"checkpoints"}


def test_a_line_that_a_killed_process_did_not_end_is_left_out(folder: Path) -> None:
    path = folder / f"instance-3.1.{os.getpid()}.jsonl"
    notes = EventRecorder(path, "instance 3", 1, clock=lambda: 5.0)
    notes.note("run", batch=0)
    notes.joint_operation_done()
    notes.note("ran", batch=0)
    notes.close()
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        found = read_parts(folder)
        assert len(found) == whole[:end].count(b"\n")
        assert [timed.event.clock for timed in found] == [0, 1][: len(found)]
    assert (found[0].event.actor, found[0].event.life, found[0].seconds) == ("instance 3", 1, 5.0)


@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16", "int8"])
def test_a_digest_tells_any_bit_apart(dtype: str) -> None:
    from podrun.core.executable import numpy_dtype

    bits = np.zeros((3, 5), np.uint8 if dtype == "bool" else numpy_dtype(dtype))
    seen = {array_digest(bits.astype(bool) if dtype == "bool" else bits)}
    flat = bits.reshape(-1).view(np.uint8)
    for place in range(flat.size):
        flat[place] ^= 1
        seen.add(array_digest(bits.astype(bool) if dtype == "bool" else bits))
        flat[place] ^= 1
    assert len(seen) == flat.size + 1
    assert array_digest(bits[:, ::2]) == array_digest(np.ascontiguousarray(bits[:, ::2]))
