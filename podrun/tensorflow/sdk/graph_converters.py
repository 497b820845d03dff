"""Changes of a frozen graph for IPUs: places, types, gelu as one operation, and shards.

Each converter has ``apply(graph_def, signature_def)``, which gives both, changed. A converter that is asked for nothing
gives them as they are.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

from podrun.tensorflow.sdk.conversion_params import (
    IpuConversionParams,
    check_embedded_runtime,
    check_gelu_replacement,
    check_sharding,
)
from podrun.tensorflow.sdk.node_types import change_types, refuse_calls, tensor_types, with_casts
from podrun.tensorflow.sdk.shard_ops import SHARDING

if TYPE_CHECKING:
    from tensorflow.core.framework.graph_pb2 import GraphDef
    from tensorflow.core.framework.node_def_pb2 import NodeDef
    from tensorflow.core.protobuf.meta_graph_pb2 import SignatureDef

Converted: TypeAlias = "tuple[GraphDef, SignatureDef]"
IPU = "/device:IPU:0"
GELU = "IpuGelu"
_HALF, _FLOAT, _DOUBLE = (t.as_datatype_enum for t in (tf.float16, tf.float32, tf.float64))
_INT32, _INT64 = tf.int32.as_datatype_enum, tf.int64.as_datatype_enum
_PRECISIONS = {"FP16": _HALF, "FP32": _FLOAT, "FP64": _DOUBLE}


def str_to_dtype(type_name: str) -> int:
    """The type of a precision mode."""
    return int(_PRECISIONS[type_name])


def node_name_from_tensor_name(tensor_name: str) -> str:
    """The node of a tensor, or of a control dependency."""
    return tensor_name.removeprefix("^").split(":")[0]


def input_name_to_tensor_name(name: str) -> str:
    """The tensor that an input of a node names."""
    return name if ":" in name else f"{name}:0"


def placeholder_of_tensor(name: str) -> str:
    """The name of the placeholder that stands for a tensor."""
    return name.removesuffix(":0").replace(":", "_")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def add_ipu_scope(node: NodeDef, deviceinfo: str) -> None:
    """Place a node on an IPU, in the scope that is compiled."""
    node.device = deviceinfo
    node.attr["_XlaCompile"].b = True
    node.attr["_XlaScope"].s = b"jit_scope_ipu_0"
    node.attr["_XlaSeparateCompiledGradients"].b = False


def split_graph_by_device_placement(origin_graph_def: GraphDef) -> tuple[GraphDef, GraphDef]:
    """The nodes of the IPU and those of the host, each in a graph of its own."""
    parts = type(origin_graph_def)(), type(origin_graph_def)()
    for part in parts:
        part.versions.CopyFrom(origin_graph_def.versions)
    for node in origin_graph_def.node:
        on_ipu = node.device == IPU
        copied = parts[0 if on_ipu else 1].node.add()
        copied.CopyFrom(node)
        copied.device = IPU if on_ipu else "/device:CPU:0"
    return parts


def get_edge_tensor(
    cpu_graph_def: GraphDef, ipu_graph_def: GraphDef, is_remove_excluded_nodes: bool
) -> dict[str, tf.Tensor]:
    """The tensors that go from the host to the IPU. With ``is_remove_excluded_nodes`` the IPU's nodes read placeholders
    in their place. ValueError if the host reads what the IPU computes.
    """
    of_ipu = {node.name for node in ipu_graph_def.node}
    for node in cpu_graph_def.node:
        for name in map(node_name_from_tensor_name, node.input):
            if name in of_ipu:
                raise ValueError(f"Please place {name} on CPU, a complete CPU head is required.")
    edges: list[str] = []
    for node in ipu_graph_def.node:
        for place, name in enumerate(node.input):
            if node_name_from_tensor_name(name) not in of_ipu:
                edges.append(input_name_to_tensor_name(name))
                if is_remove_excluded_nodes:
                    node.input[place] = placeholder_of_tensor(edges[-1])
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(cpu_graph_def, name="")
        return {name: graph.get_tensor_by_name(name) for name in dict.fromkeys(edges)}


class GraphChange:
    """The base class of converters of frozen graphs."""

    def apply(self, graph_def: GraphDef, signature_def: SignatureDef) -> Converted:
        """The graph and its signature, changed."""
        raise NotImplementedError("`apply` method is not implemented.")


class IPUPlacement(GraphChange):
    """Places all nodes on the IPU but placeholders and what is excluded. TypeError for exclusions that are no list."""

    def __init__(self, param: IpuConversionParams) -> None:
        if param.excluded_nodes is not None and not isinstance(param.excluded_nodes, list):
            raise ValueError("excluded_nodes should be a list.")
        self._excluded = list(param.excluded_nodes or [])
        self._place, self._remove = param.ipu_placement, param.remove_excluded_nodes

    def apply(self, graph_def: GraphDef, signature_def: SignatureDef) -> Converted:
        """The placed graph; without the excluded nodes, if they are to be removed."""
        if not self._place:
            return graph_def, signature_def
        for node in graph_def.node:
            if node.op != "Placeholder" and not _matches(node.name, self._excluded):
                add_ipu_scope(node, IPU)
                node.attr.pop("_class", None)  # Beside what is a constant now.
        return self._without_host(graph_def, signature_def) if self._remove else (graph_def, signature_def)

    def _without_host(self, graph_def: GraphDef, signature_def: SignatureDef) -> Converted:
        ipu_graph_def, cpu_graph_def = split_graph_by_device_placement(graph_def)
        edges = get_edge_tensor(cpu_graph_def, ipu_graph_def, True)
        changed = copy.deepcopy(signature_def)
        changed.ClearField("inputs")
        with tf.Graph().as_default() as graph:
            for name, tensor in edges.items():
                own = placeholder_of_tensor(name)
                stand_in = tf.compat.v1.placeholder(tensor.dtype, tensor.shape, own)
                changed.inputs[own].CopyFrom(tf.compat.v1.saved_model.build_tensor_info(stand_in))
            placeholders = graph.as_graph_def()
        placeholders.node.extend(ipu_graph_def.node)
        placeholders.library.CopyFrom(graph_def.library)
        return placeholders, changed


class Int64Conversion(GraphChange):
    """Makes integers of 64 bits ones of 32, which an IPU has."""

    def __init__(self, param: IpuConversionParams) -> None:
        self.int64_to_int32_conversion = param.int64_to_int32_conversion

    def apply(self, graph_def: GraphDef, signature_def: SignatureDef) -> Converted:
        """The graph with narrow integers. OverflowError for a constant that does not fit; NotImplementedError for a
        graph that calls functions.
        """
        if not self.int64_to_int32_conversion:
            return graph_def, signature_def
        refuse_calls(graph_def, "int64_to_int32_conversion")
        for node in graph_def.node:
            change_types(node, {_INT64}, _INT32)
        changed = copy.deepcopy(signature_def)
        for end in (*changed.inputs.values(), *changed.outputs.values()):
            if end.dtype == _INT64:
                end.dtype = _INT32
        return with_casts(graph_def, {_INT32, _INT64}), changed


class PrecisionConversion(GraphChange):
    """Makes floats of another precision of all but inputs, outputs and what is excluded, with casts between."""

    def __init__(self, param: IpuConversionParams) -> None:
        excluded = param.precision_conversion_excluded_nodes
        if excluded is not None and not isinstance(excluded, list):
            raise ValueError("precision_conversion_excluded_nodes should be a list")
        self._mode, self._excluded = param.precision_mode, list(excluded or [])

    def apply(self, graph_def: GraphDef, signature_def: SignatureDef) -> Converted:
        """The graph in the precision. KeyError for one that is not known; NotImplementedError for a graph that calls
        functions.
        """
        if not self._mode:
            return graph_def, signature_def
        refuse_calls(graph_def, "precision_mode")
        ends = [*signature_def.inputs.values(), *signature_def.outputs.values()]
        kept = {node_name_from_tensor_name(end.name) for end in ends if end.name}
        new = str_to_dtype(self._mode)
        for node in graph_def.node:
            if node.name not in kept and not _matches(node.name, self._excluded):
                change_types(node, {_HALF, _FLOAT}, new)
        return with_casts(graph_def, {_HALF, _FLOAT}), signature_def


class GeluReplacement(GraphChange):
    """Puts one operation, `GELU`, in the place of those that compute gelu."""

    def __init__(self, param: IpuConversionParams) -> None:
        check_gelu_replacement(param.gelu_replacement)
        self._patterns = param.gelu_replacement

    def apply(self, graph_def: GraphDef, signature_def: SignatureDef) -> Converted:
        """The graph with the operation, and with a function of the host of the same name."""
        if not self._patterns:
            return graph_def, signature_def
        removed, before, behind = (
            self._patterns[key] for key in ("nodes", "node_as_gelu_input", "node_use_gelu_output")
        )
        result = type(graph_def)()
        result.versions.CopyFrom(graph_def.versions)
        result.library.CopyFrom(graph_def.library)
        kinds: set[int] = set()
        inside = {n.name: list(n.input) for n in graph_def.node if _matches(n.name, removed)}
        for node in graph_def.node:
            if node.name in inside:
                continue
            changed = result.node.add()
            changed.CopyFrom(node)
            if _matches(node.name, behind):
                for place, name in enumerate(node.input):
                    source = _source_of(node_name_from_tensor_name(name), inside, before)
                    if source is not None:
                        changed.input[place] = f"{source}/{GELU}"
            if _matches(node.name, before):
                kind = next((t for t in tensor_types(node, "output_arg") if t), None)
                if kind is None:
                    raise ValueError(f"{node.name}/{GELU} can not get type from {node.name}.")
                kinds.add(kind)
                inserted = result.node.add(
                    name=f"{node.name}/{GELU}", op=GELU, input=[node.name], device=node.device
                )
                if node.device == IPU:
                    add_ipu_scope(inserted, IPU)
        if len(kinds) > 1:
            raise ValueError(f"{GELU} is computed in one type, not in {len(kinds)}.")
        for kind in kinds:
            result.library.function.append(_gelu_function(tf.as_dtype(kind)))
        return result, signature_def


def _source_of(name: str, inside: dict[str, list[str]], before: Sequence[str]) -> str | None:
    """The node whose values an operation of gelu comes from; None if it is none of gelu's."""
    waiting, seen = [name] if name in inside else [], set()
    while waiting:
        current = waiting.pop()
        if current in inside and current not in seen:
            seen.add(current)
            waiting.extend(node_name_from_tensor_name(n) for n in inside[current])
        elif current not in inside and _matches(current, before):
            return current
    return None


