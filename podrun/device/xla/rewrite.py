"""Replaces convolutions of a lowered piece by calls of oneDNN, before XLA compiles it.

Front ends trace plain convolutions, which JAX differentiates and the tile model costs. Only when a piece is compiled
does this module choose the library that computes them on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.channels_last import sink_transposes
from podrun.device.xla.convolutions import (
    TARGET,
    WORTH_DIVIDING,
    Convolution,
    ConvolutionCall,
    Kind,
    algorithms,
    available,
    convolution_call,
)
from podrun.device.xla.epilogues import (
    Epilogue,
    create_operation,
    inline,
    library_call,
    match,
    nested,
    rebuild_walls,
)
from podrun.private_apis.jax import convolutions_problem, mlir, stablehlo
from podrun.private_apis.jax_exports import convolution_axes

if TYPE_CHECKING:
    from jax.stages import Lowered

    from podrun.private_apis.mlir_types import MlirModule, MlirOperation, MlirValue

__all__ = ["available", "rewrite_convolutions"]


def rewrite_convolutions(
    lowered: Lowered, least: int = 0, parts: int = 1, worth_dividing: int = WORTH_DIVIDING
) -> int:
    """Replace convolutions of a ``jax.stages.Lowered`` by calls of the library, in place. Returns how many.

    What it has nothing for stays XLA's, and everything does where the library is not there, or where the program's
    convolutions have fewer than ``least`` products in all. ``parts``: into how many a call of ``worth_dividing``
    products is divided.
    """
    if convolutions_problem():
        if "stablehlo.convolution" in lowered.as_text():
            available()  # says why they stay XLA's
        return 0
    module, ir = stablehlo(lowered), mlir()
    if not any(op.name == "stablehlo.convolution" for op in nested(module.operation)):
        return 0
    with module.context, ir.Location.unknown():
        inline(ir, module)
        count = _replaced(ir, module, least, (parts, worth_dividing))
        if count:
            sink_transposes(module)
        rebuild_walls(ir, module)
    return count


def _replaced(ir: ModuleType, module: MlirModule, least: int, parts: tuple[int, int]) -> int:
    """The number of convolutions that became calls of the library."""
    convolutions = [op for op in nested(module.operation) if op.name == "stablehlo.convolution"]
    for op in convolutions:
        _drop_taps(ir, op)
    sites = [site for op in convolutions if (site := _recognise(ir, op)) is not None]
    if not sites or sum(site.products for site in sites) < least or not available():
        return 0
    return sum(_replace(ir, site, parts) for site in sites)


def _drop_taps(ir: ModuleType, op: MlirOperation) -> None:
    """Where image and result are one pixel wide, keep the column of the kernel that meets that pixel; likewise rows.

    All others meet padding. Besides being needless work, such a column makes jaxlib 0.10 abort the process in its
    algebraic simplifier: the gradient of an image of 14 rows and 1 column, kernel 2x2, stride 2, padding 1.
    """
    import numpy as np

    image, weights, result = (v.type.shape for v in (*op.operands, op.results[0]))
    if len(image) != 4 or any(_values(op.attributes, "window_reversal", False)):
        return
    of_image, of_weights, of_result = convolution_axes(op.attributes["dimension_numbers"])
    pads = [*_values(op.attributes, "padding", 0, 4)]
    dilation = _values(op.attributes, "rhs_dilation", 1)
    for place in range(2):
        one = image[of_image[1 + place]] == 1 == result[of_result[1 + place]]
        tap, rest = divmod(pads[2 * place], dilation[place])
        axis = of_weights[place]
        if not one or rest or not 0 <= tap < weights[axis] or weights[axis] == 1:
            continue
        kind = op.operands[1].type
        sizes, first = list(kind.shape), [0] * 4
        first[axis] = tap
        limits = [*sizes[:axis], tap + 1, *sizes[axis + 1 :]]
        sizes[axis] = 1
        with ir.InsertionPoint(op):
            op.operands[1] = create_operation(
                ir,
                "slice",
                ir.RankedTensorType.get(sizes, kind.element_type),
                [op.operands[1]],
                start_indices=first,
                limit_indices=limits,
                strides=[1] * 4,
            )
        pads[2 * place : 2 * place + 2] = 0, 0
        op.attributes["padding"] = ir.DenseIntElementsAttr.get(np.array(pads, np.int64).reshape(2, 2))


_Axes = tuple[int, ...]
"""Positions of an array's axes. Image: batch, rows, columns, channels. Weights: rows, columns, inputs, outputs."""


@dataclass(frozen=True, slots=True)
class _Site:
    """A convolution of a program, the call that computes it, and the order of its axes in image, weights, result."""

    op: MlirOperation
    call: ConvolutionCall
    products: int
    image: _Axes
    weights: _Axes
    result: _Axes


def _recognise(ir: ModuleType, op: MlirOperation) -> _Site | None:
    """The call that replaces an operation; None if the operation stays."""
    image, weights, result = (ir.RankedTensorType(v.type) for v in (*op.operands, op.results[0]))
    single = all(str(t.element_type) == "f32" and t.has_static_shape for t in (image, weights, result))
    if not single or len(image.shape) != 4:
        return None
    attributes = op.attributes
    of_image, of_weights, of_result = convolution_axes(attributes["dimension_numbers"])
    if any(_values(attributes, "window_reversal", False)):
        return None
    pads = _values(attributes, "padding", 0, 4)
    convolution = Convolution(
        image=tuple(image.shape[i] for i in of_image),
        weights=tuple(weights.shape[i] for i in of_weights),
        strides=_values(attributes, "window_strides", 1),
        pads=((pads[0], pads[1]), (pads[2], pads[3])),
        dilation=_values(attributes, "rhs_dilation", 1),
        spread=_values(attributes, "lhs_dilation", 1),
        groups=attributes["feature_group_count"].value,
        batch_groups=attributes["batch_group_count"].value,
        reversed_weights=_reversed(op.operands[1], of_weights) is not None,
        batch_inside=of_image[3] == 0,
    )
    call = convolution_call(convolution)
    return None if call is None else _Site(op, call, convolution.products, of_image, of_weights, of_result)


