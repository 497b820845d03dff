"""Stochastic rounding in native code: the bits of the formula, whatever the processor, the shape and the batch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from podrun.compiler import grid_rounding, stochastic
from podrun.core.names import ROUNDING
from podrun.device.xla import convolutions
from podrun.device.xla.compiler_options import COMPILER_OPTIONS
from podrun.device.xla.roundings import ROUNDING_TARGET, rewrite_roundings

native: Any = importlib.import_module("podrun.device.xla._onednn") if convolutions.available() else None
pytestmark = pytest.mark.skipif(native is None, reason="podrun's C module is not built")
LARGE = 150_000
"""More elements than one part of a call has."""
FloatArray = np.ndarray[Any, np.dtype[np.float32]]


def numbers(*shape: int) -> FloatArray:
    """float32 of every kind: any bits at all, numbers about the range of the halves, and what lies at its ends."""
    generator = np.random.default_rng(3)
    any_bits = generator.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    near = generator.standard_normal(shape) * np.exp2(generator.uniform(-30, 20, shape))
    ends = generator.choice(
        np.float32([0, -0.0, 65504, 65519, 65520, 65536, np.inf, -np.inf, 6e-8, -1e-40]), shape
    )
    return np.choose(generator.integers(0, 3, shape), [any_bits, near.astype(np.float32), ends]).astype(
        np.float32
    )


def states(*shape: int) -> Any:
    return np.random.default_rng(4).integers(0, 1 << 32, (*shape, 2), dtype=np.uint32)


def computing(
    function: Callable[..., Any], *operands: Any, by_native: bool
) -> tuple[Callable[[], np.ndarray[Any, Any]], str]:
    """What computes the bits of a function's result, and its program after rewriting."""
    lowered = jax.jit(lambda *values: function(*values)).lower(*operands)
    count = rewrite_roundings(lowered, lambda: by_native)
    assert count == (by_native and 1)
    compiled: Any = lowered.compile(compiler_options=dict(COMPILER_OPTIONS))

    def bits() -> np.ndarray[Any, Any]:
        result = np.asarray(compiled(*operands))
        return result.view(np.uint16 if result.dtype == np.float16 else np.uint32)

    return bits, lowered.as_text()


def computed(
    function: Callable[..., Any], *operands: Any, by_native: bool
) -> tuple[np.ndarray[Any, Any], str]:
    """The bits of a function's result and its program after rewriting."""
    bits, text = computing(function, *operands, by_native=by_native)
    return bits(), text


def by_row(value: Any, state: Any) -> Any:
    """Rounded with a row inside of a table."""
    return grid_rounding.rounded(value, *stochastic.Places(state, 20).of_result(7, 0))


