"""Training steps of dense networks as one call of the C module, with no program of XLA's.

Between the products of such a step stand biases, a loss and its gradient, and sums of columns: little work, in some
eighty operations. XLA takes half a millisecond for them in a step of 784-512-512-10 with 128 samples, much of it to
start each. Here the step is read from its StableHLO as a list of steps (`podrun.device.xla.dense_steps`), which the C
module carries out one after the other; results go where the machine wants them.

Only pieces of one thread that have a product for the library, and nothing but operations that are listed here, are
read; others stay XLA's. Elements are rounded as XLA rounds them, but that exponentials, logarithms and hyperbolic
tangents are those next to the exact value, and that sums have an order of their own (`native/dense_kernel.h`).
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.dense_steps import DenseOperation, DenseReduction, DenseSteps, DenseView
from podrun.device.xla.epilogues import is_identity, nested
from podrun.device.xla.layer_marks import main_blocks
from podrun.device.xla.matrix_products import (
    MOST_PLACES,
    PRODUCT_TARGET,
    FloatArray,
    ProductCall,
    has_product,
    rewrite_products,
)
from podrun.private_apis.jax import mlir, stablehlo

if TYPE_CHECKING:
    from jax.stages import Lowered

    from podrun.private_apis.mlir_types import MlirModule, MlirOperation, MlirValue

_DTYPES = {"f32": "float32", "i32": "int32", "i1": "bool"}
_FLOATS = {
    "add": DenseOperation.ADD,
    "subtract": DenseOperation.SUBTRACT,
    "multiply": DenseOperation.MULTIPLY,
    "divide": DenseOperation.DIVIDE,
    "maximum": DenseOperation.MAXIMUM,
    "minimum": DenseOperation.MINIMUM,
    "negate": DenseOperation.NEGATE,
    "exponential": DenseOperation.EXPONENTIAL,
    "log": DenseOperation.LOG,
    "sqrt": DenseOperation.SQRT,
    "tanh": DenseOperation.TANH,
    "logistic": DenseOperation.LOGISTIC,
}
_TRUTHS = {"and": DenseOperation.AND, "or": DenseOperation.OR, "not": DenseOperation.NOT}
_SUMS = {
    ("add", "f32"): (DenseReduction.SUM, (0.0,)),
    ("maximum", "f32"): (DenseReduction.LARGEST, (float("-inf"),)),
    ("and", "i1"): (DenseReduction.ALL, (1.0,)),
    ("or", "i1"): (DenseReduction.ANY, (0.0,)),
}
"""By operation and type of elements: what it is here, and what it begins with."""
_SAME = ("reshape", "broadcast_in_dim", "transpose", "slice", "optimization_barrier", "constant", "iota")
_OTHERS = ("compare", "select", "convert", "reduce", "gather", "scatter", "dot_general", "custom_call")
_INSIDE = ("return", *(name for name, _ in _SUMS))
_KNOWN = frozenset(f"stablehlo.{name}" for name in (*_FLOATS, *_TRUTHS, *_SAME, *_OTHERS, *_INSIDE))
_SQUARE = "chlo.square"
_READ = _KNOWN | {_SQUARE, "func.func", "func.return", "func.call", "sdy.mesh"}
MOST_OPERATIONS_READ = 1000
"""Pieces with more operations stay XLA's: the C module has room for four steps each."""


@dataclass(frozen=True, slots=True)
class DenseProgram:
    """A training step for the C module: its numbers, and the shape and dtype of each result."""

    numbers: tuple[int, ...]
    results: tuple[tuple[tuple[int, ...], str], ...]

    def bound(self) -> DenseCall:
        """The step, ready to be called. Several threads may call it at a time."""
        native = importlib.import_module("podrun.device.xla._onednn")
        return DenseCall(self, native.dense(np.array(self.numbers, np.int64)), native.run_dense)


