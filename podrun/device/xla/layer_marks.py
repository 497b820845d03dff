"""Finds layers that a program spells out: windows over an image and what replaces negative elements.

A pooling is traced as slices of a padded image that are combined along its rows and then along its columns
(`podrun.numerics.windows.reduced_by_window`), which XLA computes as it stands. `mark_layers` makes one call of it, by a
name that only `podrun.device.xla.networks` knows; what becomes of no network becomes a network of its own. The sums of
an image's pixels and a softmax of such a sum become calls too.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.epilogues import is_zero, producer
from podrun.private_apis.jax import run_passes

if TYPE_CHECKING:
    from podrun.private_apis.mlir_types import MlirBlock, MlirModule, MlirOperation, MlirValue

POOL, CUT, SUM, SOFTMAX = "podrun_pool", "podrun_cut", "podrun_sum", "podrun_softmax"
MARKS = frozenset({POOL, CUT, SUM, SOFTMAX})
SAME_ORDER = ("stablehlo.reshape", "stablehlo.broadcast_in_dim")
"""Operations that keep the order of elements, if they keep their number."""
_TIDY = "builtin.module(func.func(canonicalize,cse))"
_COMBINE = {"stablehlo.maximum": (0, float("-inf")), "stablehlo.add": (1, 0.0)}
"""Operation that combines a window -> the kind of the window, and the value of its padding."""


def mark_layers(ir: ModuleType, module: MlirModule) -> None:
    """Replace windows and cuts of images channels last and sums of pixels in the main function by calls, in place."""
    for op in _operations(ir, module):
        _cancel(op)
    run_passes(module, _TIDY)
    for op in reversed(_operations(ir, module)):
        if op.name in _COMBINE:
            _mark_window(ir, op)
        elif op.name == "stablehlo.select":
            _mark_cut(ir, op)
        elif op.name == _REDUCE:
            _mark_sum(ir, op)
    for op in reversed(_operations(ir, module)):
        if op.name == "stablehlo.divide":
            _mark_softmax(ir, op)
    run_passes(module, _TIDY)


def main_blocks(ir: ModuleType, module: MlirModule) -> list[MlirBlock]:
    """The blocks of a module's main function."""
    functions = module.body.operations
    main = next(f for f in functions if ir.StringAttr(f.attributes["sym_name"]).value == "main")
    return [block for region in main.operation.regions for block in region]


def _operations(ir: ModuleType, module: MlirModule) -> list[Any]:
    return [op.operation for block in main_blocks(ir, module) for op in block]


def _cancel(op: MlirOperation) -> None:
    """Let readers of a transpose of a transpose, which cancel, read what was there before."""
    before = producer(op.operands[0]) if op.name == "stablehlo.transpose" else None
    if before is None or before.name != "stablehlo.transpose":
        return
    first, second = list(before.attributes["permutation"]), list(op.attributes["permutation"])
    if [first[axis] for axis in second] == sorted(first):
        op.results[0].replace_all_uses_with(before.operands[0])


@dataclass(frozen=True, slots=True)
class _Axis:
    """Windows along one axis of an image."""

    image: MlirValue
    axis: int
    kernel: int
    stride: int


def _windows(value: MlirValue, name: str) -> _Axis | None:
    """The windows along one axis whose elements are combined in order to a value."""
    terms: list[Any] = []
    maker = producer(value)
    while maker is not None and maker.name == name:
        terms.append(producer(maker.operands[1]))
        maker = producer(maker.operands[0])
    terms.append(maker)
    terms.reverse()
    if len(terms) < 2 or any(term is None or term.name != "stablehlo.slice" for term in terms):
        return None
    image, sizes = terms[0].operands[0], list(terms[0].operands[0].type.shape)
    if len(sizes) != 4 or any(term.operands[0] != image for term in terms):
        return None
    starts = [list(term.attributes["start_indices"]) for term in terms]
    limits = [list(term.attributes["limit_indices"]) for term in terms]
    strides = [list(term.attributes["strides"]) for term in terms]
    axes = [axis for axis in range(4) if starts[0][axis] != starts[1][axis]]
    if len(axes) != 1 or any(s != strides[0] for s in strides):
        return None
    (axis,) = axes
    whole = all(
        start[a] == 0 and limit[a] == sizes[a] and strides[0][a] == 1
        for start, limit in zip(starts, limits, strict=True)
        for a in range(4)
        if a != axis
    )
    in_order = [start[axis] for start in starts] == list(range(len(terms)))
    return _Axis(image, axis, len(terms), strides[0][axis]) if whole and in_order else None


