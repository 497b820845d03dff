"""A traced model as a chain of layers, and how it lies on a system: what each layer costs, and what each IPU holds.

**Layers.** A layer is a named scope of the trace (an ONNX node's name), in the order of the forward pass; pipelines are
cut between layers. Cycles and code come from the tile model's reports, bytes from the traces themselves:

* ``weights`` belong to the layer that reads them first;
* ``saved_bytes`` are forward values that the backward pass reads (the activations that training keeps);
* ``crossing_bytes`` are values made in this layer or before it and read after it;
* ``work_bytes`` are alive beside kept activations while the layer works, ``temporary_bytes`` are the
  most temporary data of its steps.

**Layouts**, the estimate's half of the memory model. `podrun.costmodel.tile_memory` adds up, for this and for the
compiler alike. The compiler knows the program's segments; here layers stand for them. In a training pipeline every
value that backward work reads is stashed for each micro-batch in flight. With recomputation only what enters the IPU is
stashed, and the rest of its layers' values exist once. A single IPU runs the whole batch, and its liveness is that of
the batch (with recomputation: of the recomputed one).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from podrun.core.errors import InvalidOptionError, UsageError
from podrun.core.names import parse_scope
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.batch import UPDATE_PASSES
from podrun.costmodel.equations import FlatJaxpr
from podrun.costmodel.planners import VIEWS
from podrun.costmodel.products import check_proportion
from podrun.costmodel.settings import Location
from podrun.costmodel.target import Chip, System
from podrun.costmodel.tile_memory import (
    ACCUMULATORS,
    STASH,
    STATE,
    STREAMS,
    WEIGHTS,
    Demand,
    fits,
    fullest_tile,
    in_flight,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of one micro-batch on one IPU."""

    name: str
    forward_cycles: float
    step_cycles: float
    weights: int
    weight_bytes: int
    saved_bytes: int
    crossing_bytes: int
    code_bytes: int
    work_bytes: int
    temporary_bytes: int


def layers_of(
    forward: Mapping[str, Any], step: Mapping[str, Any], ahead: FlatJaxpr, whole: FlatJaxpr, parameters: int
) -> tuple[Layer, ...]:
    """The layers of a model from the reports and flat traces of its forward pass and of its whole step.

    The first ``parameters`` arguments of both traces are the weights. In inference both are the same.
    """
    names = _order(forward, ahead)
    index = {name: position for position, name in enumerate(names)}
    places = _places(ahead, index)
    ahead_cycles = _by_layer(((e["scope"], _cycles(e)) for e in forward["timeline"]), index)
    step_cycles = _by_layer(step["by_scope"].items(), index)
    code = _by_layer(((s, sum(parts.values())) for s, parts in step["code_by_scope"].items()), index)
    weights, weight_bytes = _weights(ahead, places, parameters, len(names))
    saved = _saved(whole, index)
    crossing = _crossing(ahead, places, len(names))
    work, temporary = _at_work(step, index, saved)
    columns = (ahead_cycles, step_cycles, weights, weight_bytes, saved, crossing, code, work, temporary)
    return tuple(
        Layer(name, a, s, int(w), int(b), int(k), int(c), int(o), int(m), int(t))
        for name, a, s, w, b, k, c, o, m, t in zip(names, *columns, strict=True)
    )


