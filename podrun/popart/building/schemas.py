"""ONNX's schemas as methods of ``builder.aiOnnx``: names, parameters with their defaults, and attribute values.

Source of the differences from ONNX: the opset classes in the PopART Python API reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.onnx_models.tensor_proto import to_proto
from podrun.popart.building.graph_builder import BuilderModel
from podrun.popart.operators.graphcore_ops import REQUIRED
from podrun.popart.values.exceptions import surfaced
from podrun.popart.values.tensor_info import onnx_data_type, parse_data_type

_LOGICAL = {
    "And": "logical_and",
    "Or": "logical_or",
    "Not": "logical_not",
    "Xor": "logical_xor",
    "If": "logical_if",
}

_KNOWN = """
Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool
BatchNormalization Bernoulli BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BlackmanWindow
Cast CastLike CausalConvWithState Ceil Celu CenterCropPad Clip Col2Im Compress Concat ConcatFromSequence
Constant ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh CumProd CumSum DFT DeformConv
DepthToSpace DequantizeLinear Det Div Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand
EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool
GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HammingWindow HannWindow HardSigmoid
HardSwish Hardmax Identity If ImageDecoder InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization
LeakyRelu Less LessOrEqual LinearAttention Log LogSoftmax Loop LpNormalization LpPool MatMul MatMulInteger
Max MaxPool MaxRoiPool MaxUnpool Mean MeanVarianceNormalization MelWeightMatrix Min Mish Mod Mul
Multinomial Neg NegativeLogLikelihoodLoss NonMaxSuppression NonZero Not OneHot Optional OptionalGetElement
OptionalHasElement Or PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear RMSNormalization RNN
RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2
ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
RegexFullMatch Relu Reshape Resize ReverseSequence RoiAlign RotaryEmbedding Round STFT Scan Scatter
ScatterElements ScatterND Selu SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert
SequenceLength SequenceMap Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax SoftmaxCrossEntropyLoss
Softplus Softsign SpaceToDepth Split SplitToSequence Sqrt Squeeze StringConcat StringNormalizer
StringSplit Sub Sum SwiGLU Swish Tan Tanh TensorScatter TfIdfVectorizer ThresholdedRelu Tile TopK
Transpose Trilu Unique Unsqueeze Upsample Where Xor
"""
"""ONNX's operators up to version 1.23. What has been published does not change."""

_NOT_OFFERED = frozenset(
    [
        "auto_pad",
        "sparse_value",
        "value_float",
        "value_floats",
        "value_int",
        "value_ints",
        "value_string",
        "value_strings",
    ]
)
"""Attributes that PopART's builder does not take: it wants explicit pads and tensors."""

AUTO_PAD = "auto_pad"
POOLS = ("AveragePool", "MaxPool")
"""Operators whose methods take the attribute by name, behind the others, because programs write it so."""

_LISTS = ("INTS", "FLOATS", "STRINGS")


@dataclass(frozen=True, slots=True)
class Parameter:
    """An attribute as a method argument: its ONNX kind ("INT", "FLOATS", ...) and default (REQUIRED if it has none)."""

    name: str
    kind: str
    default: Any


def _method(op_type: str) -> str:
    return _LOGICAL.get(op_type, op_type.lower())


_BY_METHOD = {_method(op_type): op_type for op_type in _KNOWN.split()}


@functools.cache
def onnx_operator(method: str, version: int) -> str | None:
    """The operator of a method at an opset version of ai.onnx; None: there is none. It is looked up by itself if it is
    known: ONNX takes longer to list the schemas of all operators than to build a small network.
    """
    from onnx import defs

    op_type = _BY_METHOD.get(method)
    if op_type is not None and defs.has(op_type, version, ""):
        return None if defs.get_schema(op_type, version, "").deprecated else op_type
    return onnx_methods(version).get(method)


@functools.cache
def onnx_methods(version: int) -> dict[str, str]:
    """Method name -> operator, for the operators that ai.onnx has at an opset version."""
    from onnx import defs

    methods = {
        _method(schema.name): schema.name
        for schema in defs.get_all_schemas_with_history()
        if schema.domain == "" and schema.since_version <= version
    }
    return {
        method: op_type
        for method, op_type in methods.items()
        if not defs.get_schema(op_type, version, "").deprecated
    }


@functools.cache
def onnx_parameters(op_type: str, version: int) -> tuple[Parameter, ...]:
    """The attributes of an operator as method arguments, required ones first."""
    from onnx import defs

    schema = defs.get_schema(op_type, version, "")
    parameters = []
    for name in sorted(schema.attributes):
        if name in _NOT_OFFERED:
            continue
        attribute = schema.attributes[name]
        kind = str(attribute.type).rpartition(".")[2]
        required = attribute.required or (op_type in ("Constant", "ConstantOfShape") and name == "value")
        default = REQUIRED if required else _default(op_type, name, kind, attribute.default_value)
        parameters.append(Parameter(name, kind, default))
    if op_type == "Constant":
        parameters.append(Parameter("is_value_sparse", "INT", False))
    parameters.sort(key=lambda parameter: parameter.default is not REQUIRED)
    if op_type in POOLS:
        parameters.append(Parameter(AUTO_PAD, "STRING", "NOTSET"))
    return tuple(parameters)


