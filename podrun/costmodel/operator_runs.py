"""An operator's runs in a trace, forward and backward: read, rewritten, and narrowed to the types of its tensors.

`operator_forms` writes the library's form of an operator with `RunWriter`.

**Narrowing.** The front end computes halves in float32 inside an operator and rounds once at its end, which fixes
results to the bit on any machine. The IPU's vertices take halves and give halves (and hold what they sum in the
partials type), so a float32 value that comes from halves and never leaves its operator is a half on the tiles. Values
of an explicit Cast, and whatever stands in no operator's scope, keep their type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from podrun.core.errors import present
from podrun.core.names import parse_scope
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.equations import Equation, FlatJaxpr, FlatTensor

HALVES = frozenset({"float16", "bfloat16"})
EXPLICIT = frozenset({"Cast", "CastLike"})
"""Operators that exist to set a type."""


@dataclass(frozen=True, slots=True)
class OperatorScope:
    """Where an equation comes from: an operator's ``label``, its ``kind`` (its ONNX type), forward or backward."""

    label: str
    kind: str
    backward: bool


def place_of(scope: str) -> OperatorScope | None:
    """The operator in whose scope an equation stands, or None."""
    said = parse_scope(scope)
    if said.operator is None:
        return None
    return OperatorScope(said.operator.label, said.operator.kind, said.backward)


def with_halves(flat: FlatJaxpr) -> FlatJaxpr:
    """``flat`` with halves where the library has halves; ``flat`` itself if nothing is computed wider."""
    labels, explicit = _labels(flat)
    crossing, leaving = _crossings(flat, labels)
    kinds = {label: _half_of(numbers, flat) for label, numbers in crossing.items() if label not in explicit}
    half: dict[int, str] = {}
    for equation, label in zip(flat.equations, labels, strict=True):
        kind = kinds.get(label)
        if kind is None:
            continue
        for number in equation.outputs:
            if flat.tensors[number].dtype == "float32" and number not in leaving:
                half[number] = kind
    if not half:
        return flat
    tensors = {n: FlatTensor(t.shape, half[n]) if n in half else t for n, t in flat.tensors.items()}
    return replace(flat, equations=[_retyped(e, tensors) for e in flat.equations], tensors=tensors)


def _labels(flat: FlatJaxpr) -> tuple[list[str], set[str]]:
    """The operator of each equation ("" for none), and the operators that exist to set a type.

    An equation without a scope that reads one operator's values alone belongs to it: differentiating a loop moves
    loop-invariant equations out of it, and drops their scope.
    """
    places: dict[str, OperatorScope | None] = {}
    maker: dict[int, str] = {}
    labels: list[str] = []
    explicit: set[str] = set()
    for equation in flat.equations:
        if equation.scope not in places:
            places[equation.scope] = place_of(equation.scope)
        place = places[equation.scope]
        if place is not None:
            label = place.label
            if place.kind in EXPLICIT:
                explicit.add(label)
        else:
            sources = {maker.get(n, "") for n in equation.inputs if n is not None}
            label = sources.pop() if len(sources) == 1 else ""
        labels.append(label)
        for number in equation.outputs:
            maker[number] = label
    return labels, explicit


def _crossings(flat: FlatJaxpr, labels: Sequence[str]) -> tuple[dict[str, set[int]], set[int]]:
    """The values of others that each operator reads; and all values that others or the outside read."""
    maker: dict[int, str] = {}
    crossing: dict[str, set[int]] = {}
    leaving = set(flat.results)
    neutral: set[int] = set()
    for equation, label in zip(flat.equations, labels, strict=True):
        foreign = {n for n in equation.inputs if n is not None and maker.get(n, "") != label}
        if all(n is None or n in neutral for n in equation.inputs):
            neutral.update(
                equation.outputs
            )  # Zeros and the like take the type of the values they are combined with.
        crossing.setdefault(label, set()).update(foreign - neutral)
        leaving |= {n for n in foreign if n in maker}
        for number in equation.outputs:
            maker[number] = label
    crossing.pop("", None)
    return crossing, leaving


