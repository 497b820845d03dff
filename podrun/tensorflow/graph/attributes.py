"""Attributes of operations as Python values, and the operators as which the tile model plans them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from podrun.private_apis.tensorflow import symbol

_make_ndarray = symbol("framework.tensor_util.MakeNdarray")

_TYPES_ALONE = {
    "Index", "N", "S", "SrcT", "T", "TI", "TL", "Ta", "Talpha", "Targmax", "Taxis", "Tb", "Tblock_shape", "Tcond",
    "Tcrops", "Tdim", "Tidx", "Tindex", "Tin", "Tindices", "Tk", "Tlabels", "Tlen", "Tmultiples", "Tnumsegments",
    "Tout", "Tpadding", "Tpaddings", "Tparams", "Tperm", "Treal", "Truncate", "Tseed", "Tsegmentids", "Tshape",
    "Tshift", "U", "allowed_devices", "bad_color", "container", "debug_name", "dtype", "element_dtype",
    "element_type", "grad_a", "grad_b", "grad_x", "grad_y", "incompatible_shape_error", "index_type",
    "lower_using_switch_merge", "message", "num_split_dims", "out_type", "parallel_iterations", "seed", "seed2",
    "shape_type", "shared_name", "size_splits", "use_cudnn_on_gpu", "use_locking", "use_node_name_sharing",
    "validate_indices", "validate_shape", "TInput",
}  # fmt: skip
"""Attributes that only say what inputs and outputs say themselves, or that mean nothing on an IPU."""

_PLANNED = {
    "MatMul": "Gemm",
    "BatchMatMulV2": "MatMul",
    "Conv2D": "Conv",
    "DepthwiseConv2dNative": "Conv",
    "MaxPool": "MaxPool",
    "AvgPool": "AveragePool",
    "FusedBatchNormV3": "BatchNormalization",
    "Relu": "Relu",
    "Softmax": "Softmax",
    "AddV2": "Add",
    "BiasAdd": "Add",
    "Mul": "Mul",
    "GatherV2": "Gather",
    "Tanh": "Tanh",
    "Sigmoid": "Sigmoid",
}


def planned_operator(op_type: str) -> str:
    """The ONNX operator as which the planner of tiles treats an operation; empty for its own type."""
    return _PLANNED.get(op_type, "")


def node_attributes(operation: tf.Operation) -> dict[str, Any]:
    """The attributes that decide what an operation computes."""
    kept = (name for name in operation.node_def.attr if not name.startswith("_"))
    attributes = {n: python_value(operation.get_attr(n)) for n in kept if n not in _TYPES_ALONE}
    if operation.outputs and operation.type in _TYPED:
        attributes["output"] = operation.outputs[0].dtype.base_dtype.as_numpy_dtype.__name__
    if operation.type.endswith("CandidateSampler"):
        attributes["seeds"] = (operation.get_attr("seed"), operation.get_attr("seed2"))
    return attributes


_TYPED = {
    "Cast", "ArgMax", "ArgMin", "Shape", "ShapeN", "Size", "RandomStandardNormal", "RandomUniform", "TruncatedNormal",
    "RandomUniformInt", "StatelessRandomUniform", "StatelessRandomUniformV2", "StatelessRandomNormal",
    "StatelessRandomNormalV2", "StatelessTruncatedNormalV2", "StatelessTruncatedNormal", "Bitcast",
    "StatelessRandomUniformFullInt", "StatelessRandomUniformFullIntV2", "Empty", "Range", "Multinomial",
}  # fmt: skip


def python_value(value: Any) -> Any:
    """An attribute as a number, text, tuple, or the name of a type."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, tf.DType):
        return value.base_dtype.name
    if isinstance(value, (list, tuple)):
        return tuple(python_value(item) for item in value)
    if isinstance(value, tf.TensorShape):
        return None if value.rank is None else tuple(value.as_list())
    if type(value).__name__ == "TensorShapeProto":
        return None if value.unknown_rank else tuple(d.size for d in value.dim)
    if type(value).__name__ == "TensorProto":
        return _make_ndarray(value)
    if type(value).__name__ in ("NameAttrList", "AttrValue"):
        return getattr(value, "name", str(value))
    return value