def _gelu_function(dtype: tf.DType) -> Any:
    """The operation for the host."""
    with tf.Graph().as_default():
        traced = tf.function(lambda x: tf.compat.v2.nn.gelu(x, approximate=True))
        definition = copy.deepcopy(traced.get_concrete_function(tf.TensorSpec(None, dtype)).function_def)
    definition.signature.name = GELU
    return definition


class GraphSharding(GraphChange):
    """Puts nodes that match a pattern of an IPU on it, and others on IPU 0. ValueError for another number of IPUs."""

    def __init__(self, param: IpuConversionParams) -> None:
        self._patterns: Sequence[Sequence[str]] = param.manual_sharding or []
        if not param.manual_sharding:
            return
        check_sharding(param.manual_sharding)
        if param.num_ipus != len(self._patterns):
            raise ValueError(
                f"The length of manual_sharding ({len(self._patterns)}) should be equal to num_ipus ({param.num_ipus})."
            )

    def apply(self, graph_def: GraphDef, signature_def: SignatureDef) -> Converted:
        """The graph with the IPU of each node. ValueError if no node is on one."""
        if not self._patterns:
            return graph_def, signature_def
        placed = [node for node in graph_def.node if "IPU" in node.device]
        if not placed:
            raise ValueError("No ops placed on IPU device to shard.")
        kind = importlib.import_module("tensorflow.compiler.xla.xla_data_pb2").OpSharding
        for node in placed:
            chosen = [i for i, patterns in enumerate(self._patterns) if _matches(node.name, patterns)]
            sharding = kind(type=kind.MAXIMAL, tile_assignment_devices=[chosen[-1] if chosen else 0])
            node.attr[SHARDING].s = sharding.SerializeToString()
        return graph_def, signature_def


