"""Clean-up: what does nothing goes, what is there twice becomes one, neighbours of one kind become one.

Where the ONNX project's own optimizer (`onnxoptimizer`) has a pass, that one runs; large weights stay out of what it is
given. What it does not have is here. Names are PopRT's.
"""

from __future__ import annotations

import hashlib
import logging

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from podrun.core.errors import UsageError
from podrun.onnx_models.ops.registry import RANDOM
from podrun.serving.convert.graph_edit import GraphEditor
from podrun.serving.convert.graph_walk import ONNX_DOMAINS, attribute, graphs_within
from podrun.serving.convert.pass_manager import Pass, pass_class, register, rewrite, run_pass
from podrun.serving.convert.type_inference import MOST_VALUES, infer_types, value_of_type, without_weights

_log = logging.getLogger("poprt")

LIBRARY_PASSES = {
    "eliminate_duplicate_nodes": "eliminate_common_subexpression",
    "eliminate_nop_arithmetic": "eliminate_nop_with_unit",
    "eliminate_nop_cast": "eliminate_nop_cast",
    "eliminate_nop_flatten": "eliminate_nop_flatten",
    "eliminate_nop_if": "eliminate_if_with_const_cond",
    "eliminate_nop_pad": "eliminate_nop_pad",
    "eliminate_nop_reshape": "eliminate_nop_reshape",
    "eliminate_nop_transpose": "eliminate_nop_transpose",
    "fuse_consecutive_squeeze": "fuse_consecutive_squeezes",
    "fuse_consecutive_transpose": "fuse_consecutive_transposes",
    "fuse_consecutive_unsqueeze": "fuse_consecutive_unsqueezes",
}
"""PopRT's name -> onnxoptimizer's."""


def optimize_by_library(model: ModelProto, names: list[str]) -> ModelProto:
    """The model after passes of onnxoptimizer; unchanged, with a warning, where that cannot read the model."""
    import onnxoptimizer

    graphs = list(graphs_within(model.graph))
    if any(graph.sparse_initializer for graph in graphs):
        return model
    if any(node.op_type in RANDOM for graph in graphs for node in graph.node):
        names = [name for name in names if name != "eliminate_common_subexpression"]
    types = infer_types(model)
    light = without_weights(model)
    stated = {value.name for value in (*light.graph.input, *light.graph.output)}
    stated |= {tensor.name for tensor in light.graph.initializer}
    light.graph.value_info.extend(
        value_of_type(name, kind)
        for name, kind in types.items()
        if name not in stated and kind.sizes is not None
    )
    try:
        better = onnxoptimizer.optimize(light, names)
    except (RuntimeError, ValueError) as error:
        _log.warning("clean-up left out: onnxoptimizer cannot read this model: %s", error)
        return model
    small = [
        i for i, t in enumerate(model.graph.initializer) if np.prod(t.dims, dtype=np.int64) <= MOST_VALUES
    ]
    for index in reversed(small):
        del model.graph.initializer[index]
    model.graph.initializer.extend(better.graph.initializer)
    del model.graph.node[:]
    model.graph.node.extend(better.graph.node)
    del model.graph.value_info[:]
    return model


def _library_pass(name: str) -> None:
    theirs = LIBRARY_PASSES[name]

    def run(self: Pass, model: ModelProto) -> ModelProto:
        return optimize_by_library(model, [theirs])

    text = f"onnxoptimizer's {theirs}."
    kind = type("".join(w.capitalize() for w in name.split("_")), (Pass,), {"run": run, "__doc__": text})
    kind.__module__ = __name__
    register(name)(kind)


for _name in LIBRARY_PASSES:
    _library_pass(_name)


@rewrite("eliminate_deadend")
def _deadend(graph: GraphEditor) -> None:
    """Nodes whose results nothing needs go."""
    graph.drop_dead()


@rewrite("eliminate_unused_initializer")
def _unused_initializer(graph: GraphEditor) -> None:
    """Initializers that nothing uses go."""
    graph.drop_unused_initializers()


