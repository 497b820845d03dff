"""Losses of classes and of alignments, and norms, against torch and NumPy in float64: values and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.core.errors import InputMismatch
from podrun.numerics import ctc, loss_functions, norms

torch = pytest.importorskip("torch")
functional = torch.nn.functional


def agree(ours: Callable[..., Any], theirs: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Values and gradients in float32 against float64."""
    inputs = [torch.from_numpy(a).requires_grad_() for a in arrays]
    expected = theirs(*inputs)
    weights = np.random.default_rng(3).uniform(0.5, 1.5, tuple(expected.shape))
    gradients = torch.autograd.grad((expected * torch.from_numpy(weights)).sum(), inputs)

    def run(*values: Any) -> tuple[Any, Any]:
        value, pullback = jax.vjp(ours, *values)
        return value, pullback(jnp.asarray(weights, jnp.float32))

    value, made = jax.jit(run)(*[a.astype(np.float32) for a in arrays])
    np.testing.assert_allclose(value, expected.detach().numpy(), 1e-4, 1e-5)
    for one, wanted in zip(made, gradients, strict=True):
        np.testing.assert_allclose(one, wanted.numpy(), 2e-4, 2e-5)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


@pytest.mark.parametrize("how", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_of_classes_are_torchs(how: str, weighted: bool) -> None:
    target = np.asarray([[0, 4, 2], [1, 1, 3]])
    weight = np.random.default_rng(1).uniform(0.5, 2, 5) if weighted else None

    def ours(log_p: Any) -> Any:
        given = None if weight is None else jnp.asarray(weight, jnp.float32)
        losses, factors = loss_functions.class_losses(log_p, jnp.asarray(target), given, 1)
        return loss_functions.weighted_reduction(losses, factors, how)

    def theirs(log_p: Any) -> Any:
        given = None if weight is None else torch.from_numpy(weight)
        return functional.nll_loss(log_p, torch.from_numpy(target), given, ignore_index=1, reduction=how)

    agree(ours, theirs, numbers(2, 5, 3))


def test_a_bounded_likelihood_keeps_a_gradient_where_it_is_bounded() -> None:
    p = jnp.asarray([0.5, 1e-9], jnp.float32)
    value, pullback = jax.vjp(lambda p: loss_functions.bounded_nll(p, p.dtype), p)
    np.testing.assert_allclose(value, [-np.log(0.5), -np.log(1e-7)], 1e-5)
    np.testing.assert_allclose(pullback(jnp.ones(2))[0], [-2.0, -1e9], 1e-5)


def test_the_gradient_of_a_softmaxs_likelihood_is_the_difference() -> None:
    logits, label = numbers(3, 4).astype(np.float32), jnp.asarray([0, 3, 1])
    hot = loss_functions.hot_classes(label, 4)

    def loss(logits: Any) -> Any:
        p = jax.lax.stop_gradient(jax.nn.softmax(logits))
        return jnp.sum(loss_functions.nll_of_softmax(p, logits, hot))

    gradient, probabilities = jax.jit(lambda x: (jax.grad(loss)(x), jax.nn.softmax(x)))(logits)
    np.testing.assert_allclose(gradient, probabilities - hot, 1e-5, 1e-6)


CTC = (np.asarray([[1, 2, 2], [3, 1, 0], [1, 1, 1]]), np.asarray([7, 6, 5]), np.asarray([3, 2, 3]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("pairwise", [False, True])
def test_losses_of_alignments_are_torchs(pairwise: bool) -> None:
    labels, inputs, targets = CTC
    given = [jnp.asarray(each, jnp.int32) for each in CTC]

    def theirs(x: Any) -> Any:
        lengths = (torch.from_numpy(inputs), torch.from_numpy(targets))
        return functional.ctc_loss(
            functional.log_softmax(x, 2), torch.from_numpy(labels), *lengths, reduction="none"
        )

    agree(
        lambda x: ctc.alignment_losses(jax.nn.log_softmax(x, 2), *given, 0, pairwise=pairwise),
        theirs,
        numbers(7, 3, 5),
    )


@pytest.mark.parametrize("pairwise", [False, True])
def test_what_no_alignment_gives_is_infinite(pairwise: bool) -> None:
    @jax.jit  # Operation by operation, JAX would compile a program for each.
    def losses(values: Any) -> tuple[Any, Any]:
        lengths = (jnp.asarray([2]), jnp.asarray([2]))
        logs = jax.nn.log_softmax(values, 2)
        found = ctc.alignment_losses(logs, jnp.asarray([[1, 1]]), *lengths, 0, pairwise=pairwise)
        return found, ctc.without_infinity(found)

    infinite, finite = losses(numbers(2, 1, 4).astype(np.float32))
    assert np.isinf(infinite).all()
    assert finite.tolist() == [0.0]


@pytest.mark.slow
def test_wide_beams_are_the_sums_over_all_alignments() -> None:
    logs = np.asarray(jax.nn.log_softmax(jnp.asarray(numbers(3, 1, 3), jnp.float32), 2))
    sums: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(3), repeat=3):
        labels = tuple(k for k, _ in itertools.groupby(path) if k)
        sums[labels] = sums.get(labels, 0.0) + float(np.exp(sum(logs[t, 0, k] for t, k in enumerate(path))))
    best = sorted(sums, key=sums.__getitem__, reverse=True)[:3]
    scores, counts, labels = ctc.best_label_sequences(jnp.asarray(logs), jnp.asarray([3]), 0, 20, 3)
    np.testing.assert_allclose(np.exp(scores[0]), [sums[b] for b in best], 1e-4)
    assert [tuple(map(int, row[:n])) for row, n in zip(labels[0], counts[0], strict=True)] == best
    with pytest.raises(InputMismatch, match="top_paths 3 is more than beam_width 2"):
        ctc.best_label_sequences(jnp.asarray(logs), jnp.asarray([3]), 0, 2, 3)


def test_norms_are_torchs() -> None:
    scale, bias = numbers(4, seed=1), numbers(4, seed=2)

    def layer(x: Any, scale: Any, bias: Any) -> Any:
        return norms.rescaled(norms.standardised(x, (1,), 1e-3)[0], scale, bias)

    agree(layer, lambda x, s, b: functional.layer_norm(x, (4,), s, b, 1e-3), numbers(3, 4), scale, bias)

    def group(x: Any) -> Any:
        return norms.standardised_groups(x, 2, 1e-3)[0]

    agree(group, lambda x: functional.group_norm(x, 2, eps=1e-3), numbers(2, 4, 5))
    agree(
        lambda x: norms.over_root_mean_square(x, (1,), 1e-3)[0],
        lambda x: functional.rms_norm(x, (4,), eps=1e-3),
        numbers(3, 4),
    )


def test_channels_are_normalised_by_given_statistics() -> None:
    mean, variance = numbers(3, seed=3), np.abs(numbers(3, seed=4)) + 0.1

    def theirs(x: Any, scale: Any, bias: Any) -> Any:
        return functional.batch_norm(
            x, torch.from_numpy(mean), torch.from_numpy(variance), scale, bias, eps=1e-3
        )

    given = [jnp.asarray(each, jnp.float32) for each in (mean, variance)]
    agree(
        lambda x, scale, bias: norms.normalised_channels(x, *given, scale, bias, 1e-3),
        theirs,
        *(numbers(4, 3, 5), numbers(3), numbers(3, seed=1)),
    )


def test_strided_groups_have_every_other_channel() -> None:
    x = numbers(2, 6, 3).astype(np.float32)
    order = [0, 2, 4, 1, 3, 5]
    strided = np.asarray(jax.jit(lambda x: norms.standardised_groups(x, 2, 1e-3, strided=True)[0])(x))
    plain = jax.jit(lambda x: norms.standardised_groups(x, 2, 1e-3)[0])(x[:, order])
    np.testing.assert_allclose(strided[:, order], plain, 1e-6)
    with pytest.raises(InputMismatch, match="6 channels do not make 4 groups"):
        norms.standardised_groups(x, 4, 1e-3)


def test_running_statistics_take_no_gradient_from_the_batch() -> None:
    before, batch = jnp.asarray([2.0]), jnp.asarray([4.0])
    value, pullback = jax.vjp(lambda b, m: norms.running(b, m, 0.75), before, batch)
    assert value.tolist() == [2.5]
    assert [g.tolist() for g in pullback(jnp.ones(1))] == [[0.75], [0.0]]
