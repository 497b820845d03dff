"""Rewrites sums over images and zero-padded images so that XLA makes fewer passes over memory.

XLA on CPUs calls a library for sums. The library reads terms from memory, so XLA writes them out first. A training step
sums many terms needlessly: the gradient of a normalisation sums the same products four times, each time with another
factor for each channel, and the weight gradient of a depthwise convolution writes out a shifted image for every kernel
position. Three rewrites reduce this:

* Factors that are constant over a sum move out of it, and equal sums are computed once (``sum(g * s) = s * sum(g)``).
* A sum of products first adds `PARTS` parts of the images element by element, which XLA fuses with reading them. Only
  the remaining part goes to the library.
* Images that differ by factors and by the zeros around them (the data gradient of a depthwise convolution) become parts
  of one image. XLA then no longer tests for every element of each whether it lies in the padding.

No sum of n numbers becomes longer, and none becomes a difference of large numbers that was not one before. The decision
depends on the program's form alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.epilogues import create_operation, is_zero, nested, producer
from podrun.private_apis.jax import mlir, run_passes

if TYPE_CHECKING:
    from podrun.private_apis.mlir_types import MlirModule, MlirOperation, MlirType, MlirValue

PARTS = 8
"""Most parts of an image that are added element by element; their number divides the image's first axis."""
LEAST = 1 << 14
"""Fewest elements of an image whose sums are rewritten."""
MANY = 4
"""Fewest zero-padded images that are joined into one."""

_BROADCAST = "stablehlo.broadcast_in_dim"
_TIDY = "builtin.module(func.func(canonicalize,cse))"
_LOW, _HIGH, _BETWEEN = "edge_padding_low", "edge_padding_high", "interior_padding"


def simplify_sums(module: MlirModule) -> None:
    """Rewrite in place the sums in a module's functions, if it sums products."""
    ir = mlir()
    with module.context, ir.Location.unknown():
        if not any(_is_sum_of_products(op) for op in nested(module.operation)):
            return
        run_passes(module, _TIDY)
        for function in module.body.operations:
            for block in (block for region in function.operation.regions for block in region):
                _shift(ir, [op.operation for op in block if op.operation.name == "stablehlo.pad"])
                _add_up(ir, [op.operation for op in block if _is_sum(op.operation)])
        run_passes(module, _TIDY)


@dataclass(frozen=True, slots=True)
class _Term:
    """A value as the product of ``core`` and ``factors``; factors are constant over some axes."""

    core: MlirValue | None
    factors: tuple[Any, ...] = ()
    negative: bool = False


def _peeled(value: MlirValue, axes: tuple[int, ...]) -> _Term:
    """Split a value into its core and the factors that are constant over the axes."""
    owner = producer(value)
    if owner is not None and owner.name == "stablehlo.negate":
        inner = _peeled(owner.operands[0], axes)
        return _Term(inner.core, inner.factors, not inner.negative)
    if owner is not None and owner.name == "stablehlo.multiply":
        for factor, other in (owner.operands, reversed(list(owner.operands))):
            if _is_constant(factor, axes) and not _is_constant(other, axes):
                inner = _peeled(other, axes)
                return _Term(inner.core, (*inner.factors, factor), inner.negative)
    return _Term(value)


def _is_constant(value: MlirValue, axes: tuple[int, ...]) -> bool:
    """Whether a value is a broadcast over the axes that keeps the order of its other axes."""
    owner = producer(value)
    if owner is None or owner.name != _BROADCAST:
        return False
    mapped = list(zip(owner.attributes["broadcast_dimensions"], owner.operands[0].type.shape, strict=True))
    kept = [axis for axis, _ in mapped if axis not in axes]
    return all(size == 1 for axis, size in mapped if axis in axes) and kept == sorted(kept)


# --- Sums -----------------------------------------------------------------------------------------------------


def _add_up(ir: ModuleType, sums: list[Any]) -> None:
    """Compute each distinct sum once, in parts, and multiply it by its constant factors."""
    done: dict[Any, Any] = {}
    for op in sums:
        axes, kind = tuple(op.attributes["dimensions"]), op.results[0].type
        whole = _peeled(op.operands[0], axes)
        product = None if whole.core is None else producer(whole.core)
        terms = [whole]
        if product is not None and product.name == "stablehlo.multiply":
            terms = [
                _Term(None, whole.factors, whole.negative),
                *(_peeled(v, axes) for v in product.operands),
            ]
        cores = [t.core for t in terms if t.core is not None]
        key = axes, frozenset(cores), len(cores)
        with ir.InsertionPoint(op):
            total = done.get(key)
            if total is None:
                total = done[key] = _added(ir, op, cores, axes)
            for factor in (f for t in terms for f in t.factors):
                total = create_operation(ir, "multiply", kind, [total, _over(ir, factor, axes, kind)])
            if sum(t.negative for t in terms) % 2:
                total = create_operation(ir, "negate", kind, [total])
        op.results[0].replace_all_uses_with(total)
        op.erase()


def _added(ir: ModuleType, op: MlirOperation, cores: list[Any], axes: tuple[int, ...]) -> Any:
    """The sum of one image, or of the product of two."""
    value = cores[0]
    if len(cores) > 1:
        value = create_operation(ir, "multiply", value.type, cores)
    if len(cores) > 1 or _is_less_something(value):
        value = _in_parts(ir, value, axes)
    clone = op.clone()
    clone.operands[0] = value
    clone.move_before(op)
    return clone.results[0]