@rewrite("eliminate_identity")
def _identity(graph: GraphEditor) -> None:
    """Identity nodes go, and Dropout nodes, which do nothing in inference."""
    for node in list(graph.nodes):
        if node.domain not in ONNX_DOMAINS:
            continue
        silent = node.op_type == "Dropout" and not any(map(graph.consumers, node.output[1:]))
        silent = silent and not any(map(graph.is_output, node.output[1:])) and not _trains(graph, node)
        if node.op_type == "Identity" or silent:
            if (
                graph.parent is not None
                and graph.is_output(node.output[0])
                and graph.producer(node.input[0]) is None
            ):
                continue
            graph.bypass(node)


def _trains(graph: GraphEditor, node: NodeProto) -> bool:
    """Whether a Dropout may drop values: its training mode is an input that is not a constant false."""
    return len(node.input) > 2 and bool(node.input[2]) and graph.scalar(node.input[2]) != 0


@rewrite("eliminate_nop_expand")
def _nop_expand(graph: GraphEditor) -> None:
    """An Expand to the shape that a tensor has goes."""
    for node in graph.onnx_nodes("Expand"):
        sizes = graph.sizes(node.output[0])
        if sizes is not None and sizes == graph.sizes(node.input[0]):
            graph.bypass(node)


def _digest(tensor: TensorProto) -> bytes:
    digest = hashlib.sha256(f"{tensor.data_type} {list(tensor.dims)}".encode())
    data = tensor.raw_data if tensor.HasField("raw_data") else numpy_helper.to_array(tensor).tobytes()
    digest.update(data)
    return digest.digest()


@rewrite("eliminate_duplicate_initializer")
def _duplicate_initializer(graph: GraphEditor) -> None:
    """Of initializers with the same type, shape and bytes one stays."""
    merge_equal_initializers(graph)


def merge_equal_initializers(graph: GraphEditor) -> None:
    """Of initializers with the same type, shape and bytes keep one."""
    first: dict[bytes, str] = {}
    by_form: dict[tuple[int, ...], list[TensorProto]] = {}
    for tensor in graph.graph.initializer:
        if tensor.data_type != TensorProto.STRING and not graph.is_input(tensor.name):
            by_form.setdefault((tensor.data_type, *tensor.dims), []).append(tensor)
    for alike in by_form.values():
        if len(alike) < 2:
            continue
        for tensor in alike:
            kept = first.setdefault(_digest(tensor), tensor.name)
            if kept != tensor.name and not graph.is_output(tensor.name):
                graph.rename_uses(tensor.name, kept)
    graph.drop_unused_initializers()


@rewrite("fuse_consecutive_cast", until_stable=True)
def _consecutive_cast(graph: GraphEditor) -> None:
    """Cast(Cast(x)) becomes one Cast where the first loses nothing."""
    for node in graph.onnx_nodes("Cast"):
        inner = graph.made_by(node.input[0], "Cast")
        if inner is None:
            continue
        source = graph.element(inner.input[0])
        if source is not None and _keeps_values(source, int(attribute(inner, "to"))):
            node.input[0] = inner.input[0]
            graph.touch()
            if source == int(attribute(node, "to")):
                graph.bypass(node)
    graph.drop_dead()


_HOLDS: dict[int, int] = {
    TensorProto.BOOL: 1,
    TensorProto.UINT8: 8,
    TensorProto.INT8: 8,
    TensorProto.UINT16: 16,
    TensorProto.INT16: 16,
    TensorProto.UINT32: 32,
    TensorProto.INT32: 32,
    TensorProto.UINT64: 64,
    TensorProto.INT64: 64,
}
"""Bits of integers."""
_EXACT: dict[int, int] = {
    TensorProto.FLOAT16: 11,
    TensorProto.BFLOAT16: 8,
    TensorProto.FLOAT: 24,
    TensorProto.DOUBLE: 53,
}
"""Bits of integers that a float holds exactly."""
_WIDTH: dict[int, int] = {
    TensorProto.FLOAT16: 1,
    TensorProto.BFLOAT16: 1,
    TensorProto.FLOAT: 2,
    TensorProto.DOUBLE: 3,
}
"""Floats: one of a greater number holds all values of one of a lesser."""
_UNSIGNED = (TensorProto.BOOL, TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64)


