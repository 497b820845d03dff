"""Faults that strike in an instance's own process: the disk is full, the instance dies while it writes a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podrun.checkpoint import CheckpointError, Checkpoints
from podrun.checkpoint.checkpoints import OneInstance
from podrun.core.environment import PODRUN_PROGRAM_FAULTS
from podrun.faults import PlanOfALaunch, ProgramFaults, parse_fault, parse_faults, program_faults
from tests.checkpoint.test_checkpoint_crashes import Program


def planned(folder: Path, *texts: str) -> dict[str, str]:
    """The environment of an instance of a launch with these faults."""
    PlanOfALaunch(folder / "plan").write([parse_fault(text) for text in texts])
    return {PODRUN_PROGRAM_FAULTS: str(folder / "plan"), "OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize("room", [0, 30, 300])
def test_a_full_disk_is_said_and_leaves_the_checkpoint_before_it(tmp_path: Path, room: int) -> None:
    environ = planned(tmp_path, f"disk:0@during=checkpoint-write:full,bytes={room}")
    (tmp_path / "checkpoints").mkdir()
    program = Program(0)
    before = Checkpoints(tmp_path / "checkpoints", instances=OneInstance(), environ={})
    before.save(program, 1, wait=True)
    with Checkpoints(tmp_path / "checkpoints", instances=OneInstance(), environ=environ) as checkpoints:
        resumed = checkpoints.resume(program)
        assert resumed is not None
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
            checkpoints.save(program, 2, wait=True)
        assert checkpoints.batches() == [1]
        checkpoints.save(program, 2, wait=True)  # It struck once.
        assert checkpoints.batches() == [2, 1]
    assert PlanOfALaunch(tmp_path / "plan").left() == []


def test_faults_strike_the_instance_they_name_as_often_as_planned(tmp_path: Path) -> None:
    environ = planned(
        tmp_path, "disk:1@during=checkpoint-write,repeat=2:full", "disk:0@during=checkpoint-write:full"
    )
    second = environ | {"OMPI_COMM_WORLD_RANK": "1"}
    assert [program_faults(second).take("checkpoint-write") is not None for _ in range(3)] == [
        True,
        True,
        False,
    ]
    assert [spec.place for spec in PlanOfALaunch(tmp_path / "plan").left()] == ["disk:0"]
    assert program_faults(second).take("load") is None


def test_an_instance_is_killed_within_a_write() -> None:
    (spec,) = parse_faults("instance:0@during=checkpoint-write:killed")
    killed: list[int] = []
    faults = ProgramFaults(
        lambda: [spec], lambda found: not killed, kill=lambda pid, number: killed.append(number)
    )
    written = [(piece, list(killed)) for piece in faults.through_write([b"a", b"b", b"c"])]
    assert written == [(b"a", []), (b"b", [signal.SIGKILL]), (b"c", [signal.SIGKILL])]


HANGS = """
from podrun.faults import ProgramFaults, parse_faults
(spec,) = parse_faults("instance:0@during=checkpoint-write:hung,seconds=0.2")
ProgramFaults(lambda: [spec], lambda spec: True)._strike(spec)
raise SystemExit(7)
"""


def test_an_instance_hangs_within_a_write_and_goes_on() -> None:
    began = time.monotonic()
    # A process of its own: a fork of this one, whose libraries have threads, might wait for a lock for ever.
    child = subprocess.Popen([sys.executable, "-c", HANGS])
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):  # if not, it went on before this process looked
        _, status = os.waitpid(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 7
    assert time.monotonic() - began > 0.15


def test_a_program_without_podrun_has_those_of_its_environment() -> None:
    faults = program_faults({"PODRUN_FAULTS": "disk:0@during=checkpoint-write:full ipu:0@batch=3:trap"})
    assert faults.take("checkpoint-write") is not None
    assert faults.take("checkpoint-write") is None
