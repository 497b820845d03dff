"""Windows of convolutions, pools and pads, checked while a model is built: lengths of attributes, and what comes out.

ONNX's own inference refuses some of these in words of its own and lets others pass until a session computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podrun.popart.errors import popart_exception
from podrun.popart.tensor_info import TensorInfo

_WINDOWED = ("Conv", "MaxPool", "AveragePool")


def check_windows(
    op_type: str, inputs: Sequence[str], infos: Sequence[TensorInfo | None], attributes: Mapping[str, Any]
) -> None:
    """popart_exception for window attributes of a wrong length, a kernel that is not the weights', or a window that
    does not fit. ``infos`` are those of ``inputs``; nothing is checked where they are not known.
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
    given = [int(size) for size in attributes.get("kernel_shape") or []]
    weights = infos[1] if op_type == "Conv" and len(infos) > 1 else None
    if weights is None or not weights.is_static:
        return given
    inferred = [int(size) for size in weights.shape()[2:]]
    if given and given != inferred:
        raise popart_exception(
            f"kernel_shape, {_spaced(given)}, does not match inferred shape from weight input "
            f"'{inputs[1]}', {_spaced(inferred)}"
        )
    return inferred


def _check_output(spatial: Sequence[int], kernel: Sequence[int], attributes: Mapping[str, Any]) -> None:
    rank = len(spatial)
    pads = attributes.get("pads") or [0] * 2 * rank
    strides = attributes.get("strides") or [1] * rank
    dilations = attributes.get("dilations") or [1] * rank
    made = [
        (spatial[i] + pads[i] + pads[rank + i] - (dilations[i] * (kernel[i] - 1) + 1)) // max(strides[i], 1)
        + 1
        for i in range(rank)
    ]
    if any(size < 0 for size in made):
        raise popart_exception(
            f"Window parameter values combine to give invalid spatial output shape: {_spaced(made)}"
        )


def _spaced(values: Sequence[int]) -> str:
    return f"[{' '.join(str(value) for value in values)}]"
