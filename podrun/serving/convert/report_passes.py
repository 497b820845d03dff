"""What a model is and whether it is right: overview, inputs and outputs, checks, precision by layer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

from podrun.core.errors import CallError, UsageError
from podrun.serving.convert.calibration import compare_layers
from podrun.serving.convert.graph_walk import ONNX_DOMAINS, graphs_within
from podrun.serving.convert.pass_manager import Pass, register
from podrun.serving.convert.structure_passes import adapted, check_shapes_known, true_inputs
from podrun.serving.convert.type_inference import infer_types, without_weights

_log = logging.getLogger("poprt")


def describe_ends(model: ModelProto) -> list[str]:
    """Lines on inputs and outputs: ``Input x: dtype - float32, shape - [2, 8]``; a size that is open is 0."""
    lines = []
    types = infer_types(model)
    ends = [("Input", list(true_inputs(model))), ("Output", [v.name for v in model.graph.output])]
    for what, names in ends:
        for name in names:
            kind = types.get(name)
            dtype = helper.tensor_dtype_to_np_dtype(kind.element).name if kind else "unknown"
            shape = [size or 0 for size in kind.shape or ()] if kind else []
            lines.append(f"{what} {name}: dtype - {dtype}, shape - {shape}")
    return lines


def describe_io(model: ModelProto) -> list[str]:
    """Lines on how many bytes go in and out."""
    types, lines = infer_types(model), []
    for what, names in (
        ("inputs", list(true_inputs(model))),
        ("outputs", [v.name for v in model.graph.output]),
    ):
        sizes = []
        for name in names:
            kind = types.get(name)
            if kind is not None and kind.sizes is not None:
                width = helper.tensor_dtype_to_np_dtype(kind.element).itemsize
                sizes.append(int(np.prod(kind.sizes, dtype=np.int64)) * width)
        lines.append(f"{len(names)} {what}, {sum(sizes)} bytes, largest {max(sizes, default=0)} bytes")
    return lines


class _Printing(Pass):
    """A pass that prints lines and changes nothing."""

    lines: Callable[[ModelProto], list[str]]

    def __init__(self, show: Callable[[str], Any] = print) -> None:
        self.show = show

    def run(self, model: ModelProto) -> ModelProto:
        """The same model."""
        for line in type(self).lines(model):
            self.show(line)
        return model


@register("model_io_info_stat")
class ModelIoInfoStat(_Printing):
    """Print inputs and outputs and their bytes."""

    lines = staticmethod(lambda model: [*describe_ends(model), *describe_io(model)])


def _overview(model: ModelProto) -> list[str]:
    counts = Counter(node.op_type for graph in graphs_within(model.graph) for node in graph.node)
    held = sum(len(t.raw_data) or onnx.numpy_helper.to_array(t).nbytes for t in model.graph.initializer)
    opset = ", ".join(f"{i.domain or 'ai.onnx'} {i.version}" for i in model.opset_import)
    first = (
        f"{sum(counts.values())} nodes, {len(model.graph.initializer)} weights of {held} bytes, opset {opset}"
    )
    return [first, *(f"{name}: {count}" for name, count in counts.most_common())]


@register("model_overview")
class ModelOverview(_Printing):
    """Print the number of nodes by operator, weights and opsets."""

    lines = staticmethod(_overview)


@register("final_check")
class FinalCheck(Pass):
    """The converted model is one: ONNX's checker takes it, shapes are known, every operator exists in podrun."""

    def run(self, model: ModelProto) -> ModelProto:
        """Check the model, which stays the same. UsageError or UnimplementedError naming what is wrong."""
        from podrun.onnx_models.graph_reader import read_graph
        from podrun.onnx_models.ops.registry import lookup

        check_shapes_known(model)
        light = without_weights(model)
        for value in light.graph.input:
            if value.type.tensor_type.elem_type in _CHECKED_AS_BYTES:
                value.type.tensor_type.elem_type = TensorProto.UINT8
        try:
            onnx.checker.check_model(light)
        except onnx.checker.ValidationError as error:
            raise UsageError(f"the converted model is not valid ONNX: {error}") from error
        for node in read_graph(light).nodes:
            lookup(node)
        return model


_CHECKED_AS_BYTES = (TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2FNUZ)


def made_up_inputs(model: ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs for a check: normal numbers; integers of 0 and 1, which are in range wherever they are places."""
    random = np.random.default_rng(seed)
    values = {}
    for name, value in true_inputs(model).items():
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind == "f":
            values[name] = random.standard_normal(shape).astype(dtype)
        else:
            values[name] = random.integers(0, 2, shape).astype(dtype)
    return values


def greatest_difference(ours: np.ndarray, right: np.ndarray) -> float:
    """The largest difference, relative to 1 or to the value; infinite for a NaN that only one side has."""
    a = np.asarray(ours).astype(np.float64).reshape(-1)
    b = np.asarray(right).astype(np.float64).reshape(-1)
    if a.size != b.size:
        return float("inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(a - b) / np.maximum(1, np.abs(b)))
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0))


TOLERANCES = {"fp32": 1e-3, "fp16": 5e-2, "fp8": 0.5, "fp8_weight": 0.5}
"""Largest difference from the original model that a check lets pass, by precision."""


@register("check_with_fake_data")
class CheckWithFakeData(Pass):
    """The model gives what the original gives on made-up data: the original by onnxruntime, the model by podrun.

    ``origin``: the original; ``tolerance``: largest difference, of values and relative to them.
    """

    def __init__(self, origin: ModelProto | None = None, tolerance: float = 1e-3) -> None:
        self.origin, self.tolerance = origin, tolerance
        self.worst = 0.0

    def run(self, model: ModelProto) -> ModelProto:
        """Check the model, which stays the same. CallError naming the output that differs most."""
        from podrun.onnx_backend import prepare
        from podrun.serving.convert.reference_runs import run_onnxruntime

        origin = self.origin if self.origin is not None else model
        inputs = made_up_inputs(origin)
        expected = run_onnxruntime(origin, inputs)
        rep = prepare(model)
        results = dict(
            zip([v.name for v in model.graph.output], rep.run(adapted(inputs, model)), strict=True)
        )
        differences = {
            name: greatest_difference(results[name], value)
            for name, value in expected.items()
            if name in results
        }
        self.worst = max(differences.values(), default=0.0)
        if not self.worst <= self.tolerance:
            name = max(differences, key=lambda key: differences[key])
            raise CallError(
                f"output {name!r} of the converted model differs from onnxruntime's by {self.worst:.3g}, "
                f"more than {self.tolerance:g}",
                hint="poprt --skip_passes leaves passes out; --fp16_skip_op_types keeps operators in float32.",
            )
        return model


def own_operators(model: ModelProto) -> bool:
    """Whether a model has operators that onnxruntime does not know."""
    return any(node.domain not in ONNX_DOMAINS for graph in graphs_within(model.graph) for node in graph.node)


@register("layer_precision_compare")
class LayerPrecisionCompare(Pass):
    """Compare the results of products with those of another model, on data; write a table. ``origin``: the other."""

    def __init__(
        self,
        origin: ModelProto | None = None,
        data: dict[str, np.ndarray] | None = None,
        output_dir: str = ".",
    ) -> None:
        self.origin, self.data, self.output_dir = origin, data, output_dir

    def run(self, model: ModelProto) -> ModelProto:
        """Compare layer by layer; the model stays the same."""
        if self.origin is None:
            _log.warning("layer_precision_compare: no original model to compare with")
            return model
        compare_layers(self.origin, model, self.data or made_up_inputs(self.origin), self.output_dir)
        return model