STATISTICS = 16
"""Wide values this many times smaller than an operator's halves are statistics; they do not make it wide."""


def _half_of(numbers: set[int], flat: FlatJaxpr) -> str | None:
    """The half type of an operator that reads these values, or None if it is wide."""
    halves = [flat.tensors[n] for n in numbers if flat.tensors[n].dtype in HALVES]
    if not halves:
        return None
    largest = max(halves, key=lambda t: t.size)
    wide = max((flat.tensors[n].size for n in numbers if flat.tensors[n].dtype == "float32"), default=0)
    return largest.dtype if wide <= 1 or wide * STATISTICS <= largest.size else None


def _retyped(equation: Equation, tensors: dict[int, FlatTensor]) -> Equation:
    operands = tuple(
        tensor if number is None or number not in tensors else FlatTensor(tensor.shape, tensors[number].dtype)
        for number, tensor in zip(equation.inputs, equation.operands, strict=True)
    )
    results = tuple(tensors[number] for number in equation.outputs)
    primitive = equation.primitive
    if primitive == "convert_element_type" and operands[0].dtype == results[0].dtype:
        primitive = "reshape"
    bodies = equation.bodies
    kind = next((t.dtype for t in (*operands, *results) if t.dtype in HALVES), None)
    if bodies and kind and not any(t.dtype == "float32" and t.size > 1 for t in (*operands, *results)):
        bodies = tuple(_all_half(body, kind) for body in bodies)
    return replace(equation, primitive=primitive, operands=operands, results=results, bodies=bodies)


def _all_half(flat: FlatJaxpr, kind: str) -> FlatJaxpr:
    """The body of a loop between halves, with all values as halves."""
    tensors = {n: FlatTensor(t.shape, kind) if t.dtype == "float32" else t for n, t in flat.tensors.items()}
    return replace(flat, equations=[_retyped(e, tensors) for e in flat.equations], tensors=tensors)


def runs_of_operators(equations: Sequence[Equation]) -> list[tuple[OperatorScope | None, int, int]]:
    """Runs of equations that stand side by side in one operator and direction: (place, first, end).

    Equations without any scope between two of one operator belong to it: differentiating a loop moves loop-invariant
    equations out of it, and drops their scope.
    """
    out: list[tuple[OperatorScope | None, int, int]] = []
    places: dict[str, OperatorScope | None] = {}
    for index, equation in enumerate(equations):
        if equation.scope not in places:
            places[equation.scope] = place_of(equation.scope)
        place = places[equation.scope]
        if out and out[-1][0] == place:
            out[-1] = (place, out[-1][1], index + 1)
        elif len(out) > 1 and place is not None and out[-2][0] == place and _unscoped(equations, out[-1]):
            out[-2:] = [(place, out[-2][1], index + 1)]
        else:
            out.append((place, index, index + 1))
    return out


def _unscoped(equations: Sequence[Equation], run: tuple[OperatorScope | None, int, int]) -> bool:
    place, first, end = run
    return place is None and not any(equation.scope for equation in equations[first:end])


@dataclass(slots=True)
class OperatorRun:
    """Equations of one operator and direction: the values they read of others, and those that others (or the outside)
    read of them.
    """

    first: int
    end: int
    reads: list[int]
    written: list[int]
    scope: str
    library_form: list[Equation] = field(default_factory=list)


class Unexpected(Exception):
    """A run does not have the shape that its operator's template knows."""