@dataclass(frozen=True, slots=True)
class DenseCall:
    """A training step: a function of its operands that gives its results, as arrays of NumPy's.

    ``into``: memory that takes results in place of new arrays, by position.
    """

    program: DenseProgram
    step: object
    run: Callable[..., None]
    into: Mapping[int, FloatArray] = field(default_factory=dict)

    def __call__(self, *operands: object) -> list[FloatArray]:
        kept = self.into
        results = [
            kept[at] if at in kept else np.empty(shape, dtype)
            for at, (shape, dtype) in enumerate(self.program.results)
        ]
        self.run(self.step, tuple(map(_plain, operands)), tuple(results))
        return results

    def placing(self, memory: Mapping[int, FloatArray]) -> DenseCall:
        """The call with memory of the caller's for results, by position."""
        return replace(self, into=memory)

    @property
    def placed(self) -> frozenset[int]:
        """Positions of results that may be written to memory of the caller's."""
        kinds = enumerate(self.program.results)
        return frozenset(at for at, (_, dtype) in kinds if dtype == "float32" and at < MOST_PLACES)


def _plain(operand: object) -> object:
    """An operand as a buffer of its elements in order: most are."""
    if isinstance(operand, np.ndarray) and not operand.flags.c_contiguous:
        return np.ascontiguousarray(operand)
    return operand


def may_be_dense(lowered: Lowered, available: Callable[[], bool]) -> bool:
    """Whether a ``jax.stages.Lowered`` has a product for the library and no operation that is not known here.
    ``available``: whether the library is there, asked last."""
    module = stablehlo(lowered)
    operations: list[MlirOperation] = []
    for op in nested(module.operation):
        if len(operations) == MOST_OPERATIONS_READ or op.name not in _READ:
            return False
        operations.append(op)
    known = all(_kind(value) in _DTYPES for op in operations for value in op.results)
    return known and has_product(module) and available()


def dense_program(lowered: Lowered) -> DenseProgram | None:
    """A ``jax.stages.Lowered`` that `may_be_dense` as a training step for the C module, or None: XLA is to compute it,
    lowered once more, since its products are calls of the library by now."""
    rewrite_products(lowered, lambda: True, small=True)
    ir, module = mlir(), stablehlo(lowered)
    with module.context, ir.Location.unknown():
        reading = _DenseReading(_walls(module))
        block = next(iter(main_blocks(ir, module)))
        is_read = reading.read(block.arguments, [op.operation for op in block])
    if not is_read or not reading.steps.is_worth_it:
        return None
    return DenseProgram(tuple(reading.steps.numbers()), tuple(reading.results))


def _walls(module: MlirModule) -> frozenset[str]:
    """The names, as calls have them (``@name``), of the module's functions that only return their argument."""
    functions = [op.operation for op in module.body.operations if op.operation.name == "func.func"]
    return frozenset(
        f"@{op.attributes['sym_name'].value}" for op in functions if is_identity(op.regions[0].blocks[0])
    )


def _combines(op: MlirOperation) -> str:
    """The operation by which a region combines its two arguments to what it returns; empty if it does otherwise."""
    block = op.regions[0].blocks[0]
    inside = [o.operation for o in block.operations]
    if len(inside) != 2 or len(block.arguments) != 2 or list(inside[0].operands) != list(block.arguments):
        return ""
    gives_it = list(inside[1].operands) == list(inside[0].results)
    return inside[0].name.removeprefix("stablehlo.") if gives_it else ""


def _kind(value: MlirValue) -> str:
    return str(value.type.element_type)


def _shape(value: MlirValue) -> tuple[int, ...]:
    return tuple(value.type.shape)


