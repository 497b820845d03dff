"""Native code that dies in a piece: which processes get an error, and its text."""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import ApplicationRuntimeError, UnrecoverableRuntimeError
from podrun.core.layout import IpuRange
from podrun.core.shared_region import SharedRegion
from podrun.device import crash_records
from podrun.device.crash_records import (
    SLOTS,
    CrashReader,
    CrashRecord,
    busiest_layers,
    describe_piece,
    running_pieces,
)
from tests.copies import CopiedProcess

from .conftest import request
from .pods import processes
from .programs import data, first_weights, linear

NULL_POINTER = """
import ctypes

def die():
    ctypes.string_at(0)
"""
STACK_OVERFLOW = """
import ctypes, sys

def die():
    sys.setrecursionlimit(1 << 30)
    deeper = ctypes.CFUNCTYPE(None)(lambda: deeper())
    deeper()
"""
CRASH = """
from podrun.device.program.interpreter import Interpreter

def crashing(rank, batch, recorded=Interpreter._recorded):
    def replacement(self, act, ipu, name):
        def crash(frame, now):
            if self._group.rank == rank and now.index == batch:
                die()
            return act(frame, now)
        return recorded(self, crash, ipu, name)
    Interpreter._recorded = replacement

crashing(rank=1, batch=3)
"""
ALONE = """
import sys
from tests.device.conftest import request
from tests.device.programs import data, first_weights, linear
from podrun.core.layout import IpuRange
from podrun.device.host.connecting import connect
connection = connect({"PODRUN_CACHE_DIR": sys.argv[1]}, standalone_ipus=8)
connection.try_attach(request(IpuRange(0, 8)))
executable = linear(8)
connection.load(executable)
connection.write_variables(first_weights())
connection.run(5, data(executable, 5))
"""


