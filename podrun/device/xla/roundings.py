"""Stochastic roundings of a lowered piece as calls of podrun's own native code, before XLA compiles it.

A rounding is a call of a function named `ROUNDING` (`podrun.compiler.grid_rounding`), which becomes one native call
(`podrun.device.xla.own_functions`, ``native/rounding.c``). The states of a program's roundings are rows of tables,
which a call reads where they lie.

The call also does what stands directly before and behind it, so that XLA has no kernel for that either: one elementwise
operation whose operands lie in memory, perhaps as halves or fewer elements than the result has; the replacement of
infinities by NaN or the greatest half; the conversion to halves. An update in float16 is a chain of such calls. What
would be fused with its operand otherwise, a sum of a product, stays XLA's, which rounds both at once. (But for a
product outside of the function that computes the sum.) A quotient is divided, where XLA may multiply by a reciprocal:
its last bit can differ, and then which of two halves it is rounded to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from podrun.core.names import ROUNDING
from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.epilogues import library_call, only_user, producer
from podrun.device.xla.own_functions import MOST_ELEMENTS, OwnFunction, replace_function

if TYPE_CHECKING:
    from types import ModuleType

    from jax.stages import Lowered

    from podrun.private_apis.mlir_types import MlirOperation, MlirType, MlirValue

ROUNDING_TARGET = "podrun_rounding"
"""The name of the call in a program."""
WORDS = 2
"""Of a state."""
_WORTH_REUSING = 1 << 16
"""Elements from which a call writes over its operand. XLA copies such operands first and compiles each copy."""


def rewrite_roundings(lowered: Lowered, available: Callable[[], bool]) -> int:
    """Replace the stochastic roundings in a lowered piece by native calls, in place. Returns how many.

    ``available``: whether the C module is there, asked only if there is such a call.
    """
    return replace_function(lowered, OwnFunction(ROUNDING, _is_rounding, _replace), available)


def _is_rounding(call: MlirOperation) -> bool:
    """Whether a call is one of the compiler's roundings, as far as its types say."""
    if len(call.operands) != 3 or len(call.results) != 1:
        return False
    value, table, row = (operand.type for operand in call.operands)
    sizes, states = list(value.shape), list(table.shape)
    kinds = [str(kind.element_type) for kind in (value, table, row)]
    return (
        str(value) == str(call.results[0].type)
        and kinds == ["f32", "ui32", "i32"]
        and states[-1:] == [WORDS]
        and sizes[: len(states) - 2] == states[:-2]
        and not list(row.shape)
        and 0 < math.prod(sizes) <= MOST_ELEMENTS
        and 0 < math.prod(states) <= MOST_ELEMENTS
    )


@dataclass(frozen=True, slots=True)
class RoundedOperand:
    """An array that a call reads; element ``i`` of the operand is its element ``i // inner % count``."""

    value: MlirValue
    inner: int
    count: int

    @property
    def stretch(self) -> int:
        """How many elements in a row are one, or lie in a row of the array."""
        return max(self.inner, self.count if self.inner == 1 else 1)


_OPERATIONS = {"add": 1, "subtract": 2, "multiply": 3, "divide": 4, "sqrt": 5}
"""What a call computes before it rounds, and its numbers (`native/rounding.c`)."""
_TO_NAN, _TO_GREATEST = 1, 2
_PICKED = ("stablehlo.select", "stablehlo.clamp", "stablehlo.pad", "stablehlo.concatenate")
"""Operations of which no sum is fused to one rounding, unless there is a product behind them."""
_MOVED = frozenset(
    (*_PICKED, *(f"stablehlo.{name}" for name in ("broadcast_in_dim", "reshape", "slice", "transpose")))
)
"""Operations through which LLVM sees a product."""
_LEAST_STRETCH = 64
"""Elements in a row of an operand that repeats: where there are fewer, XLA's own operation is faster."""
_FREE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *_OPERATIONS,
        "abs",
        "broadcast_in_dim",
        "clamp",
        "compare",
        "constant",
        "convert",
        "reshape",
        "select",
    )
)
"""What is erased when nothing reads it."""
_GREATEST = 65504.0


