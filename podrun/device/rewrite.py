"""Puts fast formulations in the place of convolutions, between tracing and compiling.

Front ends trace plain convolutions, which JAX differentiates and the tile model costs; which library computes them on a
CPU is decided here, when a piece is compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from podrun.device.channels_last import sink_transposes
from podrun.device.convolutions import Convolution, available, convolve, supported


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
    with module.context, ir.Location.unknown():
        _inline(ir, module)
        found = [op for op in _operations(module.operation) if op.name == "stablehlo.convolution"]
        all_recognised = [(op, recognised) for op in found if (recognised := _recognise(ir, op))]
        if sum(convolution.products for _, (convolution, _) in all_recognised) < least:
            return 0
        for op, recognised in all_recognised:
            if recognised not in made:
                made[recognised] = _add_function(ir, module, f"podrun_convolution_{len(made)}", *recognised)
            _replace(ir, op, made[recognised], *recognised)
            count += 1
    if count:
        sink_transposes(module)
    return count


def _inline(ir: Any, module: Any) -> None:
    """Put functions in the place of their calls, so that operations meet those that they take their operands from."""
    functions = {ir.StringAttr(f.attributes["sym_name"]).value: f for f in module.body.operations}
    queue = [op for op in _operations(module.operation) if op.name == "func.call"]
    inlined = set()
    while queue:
        call = queue.pop()
        name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
        inlined.add(name)
        block = functions[name].operation.regions[0].blocks[0]
        values = dict(zip(block.arguments, call.operands, strict=True))
        for op in block:
            if op.operation.name == "func.return":
                for old, new in zip(call.results, op.operands, strict=True):
                    old.replace_all_uses_with(values[new])
                continue
            clone = op.operation.clone(ip=ir.InsertionPoint(call))
            _rename(clone, values)
            values.update(zip(op.results, clone.results, strict=True))
            queue += [o for o in (clone, *_operations(clone)) if o.name == "func.call"]
        call.erase()
    for name in sorted(inlined):
        functions[name].operation.erase()


def _rename(op: Any, values: Any) -> None:
    """Let an operation and those inside it read the new values of old ones."""
    for inner in (op, *_operations(op)):
        for place, operand in enumerate(inner.operands):
            if operand in values:
                inner.operands[place] = values[operand]


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for op in block:
                yield op.operation
                yield from _operations(op.operation)


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


def _add_function(ir: Any, module: Any, name: str, convolution: Convolution, orders: _Orders) -> str:
    """Trace the formulation and add it to the module as a private function."""
    import numpy as np

    jax: Any = importlib.import_module("jax")

    def formulation(x: Any, w: Any) -> Any:
        return convolve(convolution, x.transpose(orders[0]), w, orders[1])

    shapes = [
        jax.ShapeDtypeStruct(tuple(sizes[i] for i in np.argsort(order)), np.float32)
        for sizes, order in ((convolution.image, orders[0]), (convolution.weights, orders[1]))
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
        for op in _operations(clone):
            if op.name == "func.call":
                callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                op.attributes["callee"] = ir.FlatSymbolRefAttr.get(f"{name}_{callee}")
        module.body.append(clone)
    return name


def _replace(ir: Any, op: Any, function: str, convolution: Convolution, orders: _Orders) -> None:
    import numpy as np

    kind = op.results[0].type
    shape = (convolution.image[0], *convolution.out, convolution.weights[3])
    with ir.InsertionPoint(op):
        call = ir.Operation.create(
            "func.call",
            results=[ir.RankedTensorType.get(shape, kind.element_type)],
            operands=list(op.operands),
            attributes={"callee": ir.FlatSymbolRefAttr.get(function)},
        )
        order = ir.DenseI64ArrayAttr.get([int(i) for i in np.argsort(orders[2])])
        turned = ir.Operation.create(
            "stablehlo.transpose",
            results=[kind],
            operands=[call.results[0]],
            attributes={"permutation": order},
        )
    op.results[0].replace_all_uses_with(turned.results[0])
    op.erase()
