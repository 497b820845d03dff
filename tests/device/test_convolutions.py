"""Convolutions rewritten into calls of oneDNN: the numbers of float64, and the same bits whoever helps."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache

from podrun.core.errors import UsageError
from podrun.device.xla import convolutions, rewrite
from podrun.device.xla.convolutions import ConvolutionCall, Kind
from tests.quick_programs import (
    programs_of_default_tests_compile_quickly as programs_of_default_tests_compile_quickly,
)

native: Any = importlib.import_module("podrun.device.xla._onednn") if convolutions.available() else None


@dataclass(frozen=True)
class Case:
    """A convolution ``[n, c, h, w] * [m, c, *kernel]``."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: int = 1
    pads: tuple[int, int] = (0, 0)
    dilation: int = 1
    groups: int = 1

    def arrays(self) -> tuple[Any, ...]:
        rng = np.random.default_rng(0)
        x, w = (rng.normal(size=s).astype(np.float32) for s in (self.x, self.w))
        g = rng.normal(size=jax.eval_shape(self.run, x, w).shape).astype(np.float32)
        return x, w, g

    def run(self, x: Any, w: Any) -> Any:
        pads = (self.pads,) * 2
        dilation, groups = (self.dilation,) * 2, self.groups
        return lax.conv_general_dilated(
            x, w, (self.stride,) * 2, pads, rhs_dilation=dilation, feature_group_count=groups
        )

    def all(self, x: Any, w: Any, g: Any) -> tuple[Any, ...]:
        """The result and both gradients."""
        return self.run(x, w), *jax.vjp(self.run, x, w)[1](g)


CASES = (
    Case((2, 16, 13, 11), (24, 16, 3, 3), 1, (1, 1)),
    Case((2, 16, 13, 11), (24, 16, 3, 3), 2, (1, 1)),
    Case((2, 16, 12, 11), (24, 16, 3, 2), 2, (1, 1)),
    Case((1, 3, 33, 33), (16, 3, 7, 7), 2, (3, 3)),
    Case((2, 16, 13, 11), (24, 16, 3, 3), 1, (2, 2), 2),
    Case((2, 64, 8, 8), (64, 64, 1, 1), 2),
    Case((2, 64, 8, 8), (64, 64, 1, 1), 1),
    Case((16, 32, 2, 2), (64, 32, 3, 3), 1, (1, 1)),
    Case((2, 16, 14, 14), (24, 16, 3, 3), 3),
    Case((2, 16, 14, 14), (24, 16, 2, 2), 3),
    Case((2, 32, 9, 9), (32, 32, 5, 5), 1, (2, 0)),
    Case((3, 8, 37, 29), (16, 8, 3, 3), 1, (1, 1)),
    Case((2, 32, 14, 14), (64, 8, 3, 3), 2, (1, 0), groups=4),
    Case((5, 32, 14, 14), (32, 1, 3, 3), 2, (1, 1), groups=32),
    Case((1, 24, 40, 40), (48, 1, 5, 5), 1, (2, 2), groups=24),
    Case((1, 64, 56, 56), (64, 64, 3, 3), 1, (1, 1)),
    Case((16, 128, 2, 2), (128, 128, 3, 3), 1, (1, 1)),
)


def compiled(function: Callable[..., Any], *arrays: Any) -> tuple[Any, int]:
    """The function rewritten and compiled, and how many convolutions were replaced."""
    lowered = jax.jit(lambda *a: function(*a)).lower(*arrays)
    count = rewrite.rewrite_convolutions(lowered, parts=2)
    return lowered.compile(), count


known = pytest.mark.skipif(not convolutions.available(), reason="no oneDNN here")


@known
@pytest.mark.parametrize(
    "case", [*CASES[::2], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES[1::2])], ids=str
)
@pytest.mark.sample(3)
def test_numbers_are_those_of_plain_convolutions(case: Case) -> None:
    arrays = case.arrays()
    expected = jax.jit(case.all)(*arrays)
    run, count = compiled(case.all, *arrays)
    assert count == 3
    for got, want in zip(run(*arrays), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * float(jnp.abs(want).max()))