def _replace(ir: ModuleType, call: MlirOperation) -> None:
    value, table, row = call.operands
    kind, (*batch, rows, _) = value.type, table.type.shape
    size = math.prod(kind.shape)
    operation, operands = _operation_before(call)
    first = operands[0]
    in_place = 0 if size >= _WORTH_REUSING and _may_be_overwritten(first, kind) else None
    last, clip = _clip_behind(call)
    converts = [use.owner for use in last.results[0].uses]
    if converts and all(map(_is_to_half, converts)):
        kind, in_place = converts[0].results[0].type, None
    else:
        converts = []
    numbers = [size // math.prod(batch), math.prod(batch), rows, operation, clip]
    patterns = [number for o in (*operands, first)[:2] for number in (o.inner, o.count)]
    arrays = [*(o.value for o in operands), table, row]
    with ir.InsertionPoint(call):
        rounded = library_call(ir, ROUNDING_TARGET, [*numbers, *patterns], arrays, kind, in_place)
    ends = converts or [last]
    for op in ends:
        op.results[0].replace_all_uses_with(rounded)
    for op in [op for op in ends if op != call]:
        _erase_unread(op)
    _erase_unread(call)


def _may_be_overwritten(operand: RoundedOperand, kind: MlirType) -> bool:
    value = operand.value
    return value.type == kind and only_user(value) is not None and producer(value) is not None


def _operation_before(call: MlirOperation) -> tuple[int, list[RoundedOperand]]:
    """The number of the operation whose result a call rounds and that operation's operands; 0 and the value itself
    where the operation stays XLA's.
    """
    value = call.operands[0]
    size = math.prod(value.type.shape)
    plain = 0, [RoundedOperand(value, 1, size)]
    maker = producer(value)
    name = "" if maker is None else maker.name.removeprefix("stablehlo.")
    if name not in _OPERATIONS or only_user(value) is None:
        return plain
    operands = [_operand(operand, size) for operand in maker.operands]
    computed = [operand.value for operand in operands if not _is_stored(operand.value)]
    if any(o.stretch < min(_LEAST_STRETCH, size) for o in operands):
        return plain
    if name in ("add", "subtract") and any(
        producer(v).name not in _PICKED or _has_product_behind(v) for v in computed
    ):
        return plain
    if len(computed) > 1 and computed[0] != computed[1]:
        return plain
    return _OPERATIONS[name], operands


def _has_product_behind(value: MlirValue) -> bool:
    queue, seen = [value], []
    while queue:
        maker = producer(queue.pop())
        if maker is None or maker in seen:
            continue
        seen.append(maker)
        if maker.name in ("stablehlo.multiply", "stablehlo.divide"):
            return True
        if maker.name in _MOVED:
            queue.extend(maker.operands)
    return False


def _operand(value: MlirValue, size: int) -> RoundedOperand:
    """An operand of ``size`` elements as the array that it is made of."""
    inner, count, narrow = 1, size, False
    while not _is_stored(value):
        maker = producer(value)
        following = maker.operands[0] if maker.operands else value
        if maker.name == "stablehlo.broadcast_in_dim":
            pattern = _pattern(maker)
            if pattern is None or (count < size and 1 < pattern[1] < count):
                break
            if pattern[1] < count:
                inner, count = (size, 1) if pattern[1] == 1 else pattern
        elif maker.name == "stablehlo.convert" and _is_half(following) and not narrow:
            narrow = True
        elif maker.name == "stablehlo.select" and (side := _chosen(maker)) is not None:
            following = side
        elif maker.name != "stablehlo.reshape":
            break
        value = following
    return RoundedOperand(value, inner, count)


def _chosen(select: MlirOperation) -> MlirValue | None:
    """What a selection gives that always gives one of its operands, or two that are the same."""
    test, first, second = select.operands
    makers = [producer(first), producer(second)]
    if first == second or (
        all(m is not None and m.name == "stablehlo.convert" for m in makers)
        and makers[0].operands[0] == makers[1].operands[0]
    ):
        return first
    compare = producer(test)
    if compare is None or compare.name != "stablehlo.compare":
        return None
    numbers = [_splat(operand) for operand in compare.operands]
    if None in numbers or "EQ" not in str(compare.attributes["comparison_direction"]):
        return None
    return first if numbers[0] == numbers[1] else second


def _pattern(broadcast: MlirOperation) -> tuple[int, int] | None:
    """How the elements of a broadcast's operand repeat in its result, if one stretch of axes has them in order."""
    sizes, shape = list(broadcast.operands[0].type.shape), list(broadcast.results[0].type.shape)
    axes = [int(axis) for axis in broadcast.attributes["broadcast_dimensions"]]
    wide = [axis for axis, size in zip(axes, sizes, strict=True) if size > 1]
    if not wide:
        return max(1, math.prod(shape)), 1
    if wide != [axis for axis in range(wide[0], wide[-1] + 1) if shape[axis] > 1]:
        return None
    return math.prod(shape[wide[-1] + 1 :]), math.prod(sizes)


def _clip_behind(call: MlirOperation) -> tuple[MlirOperation, int]:
    """The last operation of those that replace infinities of a call's result, if nothing else reads it, and by what.

    That is what the TensorFlow front end makes of halves that overflow (`podrun.tensorflow.operators.overflow`).
    """
    result = call.results[0]
    users = {use.owner.name.removeprefix("stablehlo."): use.owner for use in result.uses}
    count = len(list(result.uses))
    if count == 1 and "clamp" in users:
        low, value, high = users["clamp"].operands
        if value == result and _splat(low) == -_GREATEST and _splat(high) == _GREATEST:
            return users["clamp"], _TO_GREATEST
    if count == 2 and set(users) == {"abs", "select"}:
        compare = only_user(users["abs"].results[0])
        test, other, value = users["select"].operands
        fits = (
            compare is not None
            and compare.name == "stablehlo.compare"
            and "EQ" in str(compare.attributes["comparison_direction"])
            and _splat(compare.operands[1]) == math.inf
            and only_user(compare.results[0]) is not None
            and test == compare.results[0]
            and value == result
        )
        if fits and math.isnan(_splat(other) or 0.0):
            return users["select"], _TO_NAN
    return call, 0


def _is_stored(value: MlirValue) -> bool:
    """Whether a value lies in memory when others read it."""
    maker = producer(value)
    if maker is None:
        return True
    if maker.name == "stablehlo.constant":
        return math.prod(maker.results[0].type.shape) == 1 or not maker.attributes["value"].is_splat
    return maker.name == "stablehlo.custom_call" and ROUNDING_TARGET in str(
        maker.attributes["call_target_name"]
    )


def _splat(value: MlirValue) -> float | None:
    """What every element of a constant is; None for another value."""
    maker = producer(value)
    while maker is not None and maker.name == "stablehlo.broadcast_in_dim":
        maker = producer(maker.operands[0])
    if maker is None or maker.name != "stablehlo.constant" or "complex" in str(maker.results[0].type):
        return None  # MLIR's Python has no complex attributes.
    if not maker.attributes["value"].is_splat:
        return None
    number = maker.attributes["value"].get_splat_value()
    return float(number.value) if hasattr(number, "value") else None


def _is_half(value: MlirValue) -> bool:
    return str(value.type.element_type) == "f16"


def _is_to_half(operation: MlirOperation) -> bool:
    return operation.name == "stablehlo.convert" and _is_half(operation.results[0])


def _erase_unread(operation: MlirOperation) -> None:
    """Erase an operation if nothing reads its results, and those of `_FREE` that it alone reads."""
    queue = [operation] if _is_unread(operation) else []
    while queue:
        op = queue.pop()
        makers = [maker for operand in op.operands if (maker := producer(operand)) is not None]
        op.erase()
        # Only what lost its last reader here: it comes up once, though others that are erased read it too.
        for index, maker in enumerate(makers):
            if maker.name in _FREE and maker not in makers[:index] and _is_unread(maker):
                queue.append(maker)


def _is_unread(operation: MlirOperation) -> bool:
    return not any(list(result.uses) for result in operation.results)
