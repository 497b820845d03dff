"""A half loss that is differentiated in float32: the operators on its way run a second time.

The loss scale enters the backward pass as float32 although the loss is a half, so it may exceed the largest half.
PopART's transform passes the float32 gradient on through operators whose gradient needs only the gradient of their
output; the first other operators compute in float32 and round their result to halves. Here the operators between those
and the loss run a second time, in float32, and that loss is differentiated; anchors keep the half values. Source:
graphcore/popart, willow/src/transforms/ensurefp32lossscale.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.executable import TensorSpec
from podrun.runtime.graph import Node, subgraphs

if TYPE_CHECKING:
    from podrun.runtime.traced_tensor import TracedTensor
    from podrun.runtime.tracing import Environment, TraceSession

WIDE = "__wide"
"""Attribute of a loss of halves that is to give its value in float32."""


PASSING = frozenset(
    (
        *("IdentityLoss", "Identity", "Scale", "Neg", "Add", "Sub", "Sum", "Mean", "ReduceSum", "ReduceMean"),
        *("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Concat", "Split", "Slice", "Expand"),
    )
)
"""Operators whose gradient needs only the gradient of their output."""


def wide_nodes(nodes: Sequence[Node], tensors: Mapping[str, TensorSpec], loss: str) -> tuple[Node, ...]:
    """The operators to run a second time, in order; none if the loss is not a half.

    Raises ValueError, in the SDK's words, if the way back from the loss ends at an operator without a half input.
    """
    makers = {output: node for node in nodes for output in node.outputs if output}
    chosen: set[int] = set()
    queue = [loss] if tensors[loss].dtype == "float16" else []
    while queue:
        node = makers.get(queue.pop())
        if node is None or id(node) in chosen:
            continue
        chosen.add(id(node))
        halves = [name for name in node.inputs if name and tensors[name].dtype == "float16"]
        if not halves or list(subgraphs(node)):
            raise ValueError(
                "EnsureFp32LossScale: Unable to apply the transform. Graph traversal terminating at "
                f"{node.describe()}, but its gradient is not of data type fp16."
            )
        if node.op_type in PASSING:
            queue += halves
    return tuple(node for node in nodes if id(node) in chosen)


def widened(
    nodes: Sequence[Node], environment: Environment, session: TraceSession, key: Callable[[], Any]
) -> dict[str, Any]:
    """The float32 results of the nodes, by name. ``environment`` holds the values that the nodes read from outside."""
    from podrun.runtime.tracing import trace_node

    again = replace(session, tap=None, state_updates={})
    wide_tensors: Environment = {}
    for node in nodes:
        loss = node.op_type == "Nll"  # Bounds probabilities by their own type.
        here = {
            name: wide_tensors[name]
            if name in wide_tensors
            else environment[name]
            if loss
            else _wide(environment[name])
            for name in node.inputs
            if name
        }
        variant = replace(node, attributes={**node.attributes, WIDE: 1}) if loss else node
        trace_node(variant, here, again, key)
        wide_tensors |= {name: here[name] for name in node.outputs if name}
    return {name: tensor.traced for name, tensor in wide_tensors.items()}


def _wide(tensor: TracedTensor) -> TracedTensor:
    """Halves as float32; anything else as it is."""
    from podrun.runtime.traced_tensor import TracedTensor

    form = tensor.form
    if form is None or form.dtype != np.float16:
        return tensor
    if tensor.at_hand:
        return TracedTensor(tensor.name, tensor.x64, known=tensor.known.astype(np.float32))
    return TracedTensor(tensor.name, tensor.x64, traced=tensor.traced.astype(np.float32))
