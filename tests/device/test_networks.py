"""The layers of a network become one call: the same numbers as XLA's, and no trace of them in the program."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podrun.device.xla import convolutions
from podrun.device.xla.network_programs import network_program
from podrun.device.xla.network_steps import LayerNetwork, NetworkStep, StepKind
from podrun.device.xla.networks import join_networks
from podrun.device.xla.rewrite import rewrite_convolutions
from podrun.numerics.pools import average_of_windows, maximum_of_windows
from podrun.numerics.windows import fitted_window
from tests.quick_programs import (
    programs_of_default_tests_compile_quickly as programs_of_default_tests_compile_quickly,
)

pytestmark = pytest.mark.skipif(not convolutions.available(), reason="no oneDNN here")


def correlate(x: Any, w: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME")


def draw(*shape: int) -> Any:
    return np.random.default_rng(shape).normal(scale=0.2, size=shape).astype(np.float32)


def joined(
    function: Callable[..., Any], *operands: Any, networks: int = 1, parts: int = 2
) -> tuple[Any, str]:
    """The function compiled with so many networks, and the program's text before XLA sees it."""
    lowered = jax.jit(lambda *a: function(*a)).lower(*operands)
    assert rewrite_convolutions(lowered, parts=parts, worth_dividing=0) > 0
    assert join_networks(lowered, parts) == networks
    text = str(lowered.compiler_ir("stablehlo"))
    return lowered.compile(), text


def check(function: Callable[..., Any], *operands: Any, networks: int = 1) -> str:
    """Compare with XLA's own, on one thread and on two; the program's text."""
    return compared(function, *operands, networks=networks)[1]