def _mark_window(ir: ModuleType, op: MlirOperation) -> None:
    """Replace the last operation of a window by a call."""
    columns = _windows(op.results[0], op.name)
    kind = op.results[0].type
    if columns is None or columns.axis != 2 or str(kind.element_type) != "f32" or 0 in kind.shape:
        return
    rows = _windows(columns.image, op.name)
    if rows is None or rows.axis != 1:
        return
    sums, padding = _COMBINE[op.name]
    image, pads = rows.image, [0, 0]
    pad = producer(image)
    if pad is not None and pad.name == "stablehlo.pad":
        low, high = list(pad.attributes["edge_padding_low"]), list(pad.attributes["edge_padding_high"])
        plain = not any(pad.attributes["interior_padding"]) and min(*low, *high) >= 0
        if plain and not any((low[0], low[3], high[0], high[3])) and _is_number(pad.operands[1], padding):
            image, pads = pad.operands[0], low[1:3]
    numbers = [sums, rows.kernel, columns.kernel, rows.stride, columns.stride, *pads]
    _replace(ir, op, POOL, image, numbers)


def _mark_cut(ir: ModuleType, op: MlirOperation) -> None:
    """Replace the choice between an element that is greater than 0 and 0 by a call."""
    compare, value = producer(op.operands[0]), op.operands[1]
    if compare is None or compare.name != "stablehlo.compare" or len(value.type.shape) != 4:
        return
    greater = "GT" in str(compare.attributes["comparison_direction"])
    of_value = compare.operands[0] == value and is_zero(compare.operands[1]) and is_zero(op.operands[2])
    if greater and of_value and str(value.type.element_type) == "f32" and 0 not in value.type.shape:
        _replace(ir, op, CUT, value, [])


_REDUCE = "stablehlo.reduce"


def _reduces(op: Any, name: str, axes: list[int]) -> bool:
    """Whether an operation combines the elements along these axes with one other operation and nothing else."""
    if op is None or op.name != _REDUCE or len(op.operands) != 2:
        return False
    block = op.regions[0].blocks[0]
    plain = len(list(block.operations)) == 2 and block.operations[0].operation.name == name
    return (
        plain and list(op.attributes["dimensions"]) == axes and _is_number(op.operands[1], _COMBINE[name][1])
    )


def _mark_sum(ir: ModuleType, op: MlirOperation) -> None:
    """Replace the sum of one image's pixels by a call."""
    image = op.operands[0].type
    if not _reduces(op, "stablehlo.add", [1, 2]) or len(image.shape) != 4 or str(image.element_type) != "f32":
        return
    if image.shape[0] == 1 and min(image.shape) > 0:
        _replace(ir, op, SUM, op.operands[0], [])


def _mark_softmax(ir: ModuleType, op: MlirOperation) -> None:
    """Replace exponentials of the distances to the greatest value, over their sum, by a call."""
    powers, total = producer(op.operands[0]), _narrowed(op.operands[1])
    shape = list(op.results[0].type.shape)
    if len(shape) < 2 or math.prod(shape) != shape[1] or powers is None:
        return
    distance = producer(powers.operands[0]) if powers.name == "stablehlo.exponential" else None
    if distance is None or distance.name != "stablehlo.subtract":
        return
    values, greatest = distance.operands[0], _narrowed(distance.operands[1])
    if greatest is not None and greatest.name == "stablehlo.maximum":
        bounds = [o for o in greatest.operands if not _is_number(o, float("-inf"))]
        greatest = producer(bounds[0]) if len(bounds) == 1 else None
    of_powers = _reduces(total, "stablehlo.add", [1]) and total.operands[0] == op.operands[0]
    of_values = _reduces(greatest, "stablehlo.maximum", [1]) and greatest.operands[0] == values
    if of_powers and of_values and _is_sum(values):
        _replace(ir, op, SOFTMAX, values, [])


def _narrowed(value: MlirValue) -> Any:
    """The operation whose result is broadcast to a value."""
    maker = producer(value)
    while maker is not None and maker.name in SAME_ORDER:
        maker = producer(maker.operands[0])
    return maker


def _is_sum(value: MlirValue) -> bool:
    """Whether values are sums of pixels, or means."""
    maker = producer(value)
    while maker is not None and maker.name in (*SAME_ORDER, "stablehlo.divide", "stablehlo.multiply"):
        maker = producer(maker.operands[0])
    named = maker is not None and "call_target_name" in maker.attributes
    return named and maker.attributes["call_target_name"].value == SUM


def _is_number(value: MlirValue, number: float) -> bool:
    maker = producer(value)
    while maker is not None and maker.name == "stablehlo.broadcast_in_dim":
        maker = producer(maker.operands[0])
    if maker is None or maker.name != "stablehlo.constant" or not maker.attributes["value"].is_splat:
        return False
    return float(maker.attributes["value"].get_splat_value().value) == number


def _replace(ir: ModuleType, op: MlirOperation, name: str, image: MlirValue, numbers: list[int]) -> None:
    attributes = {
        "call_target_name": ir.StringAttr.get(name),
        "has_side_effect": ir.BoolAttr.get(False),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
        "backend_config": ir.DictAttr.get({"numbers": ir.DenseI64ArrayAttr.get(numbers)}),
    }
    with ir.InsertionPoint(op):
        call = ir.Operation.create(
            "stablehlo.custom_call", results=[op.results[0].type], operands=[image], attributes=attributes
        )
    op.results[0].replace_all_uses_with(call.results[0])
    op.erase()
