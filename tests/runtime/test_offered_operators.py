"""A table of operators on offer: other front ends find its operators, and are told how to register one without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

import pytest

from podrun.core.errors import UnimplementedError
from podrun.runtime import operators
from podrun.runtime.graph import Node
from podrun.runtime.operators import Operator, offer_operators, offered_operator

NODE = Node("Cube", "my.ops", "Cube", ("x",), ("y",), {}, 1)


class Table:
    """Knows every operator."""

    def lookup(self, node: Node) -> Operator:
        """The operator that gives its input."""
        return Operator(node.domain, node.op_type, 1, lambda ctx, node, x: x)

    def meaning(self, nodes: Iterable[Node]) -> str | None:
        """All functions are the test's own."""
        return None


@pytest.fixture(autouse=True)
def nothing_on_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_offered", [])


def test_without_a_table_the_error_says_how_to_register_the_operator() -> None:
    with pytest.raises(UnimplementedError, match=r"my\.ops\.Cube") as raised:
        offered_operator(NODE)
    assert 'register_op("my.ops", "Cube", 1, function)' in str(raised.value.hint)


def test_the_last_table_on_offer_is_asked() -> None:
    offer_operators(Table())
    assert offered_operator(NODE).name == "Cube"


@pytest.mark.slow  # It starts a process that imports torch.
def test_poptorch_programs_have_the_operators_of_popart_on_offer() -> None:
    code = (
        "import poptorch\n"
        "from podrun.runtime.graph import Node\n"
        "from podrun.runtime.operators import offered_operator\n"
        'print(offered_operator(Node("Relu", "ai.onnx", "Relu", ("x",), ("y",), {}, 13)).name)'
    )
    run = subprocess.run(
        [sys.executable, "-m", "podrun.compat", "-c", code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.stdout == "Relu\n", run.stderr