def compared(function: Callable[..., Any], *operands: Any, networks: int = 1) -> tuple[Any, str]:
    """The function compiled for two threads, and the program's text, after that comparison."""
    right = jax.tree.leaves(jax.jit(function)(*operands))
    compiled, text = None, ""
    for parts in (1, 2):
        compiled, text = joined(function, *operands, networks=networks, parts=parts)
        for got, want in zip(jax.tree.leaves(compiled(*operands)), right, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    return compiled, text


X, W, V = draw(1, 8, 14, 14), draw(16, 8, 3, 3), draw(24, 16, 1, 1)
WIDE, NARROW = (
    fitted_window((14, 14), (3, 3), (2, 2), (), (1, 1, 1, 1)),
    fitted_window((14, 14), (2, 2), (2, 2)),
)


def pooled(x: Any, w: Any) -> Any:
    y = correlate(x, w)
    means = average_of_windows(y, NARROW, with_pads=False)
    inside = average_of_windows(y, WIDE, with_pads=False)
    return jnp.concatenate([maximum_of_windows(y, WIDE), means, inside], axis=1)


def dense(x: Any, w: Any, factor: Any) -> Any:
    """Blocks that add to what came before them, each after a factor, an addend and a cut of its own."""
    y = correlate(x, w)
    for k in range(3):
        z = y * factor[None, : y.shape[1], None, None] - (k + 1.0)
        z = jnp.where(z > 0, z, 0.0)
        y = jnp.concatenate([y, correlate(z, draw(24, y.shape[1], 1, 1))], axis=1)
    return y


def residual(x: Any, w: Any, v: Any) -> Any:
    y = jnp.maximum(correlate(x, w), 0)
    return correlate(y, v) + correlate(y[:, :16] * 2.0, v) + correlate(y, v) / 3.0


def test_pooling_and_concatenation_leave_the_program() -> None:
    text = check(pooled, X, W)
    assert "podrun_network" in text
    assert "podrun_convolution" not in text
    assert "stablehlo.concatenate" not in text
    assert "stablehlo.maximum" not in text


def test_what_is_concatenated_to_itself_again_and_again() -> None:
    text = check(dense, X, W, draw(128))
    assert "stablehlo.multiply" not in text


def test_additions_of_images() -> None:
    check(residual, X, W, V)


def test_what_xla_computes_between_two_networks() -> None:
    """Powers are XLA's. What follows them is a network of its own, and what does not need them stays in the first."""

    def network(x: Any, w: Any, v: Any) -> Any:
        y = correlate(x, w)
        powers = jnp.power(jnp.abs(y) + 1.0, 1.5)
        beside = correlate(y, v)
        return correlate(y / powers, v) + beside, beside

    text = check(network, X, W, V, networks=2)
    assert text.count("podrun_network") == 2


def test_what_a_network_computes_is_no_operand_of_its_own_call() -> None:
    """Weights, and images in another order of axes, are read from operands only."""
    check(lambda x, w: correlate(x, jnp.where(w > 0, w, 0.0)), X, W)
    turned = draw(24, 14, 3, 3)
    check(lambda x, w, v: correlate(correlate(x, w).transpose(0, 2, 3, 1), v), X, W, turned, networks=2)


def test_a_batch_and_a_pool_without_neighbours() -> None:
    """Only what reads images of one sample is a value for each pixel; a program may end in a window."""

    def network(x: Any, w: Any) -> Any:
        y = correlate(x, w)
        return maximum_of_windows(jnp.exp(y), WIDE), y / jnp.arange(1.0, 197.0).reshape(1, 1, 14, 14)

    check(network, draw(3, 8, 14, 14), W, networks=2)


def test_padding_with_other_numbers_is_no_padding() -> None:
    def network(x: Any, w: Any) -> Any:
        y = lax.pad(correlate(x, w), np.float32(2), [(0, 0, 0), (0, 0, 0), (1, 1, 0), (1, 1, 0)])
        return maximum_of_windows(y, fitted_window((16, 16), (3, 3), (2, 2)))

    check(network, X, W, networks=2)


def classes(x: Any, w: Any) -> Any:
    """Means of channels, and their softmax, as a network ends."""
    means = correlate(x, w).mean(axis=(2, 3), keepdims=True)
    flat = means.reshape(1, -1)
    powers = jnp.exp(flat - flat.max(axis=1, keepdims=True))
    return (powers / powers.sum(axis=1, keepdims=True)).reshape(means.shape)


FIRST_WINDOW = fitted_window((16, 16), (3, 3), (2, 2), (), (1, 1, 1, 1))


def first_layer(x: Any, w: Any, v: Any, bias: Any) -> Any:
    y = jnp.maximum(correlate(x, w, 2) + bias[None, :, None, None], 0)
    return correlate(maximum_of_windows(y, FIRST_WINDOW) * 2.0, v)


@pytest.mark.parametrize("stored", [False, True])
def test_a_first_layer_is_convolved_from_its_planes(*, stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its window, unless something else reads what it computes; with the same bits by narrow vectors."""
    steps: list[StepKind] = []
    numbers_of = LayerNetwork.numbers

    def noted(network: LayerNetwork) -> list[int]:
        numbers = numbers_of(network)
        steps[:] = [step.kind for step in network.steps]
        return numbers

    def network(x: Any, w: Any, v: Any, _: Any) -> Any:
        y = jnp.maximum(correlate(x, w, 2), 0)
        return correlate(maximum_of_windows(y, FIRST_WINDOW), v), y

    monkeypatch.setattr(LayerNetwork, "numbers", noted)
    operands = (draw(1, 3, 32, 31 + stored), draw(40, 3, 7, 5), draw(80, 40, 3, 3), draw(40))
    function = network if stored else first_layer
    compiled, _ = compared(function, *operands)
    if importlib.import_module("podrun.device.xla._onednn").PLANES:
        assert steps == [StepKind.PLANES, *([StepKind.POOL] if stored else []), StepKind.CONVOLVE]
    bits = [np.asarray(result).tobytes() for result in jax.tree.leaves(compiled(*operands))]
    native: Any = importlib.import_module("podrun.device.xla._onednn")
    before = native.vectors(8)
    try:
        assert bits == [np.asarray(result).tobytes() for result in jax.tree.leaves(compiled(*operands))]
    finally:
        assert native.vectors(before) == min(before, 8)


LANES = """
import sys
from podrun.device.xla import _onednn
_onednn.load(sys.argv[1])
print(_onednn.PLANES, _onednn.vectors(0))
"""


@pytest.mark.system
def test_first_layers_keep_to_the_instruction_set_of_the_library() -> None:
    """Under either name, in small letters too, as the library itself reads it."""
    native: Any = importlib.import_module("podrun.device.xla._onednn")
    lanes = native.vectors(16)
    plain = {name: value for name, value in os.environ.items() if "MAX_CPU_ISA" not in name}
    for limit, most in (
        ("DNNL_MAX_CPU_ISA=AVX2", 8),
        ("ONEDNN_MAX_CPU_ISA=avx2", 8),
        ("ONEDNN_MAX_CPU_ISA=AVX", 0),
    ):
        name, _, value = limit.partition("=")
        command = [sys.executable, "-c", LANES, convolutions._path()]
        printed = subprocess.check_output(command, env={**plain, name: value}, text=True, timeout=60)
        got = min(lanes, most)
        assert printed.split() == [str(4 if got else 0), str(got)], limit


def test_nothing_native_reads_the_environment() -> None:
    """A program may change it while threads without the interpreter's lock compute, which moves what is read."""
    sources = Path(convolutions.__file__).parent.joinpath("native").glob("*.[ch]")
    assert not [source.name for source in sources if "getenv" in source.read_text()]


def test_means_and_their_softmax_leave_the_program() -> None:
    text = check(classes, X, draw(700, 8, 3, 3))
    assert "podrun_network" in text
    assert "stablehlo.reduce" not in text
    assert "stablehlo.exponential" not in text


def test_a_softmax_over_another_axis_than_the_channels_stays() -> None:
    def network(x: Any, w: Any) -> Any:
        means = correlate(x, w).mean(axis=(2, 3)).reshape(1, 1, -1)
        powers = jnp.exp(means - means.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    check(network, X, W)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_softmax_of_what_is_not_finite(value: float) -> None:
    x = X.copy()
    x[0, 0, 3, 3] = value
    compiled, _ = joined(classes, x, W)
    np.testing.assert_array_equal(np.isnan(compiled(x, W)), np.isnan(jax.jit(classes)(x, W)))


def test_a_softmax_is_within_rounding_of_the_exact_one() -> None:
    x = draw(1, 16, 16, 16) * 4000  # The least powers are less than any float32.
    eye = np.eye(16, dtype=np.float32).reshape(16, 16, 1, 1)
    means = x.astype(np.float64).mean(axis=(2, 3))
    exact = np.exp(means - means.max())
    got = joined(classes, x, eye)[0](x, eye)
    assert (exact / exact.sum() < 1e-38).any()
    np.testing.assert_allclose(np.asarray(got).ravel(), (exact / exact.sum()).ravel(), rtol=2e-5, atol=1e-37)


def test_sums_that_something_else_reads_or_of_several_images_stay_right() -> None:
    def network(x: Any, w: Any) -> Any:
        sums = correlate(x, w).sum(axis=(2, 3))
        return sums, sums.reshape(-1, 4, 4) * 2.0, sums / 7.0, sums / 3.0 + sums, jnp.exp(sums)

    for images in (1, 3):
        check(network, draw(images, 8, 14, 14), W)


def test_a_program_that_is_one_network_runs_without_xla() -> None:
    lowered = jax.jit(lambda *a: classes(*a)).lower(X, W)
    rewrite_convolutions(lowered, parts=2, worth_dividing=0)
    join_networks(lowered)
    program = network_program(lowered)
    assert program is not None
    run = program.bound({1: W})
    elsewhere = np.empty(X.size + 1, np.float32)[1:].reshape(X.shape)
    elsewhere[:] = X
    (got,) = run({0: elsewhere})
    assert got.tobytes() == np.asarray(lowered.compile()(X, W)).tobytes()
    assert run({0: np.asfortranarray(X)})[0].tobytes() == got.tobytes()
    assert not got.flags.writeable
    askew = np.frombuffer(b"." + X.tobytes(), np.float32, offset=1).reshape(X.shape)
    assert not askew.flags.aligned

    def aligned(numbers: Any, operands: tuple[Any, ...], results: Any) -> None:
        assert all(operand.flags.aligned for operand in operands)
        run.compute(numbers, operands, results)

    assert replace(run, compute=aligned)({0: askew})[0].tobytes() == got.tobytes()


def test_other_programs_are_xlas() -> None:
    def twice(x: Any, w: Any) -> Any:
        return classes(x, w), x + 1.0

    def in_order(x: Any, w: Any) -> Any:
        return jnp.exp(classes(x, w))

    def of_a_part(x: Any, w: Any) -> Any:
        return classes(x[:, :, 1:], w)

    for function in (twice, in_order, of_a_part):
        lowered = jax.jit(lambda *a, f=function: f(*a)).lower(X, W)
        assert rewrite_convolutions(lowered, parts=2, worth_dividing=0) == 1
        assert join_networks(lowered) == 1
        assert network_program(lowered) is None
        lowered.compile()


def test_what_is_no_number_stays() -> None:
    x = X.copy()
    x[0, :, 3, 3] = np.nan

    def network(x: Any, w: Any) -> Any:
        y = correlate(x, w)
        return jnp.maximum(y * 2.0, 0.5), maximum_of_windows(y, WIDE), jnp.where(y - 1.0 > 0, y - 1.0, 0.0)

    compiled, _ = joined(network, x, W)
    for got, want in zip(compiled(x, W), jax.jit(network)(x, W), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert np.isnan(want).sum() == np.isnan(got).sum()


def test_threads_compute_the_same_bits_side_by_side() -> None:
    compiled, _ = joined(dense, X, W, draw(128))
    operands = (X, W, draw(128))
    first = np.asarray(compiled(*operands)).tobytes()
    with ThreadPoolExecutor(4) as pool:
        others = pool.map(lambda _: np.asarray(compiled(*operands)).tobytes(), range(24))
        assert set(others) == {first}


def test_numbers_that_describe_no_network_are_refused() -> None:
    """Each number wrong, and each end too early: refused, or a network that stays inside of its buffers."""
    native: Any = importlib.import_module("podrun.device.xla._onednn")
    network = LayerNetwork()
    image = network.image((1, 6, 6, 4), 0)
    network.steps.append(
        NetworkStep(StepKind.POOL, image, network.image((1, 3, 3, 4)), (0, 2, 2, 2, 2, 0, 0))
    )
    network.images[-1].result = 0
    network.operands = network.results = 1
    numbers = network.numbers()
    x, y = np.arange(144, dtype=np.float32), np.empty(36, np.float32)
    native.network(np.array(numbers, np.int64), (x,), (y,))
    np.testing.assert_array_equal(y.reshape(3, 3, 4), x.reshape(3, 2, 3, 2, 4).max(axis=(1, 3)))
    for end in range(len(numbers)):
        with pytest.raises(ValueError, match="no network"):
            native.network(np.array(numbers[:end], np.int64), (x,), (y,))
    for at in range(len(numbers)):
        for value in (-1, 1 << 40):
            with pytest.raises(ValueError, match="no network"):
                native.network(np.array([*numbers[:at], value, *numbers[at + 1 :]], np.int64), (x,), (y,))
    with pytest.raises(ValueError, match="smaller than"):
        native.network(np.array(numbers, np.int64), (x[:-1],), (y,))
    with pytest.raises(ValueError, match="another number of operands"):
        native.network(np.array(numbers, np.int64), (x, x), (y,))
