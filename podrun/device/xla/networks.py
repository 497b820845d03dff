"""Joins the layers of a network into one call, so that XLA runs nothing between them.

Between convolutions of a network stand pooling, concatenations, additions and factors of channels. As operations of
XLA's each is computed by one thread, waits for the call before it, and is waited for by the next. Here such layers and
the convolutions around them become steps of one call (`podrun/device/xla/network_steps.py`), whose parts two threads
share.

A network ends where a layer reads something that XLA computes from the network's own results.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.convolutions import NETWORK_TARGET, TARGET, Kind, available
from podrun.device.xla.epilogues import nested, per_channel, producer
from podrun.device.xla.layer_marks import CUT, MARKS, POOL, SAME_ORDER, SOFTMAX, SUM, main_blocks, mark_layers
from podrun.device.xla.network_steps import (
    ChainLink,
    ChainOperand,
    ChainOperation,
    LayerNetwork,
    NetworkStep,
    StepKind,
)
from podrun.device.xla.packing import PACKED, reads_planes
from podrun.private_apis.jax import mlir, stablehlo

if TYPE_CHECKING:
    from jax.stages import Lowered

    from podrun.private_apis.mlir_types import MlirBlock, MlirOperation, MlirType, MlirValue

_OPERATIONS = {
    "stablehlo.add": ChainOperation.ADD,
    "stablehlo.subtract": ChainOperation.SUBTRACT,
    "stablehlo.multiply": ChainOperation.MULTIPLY,
    "stablehlo.divide": ChainOperation.DIVIDE,
    "stablehlo.maximum": ChainOperation.MAXIMUM,
}
_COMMUTES = {ChainOperation.ADD, ChainOperation.MULTIPLY, ChainOperation.MAXIMUM}
_FIRST_TO_LAST = [0, 2, 3, 1]


def join_networks(lowered: Lowered, parts: int = 2) -> int:
    """Join the layers of a rewritten ``jax.stages.Lowered`` into networks, in place. Returns how many networks.

    ``parts``: into how many a large layer that is no convolution is divided, at most 2.
    """
    if not available():
        return 0
    module, ir = stablehlo(lowered), mlir()
    with module.context, ir.Location.unknown():
        mark_layers(ir, module)
        return sum(_join(ir, block, parts) for block in main_blocks(ir, module))


def _join(ir: ModuleType, block: MlirBlock, parts: int) -> int:
    count = 0
    drafts = [_Draft(LayerNetwork(parts))]
    for op in [op.operation for op in block]:
        if not drafts[-1].take(ir, op):
            if _layer(ir, op) and drafts[-1].follows(op):
                drafts.append(_Draft(LayerNetwork(parts)))
                drafts[-1].take(ir, op)
            drafts[-1].pass_by(op)
    renamed: dict[Any, Any] = {}
    for draft in drafts:
        if draft.worth_it:
            renamed.update(draft.replace(ir, renamed))
            count += 1
    return count


def _target(ir: ModuleType, op: MlirOperation) -> str:
    return (
        ir.StringAttr(op.attributes["call_target_name"]).value if "call_target_name" in op.attributes else ""
    )


def _numbers(ir: ModuleType, op: MlirOperation) -> list[int]:
    return list(ir.DenseI64ArrayAttr(ir.DictAttr(op.attributes["backend_config"])["numbers"]))


def _is_image(value: MlirValue) -> bool:
    return len(value.type.shape) == 4 and str(value.type.element_type) == "f32" and min(value.type.shape) > 0


def _layer(ir: ModuleType, op: MlirOperation) -> bool:
    """Whether an operation may be a layer of a network."""
    target = _target(ir, op)
    if target in (SUM, SOFTMAX):
        return True
    if len(op.results) != 1 or not _is_image(op.results[0]):
        return False
    if target == TARGET:
        return _numbers(ir, op)[0] == Kind.FORWARD
    if op.name == "stablehlo.concatenate":
        return bool(op.attributes["dimension"].value == 3)
    if op.name == "stablehlo.transpose":
        return list(op.attributes["permutation"]) == _FIRST_TO_LAST and op.operands[0].type.shape[0] == 1
    return target in (POOL, CUT) or op.name in _OPERATIONS


@dataclass(slots=True)
class _Draft:
    """A network that grows by the operations of a block."""

    network: LayerNetwork
    members: list[Any] = field(default_factory=list)
    images: dict[Any, int] = field(default_factory=dict)
    """The image of each MLIR value."""
    operands: dict[Any, int] = field(default_factory=dict)
    """The position of each MLIR value among the call's operands."""
    vectors: set[Any] = field(default_factory=set)
    """MLIR values with a value for each channel and no pixels: `images` has them as images of one pixel."""
    results: set[Any] = field(default_factory=set)
    """MLIR values that the network's layers compute."""
    derived: set[Any] = field(default_factory=set)
    """MLIR values that XLA computes from `results`."""
    readers: list[Any] = field(default_factory=list)
    """The operations that compute `derived`, in order."""
    early: int = 0
    """How many of `readers` stand before the last layer."""
    heavy: int = 0
    """How many layers are convolutions or windows."""

    @property
    def worth_it(self) -> bool:
        """Whether it has a layer for which a call pays. A call that read its own results could never run."""
        return self.heavy > 0 and self.results.isdisjoint(self.operands)

    def follows(self, op: MlirOperation) -> bool:
        """Whether an operation reads what XLA computes from the network's results."""
        return any(value in self.derived for value in op.operands)

    def pass_by(self, op: MlirOperation) -> None:
        """Leave an operation to XLA, and note whether it reads what the network computes."""
        read = [value for inner in (op, *nested(op)) for value in inner.operands]
        if any(value in self.results or value in self.derived for value in read):
            self.readers.append(op)
            self.derived.update(op.results)

    def take(self, ir: ModuleType, op: MlirOperation) -> bool:
        """Make an operation a layer, if it can be one here."""
        target, vector = _target(ir, op), any(value in self.vectors for value in op.operands)
        if (not vector and not _layer(ir, op)) or self.follows(op) or self._reads_itself(ir, op):
            return False
        if vector or target in (SUM, SOFTMAX):
            if not self._vector(op, target):
                return False
        elif target == TARGET:
            self._convolve(ir, op)
        elif target == POOL:
            self._window(ir, op)
        elif target == CUT:
            self._link(op.results[0], op.operands[0], ChainOperation.CUT, (ChainOperand.NUMBER, 0))
        elif op.name == "stablehlo.concatenate":
            parts = [self._image(value) for value in op.operands]
            self.network.concatenate(parts, self._new(op.results[0]))
        elif op.name == "stablehlo.transpose":
            src = self._operand(op.operands[0])
            image = self.network.image(op.operands[0].type.shape, src)
            self.network.steps.append(NetworkStep(StepKind.TURN, image, self._new(op.results[0])))
        elif not self._arithmetic(op):
            return False
        self.members.append(op)
        self.results.add(op.results[0])
        self.early = len(self.readers)
        self.heavy += target == TARGET or target in MARKS
        return True

    def _reads_itself(self, ir: ModuleType, op: MlirOperation) -> bool:
        """Whether an operation reads what the network computes as only an operand of the call can be read: as weights,
        or in another order of axes.
        """
        at = 0 if op.name == "stablehlo.transpose" else 1 if _target(ir, op) == TARGET else None
        return at is not None and op.operands[at] in self.results

    def _operand(self, value: MlirValue) -> int:
        return self.operands.setdefault(value, len(self.operands))

    def _image(self, value: MlirValue) -> int:
        """The image that a value is, of this network or an operand."""
        if value not in self.images:
            self.images[value] = self.network.image(value.type.shape, self._operand(value))
        return self.images[value]

    def _new(self, value: MlirValue) -> int:
        if value not in self.images:
            self.images[value] = self.network.image(value.type.shape)
        return self.images[value]

    def _convolve(self, ir: ModuleType, op: MlirOperation) -> None:
        numbers = _numbers(ir, op)
        src, more = self._image(op.operands[0]), list(op.operands)[2:]
        bias = self._operand(more.pop(0)) if numbers[1] & 1 else 0
        other = self._image(more.pop(0)) if numbers[1] & 2 else None
        weights = self._operand(op.operands[1])
        dst = self._new(op.results[0])
        if len(list(op.operands[0].uses)) == 1 and reads_planes(numbers):
            planes = None if numbers[1] & PACKED else self.network.unturned(src)
            if planes is not None:
                step = NetworkStep(StepKind.PLANES, planes, dst, tuple(numbers), weights, bias)
                self.network.steps.append(step)
                return
        self.network.steps.append(
            NetworkStep(StepKind.CONVOLVE, src, dst, tuple(numbers), weights, bias, other)
        )

    def _window(self, ir: ModuleType, op: MlirOperation) -> None:
        src = self._image(op.operands[0])
        dst = self._new(op.results[0])
        self.network.window(src, dst, _numbers(ir, op), lone=len(list(op.operands[0].uses)) == 1)

    def _vector(self, op: MlirOperation, target: str) -> bool:
        """An operation on values of channels; False if it is none that a network computes."""
        if len(op.results) != 1 or (target not in (SUM, SOFTMAX) and op.operands[0] not in self.vectors):
            return False
        value, result = op.operands[0], op.results[0]
        count = math.prod(result.type.shape)
        if target in (SUM, SOFTMAX):
            if target == SOFTMAX and value not in self.images:
                self.images[value] = self.network.image((1, 1, 1, count), self._operand(value))
            kind = StepKind.SUM if target == SUM else StepKind.SOFTMAX
            self.images[result] = self.network.image((1, 1, 1, count))
            self.network.steps.append(NetworkStep(kind, self._image(value), self.images[result]))
        elif op.name in SAME_ORDER and count == math.prod(value.type.shape) and len(list(value.uses)) == 1:
            self.images[result] = self.images[value]
        elif op.name == "stablehlo.divide" and (splat := _splat(op.operands[1])) is not None:
            self.images[result] = self.network.image((1, 1, 1, count))
            self._link(result, value, ChainOperation.DIVIDE, (ChainOperand.NUMBER, splat))
        else:
            return False
        self.vectors.add(result)
        return True

    def _arithmetic(self, op: MlirOperation) -> bool:
        """An operation on elements; False if neither operand is an image of the network."""
        operation = _OPERATIONS[op.name]
        first, second = op.operands
        if first not in self.images and operation in _COMMUTES:
            first, second = second, first
        if first not in self.images:
            return False
        other = self._other(second)
        self._link(op.results[0], first, operation, other)
        return True

    def _other(self, value: MlirValue) -> tuple[ChainOperand, int]:
        """The second operand of a chain's operation, in the form with the fewest values: a number, one for each channel
        or pixel, or all.
        """
        splat = _splat(value)
        if splat is not None:
            return ChainOperand.NUMBER, splat
        if value not in self.images and (vector := per_channel(value, 3)) is not None:
            return ChainOperand.CHANNEL, self._operand(vector)
        if value not in self.images and (vector := _per_pixel(value)) is not None:
            return ChainOperand.PIXEL, self._operand(vector)
        return ChainOperand.ELEMENT, self._image(value)

    def _link(
        self, result: MlirValue, value: MlirValue, operation: ChainOperation, other: tuple[ChainOperand, int]
    ) -> None:
        src, dst, link = self._image(value), self._new(result), ChainLink(operation, *other)
        if len(list(value.uses)) > 1 or not self.network.lengthen(src, link, dst):
            self.network.steps.append(NetworkStep(StepKind.CHAIN, src, dst, links=(link,)))

    def replace(self, ir: ModuleType, renamed: Mapping[Any, Any]) -> dict[Any, Any]:
        """Put the call behind the last layer, what reads its results behind it, and erase the layers.

        ``renamed``: results of earlier networks, by the values that they replace. Returns those of this one.
        """
        last = self.members[-1]
        read = [op.results[0] for op in self.members if self._is_read(op.results[0])]
        for position, value in enumerate(read):
            self.network.images[self.images[value]].result = position
        self.network.operands, self.network.results = len(self.operands), len(read)
        numbers = self.network.numbers()
        with ir.InsertionPoint(last):
            operands = [renamed.get(value, value) for value in self.operands]
            call = _call(ir, numbers, operands, [value.type for value in read])
        for op in self.readers[: self.early]:
            op.move_before(last)
        results = dict(zip(read, call.results, strict=True))
        for value, result in results.items():
            value.replace_all_uses_with(result)
        for op in reversed(self.members):
            op.erase()
        return results

    def _is_read(self, value: MlirValue) -> bool:
        """Whether others than its layers read a value."""
        readers = (use.owner for use in value.uses)
        return any(not list(op.results) or op.results[0] not in self.results for op in readers)


