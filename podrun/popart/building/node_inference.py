"""Types and shapes of the results of ai.graphcore's and custom operators, and checks of windows, while a model is
built.

ONNX infers its own operators. The table of ai.graphcore has a rule for most of its operators; those whose shapes follow
from a formula too long for it are traced with the operator's own JAX function, as when a session is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podrun.core.errors import PodrunError
from podrun.popart.building.graph_builder import GRAPHCORE_DOMAIN, GraphScope
from podrun.popart.operators import custom
from podrun.popart.operators.graphcore_ops import OPS, GraphcoreOp
from podrun.popart.values.exceptions import incompatible, popart_exception
from podrun.popart.values.tensor_info import TensorInfo, data_type_of, info_from_type, type_proto

if TYPE_CHECKING:
    from onnx import NodeProto

    from podrun.popart.building.builder import Builder

InferredInfos = list[TensorInfo | None]

BY_TYPE = {op.op_type: op for op in OPS.values()}
"""ai.graphcore's operators by the type of their nodes."""


def infer_graphcore(
    scope: GraphScope, op: GraphcoreOp, node: NodeProto, attributes: Mapping[str, Any]
) -> InferredInfos:
    """The known outputs of an ai.graphcore node. popart_exception if it cannot take its inputs."""
    infos = [scope.info(name) if name else None for name in node.input]
    if op.op_type == "Call":
        results = [info_from_type(output.type) for output in attributes["callee"].output]
    elif op.rule is None:
        results = _traced(scope, node, infos)
    else:
        try:
            results = op.rule(infos, attributes)
        except (ValueError, IndexError, TypeError) as error:
            inputs = ", ".join(f"{name!r} {info}" for name, info in zip(node.input, infos, strict=True))
            raise popart_exception(f"{node.op_type} cannot take its inputs ({inputs}): {error}") from error
    return _as_many(results, node)


def infer_custom(
    scope: GraphScope, node: NodeProto, version: int, attributes: Mapping[str, Any]
) -> InferredInfos:
    """The known outputs of a node that customOp adds: an operator of ai.graphcore's, or a registered one."""
    if node.domain == GRAPHCORE_DOMAIN and node.op_type in BY_TYPE:
        op = BY_TYPE[node.op_type]
        defaults = {name: default for name, default in op.attributes if name not in attributes}
        try:
            return infer_graphcore(scope, op, node, {**defaults, **attributes})
        except popart_exception:  # The attributes have the program's spelling: the session will check them.
            return _as_many([], node)
    if not custom.registered(node.domain, node.op_type):
        return _as_many([], node)
    infos = [scope.info(tensor) if tensor else None for tensor in node.input]
    return _as_many(custom.infer(node.domain, node.op_type, version, infos, attributes), node)


def _as_many(results: Sequence[TensorInfo | None], node: NodeProto) -> InferredInfos:
    return [*results, *[None] * len(node.output)][: len(node.output)]


def _traced(scope: GraphScope, node: NodeProto, infos: InferredInfos) -> InferredInfos:
    """The outputs by tracing the node alone, for static inputs; unknown if tracing fails."""
    known = {name: info for name, info in zip(node.input, infos, strict=True) if name}
    if not node.output or any(info is None or not info.is_static for info in known.values()):
        return []
    from onnx import helper

    from podrun.onnx_models.lowering import lower

    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "node", [], outputs)
    for name, info in known.items():
        constant = scope.constant(name)
        if constant is not None:
            graph.initializer.add().CopyFrom(constant)
            graph.initializer[-1].name = name
        elif info is not None:
            graph.input.append(helper.make_value_info(name, type_proto(info)))
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid(GRAPHCORE_DOMAIN, 1), helper.make_opsetid("", 10)]
    )
    try:
        tensors = lower(model).tensors
    except PodrunError:
        return []
    return [
        TensorInfo(data_type_of(tensors[name].dtype), tensors[name].shape) if name in tensors else None
        for name in node.output
    ]


_WINDOWED = ("Conv", "MaxPool", "AveragePool")


def check_windows(
    op_type: str, inputs: Sequence[str], infos: Sequence[TensorInfo | None], attributes: Mapping[str, Any]
) -> None:
    """popart_exception for window attributes of a wrong length, a kernel other than the weights', or a window that does
    not fit. ``infos`` are those of ``inputs``; nothing is checked where they are not known.
    """
    data = infos[0] if infos else None
    if data is None or not data.is_static:
        return
    if op_type == "Pad" and "pads" in attributes:
        _check_pads(attributes["pads"], data.rank(), "dimension")
    if op_type not in _WINDOWED or data.rank() < 3:
        return
    spatial = [int(size) for size in data.shape()[2:]]
    _check_lengths(attributes, len(spatial))
    kernel = _kernel(op_type, inputs, infos, attributes)
    if len(kernel) == len(spatial) and "auto_pad" not in attributes and not attributes.get("ceil_mode"):
        _check_output(spatial, kernel, attributes)


