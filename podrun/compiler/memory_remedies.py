"""What makes a model fit that does not.

Streaming, sharding, smaller micro-batches, half precision, each tried on the modelled memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from podrun.compiler.arenas import Memory
from podrun.compiler.ipu_memory import Works, ipu_memory
from podrun.compiler.program import Locations, Program
from podrun.core.executable import numpy_dtype
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.settings import Location, Recompute
from podrun.costmodel.target import Chip
from podrun.costmodel.tile_memory import (
    ACTIVATIONS,
    CONSTANTS,
    LASTING,
    STASH,
    STATE,
    STREAMS,
    TEMPORARY,
    WEIGHTS,
    Demand,
    fits,
)

_OFF, _PLACES = Location(off_chip=True), "TensorLocationSettings"
_SETTINGS = {
    "optimizer_state": ("optimizer state", f"optimizerState{_PLACES}"),
    "accumulators": ("accumulators", f"accumulator{_PLACES}"),
    "weights": ("weights", f"weight{_PLACES}"),
}


def remedies(
    program: Program,
    memory: Memory,
    works: Works,
    updates: Mapping[int, Mapping[str, Any]],
    model: Chip,
) -> list[dict[str, Any]]:
    """The changes that would make the program fit, the simplest first: ``what`` to do, ``setting`` (how),
    ``max_tile_bytes`` then (None where only a bound says that it can). Empty: none of those tried does.
    """
    advice: list[dict[str, Any]] = []
    entries = ipu_memory(program, memory, works(program), updates, model)
    for what, setting, changed in _changes(program):
        if any(what.endswith(simpler["what"]) for simpler in advice):
            continue
        held = ipu_memory(changed, memory, works(changed), updates, model)
        if all(entry["memory"]["fits"] for entry in held):
            most = max(entry["memory"]["max_tile_bytes"] for entry in held)
            advice.append({"what": what, "setting": setting, "max_tile_bytes": most})
    if advice:
        return advice
    bound = _Bound(program, memory, [entry["memory"]["by_content"] for entry in entries], model)
    return [{"what": what, "setting": how, "max_tile_bytes": None} for what, how in bound.changes()]


@dataclass(frozen=True, slots=True)
class _Bound:
    """What changes of the program itself cannot make smaller. ``contents``: of each IPU, bytes by content."""

    program: Program
    memory: Memory
    contents: Sequence[Mapping[str, int]]
    model: Chip

    def changes(self) -> Iterator[tuple[str, str]]:
        """The changes that may make the program fit, and their settings."""
        smaller = self.program.metadata.get("samples_per_micro_batch") != 1
        fewer, staged = "use a smaller micro-batch", "pipeline over more IPUs"
        helped = False
        if smaller and self._fits(self._scaled):
            helped = True
            yield fewer, ""
        # A stage needs a weight of its own, else it has nothing to take over from the others.
        if len(self.program.parameters) > self.program.ipus_per_replica:
            if self._fits(self._of_one_weight):
                helped = True
                yield staged, "pipelineStage"
            elif not helped and smaller and self._fits(lambda c: self._of_one_weight(self._scaled(c))):
                helped = True
                yield f"{fewer} and {staged}", "pipelineStage"
        if any(item.spec.dtype == "float32" for item in self.program.parameters.values()):
            if self._fits(self._in_half):
                yield "compute in FLOAT16", ""
            elif not helped and smaller and self._fits(lambda c: self._in_half(self._scaled(c))):
                yield f"compute in FLOAT16 and {fewer}", ""

    def _fits(self, changed: Callable[[Mapping[str, float]], Mapping[str, float]]) -> bool:
        return all(fits(self.model, _demand(changed(content))) for content in self.contents)

    def _waiting(self, content: Mapping[str, float]) -> float:
        """Bytes of gradients that wait for the update, which counts them as activations."""
        program = self.program
        return content.get(WEIGHTS, 0) if program.loss is not None and not program.accumulates else 0

    def _scaled(self, content: Mapping[str, float]) -> dict[str, float]:
        """The contents with a micro-batch of one sample."""
        samples = self.program.metadata.get("samples_per_micro_batch") or _MANY
        waiting = self._waiting(content)
        scaled = {name: content.get(name, 0) / samples for name in (STREAMS, STASH)}
        scaled[ACTIVATIONS] = waiting + max(0, content.get(ACTIVATIONS, 0) - waiting) / samples
        temporary = content.get(TEMPORARY, 0)
        scaled[TEMPORARY] = max(temporary / samples, min(temporary, self._largest_gradient("float16")))
        return {**content, **scaled}

    def _of_one_weight(self, content: Mapping[str, float]) -> Mapping[str, float]:
        """The contents of a stage that has one weight. The first of P stages keeps the activations of its layers for
        2 P - 1 micro-batches in training, so that many stages keep twice as many as one IPU without a pipeline.
        """
        # A stage accumulates its gradients, beside the one that is being made.
        most = max(need + gradient for need, _, gradient in _needs(self.program, self.memory))
        grown, kept = content.get(STASH, 0), content.get(ACTIVATIONS, 0) - self._waiting(content)
        if self.program.loss is not None:
            grown, kept = (grown * 4 / 3, kept) if self.program.pipelined else (grown, 2 * kept)
        own = {name: content.get(name, 0) for name in (STREAMS, CONSTANTS, TEMPORARY)}
        return {**own, WEIGHTS: most, STASH: grown, ACTIVATIONS: max(0, kept)}

    def _in_half(self, content: Mapping[str, float]) -> Mapping[str, float]:
        """The contents with values of two bytes. Optimizer state stays as it is, and so do temporary data, which are
        partial sums in single precision; a weight's gradient has them too then.
        """
        halved = {name: size if name == STATE else size / 2 for name, size in content.items()}
        return halved | {TEMPORARY: content.get(TEMPORARY, 0) + self._largest_gradient("float32")}

    def _largest_gradient(self, dtype: str) -> int:
        """Bytes in single precision of the largest gradient of a weight of this type."""
        held = self.program.parameters
        return max(
            (
                4 * held[w.name].spec.size
                for g in self.memory.groups
                for w in g.weights
                if held[w.name].spec.dtype == dtype
            ),
            default=0,
        )


_MANY = 1_000_000
"""Samples of a micro-batch whose inputs have no leading dimension in common, so that what depends on them counts for
nothing.
"""


def _demand(content: Mapping[str, float]) -> Demand:
    """Contents without code, which a changed program has less of."""
    lasting = {name: round(content.get(name, 0)) for name in LASTING}
    return Demand(lasting, round(content.get(ACTIVATIONS, 0)), round(content.get(TEMPORARY, 0)))


def largest_need(program: Program, memory: Memory) -> dict[str, Any]:
    """The weight that needs most of an IPU, with its gradient and its optimizer state if it is ``trained``: ``name``,
    ``bytes``. Empty if the program has none.
    """
    need, name, gradient = max(_needs(program, memory), default=(0, "", 0))
    return {"name": name, "bytes": need, "trained": gradient > 0} if name else {}


def _changes(program: Program) -> Iterator[tuple[str, str, Program]]:
    """The changes that a session's options allow: name, setting, and the changed program."""
    where = program.locations
    kinds = [kind for kind in _kinds(program) if getattr(where, kind) == Location()]
    moved: list[tuple[str, str, Locations]] = []
    for kind in kinds:
        name, setting = _SETTINGS[kind]
        if program.replicas > 1 and kind != "weights":
            cut = Location(shards=program.replicas)
            moved.append((f"shard {name} over replicas", setting, _with(where, {kind: cut})))
        moved.append((f"keep {name} off chip", setting, _with(where, {kind: _OFF})))
    if len(kinds) > 1:
        names = ", ".join(_SETTINGS[kind][0] for kind in kinds)
        settings = ", ".join(_SETTINGS[kind][1] for kind in kinds)
        everything = _with(where, dict.fromkeys(kinds, _OFF))
        moved.append((f"keep {names} off chip", settings, everything))
    for what, setting, places in moved:
        yield what, setting, replace(program, locations=places)
    if program.loss is not None and program.recompute.rule == "none":
        rule = Recompute("pipeline" if program.pipelined else "standard")
        again = replace(program, recompute=rule)
        yield "recompute activations", "autoRecomputation", again
        if moved:
            what, setting, places = moved[-1]
            both = f"autoRecomputation, {setting}"
            yield f"recompute activations and {what}", both, replace(again, locations=places)


