"""Recurrent layers, writes to shared places and dropout against torch and NumPy in float64's formulas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.core.errors import InputMismatch
from podrun.numerics.norms import dropped
from podrun.numerics.recurrence import (
    SIGMOID,
    TANH,
    Cell,
    CellWeights,
    Sequences,
    cell_activations,
    recurrence,
)
from podrun.numerics.shared_places import combined, element_places

torch = pytest.importorskip("torch")

TIME, BATCH, INPUT, HIDDEN = 4, 2, 3, 5


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "gates", "layer"),
    [("rnn", "n", torch.nn.RNN), ("gru", "rzn", torch.nn.GRU), ("lstm", "ifno", torch.nn.LSTM)],
)
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.sample(2)
def test_both_directions_are_torchs(kind: str, gates: str, layer: type, turns: bool) -> None:
    activations = {"rnn": (TANH,), "gru": (SIGMOID, TANH), "lstm": (SIGMOID, TANH, TANH)}[kind]
    reference = layer(INPUT, HIDDEN, bidirectional=True)
    x = _numbers(TIME, BATCH, INPUT)
    expected = reference(torch.from_numpy(x))[0].detach().numpy()
    zeros = jnp.zeros((BATCH, HIDDEN))
    state = (zeros, zeros) if kind == "lstm" else (zeros,)
    cell, outputs = Cell(kind, gates, activations, turns=turns), []
    for suffix in ("", "_reverse"):
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w, r, b, rb = (getattr(reference, f"{name}_l0{suffix}").detach().numpy() for name in names)
        weights = CellWeights(w, r, (b,), rb)
        outputs.append(recurrence(cell, weights, Sequences(x), state, backward=bool(suffix))[0])
    np.testing.assert_allclose(np.concatenate(outputs, -1), expected, 1e-5, 1e-5)


def test_a_projected_lstm_is_torchs() -> None:
    reference = torch.nn.LSTM(INPUT, HIDDEN, proj_size=2)
    w, r, b, rb, p = (value.detach().numpy() for value in reference.parameters())
    x = _numbers(TIME, BATCH, INPUT)
    weights = CellWeights(w, r, (b,), rb, leaving=p)
    state = (jnp.zeros((BATCH, 2)), jnp.zeros((BATCH, HIDDEN)))
    outputs, _ = recurrence(Cell("lstm", "ifno", (SIGMOID, TANH, TANH)), weights, Sequences(x), state)
    expected = reference(torch.from_numpy(x))[0].detach().numpy()
    np.testing.assert_allclose(outputs, expected, 1e-5, 1e-5)


@pytest.mark.parametrize("backward", [False, True])
def test_a_short_sequence_is_one_of_its_own(backward: bool) -> None:
    cell = Cell("gru", "zrn", (SIGMOID, TANH), reset_after=False)
    weights = CellWeights(_numbers(3 * HIDDEN, INPUT), _numbers(3 * HIDDEN, HIDDEN, seed=1))
    x, state = _numbers(TIME, BATCH, INPUT, seed=2), (jnp.zeros((BATCH, HIDDEN)),)

    @jax.jit  # Operation by operation, JAX would compile a program for each.
    def both() -> Any:
        short = Sequences(x, jnp.asarray([2, TIME], jnp.int32))
        alone = Sequences(x[:2])
        return [recurrence(cell, weights, part, state, backward=backward) for part in (short, alone)]

    (outputs, (last,)), (alone, (end,)) = both()
    np.testing.assert_allclose(outputs[:2, 0], alone[:, 0], 1e-6, 1e-6)
    np.testing.assert_array_equal(outputs[2:, 0], 0)
    np.testing.assert_allclose(last[0], end[0], 1e-6, 1e-6)


def test_full_attention_keeps_nothing_of_the_state() -> None:
    cell = Cell("gru", "zrn", (SIGMOID, TANH))
    weights = CellWeights(_numbers(3 * HIDDEN, INPUT), np.zeros((3 * HIDDEN, HIDDEN), np.float32))
    x = _numbers(TIME, BATCH, INPUT, seed=2)
    whole = Sequences(x, attention=jnp.ones((TIME, BATCH)))
    outputs, _ = recurrence(cell, weights, whole, (jnp.ones((BATCH, HIDDEN)),))
    np.testing.assert_allclose(outputs, np.tanh(x @ weights.entering[2 * HIDDEN :].T), 1e-5, 1e-5)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(InputMismatch, match="'wave' is not known"):
        cell_activations(("Tanh", "wave"))


@pytest.mark.sample(3)
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(
    ("how", "name"),
    [("add", "sum"), ("mul", "prod"), ("max", "amax"), ("min", "amin"), ("mean", "mean")],
)
def test_shared_places_are_torchs(how: str, name: str, include: bool) -> None:
    x, updates = _numbers(4, 3), _numbers(6, 3, seed=1)
    x[1, 1] = updates[2, 1] = 0
    index = np.random.default_rng(2).integers(0, 4, (6, 3))

    def run(x: jax.Array, updates: jax.Array) -> jax.Array:
        return combined(x, element_places(jnp.asarray(index), 0), updates, how, include=include)

    @jax.jit  # Operation by operation, JAX would compile a program for each.
    def with_gradients(*values: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        result, pull = jax.vjp(run, *values)
        return result, pull(jnp.ones((4, 3)))

    result, gradients = with_gradients(x, updates)
    leaves = [torch.from_numpy(each).requires_grad_() for each in (x, updates)]
    expected = leaves[0].scatter_reduce(0, torch.from_numpy(index), leaves[1], name, include_self=include)
    expected.backward(torch.ones(4, 3))
    np.testing.assert_allclose(result, expected.detach(), 1e-5, 1e-5)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad, 1e-4, 1e-5)


def test_an_unknown_reduction_is_named() -> None:
    with pytest.raises(InputMismatch, match="'median' is none of"):
        combined(jnp.zeros(2), (jnp.asarray([0]),), jnp.ones(1), "median")


@pytest.mark.parametrize("below", [False, True])
def test_dropout_keeps_the_mean_and_one_key_one_mask(below: bool) -> None:
    x = np.ones((200, 50), np.float32)
    drop = jax.jit(lambda x: dropped(jax.random.key(3), x, 0.25, x.shape, below=below))
    y, kept = drop(x)
    assert abs(float(np.mean(y)) - 1) < 0.03
    np.testing.assert_allclose(y, np.where(kept, 1 / 0.75, 0), 1e-6)
    again, _ = drop(x)
    np.testing.assert_array_equal(again, y)
