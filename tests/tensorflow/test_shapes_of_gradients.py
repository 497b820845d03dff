"""Types and shapes of gradients are found without a backward pass, where that asks for nothing of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from podrun.core.errors import UnsupportedError, UsageError
from podrun.runtime.graph import Node, OperatorGraph, TensorType

if TYPE_CHECKING:
    from podrun.runtime.lowering import Lowered

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
WIDE, HALF, WHOLE = (np.dtype(name) for name in ("float32", "float16", "int32"))


def node(op_type: str, inputs: str, outputs: str, **attributes: object) -> Node:
    """A node with names that spaces part."""
    return Node(op_type, "tensorflow", outputs, tuple(inputs.split()), tuple(outputs.split()), attributes)


def inner(*nodes: Node, inputs: str = "w", outputs: str) -> OperatorGraph:
    """A graph among a node's attributes."""
    return OperatorGraph("inner", nodes, tuple(inputs.split()), tuple(outputs.split()), {}, {})


def derivative(graph: OperatorGraph, others: str = "", incoming: str = "") -> Node:
    """The gradient ``dw`` of the graph's first result, then other results. ``incoming``: where the gradient begins."""
    inputs = " ".join((*graph.inputs, incoming))
    numbers = (0,) if incoming else ()
    named = {"graph": graph, "targets": 1, "sources": len(graph.inputs), "incoming": numbers}
    return node("Differentiate", inputs, f"dw {others}".strip(), **named)


TANH, TIMES = node("Tanh", "w", "t"), node("Mul", "t x", "loss")
CHOICE = node(
    "Branch",
    "flag",
    "loss",
    branches=(inner(inputs="", outputs="t"), inner(TIMES, inputs="", outputs="loss")),
)
DOUBLED = node(
    "CustomGradient",
    "t",
    "loss",
    backward=inner(node("Add", "g g", "own"), inputs="g", outputs="own"),
    positions=(0,),
)
REFUSED = node("CustomGradient", "t", "loss", backward="its gradient reads what has no value", positions=(0,))


def lowered(step: Node, dtype: np.dtype[Any]) -> Lowered:
    """A program of ``step`` alone, with a weight ``w`` and an input ``x`` of 2 by 3."""
    from podrun.runtime.lowering import lower_graph
    from podrun.tensorflow.operators.table import TensorFlowOperators

    types = {"x": (dtype, (2, 3)), "seed": (dtype, (2, 3)), "short": (dtype, (3,)), "flag": (WHOLE, ())}
    graph = OperatorGraph(
        "step",
        (step,),
        tuple(types),
        step.outputs,
        {"w": np.full((2, 3), 0.5, dtype)},
        {name: TensorType(*form) for name, form in types.items()},
    )
    return lower_graph(graph, TensorFlowOperators(), outputs=step.outputs)


@pytest.fixture
def backward_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Grows with every backward pass that is traced. Nothing that earlier traces told is known."""
    import jax

    taken: list[int] = []
    differentiate = jax.vjp

    def counted(*arguments: Any, **named: Any) -> Any:
        taken.append(len(taken))
        return differentiate(*arguments, **named)

    monkeypatch.setenv("PODRUN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jax, "vjp", counted)
    return taken


@pytest.mark.parametrize("dtype", [WIDE, HALF], ids=str)
@pytest.mark.parametrize(
    ("step", "passes"),
    [
        (derivative(inner(TANH, TIMES, outputs="loss t"), "t"), 0),
        (derivative(inner(TANH, TIMES, outputs="loss"), incoming="seed"), 0),
        (derivative(inner(TANH, CHOICE, outputs="loss")), 1),
        (derivative(inner(TANH, DOUBLED, outputs="loss t"), "t"), 1),
    ],
    ids=["ones", "incoming", "branch", "own"],
)
def test_they_are_those_of_the_program(
    step: Node, passes: int, dtype: np.dtype[Any], backward_passes: list[int]
) -> None:
    """What the program computes has the types and shapes that were found before."""
    import jax

    found = lowered(step, dtype)
    assert len(backward_passes) == passes
    arguments = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        for name, spec in (*found.parameters.items(), *found.inputs.items())
    }
    weights, inputs = ({n: arguments[n] for n in part} for part in (found.parameters, found.inputs))
    results = jax.eval_shape(found.forward, weights, inputs, jax.eval_shape(lambda: jax.random.key(0)))
    assert len(backward_passes) == passes + 1
    assert results.keys() == set(step.outputs)
    for name, result in results.items():
        spec = found.tensors[name]
        assert (spec.shape, spec.dtype) == (result.shape, str(result.dtype))


def test_a_refusal_comes_before_the_program_is_compiled() -> None:
    """A gradient of the program's own that cannot be taken is refused where shapes are found."""
    with pytest.raises(UnsupportedError, match="its gradient reads what has no value"):
        lowered(derivative(inner(TANH, REFUSED, outputs="loss")), WIDE)


def test_a_gradient_that_does_not_fit_is_refused_there_too() -> None:
    """What comes in has another shape than the target."""
    with pytest.raises(UsageError, match="cannot take"):
        lowered(derivative(inner(TANH, TIMES, outputs="loss"), incoming="short"), WIDE)
