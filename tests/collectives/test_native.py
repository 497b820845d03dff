"""The C module beside the Python that it stands in for: same bits, in one group."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import native_rank
import numpy as np
import pytest
from collective_ranks import ranks

from podrun.collectives import Group, create, linux

needs_module = pytest.mark.skipif(linux.c_module is None, reason="podrun was installed without its C module")


def test_source_and_python_are_of_one_version() -> None:
    source = Path(linux.__file__).with_name("_collectives.c").read_text(encoding="utf-8")
    assert f"#define PROTOCOL {linux.PROTOCOL} " in source


def test_a_module_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "PROTOCOL", -1)
    assert linux._load() is None


@needs_module
def test_what_does_not_fit_is_refused() -> None:
    with ranks(2) as groups:
        board = groups[0]._board
        barrier = board.barriers.native_barrier(b"x" * 192)
        with pytest.raises(TypeError, match="timeout"):
            barrier()
        few, many = np.zeros(2, np.float32), np.zeros(3, np.float32)

        def run(
            parts: list[Any], outs: list[Any], kind: str = "float32", copies: Any = (), sets: int = 1
        ) -> None:
            one = (list(copies), (kind, "sum", parts, outs))
            linux.c_module.plan(barrier, None, 1.0, few, 0, (one,) * sets)

        for parts, outs in [([few, many], [few]), ([few], [many])]:
            with pytest.raises(ValueError, match="one size"):
                run(parts, outs)
        with pytest.raises(ValueError, match="whole elements"):
            run([many], [many], "float64")
        for parts, outs in [([], [few]), ([few], [])]:
            with pytest.raises(ValueError, match="nothing"):
                run(parts, outs)
        with pytest.raises(ValueError, match="no sum of uint8"):
            run([few], [few], "uint8")
        with pytest.raises(ValueError, match="differ in size"):
            run([few], [few], copies=[(few, many)])
        with pytest.raises(ValueError, match="at most two"):
            run([few], [few], copies=[(few, few)] * 3)
        for sets in (0, 3, 16):
            with pytest.raises(ValueError, match="1, 2, 4 or 8"):
                run([few], [few], sets=sets)


@pytest.mark.usefixtures("path")
def test_waiting_can_be_interrupted() -> None:
    """As by Ctrl-C: the handler's exception comes out of the collective at once, not after its deadline."""

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError("by a signal")

    def wait(group: Group) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        group.all_reduce("vector")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with ranks(2, timeout=60) as groups:
            groups[0].allocate("vector", "float32", 5)
            with pytest.raises(InterruptedError, match="by a signal"):
                wait(groups[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.system
@needs_module
@pytest.mark.slow
def test_processes_with_and_without_it_get_the_same_bits() -> None:
    """Processes look for one another, as threads never do; one of them has no module at all."""
    paths = ("c", "c", "python", "c")
    group, token = create(len(paths), timeout=30)
    peers = [
        subprocess.Popen(
            [sys.executable, native_rank.__file__, json.dumps(token), str(rank), path],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate(paths)
        if rank
    ]
    mine = native_rank.results(group)
    said = [peer.communicate(timeout=60)[0].strip() for peer in peers]
    group.close()
    assert [mine, *said] == [native_rank.expected(len(paths))] * len(paths)
