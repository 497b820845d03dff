"""Random words in native code: the bits of JAX's generator, whatever the processor, the shape and the batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from podrun.compiler import export
from podrun.compiler.random_words import random_words, threefry
from podrun.core.names import RANDOM_WORDS
from podrun.device.xla import convolutions
from podrun.device.xla.compiler_options import WITHOUT_MLIR
from podrun.device.xla.own_functions import (
    OPERATIONS_PER_COUNTER,
    RANDOM_WORDS_TARGET,
    operations_of_words,
    rewrite_random_words,
)
from podrun.private_apis.jax import stablehlo

native: Any = importlib.import_module("podrun.device.xla._onednn") if convolutions.available() else None
needs_native = pytest.mark.skipif(native is None, reason="podrun's C module is not built")
LARGE = 150_000
"""More words than one part of a call has."""
Words = np.ndarray[Any, np.dtype[np.uint32]]


def words(*shape: int, seed: int = 0) -> Words:
    return np.random.default_rng([seed, *shape]).integers(0, 1 << 32, shape, dtype=np.uint32)


@np.errstate(over="ignore")
def by_numpy(first: Words, second: Words, low: Words, high: Words) -> list[Words]:
    """The generator as its paper writes it: 20 rounds, and after every fourth one the next words of the key."""
    keys = first, second, first ^ second ^ np.uint32(0x1BD11BDA)
    low, high = low + keys[0], high + keys[1]
    for number, distance in enumerate((3 * (13, 15, 26, 6, 17, 29, 16, 24))[:20]):
        low = low + high
        high = low ^ (high << np.uint32(distance) | high >> np.uint32(32 - distance))
        if number % 4 == 3:
            turn = number // 4 + 1
            low, high = low + keys[turn % 3], high + keys[(turn + 1) % 3] + np.uint32(turn)
    return [low, high]


def rewritten(
    function: Callable[..., Any], *operands: Any, by_native: bool = True
) -> tuple[Callable[[], Any], str]:
    """What computes a function's result, its call replaced, and its program."""
    lowered = jax.jit(lambda *values: function(*values)).lower(*operands)
    assert rewrite_random_words(lowered, lambda: by_native) == by_native
    compiled = lowered.compile()
    return lambda: compiled(*operands), lowered.as_text()


def test_numpy_and_jax_give_the_same_words() -> None:
    operands = [words(20, seed=seed) for seed in range(4)]
    np.testing.assert_array_equal(by_numpy(*operands), threefry2x32_p.bind(*map(jnp.asarray, operands)))


@needs_native
@pytest.mark.parametrize("own_keys", [False, True])
def test_native_code_gives_these_words_on_every_processor(own_keys: bool) -> None:
    for count in (1, 17, LARGE):
        low, high = words(count, seed=1), words(count, seed=2)
        keys = [words(*low.shape, seed=seed) if own_keys else words(seed=seed) for seed in (3, 4)]
        call, text = rewritten(random_words, *keys, low, high)
        assert RANDOM_WORDS_TARGET in text
        assert RANDOM_WORDS not in text
        right = by_numpy(*(np.broadcast_to(key, count) for key in keys), low, high)
        try:
            for level in range(
                3
            ):  # Where a processor has no such instructions, the call uses those that it has.
                native.instruction_level(level)
                np.testing.assert_array_equal(call(), right)
        finally:
            native.instruction_level(2)


@pytest.mark.parametrize("by_native", [pytest.param(True, marks=needs_native), False])
def test_operands_of_one_element_are_broadcast(by_native: bool) -> None:
    for first, second, low, high in (
        ((1,), (1,), (7,), (7,)),
        ((3, 1), (), (1, 5), (3, 5)),
        ((), (), (), ()),
    ):
        operands = [words(*shape, seed=seed) for seed, shape in enumerate((first, second, low, high))]
        shape = np.broadcast_shapes(first, second, low, high)
        call, _ = rewritten(random_words, *operands, by_native=by_native)
        np.testing.assert_array_equal(call(), by_numpy(*(np.broadcast_to(o, shape) for o in operands)))


def drawn(key: Any) -> Any:
    first, second = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(key), 3))
    return jax.random.bernoulli(first, 0.3, (40, 30)), jax.random.bits(second, (7,))