class IPUCompilerWrapper(GraphChange):
    """Checks that the IPU's nodes can be one program (``merge_subgraphs``): sessions of podrun compile them so."""

    def __init__(self, param: IpuConversionParams) -> None:
        if param.excluded_nodes is not None and not isinstance(param.excluded_nodes, list):
            raise TypeError("excluded_nodes must be a list.")
        if not isinstance(param.remove_excluded_nodes, bool):
            raise TypeError("remove_excluded_nodes must be a bool.")
        self._merge = param.merge_subgraphs and not param.embedded_runtime_save_config

    def apply(self, graph_def: GraphDef, signature_def: SignatureDef) -> Converted:
        """The graph as it is. ValueError if the host reads what the IPU computes."""
        if self._merge:
            ipu_graph_def, cpu_graph_def = split_graph_by_device_placement(graph_def)
            get_edge_tensor(cpu_graph_def, ipu_graph_def, False)
        return graph_def, signature_def


class LoopRepeatWrapper(GraphChange):
    """Refuses what `ipu.serving` does: programs compiled beforehand, and pipelines of a SavedModel."""

    def __init__(self, param: IpuConversionParams) -> None:
        check_embedded_runtime(param)
        self._pipeline = bool(param.pipeline_cfg)
        self._wanted = bool(param.embedded_runtime_save_config)

    def _should_do_loop_repeat_ipu_wrapper(self) -> bool:
        return self._wanted and not self._pipeline

    def apply(self, graph_def: GraphDef, signature_def: SignatureDef) -> Converted:
        """The graph as it is. NotImplementedError for an embedded runtime or a pipeline."""
        if self._pipeline:
            raise NotImplementedError(
                "podrun does not make pipelines of SavedModels: use manual_sharding, or ipu.serving.export_pipeline."
            )
        if self._should_do_loop_repeat_ipu_wrapper():
            raise NotImplementedError(
                "podrun does not write embedded runtimes of SavedModels: use ipu.serving.export_single_step."
            )
        return graph_def, signature_def


class ConverterPipeline:
    """All converters, one behind the other."""

    def __init__(self, param: IpuConversionParams, signature_key: str = "serving_default") -> None:
        kinds = (
            IPUPlacement, Int64Conversion, PrecisionConversion, GeluReplacement, IPUCompilerWrapper, GraphSharding,
            LoopRepeatWrapper,
        )  # fmt: skip
        self._converters: list[GraphChange] = [kind(param) for kind in kinds]

    def ApplyConverters(self, graph_def: GraphDef, signature_def: SignatureDef) -> Converted:
        """The graph and its signature, changed by all of them."""
        for converter in self._converters:
            graph_def, signature_def = converter.apply(graph_def, signature_def)
        return graph_def, signature_def
