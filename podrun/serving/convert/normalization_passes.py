"""Layer normalisation written out becomes one operator, and group normalisation takes its faster forms."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto

from podrun.core.quick_dataclass import dataclass
from podrun.serving.convert.cleanup_passes import scale_and_shift
from podrun.serving.convert.graph_edit import GraphEditor
from podrun.serving.convert.graph_walk import GRAPHCORE_DOMAIN, attribute
from podrun.serving.convert.pass_manager import rewrite


@dataclass(frozen=True, slots=True)
class _LayerNorm:
    """``(x - mean) / sqrt(variance + epsilon) * scale + shift`` over the last axis."""

    x: str
    scale: str | None
    shift: str | None
    epsilon: float
    last: NodeProto


def _mean_of(graph: GraphEditor, name: str) -> str | None:
    """x of ReduceMean(x) over the last axis."""
    node = graph.made_by(name, "ReduceMean")
    if node is None or not attribute(node, "keepdims", 1):
        return None
    axes = attribute(node, "axes")
    if axes is None and len(node.input) > 1:
        axes = graph.constant(node.input[1])
    sizes = graph.sizes(node.input[0])
    if axes is None or len(axes) != 1 or sizes is None or int(axes[0]) not in (-1, len(sizes) - 1):
        return None
    return str(node.input[0])


def _written_out(graph: GraphEditor, node: NodeProto) -> _LayerNorm | None:
    """The normalisation that ends at a Div by the deviation."""
    centred = graph.made_by(node.input[0], "Sub")
    root = graph.made_by(node.input[1], "Sqrt")
    if centred is None or root is None or _mean_of(graph, centred.input[1]) != centred.input[0]:
        return None
    lifted = graph.made_by(root.input[0], "Add")
    if lifted is None:
        return None
    for side in (1, 0):
        epsilon = graph.scalar(lifted.input[side])
        square = _mean_of(graph, lifted.input[1 - side]) if epsilon is not None else None
        if epsilon is None or square is None:
            continue
        maker = graph.made_by(square, "Pow", "Mul")
        if maker is None or not _squares(graph, maker, centred):
            return None
        return _with_affine(graph, _LayerNorm(centred.input[0], None, None, epsilon, node))
    return None


def _squares(graph: GraphEditor, maker: NodeProto, centred: NodeProto) -> bool:
    def is_centred(name: str) -> bool:
        other = graph.made_by(name, "Sub")
        return other is not None and list(other.input) == list(centred.input)

    if maker.op_type == "Pow":
        return is_centred(maker.input[0]) and graph.scalar(maker.input[1]) == 2
    return maker.input[0] == maker.input[1] and is_centred(maker.input[0])


def _with_affine(graph: GraphEditor, norm: _LayerNorm) -> _LayerNorm:
    sizes = graph.sizes(norm.x)
    width = sizes[-1] if sizes else 0
    scale = shift = None
    user = graph.sole_user(norm.last.output[0])
    last = norm.last
    if user is not None and user.op_type == "Mul" and (name := _vector(graph, user, last.output[0], width)):
        scale, last = name, user
        user = graph.sole_user(last.output[0])
        if (
            user is not None
            and user.op_type == "Add"
            and (name := _vector(graph, user, last.output[0], width))
        ):
            shift, last = name, user
    return _LayerNorm(norm.x, scale, shift, norm.epsilon, last)


def _vector(graph: GraphEditor, node: NodeProto, other: str, width: int) -> str | None:
    """The constant operand of a node if it has one number for each place of the last axis."""
    name = node.input[1] if node.input[0] == other else node.input[0]
    held = graph.tensor(name)
    if held is None or not held.dims or held.dims[-1] != width or int(np.prod(held.dims)) != width:
        return None
    return str(name)


@rewrite("layer_norm_pattern")
def _layer_norm_pattern(graph: GraphEditor) -> None:
    """Layer normalisation, written out or one operator, becomes ai.graphcore.GroupNormalization with one group."""
    for node in list(graph.nodes):
        norm: _LayerNorm | None = None
        if node.op_type == "Div" and not node.domain:
            norm = _written_out(graph, node)
        elif node.op_type == "LayerNormalization" and not node.domain:
            norm = _as_operator(graph, node)
        sizes = graph.sizes(norm.x) if norm is not None else None
        if norm is not None and sizes is not None:
            _as_group_norm(graph, norm, sizes)
    graph.drop_dead()


def _as_operator(graph: GraphEditor, node: NodeProto) -> _LayerNorm | None:
    sizes = graph.sizes(node.input[0])
    axis = attribute(node, "axis", -1)
    if sizes is None or axis not in (-1, len(sizes) - 1) or len([name for name in node.output if name]) > 1:
        return None
    shift = node.input[2] if len(node.input) > 2 and node.input[2] else None
    return _LayerNorm(node.input[0], node.input[1], shift, float(attribute(node, "epsilon", 1e-5)), node)


def _as_group_norm(graph: GraphEditor, norm: _LayerNorm, sizes: tuple[int, ...]) -> None:
    width, dtype = sizes[-1], np.float16 if graph.element(norm.x) == TensorProto.FLOAT16 else np.float32
    scale = _flat(graph, norm.scale, np.ones(width, dtype))
    shift = _flat(graph, norm.shift, np.zeros(width, dtype))
    rows = graph.add_constant(np.asarray([-1, width], np.int64), "rows")
    back = graph.add_constant(np.asarray(sizes, np.int64), "shape")
    flat = graph.node("Reshape", [norm.x, rows])
    normal = graph.node(
        "GroupNormalization",
        [flat.output[0], scale, shift],
        domain=GRAPHCORE_DOMAIN,
        num_groups=1,
        epsilon=norm.epsilon,
    )
    normal.output.extend([graph.owner.new_name("mean"), graph.owner.new_name("deviation")])
    whole = graph.node("Reshape", [normal.output[0], back], norm.last.output[0])
    graph.replace([norm.last], [flat, normal, whole])


def _flat(graph: GraphEditor, name: str | None, default: np.ndarray) -> str:
    value = graph.constant(name) if name else default
    if value is None:
        return str(name)
    return str(name) if name and value.ndim == 1 else graph.add_constant(value.reshape(-1), name or "affine")


@rewrite("replace_groupnorm_with_fast_norm")
def _fast_norm(graph: GraphEditor) -> None:
    """GroupNormalization of half precision with one group becomes ai.graphcore.FastNorm."""
    for node in list(graph.nodes):
        if node.op_type != "GroupNormalization" or node.domain != GRAPHCORE_DOMAIN:
            continue
        half = graph.element(node.input[0]) == TensorProto.FLOAT16
        sizes = graph.sizes(node.input[0])
        used = any(graph.consumers(name) or graph.is_output(name) for name in node.output[1:])
        if half and not used and sizes is not None and len(sizes) == 2 and attribute(node, "num_groups") == 1:
            epsilon = float(attribute(node, "epsilon", 1e-5))
            fast = graph.node(
                "FastNorm", list(node.input), node.output[0], domain=GRAPHCORE_DOMAIN, epsilon=epsilon
            )
            graph.replace([node], [fast])


@rewrite("replace_bn_with_mul_add")
def _bn_with_mul_add(graph: GraphEditor) -> None:
    """A BatchNormalization of inference becomes a product and a sum by channel."""
    for node in graph.onnx_nodes("BatchNormalization"):
        as_product_and_sum(graph, node)
    graph.drop_dead()


def as_product_and_sum(graph: GraphEditor, node: NodeProto) -> None:
    """A BatchNormalization as a product and a sum by channel, where its parameters are constants."""
    affine, sizes = scale_and_shift(graph, node), graph.sizes(node.input[0])
    if affine is None or sizes is None:
        return
    dtype = np.float16 if graph.element(node.input[0]) == TensorProto.FLOAT16 else np.float32
    form = (-1, *[1] * (len(sizes) - 2))
    scale, shift = (graph.add_constant(v.astype(dtype).reshape(form), "channel") for v in affine)
    product = graph.node("Mul", [node.input[0], scale])
    graph.replace([node], [product, graph.node("Add", [product.output[0], shift], node.output[0])])
