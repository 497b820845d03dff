"""Products of matrices of a lowered piece as calls of oneDNN, before XLA compiles it.

XLA's own products of float32 run at five sixths of the library's speed on one thread, and use a second core only in
pieces that two threads share. A call here is divided in halves of its result, and a thread of podrun's own computes one
of them wherever there is a core for it: in machines that do not keep to one core. The bits are those of halves that
follow from the product alone; it is divided otherwise, or not at all, only where that is faster and no bit changes.

What only reads and writes the result's elements once more becomes part of a call: a bias with a cut at 0, and what the
gradient of a cut leaves. The library's result is still in the cache then. No bit changes.

Two other neighbours become part of a call. A transposed operand or result is read or written as it lies. A gradient
that is added to an accumulator of the piece's own is added by the library as it stores the product, which saves two
passes over memory; such a sum of more than one block of terms begins with the accumulator.

A product that is only a result of its piece has a *place*: memory that the machine may give for it. The library then
writes there, and nothing to where XLA has the result (`ResultPlaces`). So gradients reach the memory in which other
machines read them without a copy.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.epilogues import (
    inline,
    is_zero,
    library_call,
    nested,
    only_user,
    per_channel,
    producer,
    rebuild_walls,
)
from podrun.private_apis.jax import convolutions_problem, mlir, stablehlo
from podrun.private_apis.jax_exports import product_axes

if TYPE_CHECKING:
    from jax.stages import Lowered

    from podrun.private_apis.mlir_types import MlirModule, MlirOperation, MlirType, MlirValue

PRODUCT_TARGET = "podrun_product"
"""The name of the call in a program."""
LEAST_MULTIPLICATIONS = 1 << 22
"""Fewest multiplications of a product that the library computes; XLA computes smaller ones."""
WORTH_HALVING = 1 << 23
"""Fewest multiplications of a product that is divided in two."""
MOST_PLACES = 63
"""The highest number of a place."""
WITH_BIAS, WITH_CUT, WITH_MASK = 1, 2, 4
"""What may follow a product, in this order."""
NARROWEST = 16
"""Fewest rows, columns and terms of a product that the library computes."""

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
Multiply = Callable[[Sequence[int], tuple[FloatArray, ...], FloatArray], None]
"""The C module's product of a call's numbers, its operands and its result."""


@dataclass(frozen=True, slots=True)
class ProductCall:
    """``left [rows, terms]`` times ``right [terms, columns]``, row by row in memory.

    ``left_turned``, ``right_turned``: the operand lies as its transpose. ``adds``: to a third operand. ``place``: the
    number of the place that takes the result where there is one; 0: of none. ``follows``: the sum of `WITH_BIAS`,
    `WITH_CUT` and `WITH_MASK`: a vector that is added to each row, negative elements as 0, and 0 where a matrix of the
    result's shape is not greater than 0. Each of the first and the last is one more operand.
    """

    rows: int
    columns: int
    terms: int
    left_turned: bool = False
    right_turned: bool = False
    adds: bool = False
    place: int = 0
    follows: int = 0

    @property
    def multiplications(self) -> int:
        """Number of multiplications."""
        return self.rows * self.columns * self.terms

    @property
    def transposed(self) -> ProductCall:
        """The call whose result is the transpose of this one's: of the operands in the other order."""
        return ProductCall(
            self.columns, self.rows, self.terms, not self.right_turned, not self.left_turned, self.adds
        )

    def numbers(self) -> list[int]:
        """Arguments of the native module."""
        parts = 2 if self.multiplications >= WORTH_HALVING else 1
        sizes = (self.rows, self.columns, self.terms)
        last = [self.follows] if self.follows else []
        return [
            int(self.left_turned),
            int(self.right_turned),
            *sizes,
            int(self.adds),
            self.place,
            parts,
            *last,
        ]


def has_product(module: MlirModule) -> bool:
    """Whether a module has a product for the library, and operations can be replaced."""
    return not convolutions_problem() and any(map(_call_of, nested(module.operation)))


def rewrite_products(
    lowered: Lowered, available: Callable[[], bool], *, small: bool = False
) -> list[ProductCall]:
    """Replace products of a ``jax.stages.Lowered`` by calls of the library, in place. Returns the calls.

    ``available``: whether the library is there, asked only if there is a product for it. All others stay XLA's.
    ``small``: also products that are too small to be worth a call from a program of XLA's.
    """
    module = stablehlo(lowered)
    if not has_product(module) or not available():
        return []
    ir = mlir()
    with module.context, ir.Location.unknown():
        inline(ir, module)
        operations = [op for op in nested(module.operation) if op.name == _PRODUCT]
        calls = [_replace(ir, op, call) for op in operations if (call := _call_of(op, small=small))]
        rebuild_walls(ir, module)
    return calls


