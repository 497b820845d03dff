"""Updates of weights as lists of steps for the C module, which carries them out as it adds up gradients.

A piece that updates a machine's slice of the weights computes element by element. Read from its StableHLO, it is a list
of additions, products and the like over registers (`native/updates.c`). XLA may compute a product and the sum that
takes it with one rounding, where the processor can. StableHLO does not say so: there are several lists, and the
`UpdateSteps` whose bits are the piece's are used (`podrun.device.program.fused_updates` compares them).
"""

from __future__ import annotations

import enum
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.executable import Array, Computation
from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.epilogues import inline, nested
from podrun.private_apis.jax import mlir
from podrun.private_apis.jax_exports import exported_stablehlo, reads_stablehlo

if TYPE_CHECKING:
    from podrun.private_apis.mlir_types import MlirModule, MlirOperation, MlirValue

_KINDS = ("add", "subtract", "multiply", "divide", "sqrt", "negate")
_MULTIPLY, _MULTIPLY_ADD = _KINDS.index("multiply"), len(_KINDS)
_SUBTRACT_PRODUCT, _PRODUCT_LESS = _MULTIPLY_ADD + 1, _MULTIPLY_ADD + 2
_REGISTERS, _MOST_STEPS = 48, 64
"""What `native/updates.c` has room for."""

UpdateStep = tuple[int, int, int, int, int]
"""Kind, register of the result, registers of the operands; registers that a kind does not read are 0."""


@dataclass(frozen=True, slots=True)
class UpdateSteps:
    """An update over registers. Register 0 has the sum of gradients; then come ``vectors``, positions of the piece's
    operands that are slices; then ``scalars``, positions of those that are numbers; then ``constants``. ``results``:
    the register of each result of the piece.
    """

    vectors: tuple[int, ...]
    scalars: tuple[int, ...]
    constants: tuple[float, ...]
    steps: tuple[UpdateStep, ...]
    results: tuple[int, ...]

    @property
    def arrays(self) -> int:
        """The arrays that the C module holds for them, besides rows of gradients."""
        return len(self.vectors) + len(self.scalars) + len(self.constants)

    def prepared(
        self, rows: Sequence[Array], *, mean: bool, operands: Mapping[int, Array], stores: Sequence[int]
    ) -> Any:
        """The C module's update: the sum, or the mean, of ``rows``, with the piece's operands by position. ``stores``:
        for each result, the position of the operand that it replaces."""
        module = _module()
        constants = [np.array(value, np.float32) for value in self.constants]
        scalars = [*(operands[at] for at in self.scalars), *constants]
        pairs = [(r, self.vectors.index(at)) for r, at in zip(self.results, stores, strict=True)]
        vectors = [operands[at] for at in self.vectors]
        return module.update(list(rows), mean, vectors, scalars, list(self.steps), pairs)


def run_update(prepared: object) -> None:
    """Run an update that `UpdateSteps.prepared` returned: sum the gradients and write the new weights."""
    _module().run_update(prepared)


def _module() -> Any:
    return importlib.import_module("podrun.device.xla._onednn")


def has_updates() -> bool:
    """Whether the C module is built and has updates, and jaxlib has what reading StableHLO needs."""
    try:
        return hasattr(_module(), "run_update") and reads_stablehlo()
    except ImportError:
        return False


def update_steps(computation: Computation, gradient: int) -> list[UpdateSteps]:
    """The lists of steps that a piece may stand for, whose operand ``gradient`` is the sum of gradients; none for a
    piece that does anything else than arithmetic of float32, element by element."""
    export: Any = importlib.import_module("jax.export")
    exported = export.deserialize(bytearray(computation.stablehlo))
    kinds = {(str(a.dtype), a.shape) for a in (*exported.in_avals, *exported.out_avals) if a.shape}
    scalars = {str(a.dtype) for a in exported.in_avals if not a.shape}
    if len(kinds) != 1 or next(iter(kinds))[0] != "float32" or not scalars <= {"float32"}:
        return []
    with exported_stablehlo(exported) as module:
        ir = mlir()
        with ir.Location.unknown():
            inline(ir, module)
        count = len(exported.in_avals)
        readings = [_Reading(gradient, count, c).read(ir, module) for c in Contraction]
    return list(dict.fromkeys(steps for steps in readings if steps is not None))


class Contraction(enum.Enum):
    """Which products are one step with the sum that takes them, and round once."""

    ALONE = "alone"
    """Those with no other reader."""
    ALL = "all"
    """All, each with every sum that takes it."""
    NONE = "none"