def _at_work(
    step: Mapping[str, Any], index: Mapping[str, int], saved: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Bytes alive while each layer works, without what it and the layers before it keep; and temporary data."""
    kept = list(itertools.accumulate(saved))
    live, temporary = [0] * len(index), [0] * len(index)
    for scope, entry in step["memory_by_scope"].items():
        place = index.get(parse_scope(scope).layer, len(index) - 1)
        live[place] = max(live[place], entry["live"] - kept[place])
        temporary[place] = max(temporary[place], entry["temporary"])
    return live, temporary


def _cycles(entry: Mapping[str, Any]) -> float:
    return float(entry["compute"] + entry["exchange"] + entry["sync"])


def _order(forward: Mapping[str, Any], ahead: FlatJaxpr) -> list[str]:
    """Layers as the forward pass meets them: equations in their order (layers of views alone among them),
    and then what only the timeline names.
    """
    scopes = itertools.chain(
        (e.scope for e in ahead.equations if e.scope), (e["scope"] for e in forward["timeline"])
    )
    return list(dict.fromkeys(parse_scope(scope).layer for scope in scopes)) or [""]


def _by_layer(entries: Any, index: Mapping[str, int]) -> list[float]:
    """Sums by layer. What belongs to no layer (the loss, work without a name) counts for the last one."""
    totals = [0.0] * len(index)
    for scope, value in entries:
        totals[index.get(parse_scope(scope).layer, len(index) - 1)] += value
    return totals


def _places(flat: FlatJaxpr, index: Mapping[str, int]) -> list[int]:
    """The layer of each equation. An equation without a name is in the layer of the equation before it."""
    places, last = [], 0
    for equation in flat.equations:
        last = index.get(parse_scope(equation.scope).layer, last) if equation.scope else last
        places.append(last)
    return places


def _weights(
    flat: FlatJaxpr, places: Sequence[int], parameters: int, layers: int
) -> tuple[list[int], list[int]]:
    counts, sizes = [0] * layers, [0] * layers
    wanted = set(flat.arguments[:parameters])
    for place, equation in zip(places, flat.equations, strict=True):
        for number in equation.inputs:
            if number in wanted:
                wanted.discard(number)
                tensor = flat.tensors[number]
                counts[place] += tensor.size
                sizes[place] += tensor.nbytes
    for number in wanted:  # No equation reads it, but it is held.
        counts[-1] += flat.tensors[number].size
        sizes[-1] += flat.tensors[number].nbytes
    return counts, sizes


def _roots(flat: FlatJaxpr) -> dict[int, int]:
    """For each result of a view the value whose memory it is."""
    roots: dict[int, int] = {}
    for equation in flat.equations:
        source = next((n for n in equation.inputs if n is not None), None)
        if equation.primitive in VIEWS and source is not None:
            roots |= dict.fromkeys(equation.outputs, roots.get(source, source))
    return roots


def _saved(flat: FlatJaxpr, index: Mapping[str, int]) -> list[int]:
    roots = _roots(flat)
    maker: dict[int, int] = {}
    saved, kept = [0] * len(index), set[int]()
    for equation in flat.equations:
        if parse_scope(equation.scope).backward:
            for number in equation.inputs:
                root = roots.get(number, number) if number is not None else None
                if root in maker and root not in kept:
                    kept.add(root)
                    saved[maker[root]] += flat.tensors[root].nbytes
        elif equation.primitive not in VIEWS and equation.scope:
            place = index.get(parse_scope(equation.scope).layer, len(index) - 1)
            maker |= dict.fromkeys(equation.outputs, place)
    return saved


def _crossing(flat: FlatJaxpr, places: Sequence[int], layers: int) -> list[int]:
    roots = _roots(flat)
    maker_places: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, equation in zip(places, flat.equations, strict=True):
        for number in equation.inputs:
            if number is not None:
                root = roots.get(number, number)
                last[root] = max(place, last.get(root, place))
        if equation.primitive not in VIEWS:
            maker_places |= dict.fromkeys(equation.outputs, place)
    crossing = [0] * layers
    for number, place in maker_places.items():
        for behind in range(place, last.get(number, place)):
            crossing[behind] += flat.tensors[number].nbytes
    return crossing


@dataclass(frozen=True, slots=True)
class ProgramLayout:
    """How a program lies on the system: IPUs per replica, micro-batch, accumulation, and how it saves memory."""

    micro_batch: int = 1
    accumulation: int = 1
    ipus_per_replica: int = 1
    recompute: bool = False
    optimizer: str = "momentum"
    state_off_chip: bool = False
    shard_state: bool = False
    partials_type: str = "float16"
    proportion: float = 0.6


def check_layout(system: System, layout: ProgramLayout) -> None:
    """Check that ``system`` can run ``layout``, before anything is traced.

    Raises:
        InvalidOptionError: IPUs per replica that the system cannot hold or divide, an unknown optimizer, or a memory
            proportion outside (0, 1].
        UsageError: a micro-batch or accumulation below one.
    """
    per = layout.ipus_per_replica
    if per < 1 or system.ipus % per:
        raise InvalidOptionError(
            f"{per} IPUs per replica do not divide the {system.ipus} IPUs of {system.name}",
            hint="Give a power of two that is not larger than the system.",
        )
    if layout.optimizer not in UPDATE_PASSES:
        raise InvalidOptionError(
            f"unknown optimizer {layout.optimizer!r}", hint=f"Known: {', '.join(UPDATE_PASSES)}."
        )
    check_proportion(layout.proportion)
    check_counts(layout)


def check_counts(layout: ProgramLayout) -> None:
    """Raise UsageError for a micro-batch or accumulation below one."""
    for name, value in (("micro-batch", layout.micro_batch), ("accumulation", layout.accumulation)):
        if value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}", hint=f"As in --{name} 4.")


STATES = {"sgd": 0, "momentum": 1, "lars": 1, "adam": 2, "lamb": 2}
"""Values of optimizer state per weight, float32."""
STATE_WIDTH = 4


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Answers for one traced model and layout. ``step``: the report's memory of the step that one IPU alone would run:
    the forward pass, the training step, or the recomputed training step.
    """

    chip: Chip
    layers: Sequence[Layer]
    step: Mapping[str, Any]
    train: bool
    ipus: int
    accumulation: int
    recompute: bool
    states: int
    state_location: Location
    input_bytes: int

    def fits(self, ipu: int, first: int, end: int) -> bool:
        """True iff the fullest tile of IPU ``ipu`` holds its share of layers ``[first, end)``."""
        return fits(self.chip, self.demand(ipu, first, end))

    def tile_bytes(self, ipu: int, first: int, end: int) -> int:
        """Bytes on the fullest tile of IPU ``ipu`` if it has layers ``[first, end)``."""
        return fullest_tile(self.chip, self.demand(ipu, first, end))

    def demand(self, ipu: int, first: int, end: int) -> Demand:
        """The memory that IPU ``ipu`` needs if it has layers ``[first, end)``."""
        own = self.layers[first:end]
        lasting = {WEIGHTS: sum(layer.weight_bytes for layer in own)}
        lasting[STREAMS] = 0 if first else self.input_bytes
        entering = self.layers[first - 1].crossing_bytes if first else 0
        leaving = own[-1].crossing_bytes
        if self.train:
            lasting[STATE] = sum(self.states * self._state_bytes(layer) for layer in own)
            lasting[ACCUMULATORS] = lasting[WEIGHTS] if self.accumulation > 1 else 0
        if self.ipus == 1:
            live = self.step["not_always_live_peak_bytes"] - self.step["temporary_bytes"]
            return Demand(lasting, live, self.step["temporary_bytes"], self.step["code"])
        # An upper bound: layers that repeat an earlier one need less exchange code.
        code = {
            "vertex_code": int(self.step["code"].get("vertex_code", 0)),
            "other_code": sum(layer.code_bytes for layer in own),
        }
        work = max(layer.work_bytes for layer in own)
        temporary = max(layer.temporary_bytes for layer in own)
        saved = sum(layer.saved_bytes for layer in own)
        if not self.train:
            lasting[STASH] = entering + leaving
        else:
            flight = in_flight(self.ipus, ipu)
            # An input that is kept is in its stream's buffer once.
            first_inputs = (flight - 1) * self.input_bytes if not first else 0
            crossing = flight * entering + leaving + (leaving if ipu < self.ipus - 1 else 0)
            last = ipu == self.ipus - 1
            lasting[STASH] = first_inputs + crossing + (0 if self.recompute or last else flight * saved)
            work += saved if self.recompute or last else 0
        return Demand(lasting, work, temporary, code)

    def _state_bytes(self, layer: Layer) -> int:
        return self.state_location.on_chip(layer.weights, STATE_WIDTH)
