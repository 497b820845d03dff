"""Programs that are one network and nothing else, run without XLA.

XLA takes a tenth of a millisecond to start a program with some fifty operands, a tenth of a small network's time, and
copies inputs that do not begin where it wants them. A program whose results are a network's results, and whose network
reads nothing but the program's arguments, needs none of that: the C module computes it on the arrays themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.convolutions import NETWORK_TARGET
from podrun.device.xla.epilogues import producer
from podrun.device.xla.layer_marks import SAME_ORDER, main_blocks
from podrun.device.xla.matrix_products import FloatArray
from podrun.private_apis.jax import mlir, stablehlo

if TYPE_CHECKING:
    from jax.stages import Lowered

    from podrun.private_apis.mlir_types import MlirOperation, MlirValue


@dataclass(frozen=True, slots=True)
class NetworkProgram:
    """A program that is one network. ``operands``: the program's arguments that the network reads, in its order;
    ``results``: the shapes of its results, which are the program's.
    """

    numbers: np.ndarray[Any, np.dtype[np.int64]]
    operands: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]

    def bound(self, constants: Mapping[int, Any]) -> BoundProgram:
        """The program with arguments, by position, that are the same at every run."""
        kept = {
            at: np.require(constants[at], np.float32, ["C", "A"]) for at in self.operands if at in constants
        }
        native = importlib.import_module("podrun.device.xla._onednn")
        return BoundProgram(self, [kept.get(at) for at in self.operands], native.network)


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A network's program with its weights. Several threads may call it at a time."""

    program: NetworkProgram
    operands: list[FloatArray | None]
    """What the network reads; None for what a call gives."""
    compute: Callable[..., None]
    """The C module's function."""

    def __call__(self, arguments: Mapping[int, np.ndarray[Any, Any]]) -> list[FloatArray]:
        """The results for the other arguments, by position: arrays of float32 that nobody may write, as XLA's are."""
        program = self.program
        operands = tuple(
            np.require(arguments[at], np.float32, ["C", "A"]) if operand is None else operand
            for at, operand in zip(program.operands, self.operands, strict=True)
        )
        results = [np.empty(shape, np.float32) for shape in program.results]
        self.compute(program.numbers, operands, tuple(results))
        for result in results:
            result.flags.writeable = False
        return results


def network_program(lowered: Lowered) -> NetworkProgram | None:
    """The program of a ``jax.stages.Lowered`` whose networks are joined, if it is one network; else None."""
    module, ir = stablehlo(lowered), mlir()
    with module.context:
        (block,) = main_blocks(ir, module)
        *operations, end = [op.operation for op in block]
        calls = [op for op in operations if op.name == "stablehlo.custom_call"]
        if len(calls) != 1 or calls[0].attributes["call_target_name"].value != NETWORK_TARGET:
            return None
        (call,) = calls
        operands = [_argument(value) for value in call.operands]
        if None in operands or not _are_results(call, list(end.operands)):
            return None
        numbers = np.array(list(call.attributes["backend_config"]["numbers"]), np.int64)
        shapes = tuple(tuple(value.type.shape) for value in call.results)
        return NetworkProgram(numbers, tuple(at for at in operands if at is not None), shapes)


def _are_results(call: MlirOperation, returned: Sequence[Any]) -> bool:
    """Whether a program returns what a call computes, in order."""
    return len(call.results) == len(returned) and all(
        a == b for a, b in zip(call.results, returned, strict=True)
    )


def _argument(value: MlirValue) -> int | None:
    """The position of the program's argument in whose memory a value of float32 begins."""
    while (maker := producer(value)) is not None:
        source = maker.operands[0] if list(maker.operands) else value
        same = maker.name in SAME_ORDER and _elements(source) == _elements(value)
        if not same and not (maker.name == "stablehlo.slice" and _is_beginning(maker)):
            return None
        if maker.name == "stablehlo.broadcast_in_dim" and sum(size > 1 for size in value.type.shape) > 1:
            return None
        value = source
    number: int | None = getattr(value, "arg_number", None)
    return number if str(value.type.element_type) == "f32" else None


def _is_beginning(cut: MlirOperation) -> bool:
    """Whether a slice is the first elements of a vector."""
    starts, strides = list(cut.attributes["start_indices"]), list(cut.attributes["strides"])
    return len(starts) == 1 and starts == [0] and strides == [1]


def _elements(value: MlirValue) -> int:
    return int(np.prod(value.type.shape))