_PRODUCT, _TRANSPOSE = "stablehlo.dot_general", "stablehlo.transpose"


def _call_of(op: MlirOperation, *, small: bool = False) -> ProductCall | None:
    """The call that computes an operation as it stands; None if it is no product of two matrices, or too small."""
    if op.name != _PRODUCT or "algorithm" in op.attributes:
        return None
    kinds = [value.type for value in (*op.operands, op.results[0])]
    if any(str(kind.element_type) != "f32" or min(kind.shape, default=0) < 1 for kind in kinds):
        return None
    batch, left_axes, right_axes = product_axes(op.attributes["dot_dimension_numbers"])
    (left, right), (of_left, of_right) = (kind.shape for kind in kinds[:2]), (left_axes, right_axes)
    left_first, right_first = _is_first(of_left, len(left)), _is_first(of_right, len(right))
    if batch or left_first is None or right_first is None:
        return None
    terms = math.prod(left[axis] for axis in of_left)
    call = ProductCall(
        math.prod(left) // terms, math.prod(right) // terms, terms, left_first, not right_first
    )
    narrow = min(call.rows, call.columns, call.terms) < NARROWEST
    worth = not narrow and call.multiplications >= LEAST_MULTIPLICATIONS
    return call if worth or small else None


def _is_first(axes: Sequence[int], rank: int) -> bool | None:
    """Whether summed axes are an operand's first ones, in order, or its last ones (False); None: neither."""
    if not axes or len(axes) == rank:
        return None
    if list(axes) == list(range(len(axes))):
        return True
    return False if list(axes) == list(range(rank - len(axes), rank)) else None


def _replace(ir: ModuleType, op: MlirOperation, call: ProductCall) -> ProductCall:
    """Replace an operation and the neighbours that become part of its call. Returns the call."""
    left, right = op.operands
    makers = [producer(value) for value in op.operands]
    left, call = _untransposed(left, call, "left_turned")
    right, call = _untransposed(right, call, "right_turned")
    last, operands = op, [left, right]
    user = only_user(op.results[0])
    if user is not None and user.name == _TRANSPOSE and _swaps(user, op):
        last, operands, call = user, [right, left], call.transposed
    addition, accumulator = _accumulation(last)
    replaced = [op, last] if last is not op else [op]
    if addition is not None:
        last, call = addition, replace(call, adds=True)
        operands.append(accumulator)
        replaced.append(addition)
    more = _Followers() if call.adds else _followers(last, call.columns)
    if more.operations:
        replaced += more.operations
        last, call = more.operations[-1], replace(call, follows=more.follows)
        operands += more.operands
    if not call.adds:
        call = replace(call, place=_place(last))
    result = last.results[0]
    with ir.InsertionPoint(more.operations[0] if more.operations else last):
        kind: MlirType = result.type
        beside = len(operands) - 1 if call.adds else None
        computed = library_call(ir, PRODUCT_TARGET, call.numbers(), operands, kind, beside)
    result.replace_all_uses_with(computed)
    for compare in more.compares:
        compare.operands[0] = computed  # what is left is positive iff the sum is
    for operation in reversed(replaced):
        operation.erase()
    for maker in dict.fromkeys(makers):
        if maker is not None and maker.name == _TRANSPOSE and not list(maker.results[0].uses):
            maker.erase()
    return call


@dataclass(frozen=True, slots=True)
class _Followers:
    """What of a product's neighbours becomes part of its call, and comparisons that are to read the call's result."""

    follows: int = 0
    operands: tuple[Any, ...] = ()
    operations: tuple[Any, ...] = ()
    compares: tuple[Any, ...] = ()


def _followers(op: MlirOperation, columns: int) -> _Followers:
    """A bias and a cut at 0 after a product, or a choice between its elements and 0."""
    value, user = op.results[0], only_user(op.results[0])
    shape = list(value.type.shape)
    if user is None or shape[-1] != columns:
        return _Followers()
    if user.name == "stablehlo.select" and user.operands[1] == value and is_zero(user.operands[2]):
        compare = producer(user.operands[0])
        if compare is None or not _is_positive(compare) or list(compare.operands[0].type.shape) != shape:
            return _Followers()
        if str(compare.operands[0].type.element_type) != "f32":
            return _Followers()
        return _Followers(WITH_MASK, (compare.operands[0],), (user,))
    if user.name != "stablehlo.add":
        return _Followers()
    bias = per_channel(user.operands[1] if user.operands[0] == value else user.operands[0], len(shape) - 1)
    readers = [use.owner for use in user.results[0].uses]
    cuts = [r for r in readers if r.name == "stablehlo.maximum" and any(map(is_zero, r.operands))]
    compares = [r for r in readers if _is_positive(r) and r.operands[0] == user.results[0]]
    if bias is None or len(cuts) != 1 or len(readers) != 1 + len(compares):
        return _Followers()
    return _Followers(WITH_BIAS | WITH_CUT, (bias,), (user, cuts[0]), tuple(compares))


