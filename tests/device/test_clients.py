"""Large pieces are computed by two threads, on every host alike."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import export

from podrun.core import executable_file
from podrun.core.executable import Computation
from podrun.device.xla import clients
from podrun.device.xla.pieces import Piece, PieceCache
from tests.copies import run_copied

LARGE, SMALL = 1024, 64


def product(a, b):
    """Sums over a leading axis and over a long transposed one: what XLA divides by its number of threads."""
    return (a.T @ b).sum(0), b * 2


def computation(n: int) -> Computation:
    square = jax.ShapeDtypeStruct((n, n), np.float32)
    stablehlo = export.export(jax.jit(product), platforms=["cpu"])(square, square).serialize()
    executable_file.remember(bytes(stablehlo))
    return Computation("product", bytes(stablehlo), ("a", "b"), ("sums", "twice"))


def piece(n: int, cache: PieceCache, donated: tuple[int, ...] = ()) -> Piece:
    return cache.piece(computation(n), donated)


def operands(n: int) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    return [random.standard_normal((n, n), np.float32) for _ in range(2)]


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_piece_of_either_size_computes_what_numpy_does(n):
    a, b = operands(n)
    sums, twice = piece(n, PieceCache(None)).call(a, b)
    np.testing.assert_allclose(sums, (a.astype(np.float64).T @ b).sum(0), rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(twice, b * 2)


def test_only_large_pieces_have_another_client():
    square = {n: jax.ShapeDtypeStruct((n, n), np.float32) for n in (SMALL, LARGE)}
    assert clients.needs_two_threads(jax.jit(product).lower(square[LARGE], square[LARGE]))
    assert not clients.needs_two_threads(jax.jit(product).lower(square[SMALL], square[SMALL]))
    own = {clients.one_thread_device().client, clients.two_thread_device().client}
    assert len(own | {jax.devices("cpu")[0].client}) == 3


def test_results_of_a_large_piece_go_into_any_other_piece():
    cache = PieceCache(None)
    _, twice = piece(LARGE, cache, donated=(1,)).call(*operands(LARGE))
    again, _ = piece(LARGE, cache).call(twice, twice)
    mixed = jax.jit(lambda x, y: x + y)(again, jax.numpy.ones(LARGE))
    assert mixed.shape == (LARGE,)


def test_starting_a_client_leaves_the_environment_and_the_thread_where_they_were():
    cores, before = os.sched_getaffinity(0), os.environ.get("NPROC")
    clients._start.__wrapped__()
    assert (os.sched_getaffinity(0), os.environ.get("NPROC")) == (cores, before)


def test_a_cache_in_which_nothing_can_be_written_ends_nothing(tmp_path, caplog):
    (tmp_path / "xla").write_text("no directory")
    a, b = operands(SMALL)
    np.testing.assert_array_equal(piece(SMALL, PieceCache(tmp_path)).call(a, b)[1], b * 2)
    assert str(tmp_path) in caplog.text


def test_pieces_are_compiled_and_computed_as_in_a_new_process():
    """Where a program rounds upwards, has the processor trap on inexact results, and JAX compile nothing."""
    libm, upwards, inexact = ctypes.CDLL("libm.so.6"), 0x800, 0x20
    given, (a, b) = computation(SMALL), operands(SMALL)
    expected = np.asarray(PieceCache(None).piece(given, ()).call(a, b)[0])
    libm.fesetround(upwards)
    libm.feclearexcept(inexact)  # What was inexact before, as in TensorFlow's import, would trap late.
    try:
        libm.feenableexcept(inexact)
        with jax.disable_jit():
            compiled = PieceCache(None).piece(given, ())
        with clients.own_settings():
            found = np.asarray(compiled.call(a, b)[0])
        assert (libm.fegetround(), libm.fegetexcept()) == (upwards, inexact)
    finally:
        libm.fedisableexcept(inexact)
        libm.fesetround(0)
    np.testing.assert_array_equal(found, expected)


def test_a_thread_that_holds_settings_keeps_them_whatever_others_set():
    """Nothing is looked at in such a thread, so a setting that another thread makes later must not reach it."""
    held, changed, seen = threading.Event(), threading.Event(), {}

    def machine() -> None:
        with clients.held_machine_settings():
            held.set()
            changed.wait(60)
            with clients.machine_settings():
                seen["held"] = jax.config.jax_debug_nans, jax.config.jax_enable_x64
            seen["between"] = jax.config.jax_debug_nans
        with clients.machine_settings():
            seen["after"] = jax.config.jax_debug_nans, jax.config.jax_enable_x64
        seen["outside"] = jax.config.jax_debug_nans

    thread = threading.Thread(target=machine)
    thread.start()
    assert held.wait(60)
    try:
        jax.config.update("jax_debug_nans", True)
        changed.set()
        thread.join(60)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert seen == {"held": (False, True), "between": False, "after": (False, True), "outside": True}


def _digest() -> str:
    results = piece(LARGE, PieceCache(None)).call(*operands(LARGE))
    return " ".join(hashlib.sha256(np.asarray(r).tobytes()).hexdigest() for r in results)


@pytest.mark.usefixtures("no_cache_of_jax")
def test_a_damaged_entry_of_the_cache_is_compiled_and_written_again(tmp_path, recwarn):
    """Cut short, with other bytes, gone, or left by a process that was killed before it wrote the marker."""
    a, b = operands(SMALL)

    def compiled() -> Path:
        np.testing.assert_array_equal(piece(SMALL, PieceCache(tmp_path)).call(a, b)[1], b * 2)
        (entry,) = tmp_path.rglob("*-cache")
        return entry

    whole = compiled().read_bytes()
    assert compiled().read_bytes() == whole
    for damaged in (whole[:100], whole[:50] + whole[51:] + b"x", b""):
        compiled().write_bytes(damaged)
        assert len(compiled().read_bytes()) > len(whole) // 2
    compiled().unlink()
    compiled().write_bytes(whole[:100])
    (marker,) = tmp_path.rglob("*.done")
    marker.unlink()
    assert len(compiled().read_bytes()) > len(whole) // 2
    assert not [str(w.message) for w in recwarn if "compilation cache" in str(w.message)]


@pytest.mark.system
def test_bits_do_not_depend_on_the_cores_of_a_host():
    """XLA's clients start once a process, so another number of cores takes another process."""
    core = min(os.sched_getaffinity(0))
    command = f"import os; os.sched_setaffinity(0, [{core}]); from tests.device import test_clients as t"
    alone = run_copied(f"{command}; print(t._digest())")
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.strip() == _digest()


def test_inputs_lie_where_xla_reads_them_in_place() -> None:
    inputs = clients.AlignedInputs()
    memory = np.arange(1 << 14, dtype=np.float32)
    first = 1 + -(memory.ctypes.data // 4) % 16  # One element behind a multiple of 64 bytes.
    crooked = memory[first : first + 8192]
    room = inputs.take("x", crooked)
    assert isinstance(room, np.ndarray)
    assert room.ctypes.data % 64 == 0
    np.testing.assert_array_equal(room, crooked)
    assert inputs.take("x", crooked[::-1]) is room, "the next of that name lies there too"
    np.testing.assert_array_equal(room, crooked[::-1])
    assert inputs.take("y", room) is room
    assert inputs.take("x", crooked[:8]) is not room
    for small in (crooked[:8], 3, None, (crooked,)):
        assert inputs.take("z", small) is small


def test_threads_have_rooms_of_their_own() -> None:
    from concurrent.futures import ThreadPoolExecutor

    inputs, value = clients.AlignedInputs(), np.zeros((3, 5000), np.float64).T
    mine = inputs.take("x", value)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inputs.take, "x", value).result() is not mine