def _keeps_values(source: int, target: int) -> bool:
    """Whether every value of one type is one of another."""
    if source == target:
        return True
    if source in _HOLDS and target in _EXACT:
        return _HOLDS[source] <= _EXACT[target]
    if source in _HOLDS and target in _HOLDS and target != TensorProto.BOOL:
        sign = source in _UNSIGNED or target not in _UNSIGNED
        wider = _HOLDS[target] > _HOLDS[source] or (source in _UNSIGNED) == (target in _UNSIGNED)
        return sign and wider and _HOLDS[target] >= _HOLDS[source]
    return _WIDTH.get(target, 0) > _WIDTH.get(source, 9)


@rewrite("fuse_consecutive_reshape", until_stable=True)
def _consecutive_reshape(graph: GraphEditor) -> None:
    """Reshape(Reshape(x)) becomes one, to the shape that the second gives."""
    kinds = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
    for node in graph.onnx_nodes(*kinds):
        inner, sizes = graph.made_by(node.input[0], *kinds), graph.sizes(node.output[0])
        if inner is None or sizes is None or 0 in sizes or "Reshape" not in (node.op_type, inner.op_type):
            continue
        target = graph.add_constant(np.asarray(sizes, np.int64), f"{node.output[0]}_shape")
        graph.replace([node], [graph.node("Reshape", [inner.input[0], target], node.output[0])])
        graph.drop_dead()


@rewrite("fuse_consecutive_arithmetic", until_stable=True)
def _consecutive_arithmetic(graph: GraphEditor) -> None:
    """(x + a) + b becomes x + (a + b) for constants a and b, and so do products."""
    for node in graph.onnx_nodes("Add", "Mul"):
        outer = _constant_side(graph, node)
        inner = graph.made_by(node.input[1 - outer], node.op_type) if outer is not None else None
        side = _constant_side(graph, inner) if inner is not None else None
        if outer is None or inner is None or side is None or graph.sole_user(inner.output[0]) is not node:
            continue
        a, b = graph.constant(inner.input[side]), graph.constant(node.input[outer])
        if a is None or b is None or a.dtype != b.dtype or a.dtype.kind != "f":
            continue
        wide = a.astype(np.float64) + b if node.op_type == "Add" else a.astype(np.float64) * b
        together = wide.astype(a.dtype)
        before = graph.sizes(node.output[0])
        if before is None or together.size > max(a.size, b.size) or not np.isfinite(together).all():
            continue
        name = graph.add_constant(together, f"{node.output[0]}_constant")
        graph.replace(
            [inner, node], [graph.node(node.op_type, [inner.input[1 - side], name], node.output[0])]
        )
    graph.drop_dead()


def _constant_side(graph: GraphEditor, node: NodeProto) -> int | None:
    """Which of two inputs is a constant of at most a few thousand numbers; None for none or both."""
    held = [graph.tensor(name) is not None for name in node.input]
    return held.index(True) if held.count(True) == 1 else None


@rewrite("trace_folding", until_stable=True)
def _trace_folding(graph: GraphEditor) -> None:
    """What tracing leaves behind goes: Shape and Size of known shapes become constants, and what reads them folds."""
    from podrun.serving.convert.folding_passes import fold_constants

    fold_constants(graph, most_bytes=1 << 12)


@rewrite("fuse_bn_into_conv")
def _bn_into_conv(graph: GraphEditor) -> None:
    """A BatchNormalization behind a Conv becomes the Conv's weights and bias."""
    for node in graph.onnx_nodes("BatchNormalization"):
        _into_conv(graph, node)
    graph.drop_dead()