@known
def test_a_gradient_of_a_large_image_is_one_call() -> None:
    """Recognised as what it is: no reversal, no image spread out or cut up is left."""
    case = Case((3, 8, 90, 70), (16, 8, 3, 3), 2, (1, 1))
    lowered = jax.jit(case.all).lower(*case.arrays())
    assert rewrite.rewrite_convolutions(lowered) == 3
    text = lowered.as_text()
    assert sorted(int(kind) for kind in re.findall(r"numbers = array<i64: (\d)", text)) == [*Kind]
    assert "stablehlo.slice" not in text
    assert "stablehlo.pad" not in text


def network(x: Any, w0: Any, w1: Any, w2: Any, scale: Any) -> tuple[Any, Any]:
    """Convolutions with normalisation, pooling, a concatenation, a sum and a loop around them."""
    pads = ((1, 1), (1, 1))
    y = lax.conv_general_dilated(x, w0, (1, 1), pads)
    mean = jnp.mean(y, axis=(0, 2, 3), keepdims=True)
    y = jax.nn.relu((y - mean) * scale[None, :, None, None])
    y = jnp.maximum(y[:, :, ::2, ::2], jnp.pad(y, ((0, 0), (0, 0), (0, 1), (0, 0)))[:, :, 1::2, 1::2])
    z = lax.fori_loop(0, 2, lambda _, v: v + lax.conv_general_dilated(v, w1, (1, 1), pads), y)
    z = jnp.concatenate([z, y], axis=1)
    z = lax.conv_general_dilated(z, w2, (1, 1), pads)
    return jnp.mean(z, axis=(2, 3)), z.reshape(z.shape[0], -1)


def network_arrays() -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    shapes = ((2, 8, 12, 12), (16, 8, 3, 3), (16, 16, 3, 3), (8, 32, 3, 3), (16,))
    return tuple(rng.normal(size=s, scale=0.3).astype(np.float32) for s in shapes)


