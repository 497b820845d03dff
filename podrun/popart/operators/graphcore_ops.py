"""The ai.graphcore operators as the builder sees them: method name, node type, attributes, outputs, shapes.

One row per operator; `podrun.onnx_models.ops` holds what they compute. Sources: AiGraphcoreOpset1 in the
PopART Python API reference, and the PopART User Guide on operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrun.core.quick_dataclass import dataclass
from podrun.onnx_models.annotations import COLLECTIVE_OPERATOR, COMM_GROUP
from podrun.popart.values.enums import DataType, InitType, ReductionType, ScatterReduction, TensorRemapType
from podrun.popart.values.exceptions import popart_exception
from podrun.popart.values.tensor_info import TensorInfo, data_type_from_onnx, onnx_data_type, parse_data_type

Infos = Sequence[TensorInfo | None]
Attributes = Mapping[str, Any]
Rule = Callable[[Infos, Attributes], list[TensorInfo | None]]
REQUIRED: Any = object()
"""Marks an attribute without a default."""


def _same(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    return [infos[0]]


def _broadcast(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    import numpy as np

    known = [info for info in infos if info is not None]
    if len(known) != len(infos) or not all(info.is_static for info in known):
        return [None]
    shape = np.broadcast_shapes(*(tuple(info.shape()) for info in known))
    return [TensorInfo(known[0].dataType(), shape)]


def _loss(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    first = infos[0]
    if first is None:
        return [None]
    if attributes.get("reduction") == "NoReduction":
        return [first]
    return [TensorInfo(first.dataType(), [])]


def _nll(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    probabilities = infos[0]
    if probabilities is None:
        return [None]
    if attributes.get("reduction") == "NoReduction":
        labels = infos[1] if len(infos) > 1 else None
        return [
            TensorInfo(probabilities.dataType(), labels.shape() if labels else probabilities.shape()[:-1])
        ]
    return [TensorInfo(probabilities.dataType(), [])]


def _ctc(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    log_probabilities = infos[0]
    if log_probabilities is None:
        return [None]
    kind = log_probabilities.dataType()
    if attributes.get("outDataType", "UNDEFINED") != "UNDEFINED":
        kind = parse_data_type(attributes["outDataType"])
    scalar = attributes.get("reduction") != "NoReduction"
    return [TensorInfo(kind, [] if scalar else [log_probabilities.shape()[1]])]


def _group_normalization(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    first = infos[0]
    if first is None:
        return [None, None, None]
    statistics = TensorInfo(first.dataType(), [first.dim(0) * attributes["num_groups"]])
    return [first, statistics, statistics]


def _init(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    return [TensorInfo(data_type_from_onnx(attributes["data_type"]), attributes["shape"])]


def _dynamic_slice(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    first = infos[0]
    if first is None:
        return [None]
    shape = first.shape()
    for axis, size in zip(attributes["axes"], attributes["sizes"], strict=True):
        shape[axis] = size
    return [TensorInfo(first.dataType(), shape)]


def _slice(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    first = infos[0]
    if first is None or not first.is_static:
        return [None]
    shape = first.shape()
    axes = attributes.get("axes") or range(len(attributes["starts"]))
    for axis, start, end in zip(axes, attributes["starts"], attributes["ends"], strict=True):
        shape[axis] = len(range(shape[axis])[start:end])
    return [TensorInfo(first.dataType(), shape)]


def _subsample(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    first = infos[0]
    if first is None or not first.is_static or 0 in attributes["strides"]:
        return [None]  # The session refuses strides of 0.
    shape = [-(-dim // step) for dim, step in zip(first.shape(), attributes["strides"], strict=True)]
    return [TensorInfo(first.dataType(), shape)]


def _reshape(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    first = infos[0]
    if first is None:
        return [None]
    old = first.shape()
    shape = [old[i] if dim == 0 else dim for i, dim in enumerate(attributes["shape"])]
    if -1 in shape:
        known = 1
        for dim in shape:
            known *= dim if dim != -1 else 1
        shape[shape.index(-1)] = first.nelms() // known
    return [TensorInfo(first.dataType(), shape)]


def _shaped_like_bool(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    return [None if infos[0] is None else TensorInfo(DataType.INT32, infos[0].shape())]


def _sort(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    first = infos[0]
    return [first, None if first is None else TensorInfo(DataType.INT32, first.shape())]


def _scatter_reduce(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    data = infos[0]
    if data is None:
        return [None]
    shape, axis = data.shape(), attributes.get("axis", -1)
    if not -len(shape) <= axis < len(shape):
        return [None]  # The session reports this.
    shape[axis] = attributes["axis_size"]
    return [TensorInfo(data.dataType(), shape)]


def _depends_on_replicas(infos: Infos, attributes: Attributes) -> list[TensorInfo | None]:
    return [None]


@dataclass(frozen=True, slots=True)
class GraphcoreOp:
    """One operator: its node type, attributes with defaults in the order of the method's arguments, and outputs.

    ``rule`` gives the outputs' types and shapes (None: found by tracing, `podrun.popart.building.node_inference`).
    ``outputs``: a number, or "num_outputs" if the caller says. ``listed``: the method gives a list.
    ``inputs``: least and greatest number of inputs.
    """

    op_type: str
    attributes: tuple[tuple[str, Any], ...] = ()
    rule: Rule | None = _same
    outputs: int | str = 1
    inputs: tuple[int, int] = (1, 1)
    listed: bool = False
    keyword_attributes: tuple[tuple[str, Any], ...] = ()
    """Attributes behind debugContext in the method's arguments."""


