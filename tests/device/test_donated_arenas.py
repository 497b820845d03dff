"""Arenas that a piece updates in place: the same bits as otherwise, and no further memory."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from podrun.collectives.rendezvous import SoloGroup
from podrun.core import executable_file
from podrun.core.errors import InternalError
from podrun.core.executable import Computation
from podrun.device.program.buffers import Buffers
from podrun.device.program.xla_memory import DonatedArena, updated_in_place
from podrun.device.xla import clients
from podrun.device.xla.clients import one_thread_device, two_thread_device
from podrun.device.xla.pieces import PieceCache

from .programs import linear
from .test_runs import train

ARENAS = {"arena:w": "w", "arena_slice:w": "w", "weight": "w", "arena_slice:s": "s", "arena_slice:g": "g"}
OWN = {"arena:w", "arena_slice:w", "arena_slice:s"}


@pytest.mark.parametrize(
    ("inputs", "outputs", "found"),
    [
        (("arena_slice:w", "arena_slice:g"), ("arena_slice:w",), {0: 0}),
        (("rate", "arena_slice:s", "arena_slice:w"), ("arena_slice:w", "arena_slice:s"), {1: 1, 2: 0}),
        (("arena:w",), ("arena:w",), {0: 0}),
        (("arena_slice:w",), ("arena:w",), {}),
        (("arena_slice:w", "weight"), ("arena_slice:w",), {}),
        (("arena_slice:w", "arena:w"), ("arena:w",), {}),
        (("arena_slice:w",), ("arena_slice:w", "weight"), {}),
        (("arena_slice:g",), ("arena_slice:g",), {}),
        (("weight",), ("weight",), {}),
        (("rate",), ("rate",), {}),
    ],
    ids=repr,
)
def test_a_piece_writes_over_what_it_alone_reads_whole(
    inputs: tuple[str, ...], outputs: tuple[str, ...], found: Mapping[int, int]
) -> None:
    assert updated_in_place(Computation("update", b"", inputs, outputs), ARENAS, OWN) == found


def update(size: int, pieces: PieceCache) -> Any:
    """``w - 2 g`` and ``s + g``: results in another order than operands, and all of one shape."""
    flat = jax.ShapeDtypeStruct((size,), np.float32)
    stablehlo = export.export(jax.jit(lambda w, g, s: (w - 2 * g, s + g)), platforms=["cpu"])(
        flat, flat, flat
    )
    data = bytes(stablehlo.serialize())
    executable_file.remember(data)
    computation = Computation("update", data, ("w", "g", "s"), ("w", "s"))
    return pieces.piece(computation, (), {0: 0, 2: 1})


@pytest.mark.parametrize("threads", [1, 2])
def test_results_lie_where_operands_lay(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if threads == 2:
        monkeypatch.setattr(clients, "WORTH_READING_TOGETHER", 1)
    piece = update(1000, PieceCache(None))
    assert piece.in_place == {0: 0, 2: 1}
    assert piece.device == (two_thread_device() if threads == 2 else one_thread_device())
    donated = {at: DonatedArena((1000,), np.dtype(np.float32), piece.device) for at in piece.in_place}
    read = {at: arena.memory for at, arena in donated.items()}
    read[0][:], read[2][:] = 1, 5
    gradient = np.arange(1000, dtype=np.float32)
    for _ in range(3):
        results = jax.block_until_ready(piece.call(donated[0].donate(), gradient, donated[2].donate()))
        for operand, result in piece.in_place.items():
            donated[operand].take_back(results[result])
    np.testing.assert_array_equal(read[0], 1 - 6 * gradient)
    np.testing.assert_array_equal(read[2], 5 + 3 * gradient)


def test_what_is_asked_for_in_another_order_than_jax_gives_it_is_not_done() -> None:
    flat = jax.ShapeDtypeStruct((64,), np.float32)
    stablehlo = export.export(jax.jit(lambda w, s: (s + 1, w + 2)), platforms=["cpu"])(flat, flat).serialize()
    executable_file.remember(bytes(stablehlo))
    computation = Computation("crossed", bytes(stablehlo), ("w", "s"), ("s", "w"))
    piece = PieceCache(None).piece(computation, (), {0: 1, 1: 0})
    assert piece.in_place == {}
    assert [float(r[0]) for r in piece.call(np.zeros(64, "f"), np.ones(64, "f"))] == [2, 2]


def test_memory_lives_as_long_as_its_readers() -> None:
    read = DonatedArena((4,), np.dtype(np.int32), one_thread_device()).memory
    read[:] = 7
    gc.collect()
    assert list(read) == [7] * 4


def test_a_result_elsewhere_is_an_error() -> None:
    arena = DonatedArena((4,), np.dtype(np.float32), one_thread_device())
    with pytest.raises(InternalError, match="moved"):
        arena.take_back(jnp.ones(4))


@pytest.mark.parametrize("sliced", [True, False])
def test_runs_in_place_give_the_bits_of_runs_that_are_not(
    sliced: bool, pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = linear(4, sliced=sliced)
    moved = []
    move = Buffers._donated_arena
    monkeypatch.setattr(Buffers, "_donated_arena", lambda self, *a: moved.append(a[0]) or move(self, *a))
    losses, weights = train(executable, pieces, 1, runs=3)
    assert set(moved) == {"arena_slice:weights" if sliced else "arena:weights"}
    monkeypatch.setattr(Buffers, "updated_in_place", lambda self, computation: {})
    plain_losses, plain_weights = train(executable, pieces, 1, runs=3)
    np.testing.assert_array_equal(losses, plain_losses)
    for name, value in plain_weights.items():
        np.testing.assert_array_equal(weights[name], value)


@pytest.mark.parametrize("initial", [0.0, -0.0, 0.5, float("nan")])
@pytest.mark.parametrize("written", [False, True])
def test_a_donated_arena_starts_with_the_bits_that_the_plain_one_had(initial: float, written: bool) -> None:
    executable = linear(4)
    variables = dict(executable.variables)
    variables["b"] = replace(variables["b"], initial=initial)
    buffers = Buffers(replace(executable, variables=variables), SoloGroup())
    if written:
        buffers.write({"w": np.arange(4, dtype=np.float32).reshape(4, 1)})
    before = {name: np.array(buffers.read(name)) for name in ("w", "b")}
    buffers.donor("arena_slice:weights", None, one_thread_device())
    for name, value in before.items():
        assert buffers.read(name).tobytes() == value.tobytes()
    assert buffers.read("b").tobytes() == np.float32(initial).tobytes()
