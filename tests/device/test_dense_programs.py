"""Training steps of dense networks that the C module computes without XLA (`podrun.device.xla.dense_programs`)."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters.mlir import make_ir_context

from podrun.compiler.export import PieceFunction, export_piece
from podrun.core.executable import Computation
from podrun.device.xla import convolutions, dense_programs, pieces
from podrun.device.xla.dense_steps import DenseKind, DenseOperation, DenseReduction, DenseSteps
from podrun.device.xla.layer_marks import main_blocks
from podrun.device.xla.pieces import Piece, PieceCache
from podrun.private_apis.jax import mlir
from tests.quick_programs import (
    programs_of_default_tests_compile_quickly as programs_of_default_tests_compile_quickly,
)

pytestmark = pytest.mark.skipif(not convolutions.available(), reason="no oneDNN here")
native: Any = importlib.import_module("podrun.device.xla._onednn")
ROWS, INNER, OUTER, CLASSES = 32, 512, 256, 10
Array = np.ndarray[Any, Any]


def normal(*shapes: tuple[int, ...]) -> list[Array]:
    generator = np.random.default_rng(3)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def loss(values: dict[str, Any]) -> Any:
    hidden = jax.nn.relu(values["x"] @ values["w"] + values["b"])
    logits = jax.nn.log_softmax(hidden @ values["v"])
    return -jnp.take_along_axis(logits, values["y"][:, None], axis=1).mean()


def training(values: dict[str, Any]) -> dict[str, Any]:
    """A loss, and gradients of weights."""
    names = ("w", "b", "v")
    value, gradients = jax.value_and_grad(lambda own: loss({**values, **own}))({n: values[n] for n in names})
    return {"loss": value, **{f"gradient {n}": gradients[n] for n in names}}


def operands() -> dict[str, Array]:
    w, b, v, x = normal((INNER, OUTER), (OUTER,), (OUTER, CLASSES), (ROWS, INNER))
    y = np.random.default_rng(5).integers(0, CLASSES, ROWS).astype(np.int32)
    return {"w": w / np.float32(16), "b": b, "v": v / np.float32(16), "x": x, "y": y}


@functools.cache
def step() -> Computation:
    """The training of this file, lowered once."""
    return computation(training)


def computation(
    function: Callable[[dict[str, Any]], dict[str, Any]], values: dict[str, Array] | None = None
) -> Computation:
    values = operands() if values is None else values
    specs = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in values.items()}
    outputs = tuple(sorted(jax.eval_shape(function, specs)))
    return export_piece(PieceFunction("step", function, specs, outputs))


def float64(function: Callable[[dict[str, Any]], dict[str, Any]] = training) -> list[Array]:
    with jax.enable_x64(True):
        wide = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in operands().items()}
        return [np.asarray(v) for _, v in sorted(jax.jit(function)(wide).items())]


def results(piece: Piece, values: dict[str, Array] | None = None) -> list[Array]:
    values = operands() if values is None else values
    return [np.asarray(r) for r in piece.call(*(values[n] for n in piece.computation.inputs))]


def test_a_step_is_as_near_to_float64_as_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    own = PieceCache(None).piece(step(), ())
    assert own.dense is not None
    monkeypatch.setattr(pieces, "may_be_dense", lambda *_: False)
    xlas = PieceCache(None).piece(step(), ())
    assert xlas.dense is None
    for ours, theirs, right in zip(results(own), results(xlas), float64(), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        scale = np.abs(right).max()
        assert np.abs(ours - right).max() <= 2 * np.abs(theirs - right).max() + 1e-7 * scale


def test_results_are_written_to_memory_of_the_callers() -> None:
    piece = PieceCache(None).piece(step(), ())
    assert piece.dense is not None
    assert piece.placed == {0, 1, 2, 3}
    memory = {at: np.full(piece.kinds[len(piece.shapes) + at][0], 7, np.float32) for at in (1, 2)}
    values = operands()
    given = piece.dense.placing(memory)(*(values[n] for n in piece.computation.inputs))
    for at, right in enumerate(results(piece)):
        assert np.array_equal(given[at].reshape(right.shape), right)
        assert (given[at] is memory.get(at)) is (at in memory)


def test_another_process_neither_lowers_nor_reads_a_step_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = PieceCache(tmp_path).piece(step(), ())
    monkeypatch.setattr(pieces, "_lower", lambda *_: pytest.fail("lowered again"))
    second = PieceCache(tmp_path).piece(step(), ())
    assert second.dense is not None
    assert (second.kinds, second.placed) == (first.kinds, first.placed)
    for ours, theirs in zip(results(first), results(second), strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_the_same_bits_for_all_vectors() -> None:
    piece = PieceCache(None).piece(step(), ())
    runs = []
    for lanes in (16, 8, 0):
        before = native.vectors(lanes)
        runs.append([r.tobytes() for r in results(piece)])
        native.vectors(before)
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    "more",
    [
        lambda v: jnp.sort(v["b"]),
        lambda v: v["b"].astype(jnp.float16),
        lambda v: jnp.cumsum(v["b"]),
        lambda v: v["b"].astype(jnp.int32),
        lambda v: jnp.einsum("abc,acd->abd", v["x"].reshape(4, 8, 512), v["x"].reshape(4, 512, 8)),
        lambda v: jnp.sin(v["x"]),
        lambda v: sum(jnp.tanh(v["w"] * n) for n in range(40)),
    ],
    ids=["sort", "half", "sums so far", "int32 of float32", "batches", "sine", "work between products"],
)
@pytest.mark.sample(3)
def test_other_pieces_stay_with_xla(more: Callable[[dict[str, Any]], Any]) -> None:
    """They are forward passes that would be dense steps but for what they compute besides."""

    def function(values: dict[str, Any]) -> dict[str, Any]:
        return {"loss": loss(values), "more": more(values)}

    assert forward_piece().dense is not None
    piece = PieceCache(None).piece(computation(function), ())
    assert piece.dense is None
    np.testing.assert_allclose(results(piece)[-1], np.asarray(more(operands())), rtol=2e-3, atol=1e-5)


@functools.cache
def forward_piece() -> Piece:
    return PieceCache(None).piece(computation(lambda values: {"loss": loss(values)}), ())


def test_a_call_that_is_not_inlined_is_computed() -> None:
    """Only calls that give back their argument are walls."""
    inner = jax.jit(lambda v: v * 2 + 1)

    def function(values: dict[str, Any]) -> dict[str, Any]:
        with set_xla_metadata(inlineable="false"):
            y = inner(values["x"] @ values["w"])
        return {"y": jnp.tanh(y[:, :8])}

    piece = PieceCache(None).piece(computation(function), ())
    (right,) = float64(function)
    np.testing.assert_allclose(results(piece)[0], right, atol=1e-3)


@pytest.mark.parametrize(
    ("operands", "returned", "reads"),
    [("%1, %2", "%3", True), ("%2, %2", "%3", False), ("%1, %1", "%3", False), ("%1, %2", "%2", False)],
)
def test_a_region_has_to_combine_both_arguments(operands: str, returned: str, reads: bool) -> None:
    text = f"""func.func public @main(%a: tensor<4x8xf32>) -> tensor<4xf32> {{
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        %0 = "stablehlo.reduce"(%a, %z) <{{dimensions = array<i64: 1>}}> ({{
          ^bb0(%1: tensor<f32>, %2: tensor<f32>):
            %3 = stablehlo.add {operands} : tensor<f32>
            stablehlo.return {returned} : tensor<f32>
        }}) : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
        return %0 : tensor<4xf32> }}"""
    ir, context = mlir(), make_ir_context()
    with context, ir.Location.unknown():
        module = ir.Module.parse(text)
        block = next(iter(main_blocks(ir, module)))
        reading = dense_programs._DenseReading(frozenset())
        assert reading.read(block.arguments, [op.operation for op in block]) is reads


def test_without_a_large_product_or_the_library_pieces_stay_with_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {n: v[:8] if n in "xy" else v for n, v in operands().items()}
    assert PieceCache(None).piece(computation(training, values=small), ()).dense is None
    monkeypatch.setenv("PODRUN_CONVOLUTIONS", "xla")
    assert PieceCache(None).piece(step(), ()).dense is None


def test_indices_outside_are_as_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    values = operands()
    values["y"][:6] = [-1, -CLASSES, -CLASSES - 1, CLASSES, 2**31 - 1, -(2**31)]
    own = PieceCache(None).piece(computation(training, values=values), ())
    monkeypatch.setattr(pieces, "may_be_dense", lambda *_: False)
    xlas = PieceCache(None).piece(computation(training, values=values), ())
    for ours, theirs in zip(results(own, values), results(xlas, values), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


# --- What is computed element by element ------------------------------------------------------------------------------

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    -1e-40,
    1.2e-38,
    3e38,
    -3e38,
    88.8,
    -87.4,
    104,
    -200,
]
FUNCTIONS: dict[DenseOperation, Callable[[Array], Array]] = {
    DenseOperation.EXPONENTIAL: np.exp,
    DenseOperation.LOG: np.log,
    DenseOperation.SQRT: np.sqrt,
    DenseOperation.TANH: np.tanh,
    DenseOperation.LOGISTIC: lambda x: 1 / (1 + np.exp(-x)),
}


def mapped(what: DenseOperation, *arrays: Array) -> Array:
    """What the C module computes of arrays of one shape."""
    steps = DenseSteps()
    view = steps.map(what, *(steps.operand(array.shape) for array in arrays))
    assert view is not None
    assert steps.give(view)
    return run(steps, arrays, arrays[0].shape)


def run(steps: DenseSteps, arrays: Sequence[Array], shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    result = np.empty(shape, dtype)
    step = native.dense(np.array(steps.numbers(), np.int64))
    native.run_dense(step, tuple(arrays), (result,))
    return result


@pytest.mark.parametrize("lanes", [16, 8, 0])
@pytest.mark.parametrize("what", FUNCTIONS, ids=lambda what: what.name.lower())
def test_functions_are_next_to_float64(what: DenseOperation, lanes: int) -> None:
    """At most 0.51 units in the last place away. Denormal numbers are 0."""
    generator = np.random.default_rng(1)
    wide = np.exp(generator.uniform(-80, 80, 5000)) * generator.choice([1, -1], 5000)
    usual = [generator.normal(size=5000), generator.uniform(-100, 100, 5000), 1 + 1e-3 * usual_normal(5000)]
    x = np.concatenate([SPECIAL, wide, *usual]).astype(np.float32)
    before = native.vectors(lanes)
    result = mapped(what, x)
    native.vectors(before)
    tiny = np.finfo(np.float32).tiny
    flat = np.where(np.abs(x) < tiny, np.copysign(np.float32(0), x), x)
    with np.errstate(all="ignore"):
        right = FUNCTIONS[what](flat.astype(np.float64))
        nearest = right.astype(np.float32)
    right[np.abs(right) < tiny] = 0
    unit = np.spacing(np.abs(nearest)).astype(np.float64)
    is_finite = np.isfinite(nearest) & (np.abs(nearest) >= tiny)
    assert np.all(np.abs(result[is_finite] - right[is_finite]) <= 0.51 * unit[is_finite])
    assert np.array_equal(np.isnan(result), np.isnan(right))
    infinite = np.isinf(nearest)
    assert np.array_equal(result[infinite], nearest[infinite])
    assert np.all(np.abs(result[np.abs(right) < tiny]) <= tiny)


def usual_normal(count: int) -> Array:
    return np.random.default_rng(2).normal(size=count)


def test_operations_have_numpys_bits() -> None:
    generator = np.random.default_rng(4)
    a, b = (np.concatenate([SPECIAL, generator.normal(size=700)]).astype(np.float32) for _ in range(2))
    b = generator.permutation(b)
    a, b = (np.where(np.abs(v) < 1e-37, 0, v).astype(np.float32) for v in (a, b))
    with np.errstate(all="ignore"):
        for what, function in (
            (DenseOperation.ADD, np.add),
            (DenseOperation.SUBTRACT, np.subtract),
            (DenseOperation.MULTIPLY, np.multiply),
            (DenseOperation.DIVIDE, np.divide),
            (DenseOperation.MAXIMUM, np.maximum),
            (DenseOperation.MINIMUM, np.minimum),
        ):
            right = function(a, b)
            right[np.abs(right) < np.finfo(np.float32).tiny] *= 0
            np.testing.assert_array_equal(mapped(what, a, b), right, err_msg=what.name)
        for what, compare in (
            (DenseOperation.EQ, np.equal),
            (DenseOperation.NE, np.not_equal),
            (DenseOperation.LT, np.less),
            (DenseOperation.LE, np.less_equal),
            (DenseOperation.GT, np.greater),
            (DenseOperation.GE, np.greater_equal),
        ):
            truth = mapped(what, a, b).view(np.int32)
            np.testing.assert_array_equal(truth, compare(a, b).astype(np.int32), err_msg=what.name)
            i, j = (generator.integers(-3, 3, 100).astype(np.int32) for _ in range(2))
            truth = mapped(DenseOperation[f"INT_{what.name}"], i, j).view(np.int32)
            np.testing.assert_array_equal(truth, compare(i, j).astype(np.int32), err_msg=what.name)
    np.testing.assert_array_equal(mapped(DenseOperation.NEGATE, a).view(np.int32), (-a).view(np.int32))
    chosen = mapped(DenseOperation.SELECT, (a > b).astype(np.int32), a, b)
    np.testing.assert_array_equal(chosen, np.where(a > b, a, b))


@pytest.mark.parametrize("lanes", [16, 8, 0])
def test_greater_and_smaller_zeros_are_xlas(lanes: int) -> None:
    a, b = (
        np.tile(np.array(zeros, np.float32), 40) for zeros in ([0.0, -0.0, 0.0, -0.0], [0.0, 0.0, -0.0, -0.0])
    )
    before = native.vectors(lanes)
    ours = [mapped(what, a, b) for what in (DenseOperation.MAXIMUM, DenseOperation.MINIMUM)]
    native.vectors(before)
    for result, function in zip(ours, (jax.lax.max, jax.lax.min), strict=True):
        assert result.tobytes() == np.asarray(jax.jit(function)(a, b)).tobytes()


@pytest.mark.parametrize("shape", [(5, 300, 1), (1, 70, 130), (3, 33, 64), (2, 5, 7)])
def test_sums_and_greatest_values(shape: tuple[int, int, int]) -> None:
    (x,) = normal(shape)
    for what, function in ((DenseReduction.SUM, np.sum), (DenseReduction.LARGEST, np.max)):
        steps = DenseSteps()
        view = steps.reduce(what, steps.operand(shape), [1])
        assert view is not None
        assert steps.give(view)
        result = run(steps, [x], (shape[0], shape[2]))
        np.testing.assert_allclose(result, function(x.astype(np.float64), axis=1), rtol=0, atol=2e-5)
    x[0, -1, 0] = np.nan
    assert np.isnan(run(steps, [x], (shape[0], shape[2]))[0, 0])


def test_views_are_read_as_they_lie() -> None:
    """Transposed, repeated and cut values, against NumPy."""
    x, y = normal((6, 5, 4), (4,))
    steps = DenseSteps()
    first, second = steps.operand(x.shape), steps.operand(y.shape)
    turned = first.transpose([2, 0, 1]).cut([0, 1, 0], [4, 6, 5], [1, 2, 3])
    repeated = second.broadcast((4, 3, 2), [0])
    view = steps.map(DenseOperation.ADD, turned, repeated)
    assert view is not None
    assert steps.give(view)
    expected = x.transpose(2, 0, 1)[:, 1:6:2, ::3] + y[:, None, None]
    np.testing.assert_array_equal(run(steps, [x, y], expected.shape), expected)


def test_numbers_and_memory_of_a_step_have_to_fit() -> None:
    steps = DenseSteps()
    view = steps.map(DenseOperation.ADD, steps.operand((3, 5)), steps.operand((3, 5)))
    assert view is not None
    assert steps.give(view)
    numbers = steps.numbers()
    step = native.dense(np.array(numbers, np.int64))
    good, bad = np.zeros(15, np.float32), np.zeros(14, np.float32)
    native.run_dense(step, (good, good), (np.zeros(15, np.float32),))
    for arguments in (((good, bad), (good,)), ((good, good), (bad,)), ((good,), (good,)), ((), ())):
        with pytest.raises(ValueError, match="than the numbers say"):
            native.run_dense(step, *arguments)
    for at in range(len(numbers)):
        for value in (-1, 1 << 40):
            changed = [*numbers[:at], value, *numbers[at + 1 :]]
            with pytest.raises(ValueError, match="describe no dense step"):
                native.dense(np.array(changed, np.int64))
    for wrong in ([], numbers[:-1], [*numbers, 0]):
        with pytest.raises(ValueError, match="describe no dense step"):
            native.dense(np.array(wrong, np.int64))


def test_operations_of_the_c_module_have_the_numbers_that_python_knows() -> None:
    source = (Path(convolutions.__file__).parent / "native" / "dense.h").read_text()
    lists = re.findall(
        r"^enum \{(.*?)\};", re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL), re.DOTALL | re.MULTILINE
    )
    kinds, operations, reductions, *_ = [[name.strip() for name in text.split(",")] for text in lists]
    assert kinds == [*(kind.name for kind in DenseKind), "DENSE_STEPS"]
    assert operations == [*(f"D_{what.name}" for what in DenseOperation), "DENSE_OPERATIONS"]
    assert reductions == ["SUM", "LARGEST", "ALL", "ANY_OF", "DENSE_REDUCTIONS"]
    assert [what.value for what in DenseReduction] == [0, 1, 2, 3]
    assert 4 * dense_programs.MOST_OPERATIONS_READ < 4096
