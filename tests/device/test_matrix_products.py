"""Products as calls of oneDNN: the numbers of float64, the same bits whoever helps, results in given memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podrun.compiler.compile import CompileOptions, compile_program
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program
from podrun.core.aligned_memory import aligned_empty
from podrun.core.executable import Executable, TensorSpec
from podrun.device.host.client import InProcessMachines
from podrun.device.program.buffers import Buffers
from podrun.device.program.xla_memory import Operands
from podrun.device.xla import convolutions, matrix_products
from podrun.device.xla.clients import one_thread_device, own_settings
from podrun.device.xla.matrix_products import (
    LEAST_MULTIPLICATIONS,
    WITH_BIAS,
    WITH_CUT,
    WITH_MASK,
    ProductCall,
    ResultPlaces,
    check_products,
    rewrite_products,
)
from podrun.device.xla.pieces import PieceCache
from tests.copies import run_copied
from tests.quick_programs import (
    programs_of_default_tests_compile_quickly as programs_of_default_tests_compile_quickly,
)
from tests.stress.guarded import GuardedMemory, guarded_product

from .conftest import owners, together
from .programs import computation

native: Any = importlib.import_module("podrun.device.xla._onednn") if convolutions.available() else None
pytestmark = pytest.mark.skipif(native is None, reason="podrun's C module is not built")
M, N, K = 160, 176, 208


def normal(*shapes: tuple[int, ...]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    generator = np.random.default_rng(5)
    return [generator.standard_normal(shape).astype(np.float32) for shape in shapes]


def lower(function: Callable[..., Any], *arrays: object) -> Any:
    """A lowered function of its own: JAX keeps those of a function, and rewriting changes them."""
    return jax.jit(lambda *a: function(*a)).lower(*arrays)


@dataclass(frozen=True)
class Form:
    """A function of arrays of these shapes with one product, and the call it becomes."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    call: ProductCall


FORMS = {
    "plain": Form(jnp.dot, ((M, K), (K, N)), ProductCall(M, N, K, place=1)),
    "by rows": Form(
        lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))),
        ((K, M), (K, N)),
        ProductCall(M, N, K, left_turned=True, place=1),
    ),
    "several axes": Form(
        lambda x, w: lax.dot_general(x, w, (((2,), (1,)), ((), ()))),
        ((4, M // 4, K), (N, K)),
        ProductCall(M, N, K, right_turned=True, place=1),
    ),
    "several sums": Form(
        lambda x, y: lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ()))),
        ((4, K // 4, M), (4, K // 4, N)),
        ProductCall(M, N, K, left_turned=True, place=1),
    ),
    "transposed result": Form(
        lambda x, y: lax.dot_general(y, x, (((0,), (0,)), ((), ()))).T,
        ((K, M), (K, N)),
        ProductCall(M, N, K, left_turned=True, place=1),
    ),
    "transposed operands": Form(
        lambda x, y: jnp.dot(x.T, y.T), ((K, M), (N, K)), ProductCall(M, N, K, True, True, place=1)
    ),
    "added": Form(
        lambda total, x, y: total + jnp.dot(x, y), ((M, N), (M, K), (K, N)), ProductCall(M, N, K, adds=True)
    ),
    "transposed and added": Form(
        lambda total, x, y: lax.dot_general(y, x, (((0,), (0,)), ((), ()))).T + total,
        ((M, N), (K, M), (K, N)),
        ProductCall(M, N, K, left_turned=True, adds=True),
    ),
    "read by others": Form(
        lambda x, y: jnp.maximum(jnp.dot(x, y), 0) + 1, ((M, K), (K, N)), ProductCall(M, N, K)
    ),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_product_is_one_call_and_has_the_numbers_of_float64(form: Form) -> None:
    arrays = normal(*form.shapes)
    lowered = lower(form.function, *arrays)
    assert rewrite_products(lowered, lambda: True) == [form.call]
    text = lowered.as_text()
    assert "dot_general" not in text
    assert "stablehlo.transpose" not in text
    with jax.enable_x64(True):
        expected = form.function(*(jnp.asarray(a, jnp.float64) for a in arrays))
    np.testing.assert_allclose(lowered.compile()(*arrays), expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (jnp.dot, ((8, K), (K, 4096))),
        (jnp.dot, ((32, 32), (32, 32))),
        (jnp.matmul, ((4, M, K), (4, K, N))),
        (lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))), ((M, K, 2), (K, N))),
        (lambda x, y: jnp.dot(x.astype(jnp.float16), y.astype(jnp.float16)), ((M, K), (K, N))),
    ],
)
def test_what_is_no_large_product_of_two_matrices_stays(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]
) -> None:
    lowered = lower(function, *normal(*shapes))
    assert rewrite_products(lowered, lambda: pytest.fail("it asked for the library")) == []
    assert "dot_general" in lowered.as_text()