def _is_positive(op: MlirOperation) -> bool:
    """Whether an operation says which elements of its first operand are greater than 0."""
    is_compare = op.name == "stablehlo.compare"
    return is_compare and "GT" in str(op.attributes["comparison_direction"]) and is_zero(op.operands[1])


def _place(op: MlirOperation) -> int:
    """The number of the place of an operation's result: one more than its position, if it is only a result of the
    piece."""
    user = only_user(op.results[0])
    if user is None or user.name != "func.return":
        return 0
    place = list(user.operands).index(op.results[0]) + 1
    return place if place <= MOST_PLACES else 0


def _untransposed(value: MlirValue, call: ProductCall, name: str) -> tuple[MlirValue, ProductCall]:
    """The matrix of which an operand is the transpose, with the call that reads it so; else both as they are."""
    maker = producer(value)
    if maker is None or maker.name != _TRANSPOSE or list(maker.attributes["permutation"]) != [1, 0]:
        return value, call
    turned = {name: not getattr(call, name)}
    return maker.operands[0], replace(call, **turned)


def _swaps(transpose: MlirOperation, product: MlirOperation) -> bool:
    """Whether a transpose moves the axes of the product's right operand before those of its left one."""
    _, left_axes, _ = product_axes(product.attributes["dot_dimension_numbers"])
    rank = len(product.results[0].type.shape)
    of_left = len(product.operands[0].type.shape) - len(left_axes)
    return list(transpose.attributes["permutation"]) == [*range(of_left, rank), *range(of_left)]


def _accumulation(op: MlirOperation) -> tuple[Any, Any]:
    """The addition of an operation's result to an argument of the piece, whose sum is a result of the piece, and that
    argument; or None."""
    user = only_user(op.results[0])
    if user is None or user.name != "stablehlo.add":
        return None, None
    other = user.operands[1] if user.operands[0] == op.results[0] else user.operands[0]
    after = only_user(user.results[0])
    if after is None or after.name != "func.return" or other == op.results[0] or producer(other) is not None:
        return None, None
    return (user, other) if len(list(other.uses)) == 1 else (None, None)


class ResultPlaces:
    """Memory for results of a piece, by their position, to which the library writes them in place of XLA's.

    ``memory``: arrays of float32 in one piece, with as many elements as the results have.
    """

    def __init__(self, memory: Mapping[int, FloatArray]) -> None:
        module: Any = importlib.import_module("podrun.device.xla._onednn")
        self._give = module.give_places
        self._places = module.places({position + 1: array for position, array in memory.items()})

    @staticmethod
    def bit(position: int) -> int:
        """The bit of a position in `call`'s answer."""
        return 2 << position

    def call(
        self, piece: Callable[..., Sequence[Any]], operands: Sequence[object]
    ) -> tuple[Sequence[Any], int]:
        """The results of a piece, and the bits of the places that were filled, of which XLA's arrays hold nothing."""
        give = self._give
        give(self._places)
        try:
            results = piece(*operands)  # The calling thread computes it.
        finally:
            filled = give(None)
        return results, filled


def check_products(multiply: Multiply) -> None:
    """Compare small products of each kind on integers, whose sums are exact. RuntimeError if one is wrong."""
    rows, columns, terms = 37, 53, 19
    left, right, added = (
        _integers(shape, step)
        for shape, step in (((rows, terms), 3), ((terms, columns), 5), ((rows, columns), 7))
    )
    for kind in range(8):
        turned, adds = (bool(kind & 1), bool(kind & 2)), bool(kind & 4)
        call = ProductCall(rows, columns, terms, *turned, adds)
        pairs = zip((left, right), turned, strict=True)
        operands = [np.ascontiguousarray(matrix.T if turn else matrix) for matrix, turn in pairs]
        right_answer = left @ right + (added if adds else 0)
        for parts in (1, 2):
            result = np.empty_like(added)
            multiply([*call.numbers()[:-1], parts], (*operands, *([added] if adds else [])), result)
            if not np.array_equal(result, right_answer):
                raise RuntimeError("oneDNN computes wrong products on this processor")


def _integers(shape: tuple[int, ...], step: int) -> FloatArray:
    return (np.arange(math.prod(shape)) * step % 11 - 5).astype(np.float32).reshape(shape)