def _splat(value: MlirValue) -> int | None:
    """The bits of the number that every element of a value is; None if they are not known to be one number."""
    maker = producer(value)
    while maker is not None and maker.name == "stablehlo.broadcast_in_dim":
        maker = producer(maker.operands[0])
    if maker is None or maker.name != "stablehlo.constant" or not maker.attributes["value"].is_splat:
        return None
    number = float(maker.attributes["value"].get_splat_value().value)
    return int.from_bytes(struct.pack("<f", number), "little")


def _per_pixel(value: MlirValue) -> Any:
    """The values, one for each pixel in order, that an image of batch 1 has in all channels; None for any other."""
    maker, sizes = producer(value), list(value.type.shape)
    if maker is None or maker.name != "stablehlo.broadcast_in_dim" or sizes[0] != 1:
        return None
    source = maker.operands[0]
    axes = zip(maker.attributes["broadcast_dimensions"], source.type.shape, strict=True)
    wide = [axis for axis, size in axes if size > 1]
    return (
        source
        if wide == [1, 2] and list(value.type.shape[1:3]) == [s for s in source.type.shape if s > 1]
        else None
    )


def _row_major(ir: ModuleType, value_type: MlirType) -> Any:
    order = np.arange(len(value_type.shape), dtype=np.int64)[::-1].copy()
    return ir.DenseIntElementsAttr.get(order, type=ir.IndexType.get())


def _call(ir: ModuleType, numbers: list[int], operands: list[Any], kinds: list[Any]) -> MlirOperation:
    """The custom call of a network."""
    attributes = {
        "call_target_name": ir.StringAttr.get(NETWORK_TARGET),
        "has_side_effect": ir.BoolAttr.get(False),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
        "backend_config": ir.DictAttr.get({"numbers": ir.DenseI64ArrayAttr.get(numbers)}),
        "operand_layouts": ir.ArrayAttr.get([_row_major(ir, value.type) for value in operands]),
        "result_layouts": ir.ArrayAttr.get([_row_major(ir, kind) for kind in kinds]),
    }
    call: MlirOperation = ir.Operation.create(
        "stablehlo.custom_call", results=kinds, operands=operands, attributes=attributes
    )
    return call