def scale_and_shift(graph: GraphEditor, node: NodeProto) -> tuple[np.ndarray, np.ndarray] | None:
    """A BatchNormalization as ``x * scale + shift`` by channel, in float64; None if it is none of inference or its
    parameters are no constants.
    """
    if len([name for name in node.output if name]) > 1 or attribute(node, "training_mode", 0):
        return None
    held = [graph.constant(name) for name in node.input[1:5]]
    if any(value is None for value in held):
        return None
    gamma, beta, mean, variance = (np.asarray(value, np.float64) for value in held)
    scale = gamma / np.sqrt(variance + float(attribute(node, "epsilon", 1e-5)))
    return scale, beta - mean * scale


def _into_conv(graph: GraphEditor, node: NodeProto) -> None:
    conv = graph.made_by(node.input[0], "Conv")
    if conv is None or graph.sole_user(conv.output[0]) is not node:
        return
    weight = graph.constant(conv.input[1])
    bias = graph.constant(conv.input[2]) if len(conv.input) > 2 and conv.input[2] else None
    affine = scale_and_shift(graph, node)
    if weight is None or affine is None or (bias is None and len(conv.input) > 2 and conv.input[2]):
        return
    scale, shift = affine
    scaled = (weight.astype(np.float64) * scale.reshape(-1, *[1] * (weight.ndim - 1))).astype(weight.dtype)
    moved = (shift + (0 if bias is None else bias.astype(np.float64) * scale)).astype(weight.dtype)
    inputs = [conv.input[0], graph.add_constant(scaled, conv.input[1]), graph.add_constant(moved, "bias")]
    fused = graph.node("Conv", inputs, node.output[0])
    fused.name = conv.name or fused.name
    fused.attribute.extend(conv.attribute)
    graph.replace([conv, node], [fused])


CLEANUP_ORDER = (
    "eliminate_deadend",
    "eliminate_identity",
    "eliminate_nop_cast",
    "eliminate_nop_transpose",
    "eliminate_nop_pad",
    "eliminate_nop_expand",
    "eliminate_nop_flatten",
    "eliminate_nop_reshape",
    "eliminate_nop_arithmetic",
    "eliminate_nop_if",
    "eliminate_duplicate_nodes",
    "fuse_consecutive_transpose",
    "fuse_consecutive_squeeze",
    "fuse_consecutive_unsqueeze",
    "fuse_consecutive_reshape",
    "fuse_consecutive_cast",
    "fuse_consecutive_arithmetic",
    "fuse_bn_into_conv",
    "trace_folding",
    "eliminate_duplicate_initializer",
    "eliminate_unused_initializer",
)
"""Clean-up passes in the order in which `apply_ir_pass` runs them."""


@register("apply_ir_pass")
class ApplyIrPass(Pass):
    """Run clean-up passes until they change nothing, at most ``rounds`` times. ``passes``: their names (all)."""

    def __init__(self, passes: list[str] | None = None, rounds: int = 4) -> None:
        self.passes = list(CLEANUP_ORDER) if passes is None else passes
        unknown = [name for name in self.passes if pass_class(name).__module__ != __name__]
        if unknown:
            raise UsageError(
                f"{', '.join(unknown)}: no clean-up pass", hint=f"They are {', '.join(CLEANUP_ORDER)}."
            )
        self.rounds = rounds

    def run(self, model: ModelProto) -> ModelProto:
        library = [LIBRARY_PASSES[name] for name in self.passes if name in LIBRARY_PASSES]
        own = [Pass.get_pass(name) for name in self.passes if name not in LIBRARY_PASSES]
        for _ in range(self.rounds):
            before = _shape_of(model)
            model = optimize_by_library(model, library) if library else model
            for one in own:
                model = run_pass(one, model)
            if _shape_of(model) == before:
                break
        return model


def _shape_of(model: ModelProto) -> tuple[int, int, int]:
    """Numbers that change when a pass does something."""
    graphs = list(graphs_within(model.graph))
    return (
        sum(len(graph.node) for graph in graphs),
        sum(len(graph.initializer) for graph in graphs),
        sum(len(node.input) for graph in graphs for node in graph.node),
    )
