"""From a session's ONNX model to the function that is compiled: optimizer state taken out, the rest lowered.

`Request` states what a session needs of its model. `gradient_paths` are the tensors from which a path leads to the
loss, and the weights among them: these have gradients.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from podrun.core.errors import UsageError
from podrun.core.executable import numpy_dtype
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Model, captured
from podrun.runtime.optimizers.hyperparameters import Hyperparameters, UpdateContext
from podrun.runtime.optimizers.rules import Rule
from podrun.runtime.pipelining import RESTORED
from podrun.runtime.settings import RunPlan, RunSettings
from podrun.runtime.tensor_names import PREFIXES, STATE_PREFIXES, reserved_prefix_of

if TYPE_CHECKING:
    from podrun.runtime.lowering import Lowered


class UpdateSource(Hyperparameters, Protocol):
    """An optimizer of a front end: it makes the rule by which its weights are updated."""

    def rule(self, context: UpdateContext) -> Rule:
        """The update rule with this optimizer's values."""


@dataclass(frozen=True, slots=True)
class Request:
    """Which tensors, trained by what, on how many IPUs. ``as_in_training``: operators drop out and change running
    statistics although there is no loss. ``own_copies``: each machine keeps and updates all weights by itself.
    ``input_shapes``: shapes of inputs that the model leaves open.
    """

    name: str
    plan: RunPlan
    settings: RunSettings
    ipus_per_replica: int
    loss: str | None = None
    optimizer: UpdateSource | None = None
    as_in_training: bool = False
    own_copies: bool = False
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        """Whether operators behave as in training."""
        return self.as_in_training or self.loss is not None


_ENDS = frozenset({"Detach", "Shape", "Size"})
"""Operators that pass no gradient on."""


def differentiable(lowered: Lowered, loss: str) -> set[str]:
    """Floating-point tensors from which a path of such tensors leads to the loss, and the loss itself."""
    return _leading_to(lowered, loss, through_integers=False)


def trainable(lowered: Lowered, loss: str, only: Collection[str] | None = None) -> set[str]:
    """Floating-point parameters that the loss depends on, except statistics of norms; ``only`` restricts them."""
    reached = _leading_to(lowered, loss, through_integers=True)
    return {
        name
        for name, spec in lowered.parameters.items()
        if name in reached
        and (only is None or name in only)
        and name not in lowered.state_updates
        and (numpy_dtype(spec.dtype).kind == "f" or spec.dtype == "bfloat16")
    }


def _leading_to(lowered: Lowered, loss: str, *, through_integers: bool) -> set[str]:
    makers = {output: node for node in lowered.graph.nodes for output in node.outputs if output}
    reached: set[str] = set()
    queue = [loss]
    while queue:
        name = queue.pop()
        if name in reached or not (through_integers or _is_float(lowered, name)):
            continue
        reached.add(name)
        node = makers.get(name)
        if node is not None and node.kind not in _ENDS:
            queue.extend(item for item in node.inputs if item)
            queue.extend(captured(node))
    return reached


def _is_float(lowered: Lowered, name: str) -> bool:
    spec = lowered.tensors.get(name)
    return spec is not None and numpy_dtype(spec.dtype).kind not in "iub"


GRADIENT = PREFIXES["Gradient"]
_PRUNED = "All operations in the main graph were pruned, nothing to compute"


def take_state(model: Model) -> tuple[dict[str, np.ndarray], Model]:
    """Optimizer state that modelToHost wrote into a model, and the model without it (the same model if it has none)."""
    values = model.graph.initializers
    state = {name: value for name, value in values.items() if name.startswith(STATE_PREFIXES)}
    if not state:
        return state, model
    kept = {name: value for name, value in values.items() if name not in state}
    return state, model.with_graph(replace(model.graph, initializers=kept))


def lower_model(model: Model, request: Request, observed: Sequence[str] = ()) -> Lowered:
    """The model's main graph, as far as anchors, loss and ``observed`` tensors need it.

    UsageError for a loss that does not exist or is not a scalar, or if nothing is needed.
    """
    from podrun.runtime.lowering import LoweringOptions, lower_graph

    plan, settings, loss, graph = request.plan, request.settings, request.loss, model.graph
    wanted = _wanted(graph.tensors(), plan.returned, loss, observed)
    if loss is not None and settings.rewrite is not None:
        graph = settings.rewrite(graph, list(plan.returned))
    lowering = LoweringOptions(
        training=request.training,
        casting=settings.casting,
        casting_hint=settings.casting_hint,
        replicas=settings.replicas,
        dialect=settings.dialect,
        words=settings.words,
    )

    def lowered(outputs: list[str]) -> Lowered:
        return lower_graph(
            graph, model.operators, lowering, outputs=outputs, input_shapes=request.input_shapes
        )

    result = lowered(wanted)
    if not result.graph.nodes:
        raise UsageError(_PRUNED, hint="Anchor a tensor that an operator makes.")
    extra = [target for target in result.state_updates.values() if target not in wanted]
    if extra:
        result = lowered([*wanted, *extra])
    if loss is not None and result.tensors[loss].size != 1:
        raise UsageError(
            f"Loss tensor, '{loss}', must be a scalar tensor",
            hint=f"It has shape {list(result.tensors[loss].shape)}: reduce it, for example with "
            "aiGraphcore.identityloss.",
        )
    if loss is not None and settings.dialect is not None:
        settings.dialect.check_training(result.graph.nodes, differentiable(result, loss))
    return result


def _wanted(
    known: Collection[str], anchors: Iterable[str], loss: str | None, observed: Sequence[str]
) -> list[str]:
    """The tensors of the main graph that the function has to return: for anchors, gradients, observers and the loss."""
    anchors = list(anchors)
    wanted = dict.fromkeys(anchor for anchor in (*anchors, *observed) if anchor in known)
    if loss is not None:
        if loss not in known:
            raise UsageError(f"The loss {loss!r} is no tensor of the model's main graph.{near(loss, known)}")
        wanted[loss] = None
    for anchor in anchors:
        subject = anchor.removeprefix(GRADIENT).removeprefix(RESTORED)
        if subject != anchor and subject in known:
            wanted[subject] = None
    if not wanted and anchors:
        first = anchors[0]
        raise UsageError(f"Anchor tensor `{first}' not in Ir Tensors.{near(first, known)}")
    if not wanted:
        raise UsageError(_PRUNED, hint="Anchor a tensor that an operator makes.")
    return list(wanted)


MOST_NAMES = 8
"""Names that a message lists if none is similar to the wrong one."""


def near(name: str, known: Iterable[str]) -> str:
    """The names most similar to ``name``, else the first of all (the model's own before those that training adds), as
    the end of an error message.
    """
    names = sorted(known, key=lambda item: (reserved_prefix_of(item) is not None, item))
    similar = difflib.get_close_matches(name, names, n=2)
    if similar:
        return f" Did you mean {' or '.join(repr(item) for item in similar)}?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f" There are {', '.join(repr(item) for item in names[:MOST_NAMES])}{more}." if names else ""
