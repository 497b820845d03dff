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


def test_names_of_the_front_end_are_there_in_version_1() -> None:
    """``import tensorflow`` gives version 1 to programs of version 1, and so to podrun's own modules."""
    import re
    from pathlib import Path

    import tensorflow as tf

    def there(root: object, chain: list[str]) -> bool:
        for name in chain:
            if not hasattr(root, name):
                return False
            root = getattr(root, name)
        return True

    version_1, missing, read = tf.compat.v1, set(), set[str]()
    for path in (Path(__file__).parents[2] / "podrun" / "tensorflow").rglob("*.py"):
        read |= set(
            re.findall(r"(?<![\w.`])tf\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", path.read_text(encoding="utf-8"))
        )
    for name in read:
        chain = name.split(".")
        if hasattr(version_1, chain[0]) and there(tf, chain) and not there(version_1, chain):
            missing.add(name)
    assert "Variable" in read
    assert not missing
