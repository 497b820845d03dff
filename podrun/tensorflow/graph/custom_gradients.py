"""``tf.custom_gradient``: the program's own backward function, read as a graph that the derivative calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from podrun.private_apis.tensorflow import private_module, symbol
from podrun.tensorflow.graph.builder import GraphBuilder, Value
from podrun.tensorflow.graph.differentiation import trimmed
from podrun.tensorflow.graph.importer import Importer

_FuncGraph = symbol("framework.func_graph.FuncGraph")


def backward_of(operation: Any) -> Callable[[Importer], dict[str, Any]]:
    """What reads the backward function of an ``IdentityN`` whose gradient a program overrides: attributes of the node
    ``CustomGradient``. Inputs without a gradient (the results themselves) have no position.
    """
    name = operation.get_attr("_gradient_op_type").decode()
    function = private_module("framework.ops").gradient_registry.lookup(name)

    def read(importer: Importer) -> dict[str, Any]:
        with operation.graph.as_default():
            graph = _FuncGraph(f"{operation.name}/backward")
        with graph.as_default():
            incoming = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in operation.outputs]
            results = list(function(operation, *incoming))
        positions = tuple(i for i, r in enumerate(results) if r is not None)
        with graph.as_default():
            gradients = [graph.capture(tf.convert_to_tensor(results[i])) for i in positions]
        builder = GraphBuilder(f"{operation.name}/backward", importer.builder.facts, importer.builder)
        names = [builder.unique("incoming") for _ in incoming]
        inputs: dict[str, Value] = {t.name: n for t, n in zip(incoming, names, strict=True)}
        for outer, inner in graph.captures:
            inputs[inner.name] = importer.values[outer.name]
        outputs = [str(v) for v in Importer(builder).read(graph, inputs, gradients)]
        builder.nodes = trimmed(builder.nodes, outputs)
        return {"backward": builder.graph(names, outputs, {}, {}), "positions": positions}

    return read
