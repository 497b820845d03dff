"""Calibration of 8-bit floats: formats and scales of inputs and weights of each product, chosen by data.

The model in float32 runs on the data; what goes into each product is kept. For every format and scale the loss between
the numbers and what 8 bits make of them is computed; the least is chosen. The table goes into ``quantize.log``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.convert.float8 import FLOAT8_FORMATS, Float8Format
from podrun.serving.convert.float8_passes import product_nodes
from podrun.serving.convert.graph_edit import ModelEditor
from podrun.serving.convert.structure_passes import AddCheckpoints, adapted, true_inputs

TRIED_SCALES = range(-10, 6)
"""Scales that calibration tries."""
_BINS = 2048
_TINY = 1e-12


def _kld(right: np.ndarray, ours: np.ndarray) -> float:
    """Kullback-Leibler divergence of the histograms over the range of the right numbers."""
    limit = float(np.abs(right).max(initial=0)) or 1.0
    ends = (-limit, limit)
    p, _ = np.histogram(right, _BINS, ends)
    q, _ = np.histogram(np.clip(ours, *ends), _BINS, ends)
    a = (p + _TINY) / (p.sum() + _TINY * _BINS)
    b = (q + 1e-4) / (q.sum() + 1e-4 * _BINS)
    return float((a * np.log(a / b)).sum())


def _snr(right: np.ndarray, ours: np.ndarray) -> float:
    """Power of the noise over that of the signal: less is better."""
    return float(np.square(right - ours).sum() / max(np.square(right).sum(), _TINY))


def _cos_dist(right: np.ndarray, ours: np.ndarray) -> float:
    length = np.linalg.norm(right) * np.linalg.norm(ours)
    return float(1 - right.ravel() @ ours.ravel() / length) if length else float(np.any(right != ours))


LOSS_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "kld": _kld,
    "mse": lambda right, ours: float(np.square(right - ours).mean()),
    "mae": lambda right, ours: float(np.abs(right - ours).mean()),
    "snr": _snr,
    "cos_dist": _cos_dist,
}


@dataclass(frozen=True, slots=True)
class TriedFormat:
    """A format and what it costs."""

    chosen: Float8Format
    loss: float


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The choices for a product. ``inputs`` is None where only weights are in 8 bits, ``weights`` where there are none.
    ``loss``: the sum of both.
    """

    name: str
    inputs: TriedFormat | None
    weights: TriedFormat | None
    tried: tuple[tuple[str, TriedFormat], ...] = ()

    @property
    def loss(self) -> float:
        return sum(one.loss for one in (self.inputs, self.weights) if one is not None)


def formats_by_loss(value: np.ndarray, loss_type: str) -> list[TriedFormat]:
    """All formats and scales with their losses, the best first; a wider range wins a tie."""
    function = LOSS_FUNCTIONS["mse" if loss_type == "gptq" else loss_type]
    numbers = np.asarray(value, np.float64).reshape(-1)
    tried = []
    for name in FLOAT8_FORMATS:
        for scale in TRIED_SCALES:
            one = Float8Format(name, scale)
            ours = one.simulated(numbers).astype(np.float64)
            tried.append(TriedFormat(one, function(numbers, ours)))
    return sorted(tried, key=lambda one: (one.loss, -one.chosen.scale))