class RunWriter:
    """Rewrites the equations of a run, with fresh value numbers."""

    def __init__(self, tensors: dict[int, FlatTensor], scope: str, into: list[Equation]) -> None:
        self.tensors, self.scope, self.into = tensors, scope, into

    def new(self, shape: Sequence[int], dtype: str) -> int:
        """Add a value of a shape and type; returns its number."""
        number = len(self.tensors)
        while number in self.tensors:
            number += 1
        self.tensors[number] = FlatTensor(tuple(shape), dtype)
        return number

    def emit(
        self,
        primitive: str,
        inputs: Sequence[int],
        output: int | None = None,
        *,
        shape: Sequence[int] = (),
        params: Mapping[str, Any] | None = None,
        seen_as: Sequence[int] = (),
    ) -> int:
        """Add an equation with one result: ``output``, or a new value of ``shape``. ``seen_as``: the shape
        in which the planner sees the first operand.
        """
        dtype = self.tensors[inputs[0]].dtype
        number = self.new(shape, dtype) if output is None else output
        operands = [self.tensors[n] for n in inputs]
        if seen_as:
            operands[0] = FlatTensor(tuple(seen_as), dtype)
        result = self.tensors[number]
        self.into.append(
            Equation(
                primitive, params or {}, tuple(inputs), (number,), tuple(operands), (result,), self.scope
            )
        )
        return number


@dataclass(slots=True)
class TracedOperator:
    """An operator of the trace with its runs; templates read and write through it."""

    place: OperatorScope
    tensors: dict[int, FlatTensor]
    forward: OperatorRun
    backward: OperatorRun | None
    equations: Sequence[Equation]

    def size(self, number: int) -> int:
        """Elements of a value."""
        return self.tensors[number].size

    def shape(self, number: int) -> tuple[int, ...]:
        """Shape of a value."""
        return self.tensors[number].shape

    def main_input(self) -> int:
        """The largest value that the forward run reads of others.

        Raises:
            Unexpected: it reads none.
        """
        if not self.forward.reads:
            raise Unexpected
        return max(self.forward.reads, key=self.size)

    def main_output(self) -> int:
        """The one large result of the forward run; smaller ones are statistics.

        Raises:
            Unexpected: none, or two of its size.
        """
        written = sorted(self.forward.written, key=self.size)
        if not written or (len(written) > 1 and self.size(written[-2]) * 2 > self.size(written[-1]) > 64):
            raise Unexpected
        return written[-1]

    def gradient(self, y: int) -> int:
        """The gradient of ``y`` that the backward run reads.

        Raises:
            Unexpected: nothing of that size is read.
        """
        candidates = [n for n in self.arriving() if self.size(n) == self.size(y)]
        if not candidates:
            raise Unexpected
        return candidates[0]

    def arriving(self) -> list[int]:
        """The values that the backward run reads and the forward run neither read nor made: gradients of other
        operators.
        """
        backward = self._backward_run()
        forward = self.equations[self.forward.first : self.forward.end]
        known = {*self.forward.reads, *(n for e in forward for n in e.outputs)}
        return [n for n in backward.reads if n not in known]

    def _backward_run(self) -> OperatorRun:
        return present(self.backward, "only an operator with a backward run is asked for its gradients")

    def wanted(self, source: int) -> int | None:
        """The result of the backward run that is the gradient of ``source``, if anything reads it."""
        for number in self._backward_run().written:
            if self.shape(number) == self.shape(source):
                return number
        return None

    def writer(self, run: OperatorRun) -> RunWriter:
        """A writer that rewrites ``run``."""
        return RunWriter(self.tensors, run.scope, run.library_form)

    def finish(self, run: OperatorRun, done: set[int], source: int, main: int | None = None) -> None:
        """Copy small values of ``run`` that others read and no template made from ``source``.

        Raises Unexpected if one of them is as large as ``main`` (``source`` if left out).
        """
        limit = self.size(source if main is None else main)
        write = self.writer(run)
        for number in run.written:
            if number in done:
                continue
            if self.size(number) * 2 > limit > 64:
                raise Unexpected
            write.emit("copy", [source], number, seen_as=self.shape(number))


Template = Callable[[TracedOperator], None]
"""Rewrites the runs of one operator. Raises Unexpected, before anything is replaced, for runs it does not know."""
