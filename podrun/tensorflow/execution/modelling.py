"""What the tile model is shown of a program: the forward pass with its loss and its places, to be differentiated,
pipelined and updated by the runtime.

The program that runs computes one mini-batch in an iteration, gradients and accumulation included: its numbers hold.
Its time and memory on tiles are those of the form that an IPU would run: stages on their IPUs, a backward pass that
JAX derives, accumulators, and an update with as many slots for each weight as the program's optimizer has.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from typing import Any

import numpy as np

from podrun.compiler.compile import model_program
from podrun.compiler.program import PipelineOrder
from podrun.core.executable import Retrieval, TensorSpec
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.building import build_model
from podrun.runtime.graph import Model, Node, OperatorGraph, Place, TensorType, prune, reads
from podrun.runtime.model_lowering import Request
from podrun.runtime.optimizers.hyperparameters import Clipping, Hyperparameter, UpdateContext
from podrun.runtime.optimizers.rules import Compound, Rule, WeightUpdate, state_spec
from podrun.runtime.pipelining import check_homes
from podrun.runtime.placing import place
from podrun.runtime.settings import FixedPlan, PlacedBy, Recomputation, Returned, RunSettings
from podrun.tensorflow.capture.places import PipelineShape
from podrun.tensorflow.graph.differentiation import trimmed
from podrun.tensorflow.operators.table import TensorFlowOperators

SLOTS = ("Accl1___", "Accl2___", "Accl3___")
"""Names of the slots of an update; TensorFlow's optimizers have at most three for a weight."""


class SlotRule(Rule):
    """An update with so many slots for each weight as the program's optimizer has: what it takes on tiles, not its
    numbers.
    """

    def __init__(self, values: SlotUpdate, context: UpdateContext) -> None:
        super().__init__(values, context)
        self.slots = values.slots

    def form_key(self) -> tuple[Any, ...]:
        """What rules must have in common to replace each other: the number of slots."""
        return (self.slots,)

    def compounds(self, weight: str) -> Sequence[Compound]:
        """None: constants stand in for the scalars."""
        return ()

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        """The slots, of the weight's shape."""
        return {prefix: (state_spec(prefix, weight), 0.0) for prefix in SLOTS[: self.slots]}

    def update(self, now: WeightUpdate) -> tuple[Any, dict[str, Any]]:
        """A step along moving averages of the gradient."""
        import jax.numpy as jnp

        step, after = now.gradient, {}
        for place_, (prefix, value) in enumerate(now.state.items()):
            after[prefix] = 0.9 * value + 0.1 * (step if place_ == 0 else step * step)
            step = after[prefix] if place_ == 0 else step / (jnp.sqrt(after[prefix]) + 1e-7)
        return now.weight - 0.01 * step, after


@dataclass(frozen=True, slots=True)
class SlotUpdate:
    """An optimizer with ``slots`` for each weight: a `podrun.runtime.model_lowering.UpdateSource`."""

    slots: int
    loss_scaling: Hyperparameter = field(default_factory=lambda: Hyperparameter(1.0))
    clipping: tuple[Clipping, ...] = ()

    def hyperparameter(self, name: str, weight: str) -> Hyperparameter:
        """0: the update is the program's own, and the model of it depends on no value."""
        return Hyperparameter(0.0)

    def is_specific(self, name: str, weight: str) -> bool:
        """No weight has values of its own."""
        return False

    def rule(self, context: UpdateContext) -> Rule:
        """The rule that updates as many slots of each weight as the program's own update."""
        return SlotRule(self, context)


_QUEUE = re.compile(r"(?:in|out)feed\d+")


