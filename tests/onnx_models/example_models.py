"""Models of one node with inputs for it, from which the tests of operators are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX


@dataclass(frozen=True, slots=True)
class Example:
    """A model of one node, and inputs for it."""

    name: str
    model: onnx.ModelProto
    inputs: tuple[Any, ...]


def example(
    domain: str, op_type: str, inputs: list[Any], outputs: int = 1, opset: int = 1, **attributes: Any
) -> Example:
    """An example of one node on the given arrays."""
    names_in = [f"x{i}" for i in range(len(inputs))]
    names_out = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(
        op_type, names_in, names_out, domain="" if domain == ONNX else domain, **attributes
    )
    declared = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in zip(names_in, inputs, strict=True)
    ]
    made = [helper.make_empty_tensor_value_info(n) for n in names_out]
    graph = helper.make_graph([node], f"{domain}.{op_type}", declared, made)
    imports = [helper.make_opsetid("", opset if domain == ONNX else 10), helper.make_opsetid(GRAPHCORE, 1)]
    return Example(f"{domain}.{op_type}", helper.make_model(graph, opset_imports=imports), tuple(inputs))


def random(*shape: int, low: float = -1.0, high: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def model(nodes: list[Any], inputs: dict[str, np.ndarray], outputs: list[str], opset: int = 13) -> Example:
    """An example of several nodes."""
    declared = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in inputs.items()
    ]
    made = [helper.make_empty_tensor_value_info(n) for n in outputs]
    graph = helper.make_graph(nodes, nodes[0].op_type, declared, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return Example("+".join(n.op_type for n in nodes), model, tuple(inputs.values()))


def subgraph(op_type: str, count: int) -> onnx.GraphProto:
    names_in = [f"i{k}" for k in range(count)]
    node = helper.make_node(op_type, names_in, ["o"])
    value = helper.make_empty_tensor_value_info
    return helper.make_graph([node], "callee", [value(n) for n in names_in], [value("o")])