@known
def test_a_network_keeps_its_numbers_and_its_images_channels_last() -> None:
    arrays = network_arrays()
    run, count = compiled(network, *arrays)
    assert count == 3
    for got, want in zip(run(*arrays), jax.jit(network)(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    lowered = jax.jit(lambda *a: network(*a)).lower(*arrays)
    rewrite.rewrite_convolutions(lowered)
    text = str(lowered.compiler_ir("stablehlo"))
    assert "dim = 3" in text  # the concatenation is along the last axis
    assert "stablehlo.convolution" not in text


@known
def test_gradients_of_a_network_are_kept() -> None:
    arrays = network_arrays()

    def loss(*a: Any) -> Any:
        return jnp.sum(network(*a)[0] ** 2)

    run, _ = compiled(jax.grad(loss, argnums=(0, 1, 3)), *arrays[:2], *arrays[2:])
    expected = jax.jit(jax.grad(loss, argnums=(0, 1, 3)))(*arrays)
    for got, want in zip(run(*arrays), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(jnp.abs(want).max()))


def test_small_and_wide_convolutions_stay() -> None:
    x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32)
    assert compiled(lambda a, b: lax.conv_general_dilated(a, b, (1, 1), "SAME"), x, w)[1] == 0
    with jax.enable_x64(True):
        x64, w64 = np.ones((2, 16, 13, 11)), np.ones((24, 16, 3, 3))
        assert compiled(lambda a, b: lax.conv_general_dilated(a, b, (1, 1), "SAME"), x64, w64)[1] == 0


def generated(count: int) -> list[tuple[Any, ...]]:
    """Sizes, steps and groups that a seed gives: (image, weights, strides, dilation, pads, groups)."""
    rng, found = np.random.default_rng(11), []
    while len(found) < count:
        groups = int(rng.choice([1, 1, 1, 2, 8]))
        channels, outputs = (groups * int(rng.choice([1, 3, 8, 20])) for _ in range(2))
        kernel, stride, dilation = (rng.integers(1, most, 2).tolist() for most in (5, 4, 3))
        pads = rng.integers(0, 3, (2, 2)).tolist()
        image = (int(rng.integers(1, 6)), *rng.integers(3, 20, 2).tolist(), channels)
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        if all(n + sum(p) >= r for n, p, r in zip(image[1:3], pads, reach, strict=True)):
            weights = (outputs, channels // groups, *kernel)
            found.append((image, weights, stride, dilation, pads, groups))
    return found


@known
@pytest.mark.parametrize("case", generated(24), ids=str)
@pytest.mark.sample(8)
def test_numbers_are_those_of_float64(case: Any) -> None:
    image, shape, stride, dilation, pads, groups = case
    rng = np.random.default_rng(0)
    layout = ("NHWC", "OIHW", "NHWC")

    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, stride, pads, rhs_dilation=dilation, feature_group_count=groups, dimension_numbers=layout
        )

    x, w = (rng.normal(size=s).astype(np.float32) for s in (image, shape))
    with jax.enable_x64(True):
        y, back = jax.vjp(run, x.astype(np.float64), w.astype(np.float64))
        g = rng.normal(size=y.shape).astype(np.float32)
        exact = [np.asarray(a) for a in (y, *back(g.astype(np.float64)))]
    order = tuple(step // 4 for step in (shape[0] // groups * w.strides[0], *w.strides))
    kernel, before = shape[2:], tuple(p for p, _ in pads)
    for kind, operands, right in zip(Kind, ((x, w), (g, w), (x, g)), exact, strict=True):
        call = ConvolutionCall(kind, image, g.shape, kernel, stride, dilation, before, groups)
        numbers = call.numbers(order, (False,) * 3, 1)
        for parts in (1, 2):
            got = np.full(right.shape, np.nan, np.float32)
            native.compute([*numbers[:-1], parts], operands, got)
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=2e-6 * np.abs(right).max())


@known
def test_bits_do_not_depend_on_who_helps() -> None:
    """Alone a second thread computes half of a call; among many callers each computes all of its own."""
    image, rng = (6, 20, 20, 32), np.random.default_rng(2)
    x, w = (rng.normal(size=s).astype(np.float32) for s in (image, (32, 32, 3, 3)))
    order = tuple(step // 4 for step in (32 * w.strides[0], *w.strides))
    calls = [ConvolutionCall(kind, image, image, (3, 3), (1, 1), (1, 1), (1, 1), 1) for kind in Kind]
    given = [(x, w), (x, w), (x, x)]

    def all_kinds() -> list[bytes]:
        found = []
        for call, operands in zip(calls, given, strict=True):
            got = np.empty_like(w if call.kind is Kind.OF_WEIGHTS else x)
            native.compute(call.numbers(order, (False,) * 3, 2), operands, got)
            found.append(got.tobytes())
        return found

    alone = all_kinds()
    with ThreadPoolExecutor(6) as pool:
        several = [pool.submit(all_kinds) for _ in range(60)]
        assert all(one.result(timeout=60) == alone for one in several)


@known
@pytest.mark.system
def test_a_forked_child_computes_the_same() -> None:
    """Its parent's second thread is not there; while it forks another thread computes."""
    script = """
import os, threading
from tests.device import test_convolutions as t
mine = t._one_call()
threads = [threading.Thread(target=lambda: [t._one_call() for _ in range(40)]) for _ in range(2)]
for thread in threads: thread.start()
for _ in range(5):
    child = os.fork()
    if not child:
        os._exit(0 if all(t._one_call() == mine for _ in range(3)) else 3)
    assert os.waitpid(child, 0)[1] == 0
for thread in threads: thread.join()
print("same")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "same\n", done.stderr


@known
def test_a_library_that_has_started_is_asked_for_without_the_lock_of_its_start() -> None:
    """A child forked while another thread held the lock would wait for ever."""
    assert convolutions.available()
    with ThreadPoolExecutor(1) as pool, convolutions._starting:
        assert pool.submit(convolutions.available).result(60)


def _one_call() -> bytes:
    assert convolutions.available()
    x = np.linspace(-1, 1, 4 * 24 * 24 * 16, dtype=np.float32).reshape(4, 24, 24, 16)
    w = np.linspace(-1, 1, 16 * 16 * 9, dtype=np.float32)
    call = ConvolutionCall(Kind.FORWARD, x.shape, x.shape, (3, 3), (1, 1), (1, 1), (1, 1), 1)
    got = np.empty_like(x)
    native.compute(call.numbers((16 * 144, 144, 9, 3, 1), (False,) * 3, 2), (x, w), got)
    return got.tobytes()


@known
def test_a_wrong_number_is_an_error() -> None:
    x, w = np.ones((2, 8, 8, 16), np.float32), np.ones((16, 16, 3, 3), np.float32)
    call = ConvolutionCall(Kind.FORWARD, x.shape, x.shape, (3, 3), (1, 1), (1, 1), (1, 1), 1)
    numbers = call.numbers((2304, 144, 9, 3, 1), (False,) * 3, 1)
    with pytest.raises(ValueError, match="describe no convolution"):
        native.compute(numbers[:-1], (x, w), np.empty_like(x))
    with pytest.raises(ValueError, match="operands"):
        native.compute(numbers, (x[:1].copy(), w), np.empty_like(x))


@known
@pytest.mark.system
def test_nothing_is_computed_before_the_library_is_loaded() -> None:
    """In a process of its own, since a library stays loaded."""
    script = """
import importlib
import numpy as np
native = importlib.import_module("podrun.device.xla._onednn")
x, w = np.ones((2, 8, 8, 16), np.float32), np.ones((16, 16, 3, 3), np.float32)
numbers = NUMBERS
for call, arguments in (
    (native.prepare, (numbers,)),
    (native.compute, (numbers, (x, w), np.empty_like(x))),
    (native.pack, (numbers, w, np.empty_like(w))),
    (native.network, (np.zeros(8, np.int64), (), ())),
    (native.multiply, ([0, 0, 16, 16, 9, 0, 0, 1], (w[0].copy(), w[0].copy()), np.ones((16, 16), "f"))),
):
    try:
        call(*arguments)
    except RuntimeError as error:
        print(error)
"""
    call = ConvolutionCall(Kind.FORWARD, (2, 8, 8, 16), (2, 8, 8, 16), (3, 3), (1, 1), (1, 1), (1, 1), 1)
    numbers = call.numbers((2304, 144, 9, 3, 1), (False,) * 3, 1)
    command = [sys.executable, "-c", script.replace("NUMBERS", repr([int(n) for n in numbers]))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["no library is loaded yet: call load with its path first"] * 5, done


def test_a_library_that_computes_wrong_is_refused() -> None:
    def wrong(numbers: list[int], operands: Any, result: Any) -> None:
        result[...] = 0

    with pytest.raises(RuntimeError, match="wrong numbers"):
        convolutions.check_convolutions(wrong)


@pytest.mark.skipif((platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="no such package")
def test_the_library_and_the_module_are_installed() -> None:
    assert convolutions.available(), (
        "make installs the package; build_extension.py builds podrun.device.xla._onednn"
    )


def test_the_variable_chooses() -> None:
    assert convolutions.wanted({})
    assert not convolutions.wanted({"PODRUN_CONVOLUTIONS": "xla"})
    with pytest.raises(UsageError, match="PODRUN_CONVOLUTIONS is 'mkl'"):
        convolutions.wanted({"PODRUN_CONVOLUTIONS": "mkl"})


def test_one_message_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(convolutions, "PACKAGE", "no-such-package")
    monkeypatch.setattr(convolutions, "_started", functools.cache(convolutions._started.__wrapped__))
    assert not convolutions.available()
    assert not convolutions.available()
    assert len(caplog.records) == 1
    assert "no-such-package is not installed" in caplog.text


@known
def test_the_cache_holds_programs_with_calls(tmp_path: Path) -> None:
    """A second compilation is read from XLA's cache and computes the same."""
    case = CASES[0]
    arrays = case.arrays()
    before = jax.config.jax_compilation_cache_dir
    keys = ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    old = [getattr(jax.config, key) for key in keys]
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        for key, value in zip(keys, (0.0, -1), strict=True):
            jax.config.update(key, value)
        compilation_cache.reset_cache()
        first = [np.asarray(a).tobytes() for a in compiled(case.all, *arrays)[0](*arrays)]
        kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*-cache")}
        second = [np.asarray(a).tobytes() for a in compiled(case.all, *arrays)[0](*arrays)]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        for key, value in zip(keys, old, strict=True):
            jax.config.update(key, value)
        compilation_cache.reset_cache()
    assert kept
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*-cache")} == kept
    assert second == first


def test_without_the_library_nothing_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "available", lambda: False)
    case = CASES[0]
    run, count = compiled(case.all, *case.arrays())
    assert count == 0
    assert run(*case.arrays())[0].shape == (2, 24, 13, 11)


def _digests() -> str:
    found = []
    for case in (*CASES, Case((4, 16, 40, 40), (16, 16, 3, 3), 1, (1, 1))):
        arrays = case.arrays()
        run, _ = compiled(case.all, *arrays)
        found += [hashlib.sha256(np.asarray(a).tobytes()).hexdigest()[:12] for a in run(*arrays)]
    return " ".join(found)


@known
@pytest.mark.system
@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """NPROC is how many threads XLA's client starts with; it is read once, so each count takes a process."""
    results = {
        subprocess.run(
            [sys.executable, "-c", "from tests.device import test_convolutions as t; print(t._digests())"],
            env={**os.environ, "NPROC": str(threads), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for threads in (1, 2, 5)
    }
    assert len(results) == 1


@known
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("groups", [2, 3, 4, 6, 8])
@pytest.mark.sample(10)
def test_a_channel_shuffle_is_part_of_the_convolutions_call(groups: int, batch: int) -> None:
    def shuffle(y: Any) -> Any:
        return y.reshape(y.shape[0], groups, -1, *y.shape[2:]).swapaxes(1, 2).reshape(y.shape)

    def convolved(x: Any, w: Any) -> Any:
        return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), ((1, 1), (1, 1))))

    def alone(x: Any, w: Any) -> Any:
        return shuffle(convolved(x, w))

    def read_twice(x: Any, w: Any) -> Any:
        y = convolved(x, w)
        return shuffle(y), y

    rng = np.random.default_rng(4)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((batch, 24, 9, 11), (24, 24, 3, 3)))
    run, count = compiled(convolved, x, w)
    assert count == 1
    plain = run(x, w)
    np.testing.assert_allclose(plain, convolved(x, w), rtol=1e-4, atol=1e-3)
    shuffled = shuffle(plain)
    np.testing.assert_array_equal(compiled(alone, x, w)[0](x, w), shuffled)
    both = compiled(read_twice, x, w)[0](x, w)
    np.testing.assert_array_equal(both[0], shuffled)
    np.testing.assert_array_equal(both[1], plain)

    def operations(function: Any) -> str:
        lowered = jax.jit(function).lower(x, w)
        rewrite.rewrite_convolutions(lowered)
        return str(lowered.compiler_ir("stablehlo"))

    split = f"tensor<{batch}x9x11x{groups}x{24 // groups}xf32>"
    assert split not in operations(alone)
    assert split in operations(read_twice)