_REDUCTION = ("reduction", ReductionType.Mean)
_DYNAMIC = (("axes", REQUIRED), ("sizes", REQUIRED))
_COLLECTIVE = (("collectiveOperator", None), ("commGroup", None))
NODE_NAMES = {"collectiveOperator": COLLECTIVE_OPERATOR, "commGroup": COMM_GROUP}
"""The names on nodes of attributes that methods name differently."""
_ANY = 1 << 30

OPS: dict[str, GraphcoreOp] = {
    "l1loss": GraphcoreOp("L1", (("lambda", REQUIRED), _REDUCTION), _loss),
    "identityloss": GraphcoreOp("IdentityLoss", (_REDUCTION,), _loss),
    "nllloss": GraphcoreOp(
        "Nll", (_REDUCTION, ("ignoreIndex", None), ("inputIsLogProbability", False)), _nll, inputs=(2, 2)
    ),
    "ctcloss": GraphcoreOp(
        "Ctc",
        (_REDUCTION, ("blank", 0), ("outDataType", "UNDEFINED"), ("zeroInfinity", False)),
        _ctc,
        inputs=(4, 4),
    ),
    "scale": GraphcoreOp("Scale", (("scale", REQUIRED),)),
    "scaledadd": GraphcoreOp("ScaledAdd", (("scale0", 1.0), ("scale1", 1.0)), inputs=(2, 4)),
    "call": GraphcoreOp("Call", (("callee", REQUIRED),), None, "num_outputs", (0, _ANY), listed=True),
    "groupnormalization": GraphcoreOp(
        "GroupNormalization",
        (("num_groups", REQUIRED), ("epsilon", 1e-05)),
        _group_normalization,
        3,
        (3, 3),
        listed=True,
    ),
    "batchnormalization": GraphcoreOp(
        "BatchNormalization",
        (("epsilon", 1e-05), ("momentum", 0.9)),
        _same,
        "num_outputs",
        (5, 5),
        listed=True,
    ),
    "init": GraphcoreOp(
        "Init",
        (("shape", REQUIRED), ("data_type", REQUIRED), ("init_type", REQUIRED), ("batch_axis", -1)),
        _init,
        inputs=(0, 0),
    ),
    "detach": GraphcoreOp("Detach"),
    "gelu": GraphcoreOp("Gelu"),
    "geluerf": GraphcoreOp("GeluErf"),
    "swish": GraphcoreOp("Swish"),
    "nop": GraphcoreOp("Nop"),
    "expm1": GraphcoreOp("Expm1"),
    "log1p": GraphcoreOp("Log1p"),
    "round": GraphcoreOp("Round"),
    "nearbyint": GraphcoreOp("NearbyInt"),
    "atan2": GraphcoreOp("Atan2", rule=_broadcast, inputs=(2, 2)),
    "fmod": GraphcoreOp("Fmod", rule=_broadcast, inputs=(2, 2)),
    "remainder": GraphcoreOp("Remainder", rule=_broadcast, inputs=(2, 2)),
    "bitwisenot": GraphcoreOp("BitwiseNot"),
    "bitwiseand": GraphcoreOp("BitwiseAnd", rule=_broadcast, inputs=(2, 2)),
    "bitwiseor": GraphcoreOp("BitwiseOr", rule=_broadcast, inputs=(2, 2)),
    "bitwisexor": GraphcoreOp("BitwiseXor", rule=_broadcast, inputs=(2, 2)),
    "bitwisexnor": GraphcoreOp("BitwiseXnor", rule=_broadcast, inputs=(2, 2)),
    "bucketize": GraphcoreOp("Bucketize", (("right", 0),), _shaped_like_bool, inputs=(2, 2)),
    "incrementmod": GraphcoreOp("IncrementMod", (("increment", REQUIRED), ("modulus", REQUIRED))),
    "copyvarupdate": GraphcoreOp("CopyVarUpdate", inputs=(2, 2)),
    "reverse": GraphcoreOp("Reverse", (("dimensions", REQUIRED),)),
    "reshape": GraphcoreOp("Reshape", (("shape", REQUIRED),), _reshape),
    "slice": GraphcoreOp("Slice", (("ends", REQUIRED), ("starts", REQUIRED), ("axes", ())), _slice),
    "subsample": GraphcoreOp("Subsample", (("strides", REQUIRED),), _subsample),
    "sort": GraphcoreOp(
        "Sort",
        (("axis", -1), ("descending", 0), ("stable", 0)),
        _sort,
        2,
        listed=True,
    ),
    "shapeddropout": GraphcoreOp("ShapedDropout", (("shape", REQUIRED), ("ratio", 0.5))),
    "dynamicslice": GraphcoreOp("DynamicSlice", (*_DYNAMIC, ("noOverlap", 0)), _dynamic_slice, inputs=(2, 3)),
    "dynamicupdate": GraphcoreOp("DynamicUpdate", (*_DYNAMIC, ("noOverlap", 0)), inputs=(3, 3)),
    "dynamicadd": GraphcoreOp("DynamicAdd", _DYNAMIC, inputs=(3, 3)),
    "dynamiczero": GraphcoreOp("DynamicZero", _DYNAMIC, inputs=(2, 2)),
    "sequenceslice": GraphcoreOp(
        "SequenceSlice", (("zeroUnused", 0),), lambda infos, _: [infos[1]], inputs=(5, 5)
    ),
    "scatterreduce": GraphcoreOp(
        "ScatterReduce",
        (
            ("axis_size", REQUIRED),
            ("axis", -1),
            ("reduction", ScatterReduction.Sum),
            ("enable_index_broadcast", 1),
        ),
        _scatter_reduce,
        inputs=(2, 3),
    ),
    "groupedscatterreduce": GraphcoreOp(
        "GroupedScatterReduce",
        (
            ("axis_size", REQUIRED),
            ("axis", -1),
            ("reduction", ScatterReduction.Sum),
            ("group_size", 1),
            ("enable_index_broadcast", 1),
        ),
        None,
        inputs=(2, 3),
    ),
    "groupedgather": GraphcoreOp("GroupedGather", (("axis", 0), ("group_size", 1)), None, inputs=(2, 2)),
    "reducemedian": GraphcoreOp("ReduceMedian", (("axes", None), ("keepdims", 1)), None, 2, listed=True),
    "depthtospace": GraphcoreOp("DepthToSpace", (("blocksize", REQUIRED), ("mode", REQUIRED)), None),
    "lstm": GraphcoreOp("LSTM", (("outputFullSequence", 1),), None, 2, (2, 4), listed=True),
    "multiconv": GraphcoreOp(
        "MultiConv",
        (
            ("dilations", ()),
            ("inDilations", ()),
            ("pads", ()),
            ("outPads", ()),
            ("strides", ()),
            ("availableMemoryProportions", ()),
            ("partialsTypes", ()),
            ("planType", None),
            ("perConvReservedTiles", None),
            ("cycleBackOff", None),
            ("enableConvDithering", ()),
        ),
        None,
        listed=True,
        inputs=(2, _ANY),
    ),
    "normalize_image": GraphcoreOp("NormalizeImage", (("scale", 1.0),), None, inputs=(3, 3)),
    "packedDataBlock": GraphcoreOp(
        "PackedDataBlock",
        (
            ("maxSequenceLengths", REQUIRED),
            ("resultSize", REQUIRED),
            ("callbackBatchSize", REQUIRED),
            ("callback", REQUIRED),
        ),
        None,
        inputs=(1, _ANY),
    ),
    "printtensor": GraphcoreOp(
        "PrintTensor",
        (("print_gradient", 1),),
        keyword_attributes=(
            ("title", ""),
            ("summariseThreshold", 1000),
            ("edgeItems", 3),
            ("maxLineWidth", 75),
            ("digits", 8),
            ("floatFormat", 0),
            ("separator", " "),
            ("openBracket", "["),
            ("closeBracket", "]"),
        ),
    ),
    "replicatedallreduce": GraphcoreOp("ReplicatedAllReduce", _COLLECTIVE),
    "replicatedreducescatter": GraphcoreOp("ReplicatedReduceScatter", _COLLECTIVE, _depends_on_replicas),
    "tensorremap": GraphcoreOp("TensorRemap", (("remap_type", int(TensorRemapType.FwdBwdReverse)),)),
    "ctcbeamsearchdecoder": GraphcoreOp(
        "CtcBeamSearchDecoder",
        (("blank", 0), ("beam_width", 100), ("top_paths", 1)),
        None,
        3,
        (2, 2),
        listed=True,
    ),
    "splinebasis": GraphcoreOp("SplineBasis", (("degree", REQUIRED),), None, 2, (3, 3), listed=True),
    "splineweighting": GraphcoreOp("SplineWeighting", (), None, inputs=(4, 4)),
    "abort": GraphcoreOp("Abort", (), None, 0, (0, 1)),
}
"""Every ai.graphcore operator by its method name."""


def attribute_value(op: GraphcoreOp, name: str, value: Any) -> Any:
    """``value`` in the form of the node's attribute: enumerations by name or number, data types by ONNX's number."""
    if name == "reduction" and isinstance(value, ReductionType):
        return value.name
    if name == "data_type":
        return onnx_data_type(parse_data_type(value))
    if isinstance(value, (InitType, ScatterReduction, TensorRemapType)):
        return int(value)
    if isinstance(value, bool):
        return int(value)
    if name == "commGroup" and not isinstance(value, (list, tuple)):
        return [int(value.type), int(value.replicaGroupSize)]
    if value is REQUIRED:
        raise popart_exception(f"{op.op_type} needs its attribute {name!r}.")
    return value
