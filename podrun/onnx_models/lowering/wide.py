"""``SessionOptions.ensureFp32LossScaleTensor``: the loss scaling enters the backward pass as float32, though the loss
is of halves, and meets a half as late as it can, so that it may be greater than a half is.

As PopART's transform of that name has it: operators whose gradient needs nothing but the gradient of their output pass
it on as float32; the first others compute in float32, and what they give is rounded to halves. Here the operators
between those and the loss are run once more, in float32, and that loss is what is differentiated; what is anchored are
the halves as they are. Source: graphcore/popart, willow/src/transforms/ensurefp32lossscale.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from podrun.core.executable import TensorSpec
from podrun.onnx_models.lowering.evaluate import Environment, TraceSession, run_node
from podrun.onnx_models.lowering.graph import subgraphs
from podrun.onnx_models.lowering.tensors import TracedTensor
from podrun.onnx_models.ops.registry import Node
from podrun.onnx_models.ops.training import WIDE

PASSING = frozenset(
    (
        *("IdentityLoss", "Identity", "Scale", "Neg", "Add", "Sub", "Sum", "Mean", "ReduceSum", "ReduceMean"),
        *("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Concat", "Split", "Slice", "Expand"),
    )
)
"""Operators whose gradient is made of the gradient of their output alone."""


def wide_nodes(nodes: Sequence[Node], tensors: Mapping[str, TensorSpec], loss: str) -> tuple[Node, ...]:
    """The operators to run once more, in order; none for a loss that is not of halves.

    ValueError where the way ends at something that gives no gradient of halves, in PopART's words.
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
    """What the nodes make, in float32, by name; what they read from around them they find in ``environment``."""
    again = replace(session, tap=None, state_updates={})
    made: Environment = {}
    for node in nodes:
        loss = node.op_type == "Nll"  # Bounds probabilities by their own type.
        here = {
            name: made[name] if name in made else environment[name] if loss else _wide(environment[name])
            for name in node.inputs
            if name
        }
        given = replace(node, attributes={**node.attributes, WIDE: 1}) if loss else node
        run_node(given, here, again, key)
        made |= {name: here[name] for name in node.outputs if name}
    return {name: tensor.traced for name, tensor in made.items()}


def _wide(tensor: TracedTensor) -> TracedTensor:
    """Halves as float32; anything else as it is."""
    form = tensor.form
    if form is None or form.dtype != np.float16:
        return tensor
    if tensor.at_hand:
        return TracedTensor(tensor.name, tensor.x64, known=tensor.known.astype(np.float32))
    return TracedTensor(tensor.name, tensor.x64, traced=tensor.traced.astype(jnp.float32))
