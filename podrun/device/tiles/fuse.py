"""What the library's reductions do on the way: casts and squares of their input never reach memory.

JAX sums float16 by casting to float32 first; the IPU's reduce vertices accumulate in float32 as they load,
and have a form that squares. Equations that only feed a sum that way are taken out of the list and the sum
reads their source.
"""

from __future__ import annotations

from dataclasses import replace

from podrun.device.tiles.flatten import Equation, FlatJaxpr, Tensor

SUMS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})


def _may_vanish(equation: Equation) -> bool:
    if equation.primitive in ("convert_element_type", "square"):
        return True
    if equation.primitive == "integer_pow":
        return equation.params.get("y") == 2
    inputs = equation.inputs
    return equation.primitive == "mul" and len(inputs) == 2 and inputs[0] == inputs[1] is not None


def absorb(flat: FlatJaxpr) -> FlatJaxpr:
    """``flat`` without the casts and squares that only reductions read."""
    readers: dict[int, list[Equation]] = {}
    for equation in flat.equations:
        for number in set(equation.inputs):
            if number is not None:
                readers.setdefault(number, []).append(equation)
    kept_results = set(flat.results)
    source: dict[int, tuple[int, Tensor]] = {}
    gone: set[int] = set()
    for index in range(len(flat.equations) - 1, -1, -1):
        equation = flat.equations[index]
        if not _may_vanish(equation) or equation.inputs[0] is None:
            continue
        number = equation.outputs[0]
        users = readers.get(number, [])
        if number in kept_results or not users:
            continue
        if all(user.primitive in SUMS or user.outputs[0] in source for user in users):
            source[number] = (equation.inputs[0], equation.operands[0])
            gone.add(index)
    if not gone:
        return flat
    equations = [
        _redirect(equation, source) for index, equation in enumerate(flat.equations) if index not in gone
    ]
    return replace(flat, equations=equations)


def _redirect(equation: Equation, source: dict[int, tuple[int, Tensor]]) -> Equation:
    if not any(number in source for number in equation.inputs if number is not None):
        return equation
    inputs, operands = list(equation.inputs), list(equation.operands)
    for position in range(len(inputs)):
        number = inputs[position]
        while number is not None and number in source:
            number, operands[position] = source[number]
        inputs[position] = number
    return replace(equation, inputs=tuple(inputs), operands=tuple(operands))
