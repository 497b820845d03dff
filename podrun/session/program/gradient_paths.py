"""What has a gradient: the tensors from which a path leads to the loss, and the weights among them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from podrun.core.executable import numpy_dtype

if TYPE_CHECKING:
    from podrun.onnx_models.lowering import Lowered

_ENDS = frozenset({"Detach", "Shape", "Size"})
"""Operators that no gradient goes through."""


def differentiable(lowered: Lowered, loss: str) -> set[str]:
    """Floating-point tensors from which a path of such tensors leads to the loss, and the loss itself."""
    return _leading_to(lowered, loss, through_integers=False)


def trainable(lowered: Lowered, loss: str, only: Collection[str] | None = None) -> set[str]:
    """Floating-point parameters that the loss depends on, but for the statistics of norms; ``only``: of these."""
    reached = _leading_to(lowered, loss, through_integers=True)
    return {
        name
        for name, spec in lowered.parameters.items()
        if name in reached
        and (only is None or name in only)
        and name not in lowered.state_updates
        and (numpy_dtype(spec.dtype).kind == "f" or spec.dtype == "bfloat16")
    }


def _leading_to(lowered: Lowered, loss: str, *, through_integers: bool) -> set[str]:
    from podrun.onnx_models.lowering.graph import captured

    makers = {output: node for node in lowered.graph.nodes for output in node.outputs if output}
    reached: set[str] = set()
    queue = [loss]
    while queue:
        name = queue.pop()
        if name in reached or not (through_integers or _is_float(lowered, name)):
            continue
        reached.add(name)
        node = makers.get(name)
        if node is not None and node.kind not in _ENDS:
            queue.extend(item for item in node.inputs if item)
            queue.extend(captured(node))
    return reached


def _is_float(lowered: Lowered, name: str) -> bool:
    spec = lowered.tensors.get(name)
    return spec is not None and numpy_dtype(spec.dtype).kind not in "iub"