def _with(where: Locations, places: Mapping[str, Location]) -> Locations:
    return replace(where, **places)  # type: ignore[arg-type]


def _kinds(program: Program) -> list[str]:
    """Kinds of variables that the program has, the cheapest to move first."""
    kinds = ["weights"] if program.parameters else []
    if program.accumulates:
        kinds.insert(0, "accumulators")
    if program.update is not None:
        kinds.insert(0, "optimizer_state")
    return kinds


def _needs(program: Program, memory: Memory) -> Iterator[tuple[int, str, int]]:
    """Bytes that a weight, its gradient and its optimizer state take on chip, its name, and those of the gradient."""
    where, rule = program.locations, program.update
    trained = {weight.name: group for group in memory.groups for weight in group.weights}
    for name, parameter in program.parameters.items():
        spec = parameter.spec
        need = where.of(name, where.weights).on_chip(spec.size, numpy_dtype(spec.dtype).itemsize)
        gradient = 0
        if name in trained:
            gradient = spec.size * numpy_dtype(trained[name].gradient_dtype).itemsize
            for state, _ in rule.state(spec).values() if rule is not None else ():
                place = where.of(state.name, where.optimizer_state)
                need += place.on_chip(state.size, numpy_dtype(state.dtype).itemsize)
        yield need + gradient, name, gradient