def test_without_the_library_products_stay() -> None:
    lowered = lower(jnp.dot, *normal((M, K), (K, N)))
    assert rewrite_products(lowered, lambda: False) == []
    assert "dot_general" in lowered.as_text()


def test_matrix_products_in_loops_and_called_functions_are_replaced() -> None:
    square = jax.jit(lambda x: jnp.dot(x, x))

    def function(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, y: jnp.tanh(jnp.dot(y, y)), square(x))

    (x,) = normal((192, 192))
    lowered = lower(function, x)
    assert len(rewrite_products(lowered, lambda: True)) == 2
    np.testing.assert_allclose(lowered.compile()(x), jax.jit(function)(x), rtol=1e-3, atol=1e-3)


def test_an_accumulator_that_others_read_is_not_overwritten() -> None:
    total, x, y = normal((M, N), (M, K), (K, N))

    def function(total: Any, x: Any, y: Any) -> Any:
        return total + jnp.dot(x, y), total * 2

    lowered = lower(function, total, x, y)
    assert rewrite_products(lowered, lambda: True) == [ProductCall(M, N, K)]
    for got, want in zip(lowered.compile()(total, x, y), function(total, x, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4)


def test_a_gradient_is_added_where_its_accumulator_lies(pieces: PieceCache) -> None:
    shapes = {"g": ((M, N), "float32"), "x": ((M, K), "float32"), "y": ((K, N), "float32")}
    adds = computation("adds", lambda g, x, y: (g + jnp.dot(x, y),), shapes, ("g",))
    piece = pieces.piece(adds, (), {0: 0})
    total, x, y = normal((M, N), (M, K), (K, N))
    with own_settings(), jax.default_device(one_thread_device()):
        accumulator = jnp.array(total, copy=True)
        address = accumulator.unsafe_buffer_pointer()
        (result,) = piece.call(accumulator, x, y)
    assert result.unsafe_buffer_pointer() == address
    np.testing.assert_allclose(result, total + x @ y, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("form", [(0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 1)])
def test_bits_do_not_depend_on_who_computes_the_halves(form: tuple[int, int, int]) -> None:
    """A thread that keeps to one core computes both halves; another one may have help, and several compete for it."""
    left_turned, right_turned, adds = form
    call = ProductCall(333, 301, 257, bool(left_turned), bool(right_turned), bool(adds))
    numbers = call.numbers()
    assert numbers[-1] == 2
    operands = tuple(normal((333 * 257,), (301 * 257,), (333 * 301,))[: 2 + adds])

    def alone(pinned: bool) -> bytes:
        before = os.sched_getaffinity(0)
        if pinned:
            os.sched_setaffinity(0, {min(before)})
        try:
            result = np.empty(333 * 301, np.float32)
            native.multiply(numbers, operands, result)
        finally:
            os.sched_setaffinity(0, before)
        return result.tobytes()

    expected = alone(pinned=True)
    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(alone, [False] * 6)) == {expected}


@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        ((1, 0), (784, 512, 128)),  # With AVX2 one product of this form rounds otherwise than two.
        ((0, 0), (128, 512, 784)),
        ((0, 1), (128, 512, 512)),
        ((1, 1), (257, 301, 129)),
        ((0, 0), (17, 1000, 700)),
    ],
)
def test_an_undivided_product_has_the_bits_of_its_halves(
    form: tuple[int, int], sizes: tuple[int, int, int]
) -> None:
    """A thread that keeps to one core does not divide a product where that changes no bit."""
    rows, columns, terms = sizes
    operands = tuple(normal((rows * terms,), (terms * columns,)))

    def computed(cores: set[int]) -> bytes:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            result = np.empty(rows * columns, np.float32)
            native.multiply([*form, *sizes, 0, 0, 2], operands, result)
        finally:
            os.sched_setaffinity(0, before)
        return result.tobytes()

    every = os.sched_getaffinity(0)
    assert computed({min(every)}) == computed(every) == computed({min(every)})


