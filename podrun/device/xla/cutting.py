"""Cuts a program at its calls into the library, into steps that are compiled each for itself.

XLA's cache cannot hold calls into oneDNN, but it holds everything between them. So each call becomes a step of its own,
which takes a millisecond to compile and is shared by all calls that are equal; what lies between the calls becomes
steps without a call, which are loaded from the cache, and equal ones are compiled once. ResNet-50 repeats its blocks: a
tenth of its steps is compiled.

A step's *level* is how many calls in a row it waits for. An operation lies on the level where it is first read, so that
nothing is computed long before it is needed, and of a level those that have to do with one another make a step. What a
later level reads too it takes from memory if it is there anyway (arguments, results, what calls read and give, and all
that is small) and works it out again if not: batch normalisation's backward pass reads the convolution's result once
instead of several things made from it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from podrun.device.xla.channels_last import ELEMENTWISE
from podrun.device.xla.stablehlo import inline, nested, rename

SMALL = 1 << 16
"""Elements up to which a value is kept rather than worked out again."""

_AGAIN = ELEMENTWISE | {
    f"stablehlo.{name}"
    for name in ("broadcast_in_dim", "reshape", "transpose", "constant", "iota", "slice", "reverse")
}
"""Operations that cost about as much as reading their result from memory."""


@dataclass(frozen=True, slots=True)
class Step:
    """A program of its own (``text``: its StableHLO; ``takes``, ``gives``: type and shape of its arguments and results)
    and the values, by number, that it reads and makes.

    ``call``: it is a call into the library.
    """

    text: str
    takes: tuple[tuple[str, tuple[int, ...]], ...]
    gives: tuple[tuple[str, tuple[int, ...]], ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    call: bool


@dataclass(frozen=True, slots=True)
class Steps:
    """A program in steps, each after those that it waits for. The arguments are the values 0 to ``arguments`` - 1;
    ``results``: numbers of the results."""

    arguments: int
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Of the arguments; None for one that no step reads."""
        found = {
            value: shape
            for step in self.steps
            for value, (_, shape) in zip(step.reads, step.takes, strict=True)
        }
        return tuple(found.get(value) for value in range(self.arguments))


def cut(lowered: Any) -> Steps | None:
    """A ``jax.stages.Lowered`` that calls the library, in steps. None if it does so inside a loop or branch."""
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        inline(ir, module)
        functions = {ir.StringAttr(f.attributes["sym_name"]).value: f for f in module.body.operations}
        block = functions["main"].operation.regions[0].blocks[0]
        operations = [op.operation for op in block]
        if any(_is_call(ir, inner) for op in operations for inner in nested(op)):
            return None
        return _Cut(ir, block, operations).steps()


def _is_call(ir: Any, op: Any) -> bool:
    """Whether an operation calls oneDNN."""
    if op.name != "stablehlo.custom_call":
        return False
    return str(ir.StringAttr(op.attributes["call_target_name"]).value).startswith("__onednn$")


