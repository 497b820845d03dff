"""Where operations lie that a program did not place itself."""

from __future__ import annotations

import importlib.util

import pytest

from podrun.runtime.graph import Node, Place

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def node(op_type: str, inputs: str, output: str) -> Node:
    """A node with names that spaces part."""
    return Node(op_type, "tensorflow", output, tuple(inputs.split()), (output,))


def test_what_reads_a_weight_alone_lies_where_the_weight_does() -> None:
    from podrun.tensorflow.execution.modelling import _placed

    nodes = [
        node("MatMul", "x first", "h"),
        node("MatMul", "h second", "y"),
        node("L2Loss", "second", "penalty"),
        node("Const", "", "factor"),
        node("Mul", "penalty factor", "scaled"),
        node("AddV2", "y scaled", "loss"),
    ]
    places = {"h": Place(0, 0), "y": Place(1, 1)}
    placed = {n.label: n.place for n in _placed(nodes, places)}
    assert placed == {
        "h": Place(0, 0),
        "y": Place(1, 1),
        "penalty": Place(1, 1),
        "factor": Place(1, 1),
        "scaled": Place(1, 1),
        "loss": Place(1, 1),
    }