@pytest.mark.parametrize(
    ("rows", "columns", "terms"), [(64, 1264, 520), (72, 1264, 520), (112, 1264, 520), (17, 496, 824)]
)
def test_few_rows_have_the_bits_of_halves_of_rows(rows: int, columns: int, terms: int) -> None:
    """Where the other half of the columns is faster, it is taken only if no bit changes. It would change some with AVX2
    in the first cases, and with AVX-512 in the last one."""
    left, right, bias, mask = normal((rows, terms), (terms, columns), (columns,), (rows, columns))
    beside, follows = (bias, mask), WITH_BIAS | WITH_CUT | WITH_MASK
    result = np.empty((rows, columns), np.float32)
    native.multiply([0, 0, rows, columns, terms, 0, 0, 2, follows], (left, right, *beside), result)
    half = (rows // 2 + 15) // 16 * 16
    for part in (slice(0, half), slice(half, rows)):
        expected = np.empty_like(result[part])
        sizes = (len(expected), columns, terms)
        operands = (left[part], right, bias, mask[part])
        native.multiply([0, 0, *sizes, 0, 0, 1, follows], operands, expected)
        assert expected.tobytes() == result[part].tobytes()


def test_the_check_finds_a_wrong_product() -> None:
    check_products(native.multiply)

    def wrong(numbers: Any, operands: Any, result: Any) -> None:
        native.multiply(numbers, operands, result)
        result[-1, -1] += 1

    with pytest.raises(RuntimeError, match="wrong products"):
        check_products(wrong)


@pytest.mark.parametrize(
    ("numbers", "sizes"),
    [
        ([0, 0, 2, 3, 4, 0, 1], (8, 12, 6)),
        ([0, 0, 2, 3, 0, 0, 0, 1], (0, 0, 6)),
        ([2, 0, 2, 3, 4, 0, 0, 1], (8, 12, 6)),
        ([0, 0, 2, 3, 4, 0, 64, 1], (8, 12, 6)),
        ([0, 0, 2, 3, 4, 0, -1, 1], (8, 12, 6)),
        ([0, 0, 2, 3, 4, 0, 0, 1], (8, 11, 6)),
        ([0, 0, 2, 3, 4, 1, 0, 1], (8, 12, 6)),
        ([0, 0, 2, 3, 4, 1, 0, 1, 1], (8, 12, 6, 3, 6)),
        ([0, 0, 2, 3, 4, 0, 0, 1, 8], (8, 12, 6)),
        ([0, 0, 2, 3, 4, 0, 0, 1, 1], (8, 12, 2, 6)),
        ([0, 0, 2, 3, 4, 0, 0, 1, 4], (8, 12, 3, 6)),
        ([0, 0, 2, 3, 4, 0, 0, 1, 0, 0], (8, 12, 6)),
    ],
)
def test_numbers_and_memory_have_to_fit(numbers: list[int], sizes: tuple[int, ...]) -> None:
    *operands, result = (np.zeros(size, np.float32) for size in sizes)
    with pytest.raises(ValueError, match=r"describe no product|another number of operands"):
        native.multiply(numbers, tuple(operands), result)


def test_matrix_products_stay_inside_of_their_memory() -> None:
    """Of operands and results between pages that nobody may touch, against exact sums of integers."""
    memory = [GuardedMemory(1 << 16) for _ in range(5)]
    for number in range(60):
        guarded_product(native, 3, number, memory)


# --- Results in memory of the caller's ------------------------------------------------------------------------------

PLACED = {"x": ((K, M), "float32"), "y": ((K, N), "float32")}


def ready(*shapes: tuple[int, ...]) -> list[Any]:
    """Operands that XLA reads where they lie, as a machine's: with others it may compute on another thread, later."""
    operands = []
    for array in normal(*shapes):
        aligned = aligned_empty(array.shape, array.dtype)
        aligned[...] = array
        operands.append(Operands().over(aligned))
    return operands


def two_results(x: Any, y: Any) -> tuple[Any, ...]:
    return jnp.tanh(x).sum(0), lax.dot_general(x, y, (((0,), (0,)), ((), ())))


def test_a_result_is_written_to_its_place(pieces: PieceCache) -> None:
    piece = pieces.piece(computation("placed", two_results, PLACED, ("sum", "product")), ())
    assert piece.placed == {1}
    operands = ready((K, M), (K, N))
    with own_settings():
        plain = [np.array(result) for result in piece.call(*operands)]
        memory = np.zeros((M, N), np.float32)
        places = ResultPlaces({1: memory})
        results, filled = places.call(piece.call, operands)
        assert filled == ResultPlaces.bit(1)
        assert memory.tobytes() == plain[1].tobytes()
        assert np.array_equal(results[0], plain[0])
        memory[:] = 0
        again = [np.array(result) for result in piece.call(*operands)]
    assert again[1].tobytes() == plain[1].tobytes()
    assert not memory.any()


def test_a_place_of_another_size_is_not_filled(pieces: PieceCache) -> None:
    piece = pieces.piece(computation("placed", two_results, PLACED, ("sum", "product")), ())
    operands, memory = ready((K, M), (K, N)), np.zeros(M * N - 1, np.float32)
    with own_settings():
        results, filled = ResultPlaces({1: memory}).call(piece.call, operands)
        expected = [np.array(result) for result in piece.call(*operands)]
    assert filled == 0
    assert not memory.any()
    assert np.array_equal(results[1], expected[1])


def test_places_are_of_one_thread_and_end_with_the_call(pieces: PieceCache) -> None:
    piece = pieces.piece(computation("placed", two_results, PLACED, ("sum", "product")), ())
    operands, memory = ready((K, M), (K, N)), np.zeros((M, N), np.float32)

    def fails(*operands: object) -> Any:
        with own_settings(), ThreadPoolExecutor(1) as other:
            other.submit(piece.call, *operands).result()
        raise LookupError

    places = ResultPlaces({1: memory})
    with pytest.raises(LookupError):
        places.call(fails, operands)
    with own_settings():
        piece.call(*operands)
    assert not memory.any()
    with pytest.raises(ValueError, match="no place of that number"):
        native.places({64: memory})
    with pytest.raises((BufferError, ValueError)):
        native.places({1: memory.tobytes()})
    with pytest.raises(ValueError, match="PyCapsule"):
        native.give_places(memory)


class Descent:
    """A Program's update: w - 0.1 g."""

    elementwise = True

    def group_key(self, weight: str) -> tuple[Any, ...]:
        return ()

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        return {}

    def scalars(self, weight: str) -> dict[str, float]:
        return {}

    def apply(self, name: str, w: Any, g: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]) -> Any:
        return w - 0.1 * g, {}


