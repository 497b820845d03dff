"""Modules that a machine's process imports in advance, and modules that it never imports."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from podrun.device.service.preload import MODULES, Preload
from podrun.device.service.server import machine_actor
from tests.copies import run_copied

LOAD = """
import sys, tempfile
from pathlib import Path
import numpy as np
import jax, jax.numpy as jnp
from podrun.core import executable_file as own_pieces
from podrun.device.xla.pieces import MachinePieces
from podrun.core.executable import Computation

def computation(name, function):
    shape = jax.ShapeDtypeStruct((3, 3), np.float32)
    data = jax.export.export(jax.jit(function), platforms=("cpu",))(shape).serialize()
    own_pieces.remember(bytes(data))
    return Computation(name, bytes(data), ("x",), ("y",))

pieces = MachinePieces(None)
x = np.diag(np.float32([2, 3, 5]))
assert np.asarray(pieces.piece(computation("add", lambda x: x + 1), ()).call(x)[0]).sum() == 19
assert "scipy" not in sys.modules, "a piece without LAPACK imported SciPy"
assert abs(float(pieces.piece(computation("det", jnp.linalg.det), ()).call(x)[0]) - 30) < 1e-4
"""


def test_lapack_is_there_for_the_piece_that_calls_it_and_for_no_other() -> None:
    done = run_copied(LOAD)
    assert done.returncode == 0, done.stderr


def test_imports_begin_once_and_are_over_when_waited_for() -> None:
    seen: list[tuple[str, bool]] = []
    let = threading.Event()
    nicer = min(os.nice(0) + 1, 19)  # Linux counts it for each thread.

    def load(name: str) -> None:
        assert let.wait(60)
        seen.append((name, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) >= nicer))

    ahead = Preload(("a", "b"), load)
    ahead.wait()  # Nobody has attached: there is nothing to wait for.
    ahead.begin()
    ahead.begin()
    assert seen == []
    let.set()
    ahead.wait()
    assert seen == [("a", True), ("b", True)]


def test_a_copy_of_a_process_that_has_imported_all_starts_nothing() -> None:
    asked: list[str] = []
    ahead = Preload(("os", "sys"), asked.append)
    ahead.begin()
    ahead.wait()
    assert asked == []


def test_all_machines_are_of_one_actor_class() -> None:
    """Ray disassembles, pickles and sends each class."""
    assert machine_actor() is machine_actor()


def test_what_cannot_be_imported_ahead_is_left_to_the_load(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "podrun.device")
    ahead = Preload(("podrun.no_such_module", MODULES[0]))
    ahead.begin()
    ahead.wait()
    assert "podrun.no_such_module was not imported ahead" in caplog.text
    assert MODULES[0] in sys.modules