def by_default(cases: Iterable[str], *some: str) -> list[Any]:
    """The names of all cases; those but these are slow."""
    left = set(some).difference(cases)
    assert not left, left
    return [name if name in some else pytest.param(name, marks=pytest.mark.slow) for name in cases]


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a number": (grid_rounding.on_grid, (numbers(), states())),
    "a few": (grid_rounding.on_grid, (numbers(7, 5), states())),
    "many": (grid_rounding.on_grid, (numbers(LARGE), states())),
    "a batch": (jax.vmap(grid_rounding.on_grid), (numbers(6, 7, 5), states(6))),
    "a batch inside": (jax.vmap(grid_rounding.on_grid, (1, 0), 1), (numbers(7, 6, 5), states(6))),
    "one value": (jax.vmap(grid_rounding.on_grid, (None, 0)), (numbers(7, 5), states(6))),
    "one state": (jax.vmap(grid_rounding.on_grid, (0, None)), (numbers(6, 7), states())),
    "two batches": (jax.vmap(jax.vmap(grid_rounding.on_grid)), (numbers(2, 3, 7), states(2, 3))),
    "large batches": (jax.vmap(grid_rounding.on_grid), (numbers(3, LARGE // 2), states(3))),
    "rows of tables": (jax.vmap(by_row), (numbers(6, 7, 5), states(6))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_native_code_gives_the_bits_of_the_formula(case: str) -> None:
    function, operands = CASES[case]
    bits, text = computed(function, *operands, by_native=True)
    assert ROUNDING_TARGET in text
    assert ROUNDING not in text
    plain, text = computed(function, *operands, by_native=False)
    assert "inlineable" in text
    np.testing.assert_array_equal(bits, plain)


@pytest.fixture
def any_level() -> Iterator[Callable[[int], int]]:
    yield native.instruction_level
    native.instruction_level(2)


@pytest.mark.parametrize(("lanes", "most"), [(8, 1), (0, 0)])
def test_the_limit_of_the_librarys_instructions_holds_here_too(
    lanes: int, most: int, any_level: Callable[[int], int]
) -> None:
    before = native.vectors(lanes)
    level = any_level(2)
    native.vectors(before)
    assert level <= most


def test_every_instruction_set_gives_the_same_bits(any_level: Callable[[int], int]) -> None:
    best = any_level(2)
    operands = numbers(5, 1001), states(5)
    function = jax.vmap(grid_rounding.on_grid)
    right, _ = computed(function, *operands, by_native=False)
    bits, _ = computing(function, *operands, by_native=True)
    for level in range(best + 1):
        assert any_level(level) == level
        np.testing.assert_array_equal(bits(), right)


def test_a_batch_rounds_each_as_if_it_were_alone() -> None:
    values, of_each = numbers(4, 9), states(4)
    together = jax.vmap(grid_rounding.on_grid)(values, of_each)
    for value, state, rounded in zip(values, of_each, together, strict=True):
        np.testing.assert_array_equal(grid_rounding.on_grid(value, state), rounded)


@pytest.mark.parametrize("size", [5, LARGE])
def test_only_a_large_operand_is_written_over(size: int) -> None:
    """A small one would be copied first, and XLA compiles that."""
    operands = numbers(size), states()
    bits, text = computed(lambda v, s: grid_rounding.on_grid(lax.floor(v), s), *operands, by_native=True)
    assert ("stablehlo.output_operand_alias<" in text) == (size == LARGE)
    plain, _ = computed(lambda v, s: grid_rounding.on_grid(lax.floor(v), s), *operands, by_native=False)
    np.testing.assert_array_equal(bits, plain)


HALF = np.float16


def halves(*shape: int) -> Any:
    return np.random.default_rng(5).integers(0, 1 << 16, shape, dtype=np.uint16).view(HALF)


def over(value: Any, *axes: int) -> Any:
    """A value along these axes of all that is computed here."""
    return lax.broadcast_in_dim(value, (3, 5, 700), axes)


def to_nan(value: Any) -> Any:
    return lax.select(lax.eq(lax.abs(value), np.float32(np.inf)), lax.full_like(value, np.nan), value)


def wide(value: Any) -> Any:
    return value.astype(np.float32)


def ones(value: Any) -> Any:
    return lax.full_like(value, 1)


def there_and_back(value: Any) -> Any:
    """A value through two reshapes."""
    return lax.reshape(lax.reshape(value, (value.size,)), value.shape)


WHOLE = numbers(3, 5, 700), numbers(6, 5, 700)[3:]
BESIDE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (lambda r, a, b: r(a + b), WHOLE),
    "subtract": (lambda r, a, b: r(a - b), WHOLE),
    "multiply": (lambda r, a, b: r(a * b), WHOLE),
    "divide": (lambda r, a, b: r(a / b), WHOLE),
    "sqrt": (lambda r, a: r(lax.sqrt(a)), WHOLE[:1]),
    "square": (lambda r, a: r(a * a), WHOLE[:1]),
    "of a constant": (lambda r, a: r(np.float32(0.9) * a), WHOLE[:1]),
    "with a number": (lambda r, a, b: r(a - over(b)), (WHOLE[0], numbers())),
    "for channels": (lambda r, a, b: r(over(b, 2) + a), (WHOLE[0], numbers(700))),
    "for rows": (lambda r, a, b: r(a * over(b, 0, 1)), (WHOLE[0], numbers(3, 5))),
    "for the middle": (lambda r, a, b: r(a * over(b, 1)), (WHOLE[0], numbers(5))),
    "reshaped": (lambda r, a, b: r(a * over(b.reshape(3, 1, 1), 0, 1, 2)), (WHOLE[0], numbers(3))),
    "halves": (lambda r, a, b: r(wide(a) * wide(b)), (halves(3, 5, 700), halves(6, 5, 700)[3:])),
    "a half": (lambda r, a, b: r(a / over(wide(b))), (WHOLE[0], halves())),
    "halves for channels": (lambda r, a, b: r(a / wide(over(b, 2))), (WHOLE[0], halves(700))),
    "of a number, twice": (
        lambda r, a, b: r(a - over(lax.broadcast_in_dim(b, (3, 1, 1), ()), 0, 1, 2)),
        (WHOLE[0], numbers()),
    ),
    "of channels, twice": (
        lambda r, a, b: r(a - over(lax.broadcast_in_dim(b, (1, 700), (1,)), 0, 2)),
        (WHOLE[0], numbers(700)),
    ),
    "of one or the other": (lambda r, a, b: r(a - lax.select(b > 1, a, a)), WHOLE),
    "of what is always taken": (
        lambda r, a, b: r(a / lax.select(lax.eq(np.float32(8), np.float32(0)), lax.full_like(b, 1), b)),
        WHOLE,
    ),
    "converted, twice the same": (
        lambda r, a, b: (lambda y: r(y * lax.select(b > 1, y, y)))(wide(a)),
        (halves(3, 5, 700), WHOLE[1]),
    ),
    "converted, always taken": (
        lambda r, a: (lambda y: r(y / lax.select(lax.eq(np.float32(8), np.float32(0)), ones(y), y)))(wide(a)),
        (halves(3, 5, 700),),
    ),
    "converted and reshaped": (
        lambda r, a: (lambda y: r(y * there_and_back(y)))(wide(a)),
        (halves(3, 5, 700),),
    ),
    "a reshaped one, reshaped": (
        lambda r, a: (lambda y: r(y - there_and_back(y)))(lax.reshape(a, (3, 5, 700))),
        (numbers(15, 700),),
    ),
    "a reshaped one, twice the same": (
        lambda r, a, b: (lambda y: r(y * lax.select(b > 0, y, y)))(lax.reshape(a, (3, 5, 700))),
        (numbers(15, 700), WHOLE[1]),
    ),
    "of channels, reshaped": (lambda r, a: (lambda y: r(y * there_and_back(y)))(over(a, 2)), (numbers(700),)),
    "to halves": (lambda r, a: r(a).astype(HALF), WHOLE[:1]),
    "to NaN": (lambda r, a: to_nan(r(a)), WHOLE[:1]),
    "to the greatest": (lambda r, a: lax.clamp(np.float32(-65504), r(a), np.float32(65504)), WHOLE[:1]),
    "all of it": (lambda r, a, b: to_nan(r(a + wide(b))).astype(HALF), (WHOLE[0], halves(3, 5, 700))),
    "both uses": (lambda r, a: (r(a * 2) * 1).astype(HALF), WHOLE[:1]),
}


BESIDE_BY_DEFAULT = (
    "for rows",
    "halves",
    "of a number, twice",
    "of what is always taken",
    "converted, twice the same",
    "a reshaped one, reshaped",
    "to the greatest",
    "all of it",
    "both uses",
)
"""With all branches of the rewriting."""


@pytest.mark.parametrize("case", by_default(BESIDE, *BESIDE_BY_DEFAULT))
def test_what_stands_beside_a_rounding_is_part_of_its_call(
    case: str, any_level: Callable[[int], int]
) -> None:
    function, operands = BESIDE[case]

    def by_state(state: Any, *values: Any) -> Any:
        return function(lambda value: grid_rounding.on_grid(value, state), *values)

    right, _ = computed(by_state, states(), *operands, by_native=False)
    bits, text = computing(by_state, states(), *operands, by_native=True)
    kinds = set(re.findall(r"stablehlo\.(\w+)", text.split("func.func private")[0])) - {
        "constant",
        "custom_call",
        "reshape",
    }
    assert kinds == (
        {"multiply", "convert", "broadcast_in_dim"} if case == "both uses" else {"broadcast_in_dim"}
    )
    for level in range(any_level(2) + 1):
        any_level(level)
        np.testing.assert_array_equal(bits(), right)


UNTOUCHED: dict[str, Callable[..., Any]] = {
    "a sum of a product": lambda r, a, b: r(a * b + a),
    "a sum of a product, moved": lambda r, a, b: r(a - lax.reshape(a * b, a.shape)),
    "read twice": lambda r, a, b: (lambda y: r(y) * y)(a + b),
    "a test read twice": lambda r, a, b: (lambda y, z: lax.select(z, lax.full_like(y, np.nan), y) + wide(z))(
        *(lambda y: (y, lax.eq(lax.abs(y), np.float32(np.inf))))(r(a))
    ),
    "of two that are computed": lambda r, a, b: r(lax.sin(a) * lax.sin(b)),
    "of a test of complex numbers": lambda r, a, b: r(
        a
        * lax.select(lax.eq(lax.full_like(a, 1, np.complex64), lax.full_like(a, 2, np.complex64)), b, ones(b))
    ),
    "clipped and read": lambda r, a, b: (lambda y: to_nan(y) + y)(r(a)),
    "another clip": lambda r, a, b: lax.clamp(np.float32(-9), r(a), np.float32(9)),
}


@pytest.mark.parametrize(
    "case",
    by_default(UNTOUCHED, "a sum of a product", "of two that are computed", "of a test of complex numbers"),
)
def test_other_operations_beside_a_rounding_stay(case: str) -> None:
    def by_state(state: Any, *values: Any) -> Any:
        return UNTOUCHED[case](lambda value: grid_rounding.on_grid(value, state), *values)

    bits, _ = computed(by_state, states(), *WHOLE, by_native=True)
    right, _ = computed(by_state, states(), *WHOLE, by_native=False)
    np.testing.assert_array_equal(bits.view(np.float32), right.view(np.float32))


MOVED: dict[str, Callable[..., Any]] = {
    "pad": lambda y, a: lax.pad(y[1:], np.float32(0), ((1, 0, 0), (0, 0, 0), (0, 0, 0))),
    "concatenate": lambda y, a: lax.concatenate([y[:1], a[1:]], 0),
    "select": lambda y, a: lax.select(a > 0, y, ones(y)),
    "quotient": lambda y, a: lax.select(a > 0, a, y / np.float32(3)),
}


@pytest.mark.parametrize("case", by_default(MOVED, "concatenate", "select"))
def test_a_sum_of_a_product_that_is_moved_stays_with_xla(case: str) -> None:
    """LLVM sees the product through such operations, and rounds both at once."""

    def by_state(state: Any, a: Any, b: Any) -> Any:
        return grid_rounding.on_grid(MOVED[case](a * b, a) - b, state)

    bits, text = computed(by_state, states(), *WHOLE, by_native=True)
    assert "stablehlo.subtract" in text
    right, _ = computed(by_state, states(), *WHOLE, by_native=False)
    np.testing.assert_array_equal(bits.view(np.float32), right.view(np.float32))


@pytest.mark.parametrize(("channels", "axis"), [(2, 1), (63, 1), (63, 0)])
@pytest.mark.sample(3)
def test_short_rows_stay_with_xla(channels: int, axis: int) -> None:
    """Putting their operand together takes longer than XLA's own operation."""
    value, state = numbers(90, channels), states()

    def scaled(of_each: Any) -> Any:
        return grid_rounding.on_grid(value * lax.broadcast_in_dim(of_each, value.shape, (axis,)), state)

    bits, text = computed(scaled, numbers(value.shape[axis]), by_native=True)
    assert "stablehlo.multiply" in text
    np.testing.assert_array_equal(bits, computed(scaled, numbers(value.shape[axis]), by_native=False)[0])


def test_programs_without_roundings_ask_for_nothing() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(numbers(3))
    assert rewrite_roundings(lowered, lambda: pytest.fail("it asked for the module")) == 0


def test_a_function_of_that_name_with_other_types_stays() -> None:
    def other(value: Any, table: Any, row: Any) -> Any:
        return value + table.sum() + row

    other.__name__ = ROUNDING
    called = jax.jit(other)
    lowered = jax.jit(lambda *v: called(*v) * 2).lower(numbers(3), np.zeros((4, 3), np.uint32), np.int32(0))
    assert f"call @{ROUNDING}" in lowered.as_text()
    assert rewrite_roundings(lowered, lambda: True) == 0


def test_a_call_whose_numbers_do_not_fit_is_refused() -> None:
    value, table = numbers(8), states(3)

    def call(*sizes: int) -> Any:
        kind = jax.ShapeDtypeStruct(value.shape, np.float32)
        made = jax.ffi.ffi_call(ROUNDING_TARGET, kind)
        n = np.array([*sizes, 0, 0, 1, 8, 1, 8], np.int64)
        return jax.jit(lambda v, t: made(v, t, np.int32(2), numbers=n))(value, table)

    right = computed(lambda v, t: grid_rounding.on_grid(v, t[2]), value, table, by_native=False)[0]
    np.testing.assert_array_equal(np.asarray(call(8, 1, 3)).view(np.uint32), right)
    for wrong in ((8, 1, 4), (4, 2, 3), (9, 1, 3), (0, 1, 3), (8, 1), (8, -1, 3), (1 << 40, 1, 3), (4, 1, 3)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="podrun_rounding"):
            call(*wrong)