def network(replicas: int, factor: int) -> Executable:
    """One layer of 256 x 128 whose gradient is a product of 2^22 multiplications, and a bias."""

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        return {"loss": jnp.mean(jnp.square(jnp.tanh(inputs["x"] @ p["w"] + p["b"])))}

    w, b = TensorSpec("w", "float32", (256, 128)), TensorSpec("b", "float32", (128,))
    program = Program(
        name="layer",
        forward=forward,
        parameters={"w": ParameterSpec(w, trainable=True), "b": ParameterSpec(b, trainable=True)},
        inputs={"x": InputSpec(TensorSpec("x", "float32", (32, 256)))},
        anchors=(AnchorSpec("loss"),),
        replicas=replicas,
        accumulation_factor=factor,
        loss="loss",
        update=Descent(),
    )
    assert LEAST_MULTIPLICATIONS == 4 * 32 * 256 * 128
    return compile_program(program, options=CompileOptions(chunk_bytes=1))


def trained(executable: Executable, factor: int, pieces: PieceCache) -> tuple[bytes, ...]:
    """Losses and weights after three batches of two runs, on machines of this process."""
    machines = InProcessMachines(executable.layout.ipus, pieces)
    w, b, x = normal((256, 128), (128,), (3, factor, executable.layout.replicas, 32, 256))

    def work(connection: Any, owned: Any) -> tuple[bytes, ...]:
        connection.load(executable)
        connection.write_variables({"w": w / 16, "b": b})
        losses = [connection.run(3, {"x": x}).anchors["loss"].tobytes() for _ in range(2)]
        values = connection.read_variables(["w", "b"])
        connection.close()
        return (*losses, values["w"].tobytes(), values["b"].tobytes())

    pairs = owners(lambda: machines.connect(threaded=True), executable.layout.ipus, 1)
    (outcome,) = together([partial(work, *pair) for pair in pairs])
    assert not isinstance(outcome, BaseException), outcome
    return outcome


