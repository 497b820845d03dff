"""GPTQ: weights in 8 bits, rounded one row after the other, the error of each made up for by those that follow.

For ``y = x @ w`` the error of the output is weighed by ``h = x.T @ x`` of the calibration data. Rows of w are rounded
in order; what a row loses is spread over the rows behind it by the inverse of h. Source: Frantar et al., "GPTQ:
Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022, algorithm 1 (without lazy batches).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from podrun.serving.convert.calibration import calibration_values, check_data
from podrun.serving.convert.float8 import Float8Format
from podrun.serving.convert.float8_passes import product_nodes
from podrun.serving.convert.graph_edit import ModelEditor
from podrun.serving.convert.graph_walk import attribute

DAMPING = 0.01
"""Part of the mean of h's diagonal that is added to it, as in the paper."""


def gptq_weight(weight: np.ndarray, x: np.ndarray, chosen: Float8Format) -> np.ndarray:
    """Round weights ``[rows, columns]`` to a format by GPTQ (Frantar et al., 2022): row by row, the error of each row
    moved to the rows after it. ``x [samples, rows]`` is what the weights multiply.
    """
    w = weight.astype(np.float64).copy()
    rows = x.reshape(-1, w.shape[0]).astype(np.float64)
    h = rows.T @ rows
    h[np.diag_indices_from(h)] += DAMPING * max(float(np.diag(h).mean()), 1e-12)
    inverse = np.linalg.cholesky(np.linalg.inv(h)).T  # Upper triangle u with u.T @ u = inverse of h.
    result = np.empty_like(w)
    for row in range(w.shape[0]):
        result[row] = chosen.simulated(w[row])
        error = (w[row] - result[row]) / inverse[row, row]
        w[row + 1 :] -= np.outer(inverse[row, row + 1 :], error)
    return result.astype(weight.dtype)


def apply_gptq(
    model: ModelProto, data: Mapping[str, np.ndarray], formats: Mapping[str, Float8Format]
) -> ModelProto:
    """The model with weights rounded by GPTQ to the formats of their nodes: of MatMul, Gemm, and Conv in one group with
    fixed pads. Others stay as they are, and are rounded to the nearest when they are stored.
    """
    owner = ModelEditor(model)
    graph = owner.main
    nodes = [n for n in product_nodes(graph) if n.name in formats and graph.constant(n.input[0]) is None]
    nodes = [n for n in nodes if len(graph.consumers(n.input[1])) == 1]
    values = calibration_values(model, check_data(model, data), [node.input[0] for node in nodes])
    for node in nodes:
        weight = graph.constant(node.input[1])
        if weight is None:
            continue
        new = _rounded(node, weight, values[node.input[0]], formats[node.name])
        if new is not None:
            graph.hold(numpy_helper.from_array(np.ascontiguousarray(new.astype(weight.dtype)), node.input[1]))
    owner.commit()
    return model


def _rounded(node: NodeProto, weight: np.ndarray, x: np.ndarray, chosen: Float8Format) -> np.ndarray | None:
    if node.op_type == "Conv":
        patches = _patches(node, weight, x)
        if patches is None:
            return None
        flat = gptq_weight(weight.reshape(weight.shape[0], -1).T, patches, chosen)
        return flat.T.reshape(weight.shape)
    if weight.ndim != 2 or attribute(node, "transA", 0):
        return None
    if attribute(node, "transB", 0):
        return gptq_weight(weight.T, x, chosen).T
    return gptq_weight(weight, x, chosen)


def _patches(node: NodeProto, weight: np.ndarray, x: np.ndarray) -> np.ndarray | None:
    """What a convolution multiplies with its weights: ``[places, channels * window]``."""
    axes = weight.ndim - 2
    plain = attribute(node, "auto_pad", b"NOTSET") in (b"NOTSET", b"VALID")
    if attribute(node, "group", 1) != 1 or not plain:
        return None
    pads = list(attribute(node, "pads", [0] * 2 * axes))
    steps, spread = (list(attribute(node, key, [1] * axes)) for key in ("strides", "dilations"))
    wide = np.pad(x, [(0, 0), (0, 0), *((pads[i], pads[i + axes]) for i in range(axes))])
    window = tuple((k - 1) * d + 1 for k, d in zip(weight.shape[2:], spread, strict=True))
    views = np.lib.stride_tricks.sliding_window_view(wide, window, tuple(range(2, 2 + axes)))
    places = (slice(None), slice(None), *(slice(None, None, s) for s in steps))
    views = views[(*places, *(slice(None, None, d) for d in spread))]
    order = (0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
    return views.transpose(order).reshape(-1, int(np.prod(weight.shape[1:])))