class _DenseReading:
    """Translates operations into steps. ``walls``: functions that give back what they are given, as calls name them."""

    def __init__(self, walls: frozenset[str]) -> None:
        self._walls = walls
        self.steps = DenseSteps()
        self.results: list[tuple[tuple[int, ...], str]] = []
        self._views: dict[Any, DenseView] = {}

    def read(self, arguments: Iterable[MlirValue], operations: Sequence[MlirOperation]) -> bool:
        """Whether all could be translated."""
        *before, end = operations
        for argument in arguments:
            if _kind(argument) not in ("f32", "i32") or min(_shape(argument), default=1) < 1:
                return False
            self._views[argument] = self.steps.operand(_shape(argument))
        for op in _needed(before, end):
            view = self._view(op) if len(op.results) == 1 and _has_room(op) else None
            if view is None or view.sizes != _shape(op.results[0]):
                return False
            self._views[op.results[0]] = view
        for value in end.operands:
            if _kind(value) not in ("f32", "i32") or not self.steps.give(self._views[value]):
                return False
            self.results.append((_shape(value), _DTYPES[_kind(value)]))
        return True

    def _view(self, op: MlirOperation) -> DenseView | None:
        """The value of an operation; None if it cannot be translated."""
        name, result = op.name.removeprefix("stablehlo."), op.results[0]
        kind = _kind(result)
        if kind not in _DTYPES or any(_kind(value) not in _DTYPES for value in op.operands):
            return None
        read = [self._views[value] for value in op.operands]
        if name in (
            "optimization_barrier",
            "func.call",
        ):  # A wall of the compiler's, or a call that is not inlined.
            is_wall = name != "func.call" or str(op.attributes["callee"]) in self._walls
            return read[0] if is_wall and len(read) == 1 else None
        if name in _SAME:
            return self._same(name, op, read)
        if name == "reduce":
            return self._reduced(op, read)
        if name in ("gather", "scatter"):
            return self._at_index(name, op, read)
        if name == "custom_call":
            call = _product_call(op)
            return None if call is None else self.steps.product(call, read, _shape(result))
        if name == _SQUARE:
            return self.steps.map(DenseOperation.MULTIPLY, read[0], read[0]) if kind == "f32" else None
        what = _operation(name, op)
        if name == "select" and not read[0].sizes:
            read[0] = read[0].broadcast(read[1].sizes, ())
        if name == "convert" and what is DenseOperation.COPY:
            return read[0]
        return None if what is None else self.steps.map(what, *read)

    def _same(self, name: str, op: MlirOperation, read: Sequence[DenseView]) -> DenseView | None:
        """What only moves elements, or makes them of nothing."""
        attributes, sizes = op.attributes, _shape(op.results[0])
        if name == "reshape":
            return self.steps.reshape(read[0], sizes)
        if name == "broadcast_in_dim":
            return read[0].broadcast(sizes, list(attributes["broadcast_dimensions"]))
        if name == "transpose":
            return read[0].transpose(list(attributes["permutation"]))
        if name == "slice":
            ranges = ("start_indices", "limit_indices", "strides")
            return read[0].cut(*(list(attributes[key]) for key in ranges))
        if name == "iota":
            whole = _kind(op.results[0]) == "i32"
            return self.steps.count_up(sizes, int(attributes["iota_dimension"])) if whole else None
        bits = _bits(op)
        return None if bits is None else self.steps.number(bits, sizes)

    def _reduced(self, op: MlirOperation, read: Sequence[DenseView]) -> DenseView | None:
        if len(read) != 2:
            return None
        what, begins = _SUMS.get((_combines(op), _kind(op.results[0])), (None, ()))
        first = _number(op.operands[1])
        if what is None or first not in begins:
            return None
        return self.steps.reduce(what, read[0], list(op.attributes["dimensions"]))

    def _at_index(self, name: str, op: MlirOperation, read: Sequence[DenseView]) -> DenseView | None:
        """Elements at indices along the last axis, one index for each element: ``take_along_axis`` and its gradient."""
        axes = len(read[0].sizes) - 1
        ahead = ", ".join(map(str, range(axes)))
        batches = [f"{{}} = [{ahead}]"] * 2 if axes else []
        names = ("operand_batching_dims", "start_indices_batching_dims")
        if name == "scatter":
            names = ("input_batching_dims", "scatter_indices_batching_dims")
        batch = [text.format(n) for text, n in zip(batches, names, strict=False)]
        lone = read[1].sizes[-1:] == (1,) and read[1].sizes[:-2] == read[0].sizes[:-1]
        if not lone or len(read[1].sizes) != axes + 2:
            return None
        index = self.steps.reshape(read[1], read[1].sizes[:-1])
        last = f"index_vector_dim = {axes + 1}"
        if index is None:
            return None
        if name == "gather":
            fields = [f"collapsed_slice_dims = [{axes}]", *batch, f"start_index_map = [{axes}]", last]
            same = str(op.attributes["dimension_numbers"]) == f"#stablehlo.gather<{', '.join(fields)}>"
            return self.steps.pick(read[0], index) if same else None
        fields = [
            f"inserted_window_dims = [{axes}]",
            *batch,
            f"scatter_dims_to_operand_dims = [{axes}]",
            last,
        ]
        same = str(op.attributes["scatter_dimension_numbers"]) == f"#stablehlo.scatter<{', '.join(fields)}>"
        adds = _combines(op) == "add" and _kind(op.results[0]) == "f32"
        return self.steps.add_at(read[0], index, read[2]) if same and adds and len(read) == 3 else None


