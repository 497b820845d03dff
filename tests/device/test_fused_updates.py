"""Updates that are carried out as gradients are added up: the piece's bits, and only where nothing reads the sum."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podrun.collectives.rendezvous import SoloGroup
from podrun.core.executable import (
    AllGather,
    AllReduce,
    Compute,
    Copy,
    Instruction,
    ReduceScatter,
    StoreStream,
)
from podrun.core.layout import IpuRange
from podrun.device.host.client import InProcessMachines
from podrun.device.program import fused_updates, interpreter, program_memory
from podrun.device.program.buffers import Buffers
from podrun.device.program.fused_updates import FusedUpdate, agrees, make_fused_updates
from podrun.device.xla.clients import machine_settings
from podrun.device.xla.convolutions import available
from podrun.device.xla.pieces import Piece, PieceCache
from podrun.device.xla.update_steps import _Reading, has_updates, run_update, update_steps
from podrun.faults import parse_faults
from podrun.private_apis import jax as jax_names
from tests.stress.guarded import GuardedMemory

from .conftest import request
from .programs import computation, data, first_weights, linear

pytestmark = pytest.mark.skipif(not has_updates(), reason="podrun's C module is not built")
native: Any = importlib.import_module("podrun.device.xla._onednn") if has_updates() else None
SIZE = 3000
"""Neither a multiple of a vector's elements nor of a block's."""
F32 = np.float32


def descent(w: Any, g: Any, rate: Any) -> Any:
    return (w - rate * g,)


def decay(w: Any, g: Any, rate: Any) -> Any:
    return (w - rate * (g + F32(1e-4) * w),)


def scaled(w: Any, g: Any, rate: Any) -> Any:
    return (w * (F32(1) - rate * F32(1e-3)) - rate * g,)


def sum_first(w: Any, g: Any, rate: Any) -> Any:
    return (rate * g + w * w,)


def momentum(w: Any, v: Any, g: Any, rate: Any) -> Any:
    new = F32(0.9) * v + g / F32(3)
    return w - rate * new, new


def adaptive(w: Any, m: Any, v: Any, g: Any, rate: Any, scale: Any) -> Any:
    m = F32(0.9) * m + F32(0.1) * g
    v = F32(0.99) * v + F32(0.01) * (g * g)
    return w - rate * (m * scale) / (jnp.sqrt(v) + F32(1e-5)), m, -jnp.negative(v)


def mean_descent(w: Any, g: Any, rate: Any) -> Any:
    return (w - F32(0.001) * (g / F32(12)) * rate,)


def mean_adaptive(w: Any, m: Any, v: Any, g: Any, rate: Any, part: Any) -> Any:
    """The mean is read more than once: each sum that takes it may do so with one rounding."""
    mean = g / F32(16)
    m, v = m + (mean - m) * part, v + (mean * mean - v) * part
    return w - m * rate / (jnp.sqrt(v) + F32(1e-5)), m, v


def piece_of(pieces: PieceCache, function: Callable[..., Any], vectors: str, scalars: str = "rate") -> Piece:
    """A piece over slices by the letters of their names, ``g`` among them, and numbers."""
    names = {letter: f"arena_slice:{letter}" for letter in vectors}
    inputs = dict.fromkeys(names.values(), ((SIZE,), F32)) | dict.fromkeys(scalars.split(), ((), F32))
    outputs = tuple(name for letter, name in names.items() if letter != "g")
    return pieces.piece(computation(function.__name__, function, inputs, outputs), ())


@pytest.mark.parametrize(
    ("function", "vectors", "scalars"),
    [
        (descent, "wg", "rate"),
        (decay, "wg", "rate"),
        (scaled, "wg", "rate"),
        (sum_first, "wg", "rate"),
        (momentum, "wvg", "rate"),
        (adaptive, "wmvg", "rate scale"),
        (mean_descent, "wg", "rate"),
        (mean_adaptive, "wmvg", "rate part"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_reading_of_an_update_has_the_bits_of_its_piece(
    pieces: PieceCache, function: Callable[..., Any], vectors: str, scalars: str
) -> None:
    piece = piece_of(pieces, function, vectors, scalars)
    gradient, stores = vectors.index("g"), range(len(vectors) - 1)
    with machine_settings():
        readings = update_steps(piece.computation, gradient)
        fitting = [steps for steps in readings if agrees(steps, piece, gradient, stores)]
        assert fitting
        generator = np.random.default_rng(9)
        slices = [generator.normal(size=SIZE).astype(F32) ** 2 for _ in vectors]
        numbers = [np.array(value, F32) for value in generator.normal(size=len(scalars.split()))]
        expected = [np.array(value) for value in piece.call(*slices, *numbers)]
        operands = dict(enumerate([*slices, *numbers]))
        run_update(fitting[0].prepared([slices[gradient]], mean=False, operands=operands, stores=stores))
    for at, value in zip(stores, expected, strict=True):
        np.testing.assert_array_equal(slices[at].view(np.uint32), value.view(np.uint32))


@pytest.mark.parametrize(
    ("function", "scalars"),
    [
        (lambda w, g, rate: (w - g / jnp.sqrt(rate),), "rate"),
        (lambda w, g, rate: (w - g * jnp.sqrt(rate) / (F32(1) + rate),), "rate"),
        (lambda w, g, rate: (w - jnp.sqrt(rate) * g,), "rate"),
        (lambda w, g, rate, eps: (w - rate * g / jnp.sqrt(eps),), "rate eps"),
        (lambda w, g, rate, b: (w - rate * jnp.sqrt(F32(1) - b) * g,), "rate b"),
        (lambda w, g, rate: (w - F32(0.01) * (g / rate),), "rate"),
    ],
)
def test_roots_and_quotients_of_scalars_have_the_bits_of_the_piece_or_stay_with_it(
    pieces: PieceCache, function: Callable[..., Any], scalars: str
) -> None:
    """Also where the root of a negative scalar would make every result a NaN, whose bits say nothing."""
    piece = piece_of(pieces, function, "wg", scalars)
    generator = np.random.default_rng(4)
    steps = fused_updates.fitting_steps(piece, 1, (0,))
    for _ in range(20 if steps else 0):
        slices = [generator.normal(size=SIZE).astype(F32) for _ in "wg"]
        numbers = [np.array(value, F32) for value in generator.uniform(0.01, 0.99, len(scalars.split()))]
        with machine_settings():
            (expected,) = piece.call(*slices, *numbers)
            operands = dict(enumerate([*slices, *numbers]))
            run_update(steps.prepared([slices[1]], mean=False, operands=operands, stores=[0]))
        np.testing.assert_array_equal(slices[0].view(np.uint32), np.asarray(expected).view(np.uint32))


def test_numbers_that_say_nothing_agree_with_no_reading(pieces: PieceCache) -> None:
    """The root of a number below zero makes every result a NaN, which would be any other reading's too."""
    piece = piece_of(pieces, lambda w, g, rate: (w - g * jnp.sqrt(rate - F32(2)),), "wg")
    assert update_steps(piece.computation, 1)
    assert fused_updates.fitting_steps(piece, 1, (0,)) is None