@pytest.mark.system
def test_host_processes_of_every_machine_read_what_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two host processes: that of the machine that dies, and that of the other one. It dies in a thread whose stack
    overflows, where handlers need a stack of their own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with processes(2, tmp_path, STACK_OVERFLOW + CRASH) as pod:
        executable, errors = linear(8), dict[int, BaseException]()
        connections = [pod.connect(), pod.connect()]

        def run(first: int) -> None:
            connection = connections[first // 4]
            assert connection.try_attach(request(IpuRange(0, 8), IpuRange(first, 4))) is None
            connection.load(executable)
            connection.write_variables(first_weights())
            inputs = {n: a[:, :, first : first + 4] for n, a in data(executable, 5).items()}
            try:
                connection.run(5, inputs)
            except UnrecoverableRuntimeError as error:
                errors[first] = error

        threads = [threading.Thread(target=run, args=(first,), daemon=True) for first in (0, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for connection in connections:
            connection.close()
        assert pod.processes[1].wait(60) == -signal.SIGSEGV
        assert sorted(errors) == [0, 4]
        for error in errors.values():
            assert isinstance(error, UnrecoverableRuntimeError)
            place = f"machine 1 of the partition, {pod.endpoints[1]}"
            assert f"native code died (Segmentation fault) in the process of {place}" in error.message
            assert "while it computed piece 'step'" in error.message
            assert "on IPUs 4-7, batch 3" in error.message
            assert "export PODRUN_CONVOLUTIONS=xla" in error.hint
            kept = Path(re.findall(r"are in (\S+)", error.message)[0])
            assert kept.parent == tmp_path / "state/podrun/crashes"
            assert "in <lambda>\n" in kept.read_text()


@pytest.mark.system
def test_a_script_with_machines_inside_says_it_on_standard_error(tmp_path: Path) -> None:
    with (tmp_path / "err").open("w+") as err:
        process = CopiedProcess(NULL_POINTER + CRASH + ALONE, [str(tmp_path)], err=err)
        try:
            assert process.wait(60) == -signal.SIGSEGV
        finally:
            process.kill()
            process.communicate(60)
        text = (tmp_path / "err").read_text()
    said = text.partition("podrun: native code died in this process by SIGSEGV while it computed\n")[2]
    assert said, text
    assert "  piece 'step'" in said
    assert "on IPUs 4-7, batch 3\npodrun: to go on, export PODRUN_CONVOLUTIONS=xla" in said
    assert "Fatal Python error: Segmentation fault" in said.partition("stacks")[2]


def test_slots_are_read_by_others_and_given_back() -> None:
    record = CrashRecord()
    memory = _opened(record)
    assert running_pieces(memory) == []
    with (
        record.slot({"a": "piece 'a'", "b": "piece \u00fc" + "x" * 1000}) as one,
        record.slot({"c": "piece 'c'"}) as two,
    ):
        one.set_batch(7)
        one.begin(one.place("a"))
        two.begin(two.place("c"))
        assert running_pieces(memory) == ["piece 'a', batch 7", "piece 'c', batch 0"]
        one.begin(one.place("b"))
        assert running_pieces(memory)[0].startswith("piece \u00fcxxx")
        one.begin(one.place("unknown"))
        two.begin(0)
        assert running_pieces(memory) == []
        two.begin(two.place("c"))
    assert running_pieces(memory) == []
    with record.slot({"d": "piece 'd'"}) as one:
        one.begin(one.place("d"))
        assert running_pieces(memory) == ["piece 'd', batch 0"]


def test_threads_that_load_their_first_programs_at_once_share_one_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both, made, found = threading.Barrier(2), list[object](), list[object]()

    def slow() -> object:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # passes at once if a second thread makes one as well
        made.append(object())
        return made[-1]

    monkeypatch.setattr(crash_records, "CrashRecord", slow)
    monkeypatch.setattr(crash_records, "_own", functools.cache(crash_records._own.__wrapped__))
    threads = [
        threading.Thread(target=lambda: found.append(crash_records.own_crash_record())) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == made * 2


def test_programs_beyond_the_slots_run_unnoticed_and_texts_beyond_the_room_too() -> None:
    record = CrashRecord()
    many = {number: f"piece {number} " + "x" * 300 for number in range(100)}
    with contextlib.ExitStack() as stack:
        slots = [stack.enter_context(record.slot(many)) for _ in range(SLOTS + 1)]
        assert slots[0].place(0) > 0
        assert slots[0].place(99) == 0
        slots[-1].begin(slots[-1].place(0))
        assert running_pieces(_opened(record)) == []


def test_what_ended_otherwise_is_lost_without_such_words() -> None:
    record = CrashRecord()
    with record.slot({"a": "piece 'a'"}) as slot:
        slot.begin(slot.place("a"))
        assert CrashReader.of_peer(record.name).error(0, "host:1", {}) is None
    name = record.name
    with pytest.raises(ApplicationRuntimeError, match="expected size"):
        CrashReader(np.zeros(64, np.uint8), name.pid)


def test_stacks_that_cannot_be_kept_are_said_to_be_lost(tmp_path: Path) -> None:
    record = CrashRecord()
    memory = _opened(record)
    stacks = b"Fatal Python error: Bus error\n\nThread 1"
    memory[-(1 << 18) :][: len(stacks)] = memoryview(stacks)
    (tmp_path / "file").touch()
    environ = {"XDG_STATE_HOME": str(tmp_path / "file"), "PODRUN_CONVOLUTIONS": "xla"}
    error = CrashReader.of_peer(record.name).error(2, "host:1", environ)
    assert error is not None
    assert (
        "PODRUN_CONVOLUTIONS=xla, which helps where convolutions are the cause, is set already" in error.hint
    )
    assert "export" not in error.hint
    assert (
        "died (Bus error) in the process of machine 2 of the partition, host:1, while it computed no piece"
        in str(error)
    )
    assert "could not be kept in" in str(error)


def test_a_piece_is_told_by_its_name_its_layers_and_its_ipus() -> None:
    executable = linear(8)
    layers = busiest_layers(executable.tile_report, 0)
    names = {n: describe_piece(c, layers, "IPUs 4-7") for n, c in executable.computations.items()}
    assert any(text == f"piece {name!r} on IPUs 4-7" for name, text in names.items())
    report = {
        "segments": [
            {"ipu": 0, "report": {"by_scope": {"jvp(conv1/Conv:0)": 10, "(no scope)": 99, "L1:0": 5}}},
            {"ipu": 0, "report": {"by_scope": {"transpose(jvp(conv2/Conv:0))": 30}}},
            {"ipu": 0, "report": {"by_scope": {"jvp(m/conv4:0)/op:Conv:0": 2, "m/conv4:0/op:Conv:0": 1}}},
            {"ipu": 1, "report": {"by_scope": {"conv3": 10}}},
            {"ipu": 0},
        ]
    }
    assert busiest_layers(report, 0) == ["conv2/Conv:0", "conv1/Conv:0", "L1:0", "m/conv4:0"]
    assert busiest_layers({}, 0) == []


def _opened(record: CrashRecord) -> Any:
    return SharedRegion.open(record.name).bytes
