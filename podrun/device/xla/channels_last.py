"""Keeps images channels last between the calls into oneDNN.

oneDNN reads images channels last. XLA on CPUs stores every array in the order of its program's axes, so each transpose
around a call is a copy. This pass moves the transposes: an operation on ``transpose(x)`` becomes the transpose of the
operation on x, and two transposes that become neighbours cancel. Each element is computed as before; only sums over
batch and positions add their terms in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from podrun.device.xla.convolutions import SHUFFLE, TARGET, Kind
from podrun.device.xla.epilogues import create_operation, producer
from podrun.private_apis.jax import mlir

if TYPE_CHECKING:
    from podrun.private_apis.mlir_types import MlirModule, MlirOperation, MlirType, MlirValue


def to_first(rank: int) -> tuple[int, ...]:
    """The transpose from ``[..., H, W, C]`` to ``[..., C, H, W]``."""
    return (*range(rank - 3), rank - 1, rank - 3, rank - 2)


def to_last(rank: int) -> tuple[int, ...]:
    """The transpose from ``[..., C, H, W]`` to ``[..., H, W, C]``."""
    return (*range(rank - 3), rank - 2, rank - 1, rank - 3)


_NAMES = (
    "abs",
    "add",
    "and",
    "ceil",
    "clamp",
    "compare",
    "convert",
    "cosine",
    "divide",
    "exponential",
    "exponential_minus_one",
    "floor",
    "is_finite",
    "log",
    "log_plus_one",
    "logistic",
    "maximum",
    "minimum",
    "multiply",
    "negate",
    "not",
    "optimization_barrier",
    "or",
    "power",
    "remainder",
    "round_nearest_afz",
    "round_nearest_even",
    "rsqrt",
    "select",
    "sign",
    "sine",
    "sqrt",
    "subtract",
    "tanh",
    "xor",
)
ELEMENTWISE = frozenset(f"stablehlo.{name}" for name in _NAMES)


def sink_transposes(module: MlirModule) -> None:
    """Move transposes to channels first behind the operations that work in either order, in place."""
    ir = mlir()
    with module.context, ir.Location.unknown():
        for function in module.body.operations:
            _region(ir, function.operation)


def _region(ir: ModuleType, operation: MlirOperation) -> None:
    for region in operation.regions:
        for block in region:
            for op in list(block):
                if op.operation.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if", "func.func"):
                    _region(ir, op.operation)
                elif len(op.operation.results) == 1:
                    _sink(ir, op.operation)


def _sink(ir: ModuleType, op: MlirOperation) -> None:
    rule: Callable[[Any, Any], Any] | None = _RULES.get(op.name)
    if op.name in ELEMENTWISE:
        rule = _elementwise
    if op.name == "stablehlo.reshape" and _shuffled(op) is not None:
        rule = _shuffle
    elif rule is None or not any(_last(value) is not None for value in op.operands):
        return
    with ir.InsertionPoint(op):
        result = rule(ir, op)
    if result is not None:
        op.results[0].replace_all_uses_with(result)
        op.erase()


def _last(value: MlirValue) -> Any:
    """``x`` if the value is ``transpose(x)`` with x channels last; None for any other value."""
    owner = producer(value)
    if owner is None or owner.name != "stablehlo.transpose":
        return None
    permutation = tuple(owner.attributes["permutation"])
    return owner.operands[0] if len(permutation) > 3 and permutation == to_first(len(permutation)) else None


def _is_image(value: MlirValue) -> bool:
    return len(value.type.shape) > 3


def _permuted(ir: ModuleType, kind: MlirType) -> Any:
    return ir.RankedTensorType.get([kind.shape[i] for i in to_last(len(kind.shape))], kind.element_type)


def _as_last(ir: ModuleType, value: MlirValue) -> Any:
    """An image channels last: its transpose removed, or computed in that order, or transposed."""
    there = _last(value)
    if there is not None:
        return there
    owner, kind = producer(value), _permuted(ir, value.type)
    if owner is not None and owner.name == "stablehlo.broadcast_in_dim":
        order = to_last(len(kind.shape))
        axes = [order.index(d) for d in owner.attributes["broadcast_dimensions"]]
        return create_operation(ir, "broadcast_in_dim", kind, [owner.operands[0]], broadcast_dimensions=axes)
    if owner is not None and owner.name == "stablehlo.constant" and owner.attributes["value"].is_splat:
        element = owner.attributes["value"].get_splat_value()
        splat = ir.DenseElementsAttr.get_splat(kind, element)
        transpose = ir.Operation.create(
            "stablehlo.constant", results=[kind], operands=[], attributes={"value": splat}
        )
        return transpose.results[0]
    return create_operation(ir, "transpose", kind, [value], permutation=to_last(len(kind.shape)))


def _as_first(ir: ModuleType, value: MlirValue, kind: MlirType) -> Any:
    return create_operation(ir, "transpose", kind, [value], permutation=to_first(len(kind.shape)))


def _moved(ir: ModuleType, op: MlirOperation, permute: tuple[str, ...] = ()) -> Any:
    """The operation on images channels last; attributes with an entry for each axis are permuted as well."""
    clone = op.clone()
    for place, value in enumerate(op.operands):
        if _is_image(value):
            clone.operands[place] = _as_last(ir, value)
    kind = op.results[0].type
    clone.results[0].set_type(_permuted(ir, kind))
    for name in permute:
        values = list(op.attributes[name])
        clone.attributes[name] = ir.DenseI64ArrayAttr.get([values[i] for i in to_last(len(values))])
    # clones are appended where they are made, operands that were made on the way before them
    clone.move_before(op)
    return _as_first(ir, clone.results[0], kind)


def _elementwise(ir: ModuleType, op: MlirOperation) -> Any:
    return _moved(ir, op) if _is_image(op.results[0]) else None


def _pad(ir: ModuleType, op: MlirOperation) -> Any:
    return _moved(ir, op, ("edge_padding_low", "edge_padding_high", "interior_padding"))


def _slice(ir: ModuleType, op: MlirOperation) -> Any:
    return _moved(ir, op, ("start_indices", "limit_indices", "strides"))


def _concatenate(ir: ModuleType, op: MlirOperation) -> Any:
    axis = to_last(len(op.results[0].type.shape)).index(op.attributes["dimension"].value)
    op.attributes["dimension"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), axis)
    return _moved(ir, op)


def _reduce(ir: ModuleType, op: MlirOperation) -> Any:
    """A sum (or maximum) over at least both spatial axes, so that the remaining axes keep their order."""
    axes, rank = list(op.attributes["dimensions"]), len(op.operands[0].type.shape)
    if len(op.operands) != 2 or not {rank - 2, rank - 1} <= set(axes):
        return None
    clone = op.clone()
    clone.operands[0] = _as_last(ir, op.operands[0])
    clone.attributes["dimensions"] = ir.DenseI64ArrayAttr.get(sorted(to_last(rank).index(a) for a in axes))
    clone.move_before(op)
    return clone.results[0]


def _reshape(ir: ModuleType, op: MlirOperation) -> Any:
    """A reshape that joins or splits leading axes and leaves the image's axes alone."""
    kind = op.results[0].type
    if not _is_image(op.results[0]) or list(kind.shape)[-3:] != list(op.operands[0].type.shape)[-3:]:
        return None
    reshaped = create_operation(ir, "reshape", _permuted(ir, kind), [_last(op.operands[0])])
    return _as_first(ir, reshaped, kind)


