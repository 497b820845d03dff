"""Functions of a lowered piece that podrun's own native code computes, before XLA compiles the rest.

The compiler writes some formulas as calls of a function of their own, with a name that says what it computes. XLA would
inline it, compile its operations at each of its calls, and compute them again in every loop that reads its result. Each
call becomes one native call with the bits of the formula: XLA compiles nothing for it. Functions are recognised by
their name and by the types of their operands, so that a program's own function of that name stays as it is.

Where the C module is missing, XLA compiles the functions, but does not inline them. That takes longer, and what they
give has the same bits.

**Random words** (`podrun.compiler.random_words`, ``native/random_words.c``) are such a function; stochastic rounding is
another one (`podrun.device.xla.roundings`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from podrun.core.names import RANDOM_WORDS
from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.epilogues import NOT_INLINED, library_call, nested
from podrun.private_apis.jax import mlir, stablehlo

if TYPE_CHECKING:
    from types import ModuleType

    from jax.stages import Lowered

    from podrun.private_apis.mlir_types import MlirModule, MlirOperation

RANDOM_WORDS_TARGET = "podrun_random_words"
"""The name of the call in a program."""
OPERATIONS_PER_COUNTER = 117
"""What XLA counts for both words of a counter."""
MOST_ELEMENTS = (1 << 31) - 1
"""Of an array that native code computes."""


@dataclass(frozen=True, slots=True)
class OwnFunction:
    """A function of the compiler that native code computes.

    ``name``: in StableHLO, where a number may follow. ``fits``: whether a call of that name has its types. ``replace``:
    puts a native call in the place of such a call.
    """

    name: str
    fits: Callable[[MlirOperation], bool]
    replace: Callable[[ModuleType, MlirOperation], None]

    def matches(self, symbol: str) -> bool:
        """Whether a function's symbol in StableHLO, such as ``@name`` or ``@name_3``, has this function's name."""
        return re.fullmatch(rf"@{self.name}(_\d+)?", symbol) is not None


def replace_function(lowered: Lowered, function: OwnFunction, available: Callable[[], bool]) -> int:
    """Replace the calls of a function in a ``jax.stages.Lowered`` by native calls, in place. Returns how many.

    ``available``: whether the module is there, asked only if there is such a call.
    """
    module = stablehlo(lowered)
    calls = _calls(module, function)
    if not calls:
        return 0
    ir, native = mlir(), available()
    with module.context, ir.Location.unknown():
        for call in calls:
            if native:
                function.replace(ir, call)
            else:
                call.attributes[NOT_INLINED] = ir.DictAttr.get({"inlineable": ir.StringAttr.get("false")})
        if native:
            _erase_uncalled(module, function)
    return len(calls) if native else 0


def _calls(module: MlirModule, function: OwnFunction) -> list[MlirOperation]:
    return [
        op
        for op in nested(module.operation)
        if op.name == "func.call" and function.matches(str(op.attributes["callee"])) and function.fits(op)
    ]


def _erase_uncalled(module: MlirModule, function: OwnFunction) -> None:
    """Erase the module's functions with that name that no call names any more."""
    called = {str(op.attributes["callee"]) for op in nested(module.operation) if op.name == "func.call"}
    for op in list(module.body.operations):
        symbol = f"@{op.attributes['sym_name'].value}"
        if function.matches(symbol) and symbol not in called:
            op.operation.erase()


def rewrite_random_words(lowered: Lowered, available: Callable[[], bool]) -> int:
    """Replace the calls for random words in a lowered piece by native calls, in place. Returns how many.

    ``available``: whether the C module is there, asked only if there is such a call.
    """
    return replace_function(lowered, _WORDS, available)


def operations_of_words(module: MlirModule) -> int:
    """How many operations of a module XLA counts for random words, before native calls replace these."""
    return OPERATIONS_PER_COUNTER * sum(math.prod(op.operands[2].type.shape) for op in _calls(module, _WORDS))


def _are_words(call: MlirOperation) -> bool:
    """Keys of one word each, or of one for each word that is asked for; counters; both words of all in one result."""
    if len(call.operands) != 4 or len(call.results) != 1:
        return False
    types = [value.type for value in (*call.operands, *call.results)]
    first, second, low, high, words = ([int(size) for size in kind.shape] for kind in types)
    return (
        all(str(kind.element_type) == "ui32" for kind in types)
        and first == second
        and low == high
        and first in ([], low)
        and words == [2, *low]
        and 0 < math.prod(low) <= MOST_ELEMENTS
    )


def _replace_words(ir: ModuleType, call: MlirOperation) -> None:
    count = math.prod(call.operands[2].type.shape)
    result = call.results[0]
    with ir.InsertionPoint(call):
        words = library_call(ir, RANDOM_WORDS_TARGET, [count], list(call.operands), result.type)
    result.replace_all_uses_with(words)
    call.erase()


_WORDS = OwnFunction(RANDOM_WORDS, _are_words, _replace_words)
