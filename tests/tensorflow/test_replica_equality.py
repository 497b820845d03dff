"""Which variables stay equal on all replicas of a program."""

from __future__ import annotations

import importlib.util

import pytest

from podrun.runtime.graph import Node, OperatorGraph

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def node(op_type: str, inputs: str, output: str, **attributes: object) -> Node:
    """A node with names that spaces part."""
    return Node(op_type, "tensorflow", output, tuple(inputs.split()), (output,), attributes)


def subgraph(*nodes: Node, output: str) -> OperatorGraph:
    """A graph without inputs of its own."""
    return OperatorGraph("inner", nodes, (), (output,), {}, {})


GRADIENT = node("Differentiate", "w", "g", graph=subgraph(node("Mul", "w x", "loss"), output="loss"))
MEAN = node("Podrun:cross_replica_mean", "g", "mean", group=None)
PAIRS = node("Podrun:cross_replica_mean", "g", "mean", group=2)
UPDATE = node("Sub", "w mean", "w2")
COUNT = node("Add", "n one", "n2")
LAST = node("Equal", "n2 four", "last")
ADDED = node("Add", "a g", "a2")
CHOICE = node(
    "Branch",
    "last",
    "w2",
    branches=(
        subgraph(output="w"),
        subgraph(
            node("Podrun:cross_replica_mean", "a2", "m", group=None), node("Sub", "w m", "new"), output="new"
        ),
    ),
)


@pytest.mark.parametrize(
    ("nodes", "written", "equal"),
    [
        ((GRADIENT, MEAN, UPDATE), {"w": "w2"}, {"w"}),
        ((GRADIENT, node("Sub", "w g", "w2")), {"w": "w2"}, set()),
        ((GRADIENT, PAIRS, UPDATE), {"w": "w2"}, set()),
        ((GRADIENT, node("Podrun:cross_replica_mean", "g", "mean", group=4), UPDATE), {"w": "w2"}, {"w"}),
        ((GRADIENT, MEAN, UPDATE, node("Add", "s x", "s2")), {"w": "w2", "s": "s2"}, {"w"}),
        ((GRADIENT, MEAN, node("Sub", "w s", "w2"), node("Add", "s x", "s2")), {"w": "w2", "s": "s2"}, set()),
        ((node("RandomUniform", "shape", "r"), node("Sub", "w r", "w2")), {"w": "w2"}, set()),
        ((node("Podrun:replication_index", "", "r"), node("Sub", "w r", "w2")), {"w": "w2"}, set()),
        ((GRADIENT, COUNT, LAST, ADDED, CHOICE), {"w": "w2", "n": "n2", "a": "a2"}, {"w", "n"}),
        ((GRADIENT, node("Equal", "x four", "last"), ADDED, CHOICE), {"w": "w2", "a": "a2"}, set()),
    ],
    ids=[
        "mean",
        "own",
        "pairs",
        "all",
        "statistics",
        "chain",
        "random",
        "index",
        "accumulation",
        "own_choice",
    ],
)
def test_equal_is_what_is_computed_from_equal_values(
    nodes: tuple[Node, ...], written: dict[str, str], equal: set[str]
) -> None:
    from podrun.tensorflow.graph.replica_equality import equal_variables
    from podrun.tensorflow.operators.table import TensorFlowOperators

    TensorFlowOperators()
    assert equal_variables(nodes, written, {"x"}, replicas=4) == equal