def calibration_values(
    model: ModelProto, data: Mapping[str, np.ndarray], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Tensors of a model on data, by podrun's own operators."""
    from podrun.onnx_backend import prepare

    copy = ModelProto()
    copy.CopyFrom(model)
    inputs = true_inputs(copy)
    wanted = [name for name in dict.fromkeys(names) if name not in inputs]
    copy = AddCheckpoints(wanted).run(copy)
    results = prepare(copy).run({name: data[name] for name in inputs})
    values = dict(zip([v.name for v in copy.graph.output], results, strict=True))
    return {name: np.asarray(data[name] if name in inputs else values[name]) for name in names}


def check_data(model: ModelProto, data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The data in the types and shapes of a model's inputs. UsageError naming an input that is missing or differs."""
    from onnx import helper

    checked = {}
    for name, value in true_inputs(model).items():
        if name not in data:
            raise UsageError(
                f"data_preprocess: no data for input {name!r}; there are {', '.join(sorted(data))}"
            )
        array, kind = np.asarray(data[name]), value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        if list(array.shape) != shape:
            raise UsageError(f"data_preprocess: input {name!r} is {shape}, the data are {list(array.shape)}")
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if array.dtype.kind not in "fiub" or (array.dtype.kind == "f") != (dtype.kind == "f"):
            raise UsageError(f"data_preprocess: input {name!r} is {dtype}, the data are {array.dtype}")
        checked[name] = array.astype(dtype)
    return checked


def calibrate(
    model: ModelProto,
    data: Mapping[str, np.ndarray],
    *,
    precision: str = "fp8",
    loss_type: str = "kld",
    skipped: Collection[str] = (),
) -> list[LayerChoice]:
    """The best formats of each product of the main graph of a model in float32."""
    graph = ModelEditor(model).main
    nodes = product_nodes(graph, skipped)
    computed = [n.input[0] for n in nodes if graph.constant(n.input[0]) is None] if precision == "fp8" else []
    values = calibration_values(model, check_data(model, data), computed)
    choices = []
    for node in nodes:
        tried: list[tuple[str, TriedFormat]] = []
        inputs = weights = None
        if node.input[0] in values:
            inputs = _best(formats_by_loss(values[node.input[0]], loss_type), "input", tried)
        weight = graph.constant(node.input[1])
        if weight is not None:
            weights = _best(formats_by_loss(weight, loss_type), "weight", tried)
        if inputs is not None or weights is not None:
            choices.append(LayerChoice(node.name, inputs, weights, tuple(tried)))
    return choices


def _best(ranked: list[TriedFormat], what: str, tried: list[tuple[str, TriedFormat]]) -> TriedFormat:
    tried += [(what, one) for one in ranked]
    return ranked[0]


def write_text(path: Path, text: str) -> None:
    """Write a report. UsageError naming the file where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror}", hint="df -h shows free space."
        ) from error


def write_quantize_log(
    choices: Sequence[LayerChoice], kept: Sequence[str], loss_type: str, output_dir: str | os.PathLike[str]
) -> Path:
    """``quantize.log``: the loss of each format and scale, and what was chosen."""
    lines = [f"loss type: {loss_type}"]
    for choice in choices:
        lines.append(f"layer {choice.name}")
        lines += [
            f"  {what:6} {one.chosen.name} scale {one.chosen.scale:3d} loss {one.loss:.6e}"
            for what, one in choice.tried
        ]
        told = [
            f"{what} {one.chosen.name} scale {one.chosen.scale}"
            for what, one in (("input", choice.inputs), ("weight", choice.weights))
            if one is not None
        ]
        state = " (stays in fp16)" if choice.name in kept else ""
        lines.append(f"  chosen: {', '.join(told)}; loss {choice.loss:.6e}{state}")
    path = Path(output_dir, "quantize.log")
    write_text(path, "\n".join(lines) + "\n")
    return path


def compare_layers(
    origin: ModelProto, model: ModelProto, data: Mapping[str, np.ndarray], output_dir: str | os.PathLike[str]
) -> Path:
    """``precision_compare.log``: results of each product in both models: errors, moments, a histogram of the noise."""
    outputs = {node.name: node.output[0] for node in _products(origin)}
    ours = {node.name: node.output[0] for node in _products(model) if node.name in outputs}
    right = calibration_values(origin, check_data(origin, data), [outputs[name] for name in ours])
    low = calibration_values(model, adapted(dict(data), model), list(ours.values()))
    lines: list[str] = []
    for name, tensor in ours.items():
        a = right[outputs[name]].astype(np.float64).reshape(-1)
        b = low[tensor].astype(np.float64).reshape(-1)
        if a.size == b.size:
            lines += _comparison(name, a, b)
    path = Path(output_dir, "precision_compare.log")
    write_text(path, "\n".join(lines) + "\n")
    return path


def _products(model: ModelProto) -> list[NodeProto]:
    return product_nodes(ModelEditor(model).main)


def _comparison(name: str, right: np.ndarray, ours: np.ndarray) -> list[str]:
    noise = ours - right
    counts, ends = np.histogram(noise, 32)
    moments = [f"{what} mean {v.mean():.6e} std {v.std():.6e} min {v.min():.6e} max {v.max():.6e}"
               for what, v in (("original", right), ("converted", ours), ("noise", noise))]  # fmt: skip
    ratio = _snr(right, ours)
    decibels = -10 * np.log10(ratio) if ratio > 0 else np.inf
    return [
        f"layer {name}",
        f"  MSE {np.square(noise).mean():.6e} MAE {np.abs(noise).mean():.6e} SNR {decibels:.2f} dB "
        f"cosine distance {_cos_dist(right, ours):.6e}",
        *(f"  {line}" for line in moments),
        f"  noise from {ends[0]:.6e} to {ends[-1]:.6e} in 32 bins: {' '.join(map(str, counts))}",
    ]