def _reversed(weights: MlirValue, axes: _Axes) -> Any:
    """The operand of which weights are the reversal by rows and columns; None if they are no reversal."""
    maker = weights.owner
    if getattr(maker, "name", "") != "stablehlo.reverse":
        return None
    return maker.operands[0] if sorted(maker.attributes["dimensions"]) == sorted(axes[:2]) else None


def _values(attributes: Any, name: str, default: Any, count: int = 2) -> tuple[Any, ...]:
    """The numbers of an attribute, which is either dense elements or a dense array."""
    if name not in attributes:
        return (default,) * count
    import numpy as np

    return tuple(type(default)(v) for v in np.asarray(list(attributes[name])).reshape(-1))


def _replace(ir: ModuleType, site: _Site, parts: tuple[int, int]) -> bool:
    """Replace an operation, with its epilogue if the library can do that, by the call. Returns False if it stays."""
    call, op = site.call, site.op
    epilogue = Epilogue(sums=(op,))
    if call.kind is Kind.FORWARD:
        epilogue = match(op, site.result[3])
    numbers = call.numbers(_order(site), epilogue.kind, *parts)
    if not algorithms(numbers):
        return False
    kind = op.results[0].type
    with ir.InsertionPoint(epilogue.sums[-1]):
        bias, other = epilogue.operands(ir)
        operands = [*_operands(ir, site), *bias, *(_turned(ir, value, site.result) for value in other)]
        if call.kind is Kind.OF_WEIGHTS:
            result = library_call(ir, TARGET, numbers, operands, kind)
        else:
            shape = [kind.shape[axis] for axis in site.result]
            images = ir.RankedTensorType.get(shape, kind.element_type)
            result = library_call(ir, TARGET, numbers, operands, images)
            result = _turned(ir, result, tuple(site.result.index(axis) for axis in range(4)))
    epilogue.replace(result)
    return True


def _order(site: _Site) -> tuple[int, ...]:
    """Elements between neighbouring groups, outputs, inputs, rows and columns of the weights that the call reads or
    makes. Groups lie along the axis of the outputs, and a gradient's outputs are the convolution's inputs."""
    call, of_weights = site.call, site.call.kind is Kind.OF_WEIGHTS
    lying = (site.op.results[0] if of_weights else site.op.operands[1]).type.shape
    steps = [math.prod(lying[axis + 1 :]) for axis in range(4)]
    if of_weights:
        inputs, rows, columns, outputs = (steps[axis] for axis in site.result)
        return (call.dst[3] // call.groups * outputs, outputs, inputs, rows, columns)
    rows, columns, inputs, outputs = (steps[axis] for axis in site.weights)
    if call.kind is Kind.OF_IMAGE:
        return (call.src[3] // call.groups * outputs, inputs, outputs, rows, columns)
    return (call.dst[3] // call.groups * outputs, outputs, inputs, rows, columns)


def _operands(ir: ModuleType, site: _Site) -> list[Any]:
    """The two operands of every call: images channels last, weights in their own order."""
    image, weights = site.op.operands
    if site.call.kind is Kind.OF_WEIGHTS:
        batch, rows, columns, channels = site.image
        image = _turned(ir, image, (channels, rows, columns, batch))
        rows, columns, inputs, outputs = site.weights
        return [_cropped(ir, image, site.call), _turned(ir, weights, (inputs, rows, columns, outputs))]
    if site.call.flipped:
        before = _reversed(weights, site.weights)
        weights = before if before is not None else _flipped(ir, weights, site.weights)
    return [_cropped(ir, _turned(ir, image, site.image), site.call), weights]


def _turned(ir: ModuleType, value: MlirValue, order: Sequence[int]) -> Any:
    if list(order) == sorted(order):
        return value
    kind = value.type
    turned = ir.RankedTensorType.get([kind.shape[axis] for axis in order], kind.element_type)
    return create_operation(ir, "transpose", turned, [value], permutation=order)


def _flipped(ir: ModuleType, weights: MlirValue, axes: _Axes) -> Any:
    return create_operation(ir, "reverse", weights.type, [weights], dimensions=sorted(axes[:2]))


def _cropped(ir: ModuleType, image: MlirValue, call: ConvolutionCall) -> Any:
    """An image channels last, with the pixels that the call requires."""
    if not any(map(any, call.crop)) and call.every == (1, 1):
        return image
    kind = image.type
    first = [0, *(before for before, _ in call.crop), 0]
    limits = [
        size - cut for size, cut in zip(kind.shape, (0, *(after for _, after in call.crop), 0), strict=True)
    ]
    every = [1, *call.every, 1]
    smaller = [len(range(*bounds)) for bounds in zip(first, limits, every, strict=True)]
    return create_operation(
        ir,
        "slice",
        ir.RankedTensorType.get(smaller, kind.element_type),
        [image],
        start_indices=first,
        limit_indices=limits,
        strides=every,
    )
