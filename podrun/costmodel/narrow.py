"""What an operator computes wider than its tensors is priced as narrow as the library computes it.

The front end computes halves in float32 inside an operator and rounds once at its end, which fixes results
to the bit on any machine. The IPU's vertices take halves and give halves (and hold what they sum in the
partials type), so a float32 value that comes from halves and never leaves its operator is a half on the
tiles. Values of an explicit Cast, and whatever stands in no operator's scope, keep their type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from podrun.core.scopes import parse
from podrun.costmodel.flat_graph import Equation, FlatJaxpr, FlatTensor

HALVES = frozenset({"float16", "bfloat16"})
EXPLICIT = frozenset({"Cast", "CastLike"})
"""Operators whose very meaning is a type."""


@dataclass(frozen=True, slots=True)
class OperatorScope:
    """Where an equation comes from: an operator's ``label``, its ``kind`` (its ONNX type), forward or
    backward.
    """

    label: str
    kind: str
    backward: bool


def place_of(scope: str) -> OperatorScope | None:
    """The operator in whose scope an equation stands, or None."""
    said = parse(scope)
    if said.operator is None:
        return None
    return OperatorScope(said.operator.label, said.operator.kind, said.backward)


def narrow(flat: FlatJaxpr) -> FlatJaxpr:
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
    """The operator of each equation ("" for none), and the operators whose meaning is a type.

    An equation without a scope that reads one operator's values alone belongs to it: differentiating a loop
    moves what does not change out of it, and drops its scope.
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
    """By operator, the values of others that it reads; and all values that are read by others or the
    outside.
    """
    maker: dict[int, str] = {}
    crossing: dict[str, set[int]] = {}
    leaving = set(flat.results)
    neutral: set[int] = set()
    for equation, label in zip(flat.equations, labels, strict=True):
        foreign = {n for n in equation.inputs if n is not None and maker.get(n, "") != label}
        if all(n is None or n in neutral for n in equation.inputs):
            neutral.update(equation.outputs)  # Zeros and the like take the type of what they meet.
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
    """The body of a loop between halves: all of it in halves."""
    tensors = {n: FlatTensor(t.shape, kind) if t.dtype == "float32" else t for n, t in flat.tensors.items()}
    return replace(flat, equations=[_retyped(e, tensors) for e in flat.equations], tensors=tensors)


def runs(equations: Sequence[Equation]) -> list[tuple[OperatorScope | None, int, int]]:
    """Runs of equations that stand side by side in one operator and direction: (place, first, end).

    Equations without any scope between two of one operator are its own: differentiating a loop moves what
    does not change out of it, and drops its scope.
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