@pytest.mark.usefixtures("no_threads_left")
@pytest.mark.parametrize(
    ("replicas", "factor", "placed"),
    [(8, 1, True), pytest.param(8, 2, False, marks=pytest.mark.slow), (4, 1, True), (4, 2, False)],
)
def test_gradients_are_written_where_they_are_read(
    replicas: int, factor: int, placed: bool, pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By other machines or by the update; not those that are added up, whose arena the piece reads."""
    executable = network(replicas, factor)
    chosen: list[int] = []
    places = Buffers.places

    def noted(self: Buffers, piece: Any) -> Any:
        memory = places(self, piece)
        for position in memory:  # What is written over an operand goes there.
            assert position not in places(self, replace(piece, in_place={0: position}))
        chosen.extend(memory)
        return memory

    monkeypatch.setattr(Buffers, "places", noted)
    result = trained(executable, factor, pieces)
    assert bool(chosen) is placed
    monkeypatch.setattr(Buffers, "places", lambda self, piece: {})
    assert trained(executable, factor, pieces) == result


@pytest.mark.parametrize("form", [None, 8])
def test_a_module_of_an_earlier_checkout_is_refused_by_name(
    form: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form is None:
        monkeypatch.delattr(native, "FORM")
    else:
        monkeypatch.setattr(native, "FORM", form)
    with pytest.raises(RuntimeError, match="built from an earlier checkout"):
        convolutions._start()


def loss(weights: Any, x: Any) -> Any:
    """Two layers with biases and cuts, whose gradients pass the cut between them."""
    first, bias, second = weights
    hidden = jax.nn.relu(x @ first + bias)
    return (jax.nn.relu(hidden @ second + bias[:N]) * (1 + jnp.arange(N) % 3)).sum()


@pytest.mark.parametrize("strange", [None, 1e-39])
def test_biases_and_cuts_are_part_of_the_call_with_the_same_bits(
    strange: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, bias, second, x = normal((K, 192), (192,), (192, N), (M, K))
    if strange is not None:
        bias[::7], x[3, 5] = strange, strange
    first[:, 11] = 0
    bias[11] = 0  # A sum that is 0 passes no gradient.
    follows, bits = [], []
    for more in (True, False):
        if not more:
            monkeypatch.setattr(matrix_products, "_followers", lambda *_: matrix_products._Followers())
        lowered = lower(jax.value_and_grad(loss), (first, bias, second), x)
        follows.append(sorted(call.follows for call in rewrite_products(lowered, lambda: True)))
        assert ("maximum" in lowered.as_text()) is not more
        bits.append(
            [np.asarray(r).tobytes() for r in jax.tree.leaves(lowered.compile()((first, bias, second), x))]
        )
    assert follows == [[0, 0, WITH_BIAS | WITH_CUT, WITH_BIAS | WITH_CUT, WITH_MASK], [0] * 5]
    assert bits[0] == bits[1]


def test_what_is_no_number_passes_a_cut() -> None:
    x, y, bias = normal((M, K), (K, N), (N,))
    bias[7] = np.nan
    lowered = lower(lambda x, y, b: jax.nn.relu(x @ y + b), x, y, bias)
    (call,) = rewrite_products(lowered, lambda: True)
    assert call.follows == WITH_BIAS | WITH_CUT
    assert np.isnan(lowered.compile()(x, y, bias)).sum(axis=0).tolist() == [M * (i == 7) for i in range(N)]


def test_what_reads_a_sum_otherwise_keeps_it() -> None:
    """A sum that others read, a cut at 1, a vector for rows, and a choice between other things stay XLA's."""
    x, y, rows, columns, whole = normal((M, K), (K, N), (M, 1), (N,), (M, N))
    for function in (
        lambda x, y, r, c, w: (lambda s: (jnp.maximum(s, 0), s * 2))(x @ y + c),
        lambda x, y, r, c, w: jnp.maximum(x @ y + c, 1),
        lambda x, y, r, c, w: jnp.maximum(x @ y + r, 0),
        lambda x, y, r, c, w: jnp.where(w > 0, x @ y, 1),
        lambda x, y, r, c, w: jnp.where(w > 1, x @ y, 0),
        lambda x, y, r, c, w: jnp.where(c > 0, x @ y, 0),
        lambda x, y, r, c, w: jnp.where(w > 0, 0, x @ y),
    ):
        lowered = lower(function, x, y, rows, columns, whole)
        (call,) = rewrite_products(lowered, lambda: True)
        assert call.follows == 0
        results = lowered.compile()(x, y, rows, columns, whole)
        for got, want in zip(
            jax.tree.leaves(results), jax.tree.leaves(function(x, y, rows, columns, whole)), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4)


SIGNALLED = """
import signal, threading
import numpy as np
from podrun.device.xla import convolutions

assert convolutions.available()
from podrun.device.xla import _onednn as native

signal.signal(signal.SIGUSR1, lambda number, frame: None)
left, right, result = (np.ones(shape, np.float32) for shape in ((512, 2048), (2048, 512), (512, 512)))
over, leave = threading.Event(), threading.Event()

def multiply():
    for _ in range(10):
        result.fill(0)
        native.multiply([0, 0, 512, 512, 2048, 0, 0, 1], (left, right), result)
        assert (result == 2048).all()
    print("right")
    over.set()
    leave.wait()

thread = threading.Thread(target=multiply, daemon=True)
thread.start()
while thread.is_alive() and not over.is_set():
    signal.pthread_kill(thread.ident, signal.SIGUSR1)
leave.set()
"""


@pytest.mark.system
def test_a_signal_during_a_product_overwrites_nothing() -> None:
    """The library moves the stack pointer into its memory, below which the kernel would lay a handler's frame."""
    done = run_copied(SIGNALLED)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


HELPED = """
import re, signal
from pathlib import Path
import numpy as np
from podrun.device.xla import convolutions

assert convolutions.available()
from podrun.device.xla import _onednn as native

ones, result = np.ones((512, 512), np.float32), np.empty((512, 512), np.float32)
native.multiply([0, 0, 512, 512, 512, 0, 0, 2], (ones, ones), result)
texts = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
blocked = [int(re.search(r"SigBlk:\\s*(\\w+)", text)[1], 16) for text in texts]
print(*(any(mask >> (number - 1) & 1 for mask in blocked) for number in (signal.SIGTERM, signal.SIGSEGV)))
"""


@pytest.mark.system
def test_threads_that_help_leave_signals_to_others_but_those_of_their_own_faults() -> None:
    """A fault whose signal is held back ends the process without a word of what it computed."""
    done = run_copied(HELPED)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr


def test_the_call_of_a_product_names_its_form() -> None:
    """Programs compiled with other numbers are compiled again: raise `convolutions.FORM` with them."""
    assert convolutions.formulation() == "onednn, 10"
    assert native.FORM == 10
    assert len(ProductCall(M, N, K).numbers()) == 8