def test_a_piece_is_compared_once_for_all_machines_and_loads(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept with the code, which other tests of this process may have: it is put back as they left it."""
    kept = piece_of(pieces, descent, "wg").fitting_steps
    monkeypatch.setitem(kept, (1, (0,)), None)
    del kept[1, (0,)]
    compared = []
    monkeypatch.setattr(fused_updates, "agrees", lambda steps, *_: compared.append(steps) or True)
    first = fused_updates.fitting_steps(piece_of(pieces, descent, "wg"), 1, (0,))
    again = fused_updates.fitting_steps(piece_of(pieces, descent, "wg"), 1, (0,))
    assert compared == [first]
    assert again is first


def test_a_reading_with_other_roundings_is_found_out(pieces: PieceCache) -> None:
    """Of a product and a sum that takes it, one and two roundings differ: not both readings can be the piece."""
    piece = piece_of(pieces, descent, "wg")
    with machine_settings():
        readings = update_steps(piece.computation, 1)
        assert len(readings) == 2
        assert sum(agrees(steps, piece, 1, [0]) for steps in readings) == 1
        wrong = replace(readings[1], steps=((0, 4, 1, 0, 0),))
        assert not agrees(wrong, piece, 1, [0])


@pytest.mark.parametrize(
    "function",
    [
        lambda w, g, rate: (w - rate * jnp.sum(g),),
        lambda w, g, rate: (jnp.where(g > 0, w, rate * g),),
        lambda w, g, rate: (w - rate * g[::-1],),
        lambda w, g, rate: (w - rate * jnp.exp(g),),
        lambda w, g, rate: (w + g.astype(jnp.float16).astype(jnp.float32),),
        lambda w, g, rate: (w - lax.fori_loop(0, 3, lambda _, a: a * g, g),),
        lambda w, g, rate: (w,),
        lambda w, g, rate: (w - g * jnp.arange(SIZE, dtype=F32),),
    ],
)
def test_other_arithmetic_stays_with_the_piece(pieces: PieceCache, function: Callable[..., Any]) -> None:
    piece = piece_of(pieces, function, "wg")
    assert update_steps(piece.computation, 1) == []


def with_many_constants(w: Any, g: Any, rate: Any) -> Any:
    for k in range(15):
        w = w - rate * (g + F32(k + 2) * w)
    return (w,)


@pytest.mark.filterwarnings("error")
def test_only_constants_that_steps_read_take_registers(pieces: PieceCache) -> None:
    for steps in update_steps(piece_of(pieces, with_many_constants, "wg").computation, 1):
        assert sorted(steps.constants) == list(range(2, 17))
    piece = piece_of(pieces, lambda w, g, rate: (w - rate * (g / F32(3) + F32(1e-42) * w),), "wg")
    for steps in update_steps(piece.computation, 1):
        assert sorted(steps.constants) == [F32(1e-42), F32(1) / F32(3)]


def test_an_operation_without_results_is_none_of_an_update() -> None:
    operation: Any = SimpleNamespace(results=[], name="func.call")
    assert not _Reading(1, 3, contracts=False)._take(operation, iter(()))


@pytest.mark.parametrize(
    ("gone", "reads"),
    [
        ("jax._src.lib._jax.mlir.deserialize_portable_artifact", False),
        ("jaxlib.mlir.dialects.stablehlo.ConvDimensionNumbers", True),
    ],
)
def test_updates_need_what_reads_stablehlo_and_nothing_of_convolutions(
    monkeypatch: pytest.MonkeyPatch, gone: str, reads: bool
) -> None:
    find = jax_names.find_name
    monkeypatch.setattr(jax_names, "find_name", lambda name: None if name == gone else find(name))
    assert has_updates() == reads


@pytest.mark.parametrize("elements", [1, 63, 64, 65, 512, 513, 1500])
@pytest.mark.parametrize("mean", [False, True])
def test_rows_are_added_up_in_order(elements: int, mean: bool) -> None:
    generator = np.random.default_rng(elements)
    rows = [generator.normal(size=elements).astype(F32) for _ in range(5)]
    expected = rows[0].copy()
    for row in rows[1:]:
        expected += row
    if mean:
        expected /= F32(len(rows))
    vector = np.full(elements, np.nan, F32)
    native.run_update(native.update(rows, mean, [vector], [], [], [(0, 0)]))
    np.testing.assert_array_equal(vector, expected)


def test_updates_stay_inside_of_their_memory() -> None:
    """Between pages that kill, with whole blocks and without, beginning or ending at a page."""
    memory = [GuardedMemory(1200) for _ in range(5)]
    for elements in (1, 63, 65, 511, 512, 513, 1024, 1200):
        for at_end in (False, True):
            *rows, first, second = (m.array(elements, at_end) for m in memory)
            for array in (*rows, first, second):
                array.fill(2)
            steps = [(2, 3, 0, 1, 0), (6, 4, 3, 2, 1)]
            native.run_update(native.update(rows, True, [first, second], [], steps, [(4, 0), (3, 1)]))
            np.testing.assert_array_equal(first, 10)
            np.testing.assert_array_equal(second, 4)


@pytest.mark.skipif(not available(), reason="no oneDNN here")
def test_bits_of_updates_do_not_depend_on_vectors() -> None:
    """Every kind of step, with the vectors to which the library keeps and with narrower ones."""
    generator = np.random.default_rng(6)
    rows = [generator.normal(size=SIZE).astype(F32) for _ in range(3)]
    start = np.abs(generator.normal(size=SIZE)).astype(F32)
    steps = [(kind, 2 + kind, 0 if kind % 2 else 1, 1, 0) for kind in range(9)]
    results = []
    for lanes in (16, 8, 0):
        before = native.vectors(lanes)
        for kind in range(9):
            vector = start.copy()
            native.run_update(native.update(rows, True, [vector], [], steps, [(2 + kind, 0)]))
            results.append(vector.tobytes())
        native.vectors(before)
    assert len(set(results[:9])) == 9
    assert results[:9] == results[9:18] == results[18:]


def test_sums_keep_denormal_numbers_and_updates_do_not() -> None:
    rows = [np.full(70, 1e-40, F32), np.full(70, 2e-40, F32)]
    vectors = [np.zeros(70, F32), np.ones(70, F32)]
    kept = np.full(70, 1e-40, F32) + np.full(70, 2e-40, F32)
    native.run_update(native.update(rows, False, vectors, [], [(0, 3, 0, 1, 0)], [(0, 0), (3, 1)]))
    np.testing.assert_array_equal(vectors[0], kept)
    np.testing.assert_array_equal(vectors[1], 0)
    assert F32(1e-40) + F32(1e-40) > 0  # The processor's mode is as before.


@pytest.mark.parametrize(
    ("rows", "vectors", "scalars", "steps", "stores"),
    [
        ([], [4], [], [], []),
        ([4], [5], [], [], []),
        ([4], [4], [2], [], []),
        ([4], [4], [], [(9, 2, 0, 1, 0)], []),
        ([4], [4], [], [(0, 1, 0, 1, 0)], []),
        ([4], [4], [], [(0, 2, 0, 48, 0)], []),
        ([4], [4], [], [(0, 2, 2, 1, 0)], []),
        ([4], [4], [], [(0, 2, 0, 1, 0)], [(2, 1)]),
        ([4], [4, 4], [], [], [(1, 1)]),
        ([4], [4] * 49, [], [], []),
        ([4], [4], [], [(0, 2, 0, 1, 0)] * 65, []),
        ([4] * 513, [4], [], [], []),
    ],
)
def test_what_describes_no_update_is_refused(
    rows: list[int], vectors: list[int], scalars: list[int], steps: list[Any], stores: list[Any]
) -> None:
    arrays = [[np.zeros(n, F32) for n in sizes] for sizes in (rows, vectors, scalars)]
    with pytest.raises(ValueError, match="update"):
        native.update(arrays[0], False, arrays[1], arrays[2], steps, stores)


def test_empty_rows_fit_no_other_array() -> None:
    """The size of rows without numbers is a size like others: the update would read behind them."""
    empty = np.zeros(0, F32)
    native.run_update(native.update([empty], False, [empty], [], [], [(0, 0)]))
    with pytest.raises(ValueError, match="differ in size"):
        native.update([empty], False, [np.zeros(4, F32)], [], [], [(0, 0)])


@pytest.mark.parametrize(
    ("kind", "steps", "stores", "error"),
    [
        (np.float64, [], [(0, 0)], ValueError),
        (np.int32, [], [(0, 0)], ValueError),
        (F32, [[0, 2, 0, 1, 0]], [], TypeError),
        (F32, [], [[0, 0]], TypeError),
        (F32, [3], [], TypeError),
    ],
)
def test_other_types_are_refused(kind: Any, steps: Any, stores: Any, error: type[Exception]) -> None:
    arrays = [np.zeros(4, kind)]
    with pytest.raises(error, match="of an update are"):
        native.update(arrays, False, [np.zeros(4, F32)], [], steps, stores)
    if kind is not F32:
        with pytest.raises(error, match="of an update are"):
            native.update([np.zeros(4, F32)], False, [np.zeros(4, kind)], [], steps, stores)


AROUND = Compute("step"), ReduceScatter("gradients"), Compute("update")


@pytest.mark.parametrize(
    ("after", "fuses"),
    [
        ((AllGather("weights"),), True),
        ((AllGather("gradients"),), False),
        ((AllReduce("gradients"), AllGather("weights")), False),
        ((StoreStream("loss", "gradient:w", 0, 1), AllGather("weights")), False),
        ((Copy("gradient:w", "kept"), AllGather("weights")), False),
        ((Compute("update"), AllGather("weights")), False),
    ],
    ids=repr,
)
def test_a_sum_that_something_else_reads_is_written(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch, after: tuple[Instruction, ...], fuses: bool
) -> None:
    monkeypatch.setattr(fused_updates, "_prepared", lambda *_: (print, print))
    executable = linear(16)
    compiled = {name: pieces.piece(c, ()) for name, c in executable.computations.items()}
    updates = make_fused_updates([*AROUND, *after], compiled, Buffers(executable, SoloGroup()), {1})
    assert list(updates) == ([1] if fuses else [])
    assert not make_fused_updates([*AROUND, *after], compiled, Buffers(executable, SoloGroup()), set())


def trained(pieces: PieceCache, batches: int, fault: str = "") -> dict[str, np.ndarray]:
    executable = linear(16)
    twin = InProcessMachines(executable.layout.ipus, pieces)
    for machine in twin.machines if fault else ():
        machine.plan_faults(parse_faults(fault))
    connection = twin.connect()
    everything = IpuRange(0, executable.layout.ipus)
    assert connection.try_attach(request(everything)) is None
    connection.load(executable)
    connection.write_variables(first_weights())
    inputs = data(executable, batches)
    for batch in range(batches):
        connection.run(1, {name: a[batch : batch + 1] for name, a in inputs.items()})
    weights = connection.read_variables(["w", "b"])
    connection.close()
    return {name: np.array(value) for name, value in weights.items()}


def test_training_has_the_same_bits_with_and_without(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "make_fused_tail", lambda *_: None)
    monkeypatch.setattr(program_memory, "REDUCED_WHOLE", 0)
    expected = trained(pieces, 3)
    monkeypatch.setattr(fused_updates, "LEAST_ELEMENTS", 0)
    carried_out = []
    reduce = FusedUpdate.reduce
    monkeypatch.setattr(FusedUpdate, "reduce", lambda self: (reduce(self), carried_out.append(self.arena)))
    weights = trained(pieces, 3)
    assert len(carried_out) == 12
    for name, value in expected.items():
        np.testing.assert_array_equal(weights[name], value)


@pytest.mark.parametrize("fused_tail", [False, True])
def test_a_fault_between_reduction_and_update_strikes_before_the_update(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch, fused_tail: bool
) -> None:
    place = linear(16).instructions[0].index(Compute("update"))
    fault = f"ipu:0@batch=1,instruction={place}:corrupt,tensor=w,element=0,bit=22"
    with monkeypatch.context() as patched:
        patched.setattr(interpreter, "make_fused_tail", lambda *_: None)
        patched.setattr(program_memory, "REDUCED_WHOLE", 0)
        without, expected = trained(pieces, 3), trained(pieces, 3, fault)
        assert np.any(expected["w"] != without["w"])
        patched.setattr(fused_updates, "LEAST_ELEMENTS", 0)
        if not fused_tail:
            weights = trained(pieces, 3, fault)
    if fused_tail:  # Else the last machine updates for all others, which do not wait for it.
        weights = trained(pieces, 3, fault)
    for name, value in expected.items():
        np.testing.assert_array_equal(weights[name], value)
