"""Small pieces are compiled with less effort: which ones, that all compute the same numbers, and that it is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from podrun.core import executable_file
from podrun.core.executable import Computation
from podrun.device.xla import effort
from podrun.device.xla.effort import Effort, effort_of
from podrun.device.xla.pieces import Piece, PieceCache

SIZES = {4: Effort.LEAST, 300: Effort.LITTLE, 20_000: Effort.ONE_THREAD}


def update(weight: Any, gradient: Any) -> Any:
    """An update with a root and sums, a small product and a choice."""
    moved = weight - 0.1 * gradient / (jnp.sqrt(jnp.square(gradient).mean(0)) + 1e-3)
    return jnp.where(moved > 0, moved, 0.01 * moved), moved.T @ gradient, jnp.tanh(moved).sum()


def repeated(weight: Any, gradient: Any) -> Any:
    return jax.lax.fori_loop(0, 9, lambda _, w: w - 0.1 * gradient, weight)


def shapes(rows: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((rows, 5), np.float32), jax.ShapeDtypeStruct((rows, 5), np.float32)


def computation(function: Callable[..., Any], rows: int) -> Computation:
    stablehlo = bytes(export.export(jax.jit(function), platforms=["cpu"])(*shapes(rows)).serialize())
    executable_file.remember(stablehlo)
    names = tuple(f"r{i}" for i in range(len(jax.tree.leaves(jax.eval_shape(function, *shapes(rows))))))
    return Computation("small", stablehlo, ("weight", "gradient"), names)


def effort_for(function: Callable[..., Any], rows: int) -> Effort:
    return effort_of(jax.jit(function).lower(*shapes(rows)), computation(function, rows).stablehlo)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options with which pieces are compiled from now on."""
    seen: list[dict[str, Any]] = []
    real = Effort.options
    monkeypatch.setattr(Effort, "options", lambda self: seen.append(real(self)) or real(self))
    return seen


@pytest.mark.parametrize("rows", SIZES)
def test_it_depends_on_the_work_of_a_piece(rows: int) -> None:
    assert effort_for(update, rows) is SIZES[rows]


def test_a_piece_with_a_loop_is_compiled_in_full() -> None:
    assert effort_for(repeated, 4) is Effort.ONE_THREAD


def test_pieces_that_only_move_data_are_small_as_long_as_little_is_moved() -> None:
    turned = functools.partial(jnp.transpose, axes=(1, 0))
    few, many = (
        effort_of(jax.jit(turned).lower(jax.ShapeDtypeStruct((n, n), np.float32)), b"") for n in (16, 512)
    )
    assert (few, many) == (Effort.LEAST, Effort.LITTLE)


def run(piece: Piece, rows: int) -> list[np.ndarray]:
    random = np.random.default_rng(rows)
    weight, gradient = (random.standard_normal((rows, 5), np.float32) for _ in range(2))
    return [np.asarray(result, np.float64) for result in piece.call(weight, gradient)]


@pytest.mark.parametrize("rows", [4, 300])
def test_numbers_are_those_of_float64_with_each_effort(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(rows)
    weight, gradient = (random.standard_normal((rows, 5), np.float32).astype(np.float64) for _ in range(2))
    moved = weight - 0.1 * gradient / (np.sqrt(np.square(gradient).mean(0)) + 1e-3)
    right = [np.where(moved > 0, moved, 0.01 * moved), moved.T @ gradient, np.tanh(moved).sum()]
    for work in (effort.LEAST_WORK, 0):
        monkeypatch.setattr(effort, "LEAST_WORK", work)
        for ours, exact in zip(
            run(PieceCache(None).piece(computation(update, rows), ()), rows), right, strict=True
        ):
            np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=2e-5)


def test_a_kept_piece_has_the_options_and_bits_that_it_was_compiled_with(
    tmp_path: Path, compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = computation(update, 4)
    first = run(PieceCache(tmp_path).piece(small, ()), 4)
    assert compiled[-1]["xla_backend_optimization_level"] == 0
    compilations = len(compiled)
    again = run(PieceCache(tmp_path).piece(small, ()), 4)
    assert [a.tobytes() for a in again] == [a.tobytes() for a in first]
    assert not [options for options in compiled[compilations:] if options not in compiled[:compilations]]
    monkeypatch.setattr(effort, "LEAST_WORK", 0)
    run(PieceCache(tmp_path).piece(small, ()), 4)
    assert compiled[-1]["xla_backend_optimization_level"] == 1