def _in_parts(ir: ModuleType, value: MlirValue, axes: tuple[int, ...]) -> Any:
    """Add parts of an image along the first axis that is summed."""
    whole = list(value.type.shape)
    axis = next((a for a in axes if whole[a] > 1), axes[0])
    parts = next((p for p in range(PARTS, 1, -1) if whole[axis] % p == 0), 1)
    shape = [size // parts if a == axis else size for a, size in enumerate(whole)]
    turned = next((a for a in axes if shape[a] > 1), None)
    if parts == 1 or turned is None:
        return value
    kind = ir.RankedTensorType.get(shape, value.type.element_type)
    total: MlirValue | None = None
    for part in range(parts):
        starts = [part * shape[a] if a == axis else 0 for a in range(len(shape))]
        piece = _slice(ir, kind, value, starts)
        total = piece if total is None else create_operation(ir, "add", kind, [total, piece])
    # the library would take the additions in and have every part written out; a reversal it cannot take in
    return create_operation(ir, "reverse", kind, [total], dimensions=[turned])


def _over(ir: ModuleType, factor: MlirValue, axes: tuple[int, ...], kind: MlirType) -> Any:
    """Drop from a factor the axes that it is constant over."""
    source = factor.owner.operands[0]
    kept = [axis for axis in range(len(factor.type.shape)) if axis not in axes]
    mapped = zip(factor.owner.attributes["broadcast_dimensions"], source.type.shape, strict=True)
    there = [(axis, size) for axis, size in mapped if axis in kept]
    smaller = ir.RankedTensorType.get([size for _, size in there], kind.element_type)
    source = create_operation(ir, "reshape", smaller, [source])
    places = [kept.index(axis) for axis, _ in there]
    return create_operation(ir, "broadcast_in_dim", kind, [source], broadcast_dimensions=places)


def _is_sum(op: MlirOperation) -> bool:
    """Whether an operation sums float32 images over axes before the last."""
    if op.name != "stablehlo.reduce" or len(op.operands) != 2:
        return False
    kind, axes = op.operands[0].type, op.attributes["dimensions"]
    return (
        str(kind.element_type) == "f32"
        and [inner.name for inner in nested(op)] == ["stablehlo.add", "stablehlo.return"]
        and len(kind.shape) > 2
        and len(kind.shape) - 1 not in axes
        and math.prod(kind.shape) >= LEAST
        and is_zero(op.operands[1])
    )


def _is_sum_of_products(op: MlirOperation) -> bool:
    maker = producer(op.operands[0]) if _is_sum(op) else None
    return maker is not None and maker.name == "stablehlo.multiply"


def _is_less_something(value: MlirValue) -> bool:
    """Whether a value is an image minus one number for each channel, which is free to recompute."""
    owner = producer(value)
    if owner is None or owner.name != "stablehlo.subtract":
        return False
    return any(maker is not None and maker.name == _BROADCAST for maker in map(producer, owner.operands))


# --- Images in zeros ------------------------------------------------------------------------------------------


def _shift(ir: ModuleType, pads: list[Any]) -> None:
    """Join images that differ only by factors and by the zeros around them into one."""
    groups: dict[Any, list[tuple[Any, _Term]]] = {}
    for op in pads:
        low, high, between = (tuple(op.attributes[name]) for name in (_LOW, _HIGH, _BETWEEN))
        if min(*low, *high) >= 0 and is_zero(op.operands[1]):
            axes = tuple(a for a, numbers in enumerate(zip(low, high, between, strict=True)) if any(numbers))
            term = _peeled(op.operands[0], axes)
            shape = tuple(op.results[0].type.shape)
            groups.setdefault((term.core, axes, between, shape), []).append((op, term))
    for (core, _, between, shape), members in groups.items():
        if len(members) >= MANY and math.prod(shape) >= LEAST:
            _join(ir, core, between, members)


def _join(
    ir: ModuleType, core: MlirValue, between: tuple[int, ...], members: list[tuple[Any, _Term]]
) -> None:
    lows, highs = ([tuple(op.attributes[name]) for op, _ in members] for name in (_LOW, _HIGH))
    low, high = _greatest(lows), _greatest(highs)
    spread = [n + max(n - 1, 0) * gap for n, gap in zip(core.type.shape, between, strict=True)]
    sizes = [a + n + b for a, n, b in zip(low, spread, high, strict=True)]
    first = members[0][0]
    with ir.InsertionPoint(first):
        kind = ir.RankedTensorType.get(sizes, core.type.element_type)
        numbers = {_LOW: low, _HIGH: high, _BETWEEN: list(between)}
        whole = create_operation(ir, "pad", kind, [core, first.operands[1]], **numbers)
    for (op, term), before in zip(members, lows, strict=True):
        kind = op.results[0].type
        with ir.InsertionPoint(op):
            whole_term = _slice(
                ir, kind, whole, [most - here for most, here in zip(low, before, strict=True)]
            )
            for factor in term.factors:
                places = list(factor.owner.attributes["broadcast_dimensions"])
                operands = [factor.owner.operands[0]]
                wider = create_operation(ir, "broadcast_in_dim", kind, operands, broadcast_dimensions=places)
                whole_term = create_operation(ir, "multiply", kind, [whole_term, wider])
            if term.negative:
                whole_term = create_operation(ir, "negate", kind, [whole_term])
        op.results[0].replace_all_uses_with(whole_term)
        op.erase()


def _greatest(rows: Iterable[tuple[int, ...]]) -> list[int]:
    return [max(numbers) for numbers in zip(*rows, strict=True)]


# --- MLIR -----------------------------------------------------------------------------------------------------


def _slice(ir: ModuleType, kind: MlirType, value: MlirValue, starts: list[int]) -> Any:
    """The slice that begins at ``starts`` and has the shape of ``kind``."""
    limits = [start + size for start, size in zip(starts, kind.shape, strict=True)]
    strides = [1] * len(starts)
    return create_operation(
        ir, "slice", kind, [value], start_indices=starts, limit_indices=limits, strides=strides
    )
