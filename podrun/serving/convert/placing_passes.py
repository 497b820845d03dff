"""Where nodes and inputs lie: IPUs, I/O tiles, remaps, inputs that the host puts together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from podrun.core.errors import UsageError
from podrun.onnx_models.annotations import HOST_CONCAT_KEY, TRANSFERS_KEY
from podrun.serving.convert.fusion_passes import split_node
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import GRAPHCORE_DOMAIN
from podrun.serving.convert.half_passes import listed_names
from podrun.serving.convert.pass_manager import Pass, register
from podrun.serving.convert.sharder import Sharder, sharder_of
from podrun.serving.convert.structure_passes import true_inputs


def set_metadata(model: ModelProto, key: str, value: str) -> None:
    """Set one entry of a model's metadata."""
    for entry in model.metadata_props:
        if entry.key == key:
            entry.value = value
            return
    model.metadata_props.add(key=key, value=value)


@register("manual_sharding")
class ManualSharding(Pass):
    """Nodes get IPUs and pipeline stages. ``sharding_info`` and ``pipelining_info`` as for `Sharder`; or ``entries``, a
    list of ``{node, device, stage}``.
    """

    def __init__(
        self,
        sharding_info: Mapping[str, int] | None = None,
        pipelining_info: Mapping[str, int] | None = None,
        entries: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.sharder: Sharder | None = None
        if entries is not None:
            self.sharder = sharder_of(entries, "manual_sharding")
        elif sharding_info:
            self.sharder = Sharder(sharding_info, pipelining_info)

    def run(self, model: ModelProto) -> ModelProto:
        return model if self.sharder is None else self.sharder.run(model)


@register("overlap_io")
class OverlapIo(Pass):
    """Inputs move through I/O tiles while the model computes; compile with ``num_io_tiles``, which does it for outputs
    too.
    """

    def run(self, model: ModelProto) -> ModelProto:
        set_metadata(model, TRANSFERS_KEY, json.dumps(dict.fromkeys(true_inputs(model), "OverlapInnerLoop")))
        return model


@register("auto_insert_remap")
class AutoInsertRemap(Pass):
    """Results (``after_`` an operator) or operands (``before_``) are laid out over all tiles anew."""

    def __init__(self, remap_mode: str | Iterable[str] | None = None) -> None:
        modes = ["after_matmul"] if remap_mode is None else listed_names(remap_mode, "remap_mode")
        self.modes = [self._mode(mode) for mode in modes]

    @staticmethod
    def _mode(text: str) -> tuple[str, str]:
        match = re.fullmatch(r"(before|after)_([A-Za-z0-9]+)", text)
        if match is None:
            raise UsageError(f"remap_mode: {text!r} is no place", hint="As in after_matmul or before_add.")
        return match[1], match[2].lower()

    def run(self, model: ModelProto) -> ModelProto:
        owner = ModelEditor(model)
        for graph in owner.graphs():
            for place, operator in self.modes:
                for node in [n for n in graph.nodes if n.op_type.lower() == operator]:
                    if place == "after":
                        graph.lead_result(node, "TensorRemap", domain=GRAPHCORE_DOMAIN, remap_type=0)
                        continue
                    for index, name in enumerate(node.input):
                        if name and not graph.is_constant(name):
                            graph.lead_input(
                                node, index, "TensorRemap", domain=GRAPHCORE_DOMAIN, remap_type=0
                            )
        return model


_TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "bool": TensorProto.BOOL,
}


def parse_hcsr(word: str) -> tuple[int, list[int], int]:
    """Element type, shape and least count of inputs, from ``fp32,[512,1],50``. UsageError if it is none."""
    match = re.fullmatch(r"\s*(\w+)\s*,\s*\[([\d,\s]*)\]\s*(?:,\s*(\d+))?\s*", word)
    if match is None or match[1] not in _TYPES:
        raise UsageError(
            f"apply_hcsr: {word!r} is no type, shape and number of inputs",
            hint=f"As in fp32,[512,1],50; types are {', '.join(_TYPES)}.",
        )
    shape = [int(size) for size in match[2].split(",") if size.strip()]
    return _TYPES[match[1]], shape, int(match[3] or 2)


@register("apply_host_concat_split")
class ApplyHostConcatSplit(Pass):
    """Many inputs of one form become one that the host puts together, and a Split behind it.

    ``apply_hcsr``: words ``type,shape[,least number]``. The model's metadata tell the runner which inputs were merged.
    """

    def __init__(self, apply_hcsr: str | Sequence[str] = ()) -> None:
        words = apply_hcsr.split() if isinstance(apply_hcsr, str) else apply_hcsr
        self.forms = [parse_hcsr(word) for word in words]

    def run(self, model: ModelProto) -> ModelProto:
        """The changed model. UsageError where fewer inputs have the form than are asked for."""
        owner = ModelEditor(model)
        told: dict[str, Any] = {}
        for number, (element, shape, least) in enumerate(self.forms):
            names = [
                name
                for name, value in true_inputs(model).items()
                if value.type.tensor_type.elem_type == element
                and [d.dim_value for d in value.type.tensor_type.shape.dim] == shape
            ]
            if len(names) < max(least, 2):
                raise UsageError(
                    f"apply_hcsr: {len(names)} inputs are {TensorProto.DataType.Name(element)} {shape}, "
                    f"{max(least, 2)} are wanted"
                )
            name = owner.new_name(f"hcsr_input_{number}")
            self._merge(owner.main, name, names, element, shape)
            width = helper.tensor_dtype_to_np_dtype(element).itemsize
            told[name] = {
                "tensor_name": name,
                "input_tensor_names": names,
                "shape": [len(names), *shape],
                "input_shape": shape,
                "data_size_bytes": len(names) * int(np.prod(shape, dtype=np.int64)) * width,
            }
        owner.commit()
        if told:
            set_metadata(model, HOST_CONCAT_KEY, json.dumps(told))
        return model

    @staticmethod
    def _merge(graph: GraphEditor, name: str, names: list[str], element: int, shape: list[int]) -> None:
        parts = [graph.owner.new_name(f"{one}_part") for one in names]
        form = graph.add_constant(np.asarray(shape, np.int64), f"{name}_shape")
        split = split_node(graph, name, parts, 0, [1] * len(names))
        new = [split, *(graph.node("Reshape", [p, form], n) for p, n in zip(parts, names, strict=True))]
        graph.nodes[:0] = new
        graph.touch()
        for index in reversed([i for i, v in enumerate(graph.graph.input) if v.name in names]):
            del graph.graph.input[index]
        graph.graph.input.append(helper.make_tensor_value_info(name, element, [len(names), *shape]))
