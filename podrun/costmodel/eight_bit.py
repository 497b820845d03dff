"""Products of 8-bit floats, on chips whose AMP multiplies them.

A front end's trace casts 8-bit operands to 16 bits, multiplies them by their scale and then by each other: the same
numbers. The hardware takes the 8-bit operands themselves, and the scale with them. So a product both of whose operands
are such casts reads what was cast, and casts that nothing else reads are gone. On other chips the casts are work.
"""

from __future__ import annotations

from dataclasses import replace

from podrun.costmodel.equations import Equation, FlatJaxpr, FlatTensor, needed
from podrun.costmodel.planners import PRODUCTS, VIEWS
from podrun.costmodel.target import Chip


def in_eight_bits(flat: FlatJaxpr, chip: Chip) -> FlatJaxpr:
    """``flat`` with products of 8-bit floats where ``chip`` has them, in the bodies of loops and branches too."""
    if "amp_inputs_float8" not in chip.facts:
        return flat
    makers = {number: equation for equation in flat.equations for number in equation.outputs}
    equations = [_of_bodies(_narrowed(equation, flat, makers), chip) for equation in flat.equations]
    if all(new is old for new, old in zip(equations, flat.equations, strict=True)):
        return flat
    return replace(flat, equations=needed(equations, flat.results))


def _of_bodies(equation: Equation, chip: Chip) -> Equation:
    bodies = tuple(in_eight_bits(body, chip) for body in equation.bodies)
    same = all(new is old for new, old in zip(bodies, equation.bodies, strict=True))
    return equation if same else replace(equation, bodies=bodies)


def _narrowed(equation: Equation, flat: FlatJaxpr, makers: dict[int, Equation]) -> Equation:
    if equation.primitive not in PRODUCTS:
        return equation
    sources = [_source(number, flat, makers) for number in equation.inputs[:2]]
    if None in sources:
        return equation
    operands = tuple(
        FlatTensor(operand.shape, flat.tensors[source].dtype)
        for operand, source in zip(equation.operands, sources, strict=False)
        if source is not None
    )
    return replace(
        equation,
        inputs=(*sources, *equation.inputs[2:]),
        operands=(*operands, *equation.operands[2:]),
    )


def _source(number: int | None, flat: FlatJaxpr, makers: dict[int, Equation]) -> int | None:
    """The 8-bit float that a value is cast and scaled from; None if there is none."""
    while number is not None and not flat.tensors[number].dtype.startswith("float8"):
        maker = makers.get(number)
        if maker is None:
            return None
        number = _cast_from(maker)
    return number


def _cast_from(maker: Equation) -> int | None:
    """What a cast, a view or a multiplication by one number reads; None for anything else."""
    if maker.primitive == "convert_element_type" or maker.primitive in VIEWS:
        return maker.inputs[0]
    if maker.primitive == "mul":
        tensors = [n for n, t in zip(maker.inputs, maker.operands, strict=True) if t.shape]
        return tensors[0] if len(tensors) == 1 else None
    return None
