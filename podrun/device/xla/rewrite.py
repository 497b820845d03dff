"""Puts fast formulations in the place of convolutions, between tracing and compiling.

Front ends trace plain convolutions, which JAX differentiates and the tile model costs; which library computes them on a
CPU is decided here, when a piece is compiled.
"""

from __future__ import annotations

import importlib
from typing import Any

from podrun.device.xla.channels_last import sink_transposes
from podrun.device.xla.convolutions import After, Convolution, available, convolve, supported
from podrun.device.xla.epilogues import Epilogue, match
from podrun.device.xla.stablehlo import inline, nested

__all__ = ["available", "rewrite"]


def rewrite(lowered: Any, least: int = 0) -> int:
    """Replace convolutions of a ``jax.stages.Lowered`` by calls of `convolve`, in place. Returns how many.

    What it has no formulation for stays XLA's, and everything does where oneDNN is not there, or where the program's
    convolutions have fewer than ``least`` products in all.
    """
    if not available():
        return 0
    module = lowered.compiler_ir("stablehlo")
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    made: dict[Any, str] = {}
    count = 0
    if not any(op.name == "stablehlo.convolution" for op in nested(module.operation)):
        return 0  # And calls stay calls: some are walls (`podrun.compiler.export.walls`).
    with module.context, ir.Location.unknown():
        inline(ir, module)
        found = [op for op in nested(module.operation) if op.name == "stablehlo.convolution"]
        all_recognised = [(op, recognised) for op in found if (recognised := _recognise(ir, op))]
        if sum(convolution.products for _, (convolution, _) in all_recognised) < least:
            return 0
        for op, (convolution, orders) in all_recognised:
            epilogue = match(op, orders[2][3])
            key = (convolution, orders, epilogue.kind)
            if key not in made:
                made[key] = _add_function(ir, module, f"podrun_convolution_{len(made)}", *key)
            _replace(ir, op, made[key], convolution, orders, epilogue)
            count += 1
    if count:
        sink_transposes(module)
    return count


_Orders = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _recognise(ir: Any, op: Any) -> tuple[Convolution, _Orders] | None:
    """The convolution that an operation is and the order of its axes in image, weights and result; or None."""
    image, weights, result = (ir.RankedTensorType(v.type) for v in (*op.operands, op.results[0]))
    single = all(str(t.element_type) == "f32" and t.has_static_shape for t in (image, weights, result))
    if not single or len(image.shape) != 4:
        return None
    attributes = op.attributes
    stablehlo: Any = importlib.import_module("jaxlib.mlir.dialects.stablehlo")
    numbers = stablehlo.ConvDimensionNumbers(attributes["dimension_numbers"])
    orders = (
        (numbers.input_batch_dimension, *numbers.input_spatial_dimensions, numbers.input_feature_dimension),
        (
            *numbers.kernel_spatial_dimensions,
            numbers.kernel_input_feature_dimension,
            numbers.kernel_output_feature_dimension,
        ),
        (
            numbers.output_batch_dimension,
            *numbers.output_spatial_dimensions,
            numbers.output_feature_dimension,
        ),
    )
    if attributes["batch_group_count"].value != 1 or any(_values(attributes, "window_reversal", False)):
        return None
    pads = _values(attributes, "padding", 0, 4)
    convolution = Convolution(
        image=tuple(image.shape[i] for i in orders[0]),
        weights=tuple(weights.shape[i] for i in orders[1]),
        strides=_values(attributes, "window_strides", 1),
        pads=((pads[0], pads[1]), (pads[2], pads[3])),
        dilation=_values(attributes, "rhs_dilation", 1),
        spread=_values(attributes, "lhs_dilation", 1),
        groups=attributes["feature_group_count"].value,
    )
    return (convolution, orders) if supported(convolution) else None


def _values(attributes: Any, name: str, default: Any, count: int = 2) -> tuple[Any, ...]:
    """An attribute's numbers, whether it is dense elements or a dense array."""
    if name not in attributes:
        return (default,) * count
    import numpy as np

    return tuple(type(default)(v) for v in np.asarray(list(attributes[name])).reshape(-1))


def _add_function(
    ir: Any,
    module: Any,
    name: str,
    convolution: Convolution,
    orders: _Orders,
    kind: tuple[bool, bool, bool],
) -> str:
    """Trace the formulation and add it to the module as a private function."""
    import numpy as np

    jax: Any = importlib.import_module("jax")

    bias, other, relu = kind
    result = (convolution.image[0], *convolution.out, convolution.weights[3])

    def formulation(x: Any, w: Any, *more: Any) -> Any:
        after = After(more[0] if bias else None, more[-1].transpose(orders[2]) if other else None, relu)
        return convolve(convolution, x.transpose(orders[0]), w, orders[1], after)

    shapes = [
        jax.ShapeDtypeStruct(tuple(sizes[i] for i in np.argsort(order)), np.float32)
        for sizes, order in (
            (convolution.image, orders[0]),
            (convolution.weights, orders[1]),
            *([(result[3:], (0,))] if bias else []),
            *([(result, orders[2])] if other else []),
        )
    ]
    with jax.enable_x64(False):
        text = str(jax.jit(formulation).lower(*shapes).compiler_ir("stablehlo"))
    for function in ir.Module.parse(text).body.operations:
        # names of inner functions may be there already
        clone = function.operation.clone()
        old = ir.StringAttr(clone.attributes["sym_name"]).value
        new = name if old == "main" else f"{name}_{old}"
        clone.attributes["sym_name"] = ir.StringAttr.get(new)
        clone.attributes["sym_visibility"] = ir.StringAttr.get("private")
        for op in nested(clone):
            if op.name == "func.call":
                callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                op.attributes["callee"] = ir.FlatSymbolRefAttr.get(f"{name}_{callee}")
        module.body.append(clone)
    return name


def _replace(
    ir: Any, op: Any, function: str, convolution: Convolution, orders: _Orders, epilogue: Epilogue
) -> None:
    import numpy as np

    kind = op.results[0].type
    shape = (convolution.image[0], *convolution.out, convolution.weights[3])
    with ir.InsertionPoint(epilogue.sums[-1]):
        call = ir.Operation.create(
            "func.call",
            results=[ir.RankedTensorType.get(shape, kind.element_type)],
            operands=[*op.operands, *epilogue.operands(ir)],
            attributes={"callee": ir.FlatSymbolRefAttr.get(function)},
        )
        order = ir.DenseI64ArrayAttr.get([int(i) for i in np.argsort(orders[2])])
        turned = ir.Operation.create(
            "stablehlo.transpose",
            results=[kind],
            operands=[call.results[0]],
            attributes={"permutation": order},
        )
    epilogue.replace(turned.results[0])
