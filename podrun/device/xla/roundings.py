"""Stochastic roundings of a lowered piece as calls of podrun's own native code, before XLA compiles it.

The compiler writes a rounding as a call of a function named `ROUNDING` (`podrun.compiler.grid_rounding`). XLA would
inline it, and then compute it again in every loop that reads its result. Each becomes one native call
(`native/rounding.c`) with the same bits: XLA compiles nothing for it. The states of a program's roundings are rows of
tables, which a call reads where they lie.

Where the C module is missing, XLA compiles the functions, but does not inline them. That takes longer, with the same
bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from podrun.core.names import ROUNDING
from podrun.device.xla.epilogues import NOT_INLINED, library_call, nested, only_user, producer
from podrun.private_apis.jax import mlir, stablehlo

if TYPE_CHECKING:
    from types import ModuleType

    from jax.stages import Lowered

    from podrun.private_apis.mlir_types import MlirOperation

ROUNDING_TARGET = "podrun_rounding"
"""The name of the call in a program."""
WORDS = 2
"""Of a state."""
_MOST = (1 << 31) - 1
_WORTH_REUSING = 1 << 16
"""Elements from which a call writes over its operand. XLA copies such operands first and compiles each copy."""
_NAME = re.compile(rf"@{ROUNDING}(_\d+)?")


def rewrite_roundings(lowered: Lowered, available: Callable[[], bool]) -> int:
    """Replace the roundings of a ``jax.stages.Lowered`` by native calls, in place. Returns how many.

    ``available``: whether the module is there, asked only if there is a rounding.
    """
    module = stablehlo(lowered)
    calls = [op for op in nested(module.operation) if op.name == "func.call" and _is_rounding(op)]
    if not calls:
        return 0
    ir, native = mlir(), available()
    with module.context, ir.Location.unknown():
        for call in calls:
            if native:
                _replace(ir, call)
            else:
                call.attributes[NOT_INLINED] = ir.DictAttr.get({"inlineable": ir.StringAttr.get("false")})
        if native:
            for function in list(module.body.operations):
                if _NAME.fullmatch(f"@{ir.StringAttr(function.attributes['sym_name']).value}"):
                    function.operation.erase()
    return len(calls) if native else 0


def _is_rounding(call: MlirOperation) -> bool:
    """Whether a call is one of the compiler's roundings, as far as its name and its types say."""
    if (
        not _NAME.fullmatch(str(call.attributes["callee"]))
        or len(call.operands) != 3
        or len(call.results) != 1
    ):
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
        and 0 < math.prod(sizes) <= _MOST
        and 0 < math.prod(states) <= _MOST
    )


def _replace(ir: ModuleType, call: MlirOperation) -> None:
    value, table, row = call.operands
    *batch, rows, _ = table.type.shape
    numbers = [math.prod(value.type.shape) // math.prod(batch), math.prod(batch), rows]
    large = math.prod(value.type.shape) >= _WORTH_REUSING
    in_place = 0 if large and only_user(value) is not None and producer(value) is not None else None
    with ir.InsertionPoint(call):
        rounded = library_call(ir, ROUNDING_TARGET, numbers, [value, table, row], value.type, in_place)
    call.results[0].replace_all_uses_with(rounded)
    call.erase()
