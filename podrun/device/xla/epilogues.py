"""Epilogues: operations on a convolution's result that oneDNN can do in the same call.

An epilogue adds a bias, another image or both, and then may replace negative elements by 0. The library does this
before it stores the sums (`podrun/device/xla/native`). As operations of their own each would be another pass over
memory and another task for XLA's threads, which slows small networks at batch 1 most.

What all rewrites of StableHLO use is here too: `nested` yields the operations of a program at any depth, `inline`
replaces calls by the called functions, `producer` finds the operation that defines a value, and
`create_operation` and `library_call` make one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.private_apis.mlir_types import MlirBlock, MlirModule, MlirOperation, MlirType, MlirValue


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The operations after a convolution that become part of its call. Values and operations are MLIR's."""

    bias: MlirValue | None = None
    """A value with one element for each output channel."""
    other: MlirValue | None = None
    """A value of the result's shape."""
    sums: tuple[MlirOperation, ...] = ()
    """The convolution and the additions of bias and image, in order."""
    cut: MlirOperation | None = None
    """The operation that replaces negative elements by 0."""
    compare: MlirOperation | None = None
    """The comparison that a select of ``cut`` reads; gradients may read it too."""

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Whether there is a bias, another image, and a cut."""
        return self.bias is not None, self.other is not None, self.cut is not None

    def operands(self, ir: ModuleType) -> tuple[list[Any], list[Any]]:
        """Further operands of the call: the bias as a vector, made where MLIR inserts now, and the other image."""
        other = [] if self.other is None else [self.other]
        if self.bias is None:
            return [], other
        kind = self.bias.type
        vector = ir.RankedTensorType.get([math.prod(kind.shape)], kind.element_type)
        reshape = ir.Operation.create("stablehlo.reshape", results=[vector], operands=[self.bias])
        return [reshape.results[0]], other

    def replace(self, result: MlirValue) -> None:
        """Replace the epilogue's result by ``result`` and erase its operations."""
        (self.cut or self.sums[-1]).results[0].replace_all_uses_with(result)
        if self.cut is not None:
            self.cut.erase()
        if self.compare is not None and list(self.compare.results[0].uses):
            self.compare.operands[0] = result  # what is left is positive iff the sum is
        elif self.compare is not None:
            self.compare.erase()
        for operation in reversed(self.sums):
            operation.erase()


def match(convolution: MlirOperation, feature: int) -> Epilogue:
    """The longest epilogue of a convolution whose result has its channels on axis ``feature``."""
    bias: MlirValue | None = None
    other: MlirValue | None = None
    sums, value = [convolution], convolution.results[0]
    while (user := only_user(value)) is not None and user.name == "stablehlo.add":
        addend = user.operands[1] if user.operands[0] == value else user.operands[0]
        vector = per_channel(addend, feature)
        if vector is not None and bias is None and other is None:
            bias = vector
        elif other is None and addend != value and not _is_broadcast(addend):
            other = addend
        else:
            break
        value = user.results[0]
        sums.append(user)
    return Epilogue(bias, other, tuple(sums), *_cut(value))


def _cut(value: MlirValue) -> tuple[Any, Any]:
    """The operation that replaces a value's negative elements by 0, and the comparison that it reads; or None."""
    users = [use.owner for use in value.uses]
    if len(users) == 1 and users[0].name == "stablehlo.maximum":
        return (users[0], None) if any(map(is_zero, users[0].operands)) else (None, None)
    compares = [u for u in users if u.name == "stablehlo.compare"]
    selects = [u for u in users if u.name == "stablehlo.select"]
    if len(users) != 2 or not compares or not selects:
        return None, None
    compare, select = compares[0], selects[0]
    positive = "GT" in str(compare.attributes["comparison_direction"])
    fits = (
        compare.operands[0] == value
        and is_zero(compare.operands[1])
        and select.operands[0] == compare.results[0]
        and select.operands[1] == value
        and is_zero(select.operands[2])
    )
    return (select, compare) if positive and fits else (None, None)