def _shuffled(op: MlirOperation) -> tuple[Any, list[int], list[int]] | None:
    """Of a reshape that joins channels which were split into parts and the parts put in another order (a channel
    shuffle): the image channels last, the parts' sizes, and their order."""
    turn = producer(op.operands[0])
    split = producer(turn.operands[0]) if turn is not None and turn.name == "stablehlo.transpose" else None
    if split is None or split.name != "stablehlo.reshape":
        return None
    image = _last(split.operands[0])
    whole, shape = list(split.operands[0].type.shape), list(split.results[0].type.shape)
    order, rank = list(turn.attributes["permutation"]), len(shape)
    kept = [0, rank - 2, rank - 1]
    if image is None or len(whole) != 4 or list(op.results[0].type.shape) != whole or rank < 5:
        return None
    if [order[i] for i in kept] != kept or [shape[i] for i in kept] != [whole[0], *whole[2:]]:
        return None
    return image, shape[1:-2], [i - 1 for i in order[1:-2]]


def _shuffle(ir: ModuleType, op: MlirOperation) -> Any:
    parsed: Any = _shuffled(op)
    image, parts, order = parsed
    if order == [1, 0] and _shuffle_inside(ir, op, image, parts[0]):
        return _as_first(ir, image, op.results[0].type)
    kind, lead = op.results[0].type, list(image.type.shape)[:3]
    split = ir.RankedTensorType.get([*lead, *parts], kind.element_type)
    turned = ir.RankedTensorType.get([*lead, *(parts[i] for i in order)], kind.element_type)
    value = create_operation(ir, "reshape", split, [image])
    value = create_operation(ir, "transpose", turned, [value], permutation=[0, 1, 2, *(3 + i for i in order)])
    value = create_operation(ir, "reshape", _permuted(ir, kind), [value])
    return _as_first(ir, value, kind)


def _shuffle_inside(ir: ModuleType, op: MlirOperation, image: MlirValue, rows: int) -> bool:
    """Have the call that computes the image shuffle its channels. False if no call does, or others read the image."""
    call, value = producer(image), op.operands[0]
    target = (
        call.attributes["call_target_name"]
        if call is not None and "call_target_name" in call.attributes
        else None
    )
    if target is None or ir.StringAttr(target).value != TARGET:
        return False
    while value != image:  # from the shuffle back to the call: each has one reader
        if len(list(value.uses)) > 1:
            return False
        value = producer(value).operands[0]
    numbers = list(ir.DenseI64ArrayAttr(ir.DictAttr(call.attributes["backend_config"])["numbers"]))
    if len(list(image.uses)) > 1 or numbers[0] != Kind.FORWARD or numbers[SHUFFLE] != 1:
        return False
    numbers[SHUFFLE] = rows
    call.attributes["backend_config"] = ir.DictAttr.get({"numbers": ir.DenseI64ArrayAttr.get(numbers)})
    return True


_RULES: dict[str, Callable[[Any, Any], Any]] = {
    "stablehlo.pad": _pad,
    "stablehlo.slice": _slice,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.reduce": _reduce,
    "stablehlo.reshape": _reshape,
}