@needs_native
@pytest.mark.parametrize("batched", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_exported_piece_draws_what_jax_draws_and_has_no_loop_for_it(batched: bool) -> None:
    draw = jax.vmap(drawn) if batched else drawn
    key = words(4, 2) if batched else words(2)
    piece = export.PieceFunction(
        "p",
        lambda buffers: dict(zip("ab", draw(buffers["key"]), strict=True)),
        {"key": jax.ShapeDtypeStruct(key.shape, np.uint32)},
        ("a", "b"),
    )
    computation = export.export_piece(piece)
    exported = jax.export.deserialize(bytearray(computation.stablehlo))
    lowered = jax.jit(exported.call).lower(jax.ShapeDtypeStruct(key.shape, np.uint32))
    assert RANDOM_WORDS in lowered.as_text()
    assert rewrite_random_words(lowered, lambda: True) >= 4
    assert "stablehlo.while" not in lowered.as_text()
    by_jax = jax.jit(draw).lower(key).compile(compiler_options=dict(WITHOUT_MLIR))
    for result, right in zip(lowered.compile()(key), by_jax(key), strict=True):
        np.testing.assert_array_equal(np.asarray(result), np.asarray(right))


def test_programs_without_random_words_ask_for_nothing() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(words(3))
    assert rewrite_random_words(lowered, lambda: pytest.fail("it asked for the module")) == 0


@pytest.mark.parametrize("shapes", [[(), (), (0,), (0,)], [(3,), (3,), (2,), (2,)], [(3,), (), (3,), (3,)]])
def test_a_function_of_that_name_with_other_types_stays(shapes: list[tuple[int, ...]]) -> None:
    def other(*operands: Any) -> Any:
        return jnp.stack((operands[2], operands[3]))

    other.__name__ = RANDOM_WORDS
    called = jax.jit(threefry if 0 in shapes[2] else other)
    lowered = jax.jit(lambda *v: called(*v) + 1).lower(*(words(*shape) for shape in shapes))
    assert f"call @{RANDOM_WORDS}" in lowered.as_text()
    assert rewrite_random_words(lowered, lambda: True) == 0


@needs_native
def test_words_of_nothing_beside_others_are_compiled_as_they_are() -> None:
    def both(key: Any) -> tuple[Any, Any]:
        key = jax.random.wrap_key_data(key)
        return jax.random.bits(key, (0,)), jax.random.bits(key, (8,))

    kind = jax.ShapeDtypeStruct((2,), np.uint32)
    piece = export.PieceFunction(
        "p", lambda buffers: dict(zip("ab", both(buffers["key"]), strict=True)), {"key": kind}, ("a", "b")
    )
    exported = jax.export.deserialize(bytearray(export.export_piece(piece).stablehlo))
    lowered = jax.jit(exported.call).lower(kind)
    assert rewrite_random_words(lowered, lambda: True) == 1
    empty, drawn_words = lowered.compile()(words(2))
    assert empty.shape == (0,)
    np.testing.assert_array_equal(drawn_words, both(words(2))[1])


def test_words_do_not_count_among_the_operations_that_choose_threads() -> None:
    kinds = [jax.ShapeDtypeStruct((), np.uint32)] * 2 + [jax.ShapeDtypeStruct((5000,), np.uint32)] * 2
    lowered = jax.jit(lambda *v: random_words(*v)).lower(*kinds)
    by_xla = (lowered.cost_analysis() or {})["flops"]
    assert operations_of_words(stablehlo(lowered)) == 5000 * OPERATIONS_PER_COUNTER
    assert 0 <= by_xla - 5000 * OPERATIONS_PER_COUNTER < 10


@needs_native
def test_a_call_whose_number_does_not_fit_is_refused() -> None:
    def call(count: int, *operands: Words, size: int = 8) -> Any:
        made = jax.ffi.ffi_call(RANDOM_WORDS_TARGET, jax.ShapeDtypeStruct((2, size), np.uint32))
        return jax.jit(lambda *v: made(*v, numbers=np.array([count], np.int64)))(*operands)

    key, counters = words(), words(8)
    right = by_numpy(key, key, counters, counters)
    np.testing.assert_array_equal(call(8, key, key, counters, counters), right)
    for count, *operands in (
        (4, key, key, counters, counters),
        (0, key, key, counters, counters),
        (1 << 40, key, key, counters, counters),
        (8, key, counters, counters, counters),
        (8, words(4), words(4), counters, counters),
        (8, key, key, counters, words(7)),
        (8, key, key, counters, counters.view(np.float32)),
        (8, key, key, counters),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="podrun_random_words"):
            call(count, *operands)