def only_user(value: MlirValue) -> Any:
    """The operation that reads a value; None if there is no one, or several."""
    users = [use.owner for use in value.uses]
    return users[0] if len(users) == 1 else None


def producer(value: MlirValue) -> Any:
    """The operation that defines a value; None for an argument."""
    owner = value.owner
    return owner if hasattr(owner, "operands") else None


def _is_broadcast(value: MlirValue) -> bool:
    maker = producer(value)
    return maker is not None and maker.name in ("stablehlo.broadcast_in_dim", "stablehlo.constant")


def per_channel(value: MlirValue, feature: int) -> Any:
    """The vector that a value broadcasts over all axes but ``feature``; None if it is no such broadcast."""
    maker = producer(value)
    if maker is None or maker.name != "stablehlo.broadcast_in_dim":
        return None
    source = maker.operands[0]
    axes, sizes = list(maker.attributes["broadcast_dimensions"]), list(source.type.shape)
    wide = [axis for axis, size in zip(axes, sizes, strict=True) if size > 1]
    return source if wide == [feature] and math.prod(sizes) == value.type.shape[feature] else None


def is_zero(value: MlirValue) -> bool:
    """True iff every element is known to be 0."""
    maker = producer(value)
    while maker is not None and maker.name in ("stablehlo.broadcast_in_dim", "stablehlo.convert"):
        maker = producer(maker.operands[0])
    if maker is None or maker.name != "stablehlo.constant" or not maker.attributes["value"].is_splat:
        return False
    return float(maker.attributes["value"].get_splat_value().value) == 0


_BARRIER = "stablehlo.optimization_barrier"
NOT_INLINED = "mhlo.frontend_attributes"
"""On calls that XLA must not inline: their results are in memory whatever reads them (`podrun.compiler.export`)."""


def inline(ir: ModuleType, module: MlirModule) -> None:
    """Replace calls by the called functions, so that operations stand beside those that define their operands.

    A wall becomes a barrier, which any rewrite may give another type; `rebuild_walls` makes calls of them again. Other
    calls that XLA must not inline stay.
    """
    functions = {ir.StringAttr(f.attributes["sym_name"]).value: f for f in module.body.operations}
    queue = [op for op in nested(module.operation) if op.name == "func.call"]
    inlined, kept = set(), set()
    while queue:
        call = queue.pop()
        name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
        block = functions[name].operation.regions[0].blocks[0]
        if _is_held(call) and not _is_wall(call, block):
            kept.add(name)
            continue
        inlined.add(name)
        if _is_wall(call, block):
            _barrier(ir, call)
            continue
        copy = functions[name].operation.clone(ip=ir.InsertionPoint(module.body))
        body = copy.regions[0].blocks[0]
        for argument, operand in zip(body.arguments, call.operands, strict=True):
            argument.replace_all_uses_with(operand)
        *operations, end = [op.operation for op in body]
        for op in operations:
            op.move_before(call)
            queue += [o for o in (op, *nested(op)) if o.name == "func.call"]
        for old, new in zip(call.results, end.operands, strict=True):
            old.replace_all_uses_with(new)
        call.erase()
        copy.erase()
    for name in sorted(inlined - kept):
        functions[name].operation.erase()


def _is_wall(call: MlirOperation, block: MlirBlock) -> bool:
    """Whether a call is not to be inlined and its function gives back what it is given."""
    return _is_held(call) and is_identity(block)


def is_identity(block: MlirBlock) -> bool:
    """Whether a function with one block gives back its one argument, and does nothing else."""
    first = block.operations[0].operation
    return first.name == "func.return" and len(block.arguments) == len(first.operands) == 1


def _is_held(call: MlirOperation) -> bool:
    return NOT_INLINED in call.attributes and "inlineable" in str(call.attributes[NOT_INLINED])