class _Cut:
    """One program. Operations are known by their place in it, values by a number."""

    def __init__(self, ir: Any, block: Any, operations: Sequence[Any]) -> None:
        self.ir = ir
        self.operations = [op for op in operations if op.name != "func.return"]
        self.numbers: dict[Any, int] = {value: n for n, value in enumerate(block.arguments)}
        self.arguments = len(self.numbers)
        self.values = list(block.arguments)
        self.maker: dict[int, int] = {}
        self.reads: list[tuple[int, ...]] = []
        for place, op in enumerate(self.operations):
            self.reads.append(tuple(dict.fromkeys(self.numbers[v] for v in _reads(op) if v in self.numbers)))
            for value in op.results:
                self.maker[len(self.values)] = place
                self.numbers[value] = len(self.values)
                self.values.append(value)
        self.results = tuple(self.numbers[v] for v in operations[-1].operands)
        self.calls = [_is_call(ir, op) for op in self.operations]
        self.kept = set(range(self.arguments)) | set(self.results)
        self.inside: dict[int, list[int]] = {}
        for place, call in enumerate(self.calls):
            if call:
                self._take_in(place)
                self.kept |= {*self.reads[place], *self._made(place)}
        self.levels = self._levels()
        self.again, self.trivial = self._again(), self._trivial()

    def _made(self, place: int) -> list[int]:
        return [self.numbers[v] for v in self.operations[place].results]

    def _take_in(self, call: int) -> None:
        """Let a call's step hold what costs nothing before it: another shape, or a reversal that is taken back."""
        inside: list[int] = []
        reads = []
        for value in self.reads[call]:
            while free := self._free(value):
                inside += free
                (value,) = self.reads[free[-1]]
            reads.append(value)
        self.inside[call] = sorted({call, *inside})
        self.reads[call] = tuple(dict.fromkeys(reads))

    def _free(self, value: int) -> list[int]:
        maker = self.maker.get(value)
        if maker is None or self.calls[maker]:
            return []
        op = self.operations[maker]
        if op.name == "stablehlo.reshape":
            return [maker]
        if op.name == "stablehlo.reverse":
            before = self.maker.get(self.reads[maker][0])
            if before is not None and self.operations[before].name == op.name:
                there, back = (list(o.attributes["dimensions"]) for o in (op, self.operations[before]))
                return [maker, before] if there == back else []
        return []

    def _levels(self) -> list[int]:
        """Where each operation lies: as late as the first that reads it allows; results and calls as early as
        can be."""
        earliest: list[int] = []
        after: dict[int, int] = {}  # level from which on a value is there
        for place, reads in enumerate(self.reads):
            level = max((after.get(v, 0) for v in reads), default=0)
            earliest.append(level)
            after |= dict.fromkeys(self._made(place), level + self.calls[place])
        wanted: dict[int, int] = {v: earliest[self.maker[v]] for v in self.results if v in self.maker}
        levels = list(earliest)
        for place in reversed(range(len(levels))):
            if not self.calls[place]:
                uses = [wanted[v] for v in self._made(place) if v in wanted]
                levels[place] = max(earliest[place], min(uses, default=earliest[place]))
            for v in self.reads[place]:
                wanted[v] = min(wanted.get(v, levels[place]), levels[place])
        return levels

    def steps(self) -> Steps:
        """See `cut`."""
        levels: list[list[int]] = [[] for _ in range(max(self.levels, default=0) + 1)]
        for place, level in enumerate(self.levels):
            levels[level].append(place)
        wanted = set(self.results)  # by results and by steps of later levels
        found: list[Step] = []
        for places in reversed(levels):
            calls = [p for p in places if self.calls[p]]
            found += [self._step(self.inside[p], self._made(p), self.reads[p]) for p in calls]
            wanted |= {v for p in calls for v in self.reads[p]}
            made = [v for p in places if not self.calls[p] for v in self._made(p) if v in wanted]
            for makes in self._groups(made):
                step = self._step(*self._closure(makes))
                found.append(step)
                wanted |= set(step.reads)
        return Steps(self.arguments, tuple(reversed(found)), self.results)

    def _groups(self, made: Sequence[int]) -> list[list[int]]:
        """Values that have operations in common, together."""
        groups: list[tuple[set[int], list[int]]] = []
        for value in made:
            places = {p for p in self._closure([value])[0] if not self.trivial[p]}
            shared = [g for g in groups if not places.isdisjoint(g[0])]
            groups = [g for g in groups if g not in shared]
            groups.append(
                (places.union(*(g[0] for g in shared)), [v for g in shared for v in g[1]] + [value])
            )
        return [sorted(values) for _, values in groups]

    def _closure(self, makes: Sequence[int]) -> tuple[list[int], list[int], tuple[int, ...]]:
        """The operations that values are made by, in order, the values, and what is read for it."""
        level = self.levels[self.maker[makes[0]]]
        places: set[int] = set()
        reads: set[int] = set()
        queue = [self.maker[v] for v in makes]
        while queue:
            place = queue.pop()
            if place in places:
                continue
            places.add(place)
            for v in self.reads[place]:
                maker = self.maker.get(v)
                here = (
                    maker is not None
                    and not self.calls[maker]
                    and (self.levels[maker] == level or self.again[v])
                )
                if here:
                    assert maker is not None
                    queue.append(maker)
                else:
                    reads.add(v)
        return sorted(places), list(makes), tuple(sorted(reads))

    def _again(self) -> list[bool]:
        """Of each value, whether a later level works it out again."""
        free = [v in self.kept or _elements(value) <= SMALL for v, value in enumerate(self.values)]
        again = [False] * len(free)
        for v, place in self.maker.items():
            op = self.operations[place]
            constant = op.name in ("stablehlo.constant", "stablehlo.iota") and _short(op)
            cheap = op.name in _AGAIN and all(free[r] for r in self.reads[place])
            again[v] = constant or (cheap and not free[v])
            free[v] = free[v] or again[v]
        return again

    def _trivial(self) -> list[bool]:
        found: list[bool] = []
        for reads in self.reads:
            found.append(all(v in self.maker and found[self.maker[v]] for v in reads))
        return found

    def _step(self, places: Sequence[int], makes: Sequence[int], reads: Sequence[int]) -> Step:
        ir = self.ir
        func: Any = importlib.import_module("jaxlib.mlir.dialects.func")
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            kinds = [[self.values[v].type for v in side] for side in (reads, makes)]
            main = func.FuncOp("main", ir.FunctionType.get(*kinds))
        block = main.add_entry_block()
        values = dict(zip((self.values[v] for v in reads), block.arguments, strict=True))
        with ir.InsertionPoint(block):
            for place in places:
                op = self.operations[place]
                clone = op.clone()
                rename(clone, values)
                values.update(zip(op.results, clone.results, strict=True))
            func.ReturnOp([values[self.values[v]] for v in makes])
        takes, gives = (tuple((str(k.element_type), tuple(k.shape)) for k in side) for side in kinds)
        return Step(str(module), takes, gives, tuple(reads), tuple(makes), self.calls[places[-1]])


def _reads(op: Any) -> Iterable[Any]:
    for inner in (op, *nested(op)):
        yield from inner.operands


def _elements(value: Any) -> int:
    shape = getattr(value.type, "shape", ())
    return math.prod(shape)


def _short(op: Any) -> bool:
    return (
        op.name != "stablehlo.constant" or op.attributes["value"].is_splat or _elements(op.results[0]) <= 4096
    )