def _check_lengths(attributes: Mapping[str, Any], rank: int) -> None:
    for name in ("strides", "dilations"):
        length = len(attributes.get(name) or [0] * rank)
        if length != rank:
            raise popart_exception(
                f"Length of {name} vector {length} != number of spatial dimensions {rank}."
            )
    _check_pads(attributes.get("pads") or [0] * 2 * rank, rank, "spatial dimension")


def _check_pads(pads: Sequence[int], rank: int, what: str) -> None:
    if len(pads) != 2 * rank:
        raise popart_exception(
            f"Padding vector (length {len(pads)}) does not have 2 values for each {what} ({rank})."
        )


def _kernel(
    op_type: str, inputs: Sequence[str], infos: Sequence[TensorInfo | None], attributes: Mapping[str, Any]
) -> list[int]:
    stated = [int(size) for size in attributes.get("kernel_shape") or []]
    weights = infos[1] if op_type == "Conv" and len(infos) > 1 else None
    if weights is None or not weights.is_static:
        return stated
    inferred = [int(size) for size in weights.shape()[2:]]
    if stated and stated != inferred:
        raise popart_exception(
            f"kernel_shape, {_spaced(stated)}, does not match inferred shape from weight input "
            f"'{inputs[1]}', {_spaced(inferred)}"
        )
    return inferred


def _check_output(spatial: Sequence[int], kernel: Sequence[int], attributes: Mapping[str, Any]) -> None:
    rank = len(spatial)
    pads = attributes.get("pads") or [0] * 2 * rank
    strides = attributes.get("strides") or [1] * rank
    dilations = attributes.get("dilations") or [1] * rank
    sizes = [
        (spatial[i] + pads[i] + pads[rank + i] - (dilations[i] * (kernel[i] - 1) + 1)) // max(strides[i], 1)
        + 1
        for i in range(rank)
    ]
    if any(size < 0 for size in sizes):
        raise popart_exception(
            f"Window parameter values combine to give invalid spatial output shape: {_spaced(sizes)}"
        )


def _spaced(values: Sequence[int]) -> str:
    return f"[{' '.join(str(value) for value in values)}]"


def multi_convolution(builder: Builder, bound: dict[str, Any]) -> dict[str, Any]:
    """The arguments of multiconv, a list for each convolution, in the form of the node's attributes: one after the
    other.

    popart_exception, in PopART's words, for lists that do not fit together.
    """
    sets = bound["args"]
    if not isinstance(sets, (list, tuple)) or not all(isinstance(item, (list, tuple)) for item in sets):
        raise incompatible(
            "multiconv",
            f"Inputs are a list for each convolution: [[data, weights], [data, weights, bias]], not {sets!r}.",
        )
    for index, item in enumerate(sets):
        if len(item) < 2:
            raise popart_exception(
                f"MultiConv: input set {index} must have at least two inputs - data and weights"
            )
        if len(item) > 3:
            raise popart_exception(
                f"MultiConv: input set {index} can have at most three inputs - data, weights, and bias"
            )
    spatial = [_spatial(builder, item[0]) for item in sets]
    for name, times in (("dilations", 1), ("inDilations", 1), ("pads", 2), ("outPads", 2), ("strides", 1)):
        parameter_sets = bound[name]
        if parameter_sets and len(parameter_sets) != len(sets):
            raise popart_exception(
                f"MultiConv: the number of {name} parameter sets ({len(parameter_sets)}) does not match the "
                f"number of input sets ({len(sets)})"
            )
        for values, axes in zip(parameter_sets, spatial, strict=False):
            if axes is not None and len(values) != times * axes:
                what = (
                    "number of spatial dimensions" if times == 1 else "twice the number of spatial dimensions"
                )
                raise popart_exception(f"Length of {name} vector {len(values)} != {what} {times * axes}")
    flat = {name: [v for item in bound[name] for v in item] for name in _MULTI_CONV_LISTS}
    return {
        **bound,
        **flat,
        "args": [name for item in sets for name in item],
        "counts": [len(item) for item in sets],
    }


_MULTI_CONV_LISTS = ("dilations", "inDilations", "pads", "outPads", "strides")


def _spatial(builder: Builder, data: str) -> int | None:
    try:
        return len(builder.getTensorShape(data)) - 2
    except popart_exception:
        return None