def _barrier(ir: ModuleType, call: MlirOperation) -> None:
    kinds, attributes = [result.type for result in call.results], {NOT_INLINED: call.attributes[NOT_INLINED]}
    with ir.InsertionPoint(call):
        barrier = ir.Operation.create(
            _BARRIER, results=kinds, operands=list(call.operands), attributes=attributes
        )
    for old, new in zip(call.results, barrier.results, strict=True):
        old.replace_all_uses_with(new)
    call.erase()


def rebuild_walls(ir: ModuleType, module: MlirModule) -> None:
    """Make calls of the identity, which XLA does not inline, of the barriers that `inline` left for walls."""
    names: dict[str, str] = {}
    for op in [o for o in nested(module.operation) if o.name == _BARRIER and NOT_INLINED in o.attributes]:
        (value,), (result,) = op.operands, op.results
        kind = str(result.type)
        if kind not in names:
            names[kind] = f"wall_{len(names)}"
            text = f"func.func private @{names[kind]}(%0: {kind}) -> {kind} {{ return %0 : {kind} }}"
            parsed = ir.Module.parse(text)  # It owns the function that is copied.
            parsed.body.operations[0].operation.clone(ip=ir.InsertionPoint(module.body))
        attributes = {
            "callee": ir.FlatSymbolRefAttr.get(names[kind]),
            NOT_INLINED: op.attributes[NOT_INLINED],
        }
        with ir.InsertionPoint(op):
            barrier = ir.Operation.create(
                "func.call", results=[result.type], operands=[value], attributes=attributes
            )
        result.replace_all_uses_with(barrier.results[0])
        op.erase()


def nested(operation: MlirOperation) -> Iterator[Any]:
    """The operations nested in one, at any depth."""
    for region in operation.regions:
        for block in region:
            for op in block:
                yield op.operation
                yield from nested(op.operation)


def create_operation(
    ir: ModuleType, name: str, kind: MlirType, operands: Sequence[Any], **numbers: Sequence[int]
) -> Any:
    """The result, of type ``kind``, of a new StableHLO operation where MLIR inserts now. ``numbers``: attributes."""
    attributes = {key: ir.DenseI64ArrayAttr.get(list(value)) for key, value in numbers.items()}
    operation = ir.Operation.create(
        f"stablehlo.{name}", results=[kind], operands=list(operands), attributes=attributes
    )
    return operation.results[0]


def library_call(
    ir: ModuleType,
    target: str,
    numbers: Sequence[int],
    operands: Sequence[Any],
    kind: MlirType,
    overwritten: int | None = None,
) -> Any:
    """The result, of type ``kind``, of a custom call through XLA's foreign function interface, where MLIR inserts now.

    All arrays are in row-major order. ``overwritten``: the operand in whose memory the result lies.
    """
    attributes = {
        "call_target_name": ir.StringAttr.get(target),
        "has_side_effect": ir.BoolAttr.get(False),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
        "backend_config": ir.DictAttr.get({"numbers": ir.DenseI64ArrayAttr.get(list(numbers))}),
        "operand_layouts": ir.ArrayAttr.get([_row_by_row(ir, value.type) for value in operands]),
        "result_layouts": ir.ArrayAttr.get([_row_by_row(ir, kind)]),
    }
    if overwritten is not None:
        alias = f"output_tuple_indices = [], operand_index = {overwritten}, operand_tuple_indices = []"
        attributes["output_operand_aliases"] = ir.ArrayAttr.get(
            [ir.Attribute.parse(f"#stablehlo.output_operand_alias<{alias}>")]
        )
    operation = ir.Operation.create(
        "stablehlo.custom_call", results=[kind], operands=list(operands), attributes=attributes
    )
    return operation.results[0]


def _row_by_row(ir: ModuleType, kind: MlirType) -> Any:
    import numpy as np

    order = np.arange(len(kind.shape), dtype=np.int64)[::-1].copy()
    return ir.DenseIntElementsAttr.get(order, type=ir.IndexType.get())