def _in_full(value: object) -> object:
    """A stand-in whose ``repr`` is different for different values: a digest for an array, the nodes of a graph."""
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, OperatorGraph):
        return _in_full(value.nodes), value.inputs, value.outputs
    if isinstance(value, Node):
        return value.op_type, value.inputs, value.outputs, _in_full(value.attributes)
    if isinstance(value, Mapping):
        return [(key, _in_full(item)) for key, item in sorted(value.items())]
    if isinstance(value, (list, tuple)):
        return [_in_full(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """A step as the tile model is to see it. ``places``: node -> place; ``losses``: node that differentiates -> whether
    its first target is a scalar; ``written``: variables that the step writes; ``out``: tensors that leave it.
    """

    name: str
    nodes: Sequence[Node]
    places: Mapping[str, Place]
    losses: Mapping[str, bool]
    written: Collection[str]
    out: Sequence[str]
    pipeline: PipelineShape | None
    recomputes: bool = False
    shares: tuple[tuple[str, float], ...] = ()
    """The part of the tiles that products may take for temporary data, by their operator in the planner."""
    recomputed: Mapping[str, bool] = field(default_factory=dict)
    """Node -> whether its results are computed again in the backward pass, or kept, where the program says it."""

    @property
    def form(self) -> str:
        """What the report depends on besides the nodes, as text."""
        places = sorted((label, place.ipu, place.stage) for label, place in self.places.items())
        shares = self.shares, self.own_shares
        return repr((self.pipeline, self.recomputes, shares, places, sorted(self.recomputed.items())))

    @property
    def own_shares(self) -> tuple[tuple[str, float], ...]:
        """The part of the tiles for temporary data that operators name themselves, by label."""
        inner = (n for item in self.nodes if item.op_type == "Differentiate" for n in item["graph"].nodes)
        shares = ((n.label, n.get("memory_share", 0.0)) for n in (*self.nodes, *inner))
        return tuple((label, share) for label, share in shares if share > 0)

    def content(
        self,
        types: Mapping[str, TensorType],
        values: Mapping[str, np.ndarray],
        baked: Mapping[str, np.ndarray],
        device: tuple[int, str],
    ) -> str:
        """A digest that two steps have in common if one compilation is enough for both: they compute the same, on
        values of the same types, whichever their queues are. ``baked``: the values that are constants of the program.
        """
        held = sorted((key, value.shape, str(value.dtype)) for key, value in values.items())
        read = _in_full(self.nodes), list(types.items()), held, _in_full(baked)
        text = repr((device, self.form, read, tuple(self.out)))
        numbers: dict[str, str] = {}
        text = _QUEUE.sub(lambda hit: numbers.setdefault(hit.group(), f"feed:{len(numbers)}"), text)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def micro_batches(self) -> int:
        """Iterations that one modelled batch stands for."""
        return 1 if self.pipeline is None else self.pipeline.micro_batches

    @property
    def differentiated(self) -> Node | None:
        """The node whose forward pass is most of the step; None for inference, or where the loss is no scalar."""
        able = [n for n in self.nodes if n.op_type == "Differentiate" and self.losses.get(n.label)]
        return max(able, key=lambda node: len(node["graph"].nodes), default=None)

    @property
    def apart(self) -> bool:
        """Whether the program is modelled in another form than the one that runs."""
        return self.differentiated is not None or bool(self.places or self.shares or self.own_shares)


def _forward(step: ModelledStep, node: Node | None) -> list[Node]:
    """The step's nodes with the forward pass of ``node`` in its place; without one, with the forward passes of all."""
    nodes: list[Node] = []
    there: set[str] = set()
    for item in step.nodes:
        if item is node or (node is None and item.op_type == "Differentiate"):
            fed = dict(zip(item["graph"].inputs, item.inputs, strict=False))
            fresh = [n for n in item["graph"].nodes if n.label not in there]
            there.update(n.label for n in fresh)
            nodes += [replace(n, inputs=tuple(fed.get(i, i) for i in n.inputs)) for n in fresh]
        elif item.op_type not in ("Differentiate", "Store"):
            nodes.append(item)
    return nodes


def _placed(nodes: Sequence[Node], places: Mapping[str, Place]) -> list[Node]:
    """The nodes with places: their own, else that of the last maker of what they read, or of another reader of the
    variables that they read; of constants, a reader's. What has none of these, such as the counter of a loop, lies with
    the first stage.
    """
    makers: dict[str, Place] = {}
    homes: dict[str, Place] = {}
    for node in nodes:
        own = places.get(node.label)
        if own is not None and own.ipu is not None:
            homes |= {name: own for name in sorted(reads(node)) if name not in homes}
    chosen: dict[str, Place] = {}
    first = next((p for p in places.values() if p.stage == 0 and p.ipu is not None), Place(0, 0))

    def order(item: Place) -> tuple[int, int]:
        return item.stage or 0, item.ipu or 0

    for node in nodes:
        sources = [makers[name] for name in sorted(reads(node)) if name in makers]
        sources = sources or [homes[name] for name in sorted(reads(node)) if name in homes]
        own = places.get(node.label)
        chosen[node.label] = (
            own if own is not None and own.ipu is not None else max(sources, key=order, default=first)
        )
        if sources or own is not None:
            makers |= dict.fromkeys(node.outputs, chosen[node.label])
    readers: dict[str, Place] = {}
    for node in reversed(nodes):
        if not node.inputs and node.outputs[0] in readers:
            chosen[node.label] = readers[node.outputs[0]]
        for name in reads(node):
            readers[name] = min(readers.get(name, chosen[node.label]), chosen[node.label], key=order)
    return [replace(node, place=chosen[node.label]) for node in nodes]


def _without_gaps(nodes: Sequence[Node]) -> list[Node]:
    """The nodes with stages numbered from 0: a stage that only hands values on has none."""
    stages = sorted({n.place.stage for n in nodes if n.place is not None and n.place.stage is not None})
    numbers = {stage: number for number, stage in enumerate(stages)}
    return [
        n
        if n.place is None or n.place.stage is None
        else replace(n, place=replace(n.place, stage=numbers[n.place.stage]))
        for n in nodes
    ]


def _hinted(nodes: Sequence[Node], step: ModelledStep) -> list[Node]:
    """The nodes with what the configuration and the program say of their memory."""
    shares = dict(step.shares)

    def hinted(node: Node) -> Node:
        share = node.get("memory_share") or shares.get(node.kind)
        again = step.recomputed.get(node.label)
        if share is None and again is None:
            return node
        own = node.hints
        share = own.available_memory if share is None else share
        again = own.recompute if again is None else again
        return replace(node, hints=replace(own, available_memory=share, recompute=again))

    return [hinted(node) for node in nodes]


def _slots(step: ModelledStep, trained: Collection[str], values: Mapping[str, np.ndarray]) -> int:
    """Slots of a weight: what the step writes besides weights and accumulators, in weights' sizes."""
    weights = sum(values[key].size for key in trained) or 1
    others = sum(values[key].size for key in step.written if key not in trained and values[key].ndim)
    accumulators = step.micro_batches > 1
    return max(0, min(round(others / weights) - accumulators, len(SLOTS)))


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The forward pass of a step: its graph, its loss (None in inference) and the weights that it trains."""

    graph: OperatorGraph
    loss: str | None
    trained: frozenset[str]


def forward_graph(
    step: ModelledStep, types: Mapping[str, TensorType], values: Mapping[str, np.ndarray]
) -> ForwardPass:
    """The forward pass of a step. ``types``: of what infeeds give; ``values``: of all variables, by their names."""
    node = step.differentiated
    nodes = _forward(step, node)
    loss = None if node is None else str(node["graph"].outputs[0])
    outputs = tuple(step.out) if loss is None else (loss,)
    if step.places:
        nodes = _placed(nodes, step.places)
    kept = _hinted(_without_gaps(trimmed(nodes, outputs)), step)
    graph = OperatorGraph(step.name, tuple(kept), tuple(types), outputs, dict(values), dict(types))
    graph = prune(graph, outputs)
    sources = () if node is None else node.inputs[: node["sources"]]
    return ForwardPass(graph, loss, frozenset(sources) & graph.initializers.keys())


def modelled_report(
    step: ModelledStep,
    types: Mapping[str, TensorType],
    values: Mapping[str, np.ndarray],
    settings: RunSettings,
    ipus_per_replica: int,
    target: str,
) -> dict[str, Any]:
    """The tile report of a step on a chip ``target``: of one weight update, or of as many mini-batches of inference as
    run together. UsageError for stages that no pipeline can have.
    """
    forward = forward_graph(step, types, values)
    graph, loss, trained = forward.graph, forward.loss, forward.trained
    outputs = graph.outputs
    run = _settings(step, settings, training=loss is not None)
    graph = place(graph, run, ipus_per_replica)
    if run.overlaps:
        check_homes(graph)
    batches = 1 if loss is not None else step.micro_batches
    returned = {name: Returned(Retrieval.ALL) for name in sorted(outputs)}
    request = Request(
        step.name,
        FixedPlan(batches, returned),
        run,
        ipus_per_replica,
        loss if trained else None,
        SlotUpdate(_slots(step, trained, values)) if trained else None,
    )
    built = build_model(Model(graph, TensorFlowOperators(), trained=trained or None), request)
    return model_program(built.program, target=target)


StepTaker = Callable[[ModelledStep, Mapping[str, TensorType], Mapping[str, np.ndarray]], None]
_takers: list[StepTaker] = []


@contextmanager
def steps_offered_to(taker: StepTaker) -> Iterator[None]:
    """Show ``taker`` each step before its first run, with the types of its inputs and the values of its variables; it
    may end the program.
    """
    _takers.append(taker)
    try:
        yield
    finally:
        _takers.remove(taker)


def offer_step(step: ModelledStep, types: Mapping[str, TensorType], values: Mapping[str, np.ndarray]) -> None:
    """Show a step to those who asked for it."""
    for taker in _takers:
        taker(step, types, values)


def _settings(step: ModelledStep, settings: RunSettings, *, training: bool) -> RunSettings:
    shape = step.pipeline
    again = step.recomputes or (shape is not None and shape.recomputes)
    run = replace(settings, placement=PlacedBy.BY_HAND if step.places else PlacedBy.ONE_IPU)
    if shape is None:
        return replace(run, recomputation=Recomputation.STANDARD if again else Recomputation.NOTHING)
    order = shape.order
    if order is PipelineOrder.INTERLEAVED and not training:
        order = PipelineOrder.GROUPED
    return replace(
        run,
        locations=shape.storage.locations(settings.replicas) if training else run.locations,
        accumulates=training and shape.micro_batches > 1,
        accumulation=shape.micro_batches if training else 1,
        pipelined=bool(step.places),
        order=order,
        checks_restores=False,
        io_tiles=shape.io_tiles,
        recomputation=Recomputation.PIPELINE if again else Recomputation.NOTHING,
    )