def _needed(operations: Sequence[MlirOperation], end: MlirOperation) -> list[MlirOperation]:
    """Those that the result needs, in order."""
    wanted = set(end.operands)
    needed = []
    for op in reversed(operations):
        if any(value in wanted for value in op.results):
            wanted.update(op.operands)
            needed.append(op)
    return needed[::-1]


def _has_room(op: MlirOperation) -> bool:
    return min(_shape(op.results[0]), default=1) > 0


def _operation(name: str, op: MlirOperation) -> DenseOperation | None:
    """What an operation does with each element."""
    result, first = _kind(op.results[0]), _kind(op.operands[0])
    if name == "compare":
        direction = str(op.attributes["comparison_direction"]).rstrip(">").rpartition(" ")[2]
        if "TOTALORDER" in str(op.attributes.get("compare_type", "")):
            return None
        return DenseOperation[direction if first == "f32" else f"INT_{direction}"]
    if name == "select":
        return DenseOperation.SELECT
    if name == "convert":
        if first == result or (first, result) == ("i1", "i32"):
            return DenseOperation.COPY
        return DenseOperation.FLOAT if result == "f32" else None
    if result == "i1":
        return _TRUTHS.get(name)
    if result == "i32":
        return DenseOperation.INT_ADD if name == "add" else None
    return _FLOATS.get(name)


def _product_call(op: MlirOperation) -> ProductCall | None:
    if op.attributes["call_target_name"].value != PRODUCT_TARGET:
        return None
    turned = list(op.attributes["backend_config"]["numbers"])
    return ProductCall(
        rows=turned[2],
        columns=turned[3],
        terms=turned[4],
        left_turned=bool(turned[0]),
        right_turned=bool(turned[1]),
        adds=bool(turned[5]),
        follows=turned[8] if len(turned) > 8 else 0,
    )


def _number(value: MlirValue) -> float | None:
    """The number that a constant has for all elements; None for another value."""
    maker = value.owner
    if getattr(maker, "name", "") != "stablehlo.constant" or not maker.attributes["value"].is_splat:
        return None
    return float(maker.attributes["value"].get_splat_value().value)


def _bits(op: MlirOperation) -> int | None:
    """The bits of a constant whose elements are equal."""
    number, kind = _number(op.results[0]), _kind(op.results[0])
    if number is None:
        return None
    if kind == "i1":
        return int(bool(number))
    whole: int = struct.unpack("<i", struct.pack("<f" if kind == "f32" else "<i", _as(number, kind)))[0]
    return whole


def _as(number: float, kind: str) -> float | int:
    return number if kind == "f32" else int(number)
