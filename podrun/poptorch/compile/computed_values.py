"""The values that a session computes for a captured graph, and the nodes that the graph gets for them."""

from __future__ import annotations

from collections.abc import Mapping

from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.api.options import Options
from podrun.poptorch.capture.capture import Capture
from podrun.poptorch.capture.graph import GraphNode, GraphValue, Origin
from podrun.poptorch.compile.compared_values import check_comparisons
from podrun.poptorch.compile.graph_checks import find_loss
from podrun.poptorch.errors import Error


@dataclass(frozen=True, slots=True)
class ValuesToCompute:
    """The values that a session computes: ``outputs`` of forward, ``updates`` of its inputs by position, ``checks`` of
    comparisons, the ``loss``, and a value that stands for forward where it returns nothing (``unseen``).
    """

    outputs: tuple[GraphValue, ...]
    updates: Mapping[int, GraphValue]
    checks: tuple[GraphValue, ...]
    loss: GraphValue | None
    unseen: GraphValue | None

    @property
    def all(self) -> list[GraphValue]:
        """All values that are to be computed."""
        unseen = () if self.unseen is None else (self.unseen,)
        return [*self.outputs, *self.updates.values(), *unseen, *self.checks]


def values_to_compute(captured: Capture, options: Options, *, training: bool) -> ValuesToCompute:
    """Add to the graph what a session needs. Error for a model that computes nothing, or trains without a loss."""
    loss = _summed(captured, find_loss(captured.graph)) if training else None
    _compute_returned_inputs(captured)
    checks = check_comparisons(captured.graph) if options.Precision.floating_point_exceptions else []
    outputs = tuple(leaf for leaf in captured.graph.outputs if isinstance(leaf, GraphValue))
    updates = _input_updates(captured)
    if not outputs and not captured.graph.inputs:
        raise Error(
            "forward computes nothing on the IPU: it gets no tensor and returns none that the IPU computes",
            hint="Give it tensors as arguments, or in lists, tuples, dictionaries and dataclasses.",
        )
    unseen = loss
    if not outputs and loss is None:
        unseen = _copied(captured, next(iter(captured.graph.inputs.values())))
    return ValuesToCompute(outputs, updates, tuple(checks), loss, unseen)


def _new_number(captured: Capture) -> int:
    graph = captured.graph
    taken = [v.number for node in graph.nodes for v in node.results]
    taken += [v.number for v in (*graph.inputs.values(), *graph.parameters.values())]
    return 1 + max([*taken, *graph.constants], default=0)


def _input_updates(captured: Capture) -> dict[int, GraphValue]:
    """The new values of inputs, as separate values, by position."""
    return {place: _copied(captured, value) for place, value in captured.graph.input_updates.items()}


def _copied(captured: Capture, value: GraphValue) -> GraphValue:
    """A new value that an operator makes equal to another one."""
    copy = GraphValue(_new_number(captured), value.shape, value.dtype)
    origin = next((n.origin for n in captured.graph.nodes if value in n.results), Origin())
    captured.graph.nodes.append(GraphNode("aten.clone.default", (value,), {}, (copy,), origin))
    return copy


def _compute_returned_inputs(captured: Capture) -> None:
    """Let inputs that forward returns unchanged pass through an operator, because a session returns only computed
    values.
    """
    inputs = {value.number: value for value in captured.graph.inputs.values()}
    for place, leaf in enumerate(captured.graph.outputs):
        if isinstance(leaf, GraphValue) and leaf.number in inputs:
            captured.graph.outputs[place] = _copied(captured, leaf)


def _summed(captured: Capture, loss: GraphValue) -> GraphValue:
    """The loss as one number: the gradient of an unreduced loss is that of its sum."""
    if not loss.shape:
        return loss
    total = GraphValue(_new_number(captured), (), loss.dtype)
    origin = next(node.origin for node in captured.graph.nodes if loss in node.results)
    captured.graph.nodes.append(GraphNode("aten.sum.default", (loss,), {}, (total,), origin))
    return total