@dataclass(slots=True)
class _Reading:
    """Translates a StableHLO module into steps."""

    gradient: int
    arguments: int
    contracts: Contraction
    constants: list[float] = field(default_factory=list)
    steps: list[UpdateStep] = field(default_factory=list)
    of_value: dict[Any, int] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)
    """Registers that hold one number for all elements."""
    divisors: range = range(0)
    """Registers of constants; the one of a constant's reciprocal is ``reciprocals`` further. Behind all reciprocals
    come the products of two constants or reciprocals.
    """
    reciprocals: int = 0

    def read(self, ir: ModuleType, module: MlirModule) -> UpdateSteps | None:
        main = next(op for op in module.body if ir.StringAttr(op.attributes["sym_name"]).value == "main")
        block = main.operation.regions[0].blocks[0]
        operations = [op.operation for op in block]
        if len(block.arguments) != self.arguments:  # JAX leaves out what nothing reads.
            return None
        arguments = list(enumerate(block.arguments))
        vectors = [at for at, a in arguments if len(a.type.shape) and at != self.gradient]
        scalars = [at for at, a in arguments if not len(a.type.shape)]
        self.constants = [c for op in operations if (c := _constant(op)) is not None]
        self.reciprocals = len(self.constants)
        with np.errstate(all="ignore"):
            self.constants += [float(np.float32(1) / np.float32(c)) for c in self.constants]
            self.constants += [
                float(np.float32(a) * np.float32(b)) for a in self.constants for b in self.constants
            ]
        order = [self.gradient, *vectors, *scalars]
        self.of_value = {block.arguments[at]: register for register, at in enumerate(order)}
        self.numbers = set(range(1 + len(vectors), len(order) + len(self.constants)))
        constants = iter(range(len(order), len(order) + self.reciprocals))
        self.divisors = range(len(order), len(order) + self.reciprocals)
        for op in operations[:-1]:
            if not self._take(op, constants):
                return None
        results = tuple(self.of_value[value] for value in operations[-1].operands)
        first = len(order) + len(self.constants)
        steps = self._needed(results)
        read = {register for step in steps for register in step[2:]}
        constants_read = [register for register in range(len(order), first) if register in read]
        registers = [*range(len(order)), *constants_read, *(step[1] for step in steps)]
        if any(0 < result < first for result in results) or len(steps) > _MOST_STEPS:
            return None
        if len(registers) > _REGISTERS:
            return None
        at = registers.index
        return UpdateSteps(
            tuple(vectors),
            tuple(scalars),
            tuple(self.constants[register - len(order)] for register in constants_read),
            tuple((s[0], at(s[1]), at(s[2]), at(s[3]), at(s[4])) for s in steps),
            tuple(map(at, results)),
        )

    def _take(self, op: MlirOperation, constants: Any) -> bool:
        """Add the step of an operation; False if it is not one of an update."""
        if len(op.results) != 1 or any(True for _ in nested(op)):
            return False
        name, result = op.name.removeprefix("stablehlo."), op.results[0]
        if _constant(op) is not None:
            self.of_value[result] = next(constants)
            return True
        operands = [self.of_value[value] for value in op.operands]
        if name == "divide" and operands[1] in self.divisors:  # XLA multiplies by the reciprocal.
            name, operands[1] = "multiply", operands[1] + self.reciprocals
        if name == "broadcast_in_dim" and not len(op.operands[0].type.shape):
            self.of_value[result] = operands[0]
            return True
        if name not in _KINDS:
            return False
        if name == "multiply":
            operands = self._with_one_number(*operands)
        register = self._new_register()
        if number := self.numbers.issuperset(operands):
            self.numbers.add(register)
        self.of_value[result] = register
        joined = self._joined(name, op, number=number) if self.contracts is not Contraction.NONE else None
        a, b, c = joined[1:] if joined else (*operands, *[0] * (3 - len(operands)))
        self.steps.append((joined[0] if joined else _KINDS.index(name), register, a, b, c))
        return True

    def _with_one_number(self, left: int, right: int) -> list[int]:
        """The operands of a product. Of a product with a constant and another number, XLA multiplies these first."""
        first, count = self.divisors.start, 2 * self.reciprocals
        for value, number in ((left, right), (right, left)):
            step = next((s for s in self.steps if s[:2] == (_MULTIPLY, value)), None)
            if number not in self.numbers or step is None or value in self.numbers:
                continue
            for other, constant in (step[2:4], step[3:1:-1]):
                place = constant - first
                if constant in range(first, first + count) and number in range(first, first + count):
                    return [other, first + count + place * count + number - first]
                if constant in range(first, first + len(self.constants)):
                    product = self._new_register()
                    self.numbers.add(product)
                    self.steps.append((_MULTIPLY, product, number, constant, 0))
                    return [other, product]
        return [left, right]

    def _new_register(self) -> int:
        return 1 + max((*self.of_value.values(), *self.numbers))

    def _joined(self, name: str, op: MlirOperation, *, number: bool) -> tuple[int, int, int, int] | None:
        """Kind and operands of a sum that takes a product with one rounding; XLA looks at the left operand first.
        ``number``: it is one number for all elements."""
        if name not in ("add", "subtract"):
            return None
        left, right = op.operands
        kinds = (_MULTIPLY_ADD, _MULTIPLY_ADD) if name == "add" else (_PRODUCT_LESS, _SUBTRACT_PRODUCT)
        for product, other, kind in ((left, right, kinds[0]), (right, left, kinds[1])):
            if (factors := self._factors(product, number=number)) is not None:
                return kind, *factors, self.of_value[other]
        return None

    def _factors(self, value: MlirValue, *, number: bool) -> tuple[int, int] | None:
        """The registers of the factors of a product that one operation takes. XLA computes numbers before it looks at
        elements."""
        register, alone = self.of_value[value], len(list(value.uses)) == 1
        alone = alone or self.contracts is Contraction.ALL
        if not alone or (register in self.numbers and not number):
            return None
        return next((s[2:4] for s in self.steps if s[:2] == (_MULTIPLY, register)), None)

    def _needed(self, results: Sequence[int]) -> tuple[UpdateStep, ...]:
        """The steps without those whose result nothing reads."""
        read, needed = set(results), []
        for step in reversed(self.steps):
            if step[1] in read:
                read |= set(step[2:])
                needed.append(step)
        return tuple(reversed(needed))


def _constant(op: MlirOperation) -> float | None:
    """The number that a constant has for all elements; None for what is no such constant."""
    if op.name != "stablehlo.constant" or str(op.results[0].type.element_type) != "f32":
        return None
    value = op.attributes["value"]
    number = float(value.get_splat_value().value) if value.is_splat else math.nan
    return None if math.isnan(number) else number
