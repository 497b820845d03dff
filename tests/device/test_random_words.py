"""Random words in native code: the bits of JAX's generator, whatever the processor, the shape and the batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
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
from podrun.device.xla.own_functions import RANDOM_WORDS_TARGET, rewrite_random_words

native: Any = importlib.import_module("podrun.device.xla._onednn") if convolutions.available() else None
needs_native = pytest.mark.skipif(native is None, reason="podrun's C module is not built")
LARGE = 150_000
"""More words than one part of a call has."""
Words = np.ndarray[Any, np.dtype[np.uint32]]


@pytest.fixture(params=[0, 1, 2])
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Instructions of any processor, AVX2 and AVX-512."""
    if native.rounding_level(request.param) != request.param:
        native.rounding_level(2)
        pytest.skip("this processor has no such instructions")
    yield
    native.rounding_level(2)


def words(*shape: int, seed: int = 0) -> Words:
    return np.random.default_rng([seed, *shape]).integers(0, 1 << 32, shape, dtype=np.uint32)


def by_jax(*operands: Words) -> list[Words]:
    first, second = threefry2x32_p.bind(*map(jnp.asarray, operands))
    return [np.asarray(first), np.asarray(second)]


def rewritten(
    function: Callable[..., Any], *operands: Any, by_native: bool = True, calls: int = 1
) -> tuple[Any, str]:
    """A function's result, its calls replaced, and its program."""
    lowered = jax.jit(lambda *values: function(*values)).lower(*operands)
    assert rewrite_random_words(lowered, lambda: by_native) == (calls if by_native else 0)
    return lowered.compile()(*operands), lowered.as_text()


@needs_native
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("own_keys", [False, True])
def test_native_code_gives_the_words_of_jax(own_keys: bool) -> None:
    for count in (1, 2, 15, 16, 17, 1000, LARGE):
        low, high = words(count, seed=1), words(count, seed=2)
        keys = [words(*low.shape, seed=seed) if own_keys else words(seed=seed) for seed in (3, 4)]
        result, text = rewritten(random_words, *keys, low, high)
        assert RANDOM_WORDS_TARGET in text
        assert RANDOM_WORDS not in text
        np.testing.assert_array_equal(result, by_jax(*keys, low, high))


@pytest.mark.parametrize("by_native", [pytest.param(True, marks=needs_native), False])
def test_operands_of_one_element_are_broadcast(by_native: bool) -> None:
    for first, second, low, high in (
        ((), (), (3, 5), (3, 5)),
        ((3, 1), (3, 1), (3, 5), (3, 5)),
        ((1,), (1,), (7,), (7,)),
        ((3, 1), (), (1, 5), (3, 5)),
        ((), (), (), ()),
    ):
        operands = [words(*shape, seed=seed) for seed, shape in enumerate((first, second, low, high))]
        shape = np.broadcast_shapes(first, second, low, high)
        whole = [np.broadcast_to(operand, shape).copy() for operand in operands]
        result, _ = rewritten(random_words, *operands, by_native=by_native)
        np.testing.assert_array_equal(result, by_jax(*whole))


def drawn(key: Any) -> Any:
    key = jax.random.fold_in(jax.random.wrap_key_data(key), 3)
    first, second = jax.random.split(key)
    mask = jax.random.bernoulli(first, 0.3, (40, 30))
    return jnp.where(mask, jax.random.normal(second, (40, 30)), 0), jax.random.permutation(second, 50)


@needs_native
@pytest.mark.parametrize("batched", [False, True])
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
    for result, right in zip(lowered.compile()(key), jax.jit(draw)(key), strict=True):
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
def test_a_call_whose_number_does_not_fit_is_refused() -> None:
    def call(count: int, *operands: Words, size: int = 8) -> Any:
        made = jax.ffi.ffi_call(RANDOM_WORDS_TARGET, jax.ShapeDtypeStruct((2, size), np.uint32))
        return jax.jit(lambda *v: made(*v, numbers=np.array([count], np.int64)))(*operands)

    key, counters = words(), words(8)
    right = by_jax(np.broadcast_to(key, 8).copy(), np.broadcast_to(key, 8).copy(), counters, counters)
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
