"""Constant weights in the order in which oneDNN reads them.

oneDNN wants the weights of most convolutions in blocks of its own. A call brings them into that order at every run: a
quarter of ResNet-50's time at batch 1. Where weights are arguments of a program that nobody changes between runs, that
is done once, and the calls say so. No bit of a result changes.

Blocks are filled up with zeros, so packed weights can be larger. The program therefore takes such weights as vectors
with room behind them (`WeightRoom`), of which it makes arrays again; calls of oneDNN take the vectors themselves.

Packed weights are for the process that packed them: the order depends on the processor and on the library.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.convolutions import SHUFFLE, TARGET, Kind, available
from podrun.device.xla.epilogues import nested, producer
from podrun.private_apis.jax import mlir, stablehlo

if TYPE_CHECKING:
    from jax.stages import Lowered

    from podrun.private_apis.mlir_types import MlirOperation, MlirValue

PACKED = 8
"""In a call's second number: its weights are packed."""
_CHANNELS, _KERNEL_ROWS, _DILATION = 6, 10, slice(14, 16)
_OTHER, _MOST_ROWS = 2, 64  # as in native/convolution.h and native/planes.c
LEAST = 1 << 10
"""Fewest elements of weights that get room."""


@dataclass(frozen=True, slots=True)
class WeightRoom:
    """Which arguments of a program are vectors with room behind the weights: the shapes of those, None for others."""

    shapes: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> WeightRoom:
        """Room for all that can be weights of a convolution: arrays of float32 with four axes. None without oneDNN,
        where nothing would be packed and every run would copy the weights out of their vectors.
        """
        used = available()
        able = (used and a.dtype == np.float32 and a.ndim == 4 and a.size >= LEAST for a in arguments)
        return cls(tuple(a.shape if fits else None for a, fits in zip(arguments, able, strict=True)))

    def widened(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments as the program takes them: half as much again, as blocks are filled up with zeros."""
        return [a if s is None else _vector(a) for a, s in zip(arguments, self.shapes, strict=True)]

    def restored(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments in their shapes, inside of the program."""
        return [
            a if s is None else a[: math.prod(s)].reshape(s)
            for a, s in zip(arguments, self.shapes, strict=True)
        ]


def _vector(weights: np.ndarray) -> np.ndarray:
    vector = np.zeros(weights.size * 3 // 2, np.float32)
    vector[: weights.size] = np.asarray(weights).reshape(-1)
    return vector


def pack_weights(lowered: Lowered, room: WeightRoom, arguments: Sequence[Any]) -> dict[int, np.ndarray]:
    """Let the convolutions of a rewritten ``jax.stages.Lowered`` read packed weights, in place.

    ``arguments``: the first arguments of the program, widened, which are the same at every run. Returns, by position,
    the vectors that are to be given in the place of those.
    """
    module, ir = stablehlo(lowered), mlir()
    packed: dict[int, np.ndarray] = {}
    with module.context:
        for op in [op for op in nested(module.operation) if _is_forward(op)]:
            position = _vector_of(op.operands[1])
            if position is None or position >= len(room.shapes) or (shape := room.shapes[position]) is None:
                continue
            result = _packed(op, np.asarray(arguments[position]), math.prod(shape))
            if result is not None:
                packed[position] = result
            _take_vector(ir, op, packed=result is not None)
    return packed


def _is_forward(op: MlirOperation) -> bool:
    called = op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == TARGET
    return called and _numbers(op)[0] == Kind.FORWARD and not (_is_turned(op) and reads_planes(_numbers(op)))


def reads_planes(numbers: Sequence[int]) -> bool:
    """Whether the C module can compute a call by itself from an image of few channels that lie one after the other."""
    kind, follows, groups, batch, *_ = numbers
    channels, dilation, shuffle = numbers[_CHANNELS], numbers[_DILATION], numbers[SHUFFLE]
    module = importlib.import_module("podrun.device.xla._onednn")
    plain = (kind, groups, batch, shuffle, *dilation) == (
        Kind.FORWARD,
        1,
        1,
        1,
        1,
        1,
    ) and not follows & _OTHER
    return plain and channels <= module.PLANES and channels * numbers[_KERNEL_ROWS] <= _MOST_ROWS


def _is_turned(op: MlirOperation) -> bool:
    """Whether a call reads an argument of the program with another order of axes."""
    maker = producer(op.operands[0])
    return maker is not None and maker.name == "stablehlo.transpose"


def _numbers(op: MlirOperation) -> list[int]:
    return list(op.attributes["backend_config"]["numbers"])


def _vector_of(weights: MlirValue) -> int | None:
    """The position of the program's argument that a call's weights are the beginning of, if nothing else reads it."""
    value = weights
    for name in ("stablehlo.reshape", "stablehlo.slice"):
        maker = producer(value)
        if maker is None or maker.name != name or len(list(value.uses)) != 1:
            return None
        value = maker.operands[0]
    number: int | None = getattr(value, "arg_number", None)
    if number is None or len(list(value.uses)) != 1:
        return None
    function = value.owner.owner.operation
    is_main = function.name == "func.func" and function.attributes["sym_name"].value == "main"
    return number if is_main else None


def _packed(op: MlirOperation, vector: np.ndarray, size: int) -> np.ndarray | None:
    """The weights in the library's order; None for those that it takes as they are, or that need more room."""
    native: Any = importlib.import_module("podrun.device.xla._onednn")
    result = np.zeros_like(vector)
    try:
        native.pack(_numbers(op), np.ascontiguousarray(vector[:size]), result)
    except ValueError:
        return None
    return result


def _take_vector(ir: ModuleType, op: MlirOperation, *, packed: bool) -> None:
    """Let a call take the argument itself in the place of weights of four axes."""
    op.operands[1] = producer(producer(op.operands[1]).operands[0]).operands[0]
    layouts = list(op.attributes["operand_layouts"])
    layouts[1] = ir.DenseIntElementsAttr.get(np.zeros(1, np.int64), type=ir.IndexType.get())
    op.attributes["operand_layouts"] = ir.ArrayAttr.get(layouts)
    if packed:
        numbers = _numbers(op)
        numbers[1] |= PACKED
        op.attributes["backend_config"] = ir.DictAttr.get({"numbers": ir.DenseI64ArrayAttr.get(numbers)})