def _default(op_type: str, name: str, kind: str, proto: Any) -> Any:
    from onnx import AttributeProto, helper

    if proto.type != AttributeProto.UNDEFINED:
        value = helper.get_attribute_value(proto)
        return value.decode() if isinstance(value, bytes) else value
    if kind in _LISTS and not (op_type.startswith("Reduce") and name == "axes"):
        return []
    return None


_INTEGER = (int, np.integer)
_NUMBER = (int, float, np.integer, np.floating)


def _is_number(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) or (
        isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf"
    )


_KINDS: dict[str, Callable[[Any], bool]] = {
    "INT": lambda value: isinstance(value, _INTEGER),
    "FLOAT": lambda value: _is_number(value, _NUMBER),
    "STRING": lambda value: isinstance(value, (str, bytes)),
    "INTS": lambda value: _all(value, _INTEGER),
    "FLOATS": lambda value: _all(value, _NUMBER),
    "STRINGS": lambda value: _all(value, (str, bytes)),
    "TENSOR": lambda value: isinstance(value, np.ndarray),
}


def _all(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and (value.dtype.kind in "iu" or float in kinds)
    return isinstance(value, (list, tuple, range)) and all(isinstance(item, kinds) for item in value)


class Unfit(Exception):
    """An impossible attribute value; the message says why."""


def onnx_value(op_type: str, parameter: Parameter, value: Any) -> Any:
    """The attribute to write, or None if it is the default. Unfit for an impossible value."""
    if parameter.kind == "GRAPH":
        if not isinstance(value, BuilderModel):
            raise Unfit(f"{parameter.name} is a Builder")
        return value._subgraph_proto()
    if parameter.kind == "TENSOR":
        if not isinstance(value, np.ndarray):
            raise Unfit(f"{parameter.name} is a numpy.ndarray, not {value!r}")
        with surfaced():
            return to_proto("", value)
    if parameter.name in ("to", "dtype") and parameter.kind == "INT" and isinstance(value, str):
        return onnx_data_type(parse_data_type(value))
    if value is None and parameter.default is None:
        return None
    if not _KINDS.get(parameter.kind, lambda _: True)(value):
        raise Unfit(f"{op_type}'s {parameter.name} is {parameter.kind}, not {value!r}")
    plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    if isinstance(plain, (tuple, range)):
        plain = list(plain)
    if parameter.kind == "FLOAT":
        plain = float(plain)
    elif parameter.kind == "FLOATS":
        plain = [float(item) for item in plain]
    elif parameter.kind == "INT":
        plain = int(plain)
    if parameter.default is not REQUIRED and plain == parameter.default:
        return None
    return plain


@dataclass(frozen=True, slots=True)
class OperatorIdentifier:
    """Domain, type and version of an operator."""

    domain: str
    type: str
    version: int


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """The inputs and outputs of an operator, according to ONNX's schema."""

    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)


def getSupportedOperations(includeInternal: bool) -> list[OperatorIdentifier]:
    """Every operator and version that sessions run. There are no internal ones to include."""
    from podrun.onnx_models.ops.registry import operators

    return [OperatorIdentifier(item.domain, item.name, item.since) for item in operators()]


def getUnsupportedOperations(opsetVersion: int) -> list[OperatorIdentifier]:
    """Operators of an ai.onnx opset that sessions do not run."""
    from onnx import defs

    from podrun.onnx_models.ops.registry import find_onnx_operator

    return [
        OperatorIdentifier("ai.onnx", name, defs.get_schema(name, opsetVersion, "").since_version)
        for name in sorted(onnx_methods(opsetVersion).values())
        if find_onnx_operator("ai.onnx", name, opsetVersion) is None
    ]


def getSupportedOperationsDefinition(includeInternal: bool) -> dict[OperatorIdentifier, OpDefinition]:
    """Inputs and outputs of each supported ai.onnx operator."""
    from onnx import defs

    definitions = {}
    for identifier in getSupportedOperations(includeInternal):
        if identifier.domain != "ai.onnx" or not defs.has(identifier.type, identifier.version, ""):
            continue
        schema = defs.get_schema(identifier.type, identifier.version, "")
        definitions[identifier] = OpDefinition(
            [item.name for item in schema.inputs],
            [item.name for item in schema.outputs],
            {name: str(item.type) for name, item in schema.attributes.items()},
        )
    return definitions
