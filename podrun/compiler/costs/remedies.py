"""What would make a program fit that does not: each change is tried against the memory model before it is named.

Places of variables and recomputation can be changed here as a session's options change them, and the model says what
the fullest tile holds then. A smaller micro-batch and more IPUs change the program itself: they are named only where
what they cannot make smaller would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from podrun.compiler.costs.ipu_memory import SegmentWork, ipu_memory
from podrun.compiler.program import Locations, Program
from podrun.compiler.state.arenas import Memory
from podrun.core.executable import numpy_dtype
from podrun.costmodel.recompute import Recompute
from podrun.costmodel.target import Chip
from podrun.costmodel.tile_memory import ACCUMULATORS, CONSTANTS, STATE, WEIGHTS, Demand, Location, fits

Works = Callable[[Program], Sequence[SegmentWork]]
"""The costed segments of a program; asked for a changed program only if its recomputation changes."""

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
    found = []
    entries = ipu_memory(program, memory, works(program), updates, model)
    for what, setting, changed in _changes(program):
        held = ipu_memory(changed, memory, works(changed), updates, model)
        if all(entry["memory"]["fits"] for entry in held):
            most = max(entry["memory"]["max_tile_bytes"] for entry in held)
            found.append({"what": what, "setting": setting, "max_tile_bytes": most})
    if found:
        return found
    samples = program.metadata.get("samples_per_micro_batch")
    if samples != 1 and all(fits(model, _without_batch(program, entry)) for entry in entries):
        found.append({"what": "use a smaller micro-batch", "setting": "", "max_tile_bytes": None})
    needs = [need for need, _ in _needs(program, memory)]
    if len(needs) != 1 and all(need <= model.tiles * model.tile_bytes for need in needs):
        found.append({"what": "pipeline over more IPUs", "setting": "pipelineStage", "max_tile_bytes": None})
    return found


def largest_need(program: Program, memory: Memory) -> dict[str, Any]:
    """The weight that needs most of an IPU together with its gradient and its optimizer state: ``name``, ``bytes``.
    Empty if the program has none.
    """
    need, name = max(_needs(program, memory), default=(0, ""))
    return {"name": name, "bytes": need} if name else {}


def _changes(program: Program) -> Iterator[tuple[str, str, Program]]:
    """What a session's options can change: what it is called, the setting, the program then."""
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
        everything = _with(where, dict.fromkeys(kinds, _OFF))
        moved.append((f"keep {names} off chip", f"...{_PLACES}", everything))
    for what, setting, places in moved:
        yield what, setting, replace(program, locations=places)
    if program.loss is not None and program.recompute.rule == "none":
        rule = Recompute("pipeline" if program.pipelined else "standard")
        again = replace(program, recompute=rule)
        yield "recompute activations", "autoRecomputation", again
        if moved:
            what, setting, places = moved[-1]
            yield f"recompute activations and {what}", setting, replace(again, locations=places)


def _with(where: Locations, places: Mapping[str, Location]) -> Locations:
    return replace(where, **places)  # type: ignore[arg-type]


def _kinds(program: Program) -> list[str]:
    """Kinds of variables that the program has, the cheapest to move first."""
    found = ["weights"] if program.parameters else []
    if program.accumulates:
        found.insert(0, "accumulators")
    if program.update is not None:
        found.insert(0, "optimizer_state")
    return found


def _without_batch(program: Program, entry: Mapping[str, Any]) -> Demand:
    """What an IPU holds whatever the micro-batch: variables, and gradients that wait for the update."""
    content = entry["memory"]["by_content"]
    lasting = {name: content.get(name, 0) for name in (WEIGHTS, STATE, ACCUMULATORS, CONSTANTS)}
    waiting = lasting[WEIGHTS] if program.loss is not None and not program.accumulates else 0
    return Demand(lasting, waiting)


def _needs(program: Program, memory: Memory) -> Iterator[tuple[int, str]]:
    """Bytes that a weight, its gradient and its optimizer state take on chip, and its name."""
    where, rule = program.locations, program.update
    trained = {weight.name: group for group in memory.groups for weight in group.weights}
    for name, parameter in program.parameters.items():
        spec = parameter.spec
        need = where.of(name, where.weights).on_chip(spec.size, numpy_dtype(spec.dtype).itemsize)
        if name in trained:
            need += spec.size * numpy_dtype(trained[name].gradient_dtype).itemsize
            for state, _ in rule.state(spec).values() if rule is not None else ():
                place = where.of(state.name, where.optimizer_state)
                need += place.on_chip(state.size, numpy_dtype(state.dtype).itemsize)
        yield need, name
