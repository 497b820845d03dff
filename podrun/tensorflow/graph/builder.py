"""A graph of the runtime under construction: nodes in order, and which name stands for which tensor and variable."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from podrun.core.errors import UnsupportedError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Node, OperatorGraph, Place

DOMAIN = "tensorflow"
GIVEN = "given"
"""The end of the name of the tensor that says whether an iteration gives to a queue."""


@dataclass(frozen=True, slots=True)
class VariableHandle:
    """What a handle stands for: a variable, by its name in the program."""

    key: str


ASSERTIONS = "assertions"
"""The variable that holds whether all assertions of a step held so far."""
FeedNames = dict[int, list[str]]
"""Queue -> names of tensors."""
Value = str | VariableHandle
"""What a tensor of TensorFlow is: the name of a tensor of the runtime, or a variable."""


@dataclass(slots=True)
class ProgramFacts:
    """What the reading of a whole program collects besides its nodes."""

    random: bool = False
    batch_norm_replicas: int = 1
    """Neighbouring replicas over whose batches training takes the statistics of a batch normalization."""
    infeeds: dict[int, list[str]] = field(default_factory=dict)
    """Queue -> the names of its inputs."""
    outfeeds: dict[int, list[str]] = field(default_factory=dict)
    """Queue -> the names of the tensors that go out."""
    conditional: dict[int, list[str]] = field(default_factory=dict)
    """Queue that a branch gives to -> the names of what it gives among variables, and of whether it does, the last."""
    not_given: dict[int, str] = field(default_factory=dict)
    """The same queue -> the constant that says that it was given nothing."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    places: dict[str, Place] = field(default_factory=dict)
    """Node -> the IPU and stage that the program gave it."""
    recomputed: dict[str, bool] = field(default_factory=dict)
    """Node -> whether its results are computed again for gradients, or kept, where the program says it."""
    losses: dict[str, bool] = field(default_factory=dict)
    """Node that differentiates -> whether its first target is a scalar."""
    replaced: dict[str, set[str]] = field(default_factory=dict)
    """Variable -> the names of the values that it had before it was written."""
    assigned: set[str] = field(default_factory=set)
    """The names of values that variables were written with."""

    def of_steps(self) -> tuple[FeedNames, FeedNames, dict[str, Place], dict[str, bool], dict[str, bool]]:
        """Infeeds, outfeeds, places, losses and what is recomputed, in the order in which a step has them."""
        return self.infeeds, self.outfeeds, self.places, self.losses, self.recomputed


class GraphBuilder:
    """Nodes and names of one graph. Subgraphs have builders of their own, which see the names around them."""

    def __init__(self, name: str, facts: ProgramFacts, outer: GraphBuilder | None = None) -> None:
        self.name, self.facts, self.outer = name, facts, outer
        self.nodes: list[Node] = []
        self.originals: dict[str, Node] = {}
        """The node that makes a tensor, also if it has moved into a subgraph."""
        self.current: dict[str, str] = {}
        """VariableHandle -> the name of its present value."""
        self.written: dict[str, str] = {}
        """VariableHandle -> the name of its last value that this graph computes."""
        self.place: Place | None = None if outer is None else outer.place
        """Where the nodes that are being added lie; None: nowhere in particular."""
        self.repeats: bool = outer is not None and outer.repeats
        """Whether the graph is in a loop of the program's step."""

    def unique(self, base: str) -> str:
        """A name that nothing else in the program has."""
        return f"{base}#{next(self.facts.numbers)}"

    def add(
        self,
        op_type: str,
        inputs: Sequence[str],
        count: int = 1,
        *,
        name: str = "",
        planned_as: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node; returns the names of its outputs."""
        label = self.unique(name or op_type)
        outputs = [label] if count == 1 else [f"{label}:{i}" for i in range(count)]
        node = Node(
            op_type,
            DOMAIN,
            label,
            tuple(inputs),
            tuple(outputs),
            attributes,
            planned_as=planned_as,
        )
        if self.place is not None:
            self.facts.places[label] = self.place
        self.nodes.append(node)
        self.originals.update(dict.fromkeys(outputs, node))
        return outputs

    def constant(self, value: npt.ArrayLike, name: str = "Const") -> str:
        """The name of a constant."""
        return self.add("Const", [], name=name, value=np.asarray(value))[0]

    def read(self, variable: VariableHandle) -> str:
        """The name of a variable's present value."""
        builder: GraphBuilder | None = self
        while builder is not None:
            if variable.key in builder.current:
                return builder.current[variable.key]
            builder = builder.outer
        raise UnsupportedError(f"The program reads the variable {variable.key!r}, which it does not hold.")

    def maker(self, name: str) -> Node | None:
        """The node that makes a tensor; None for an input of the program."""
        builder: GraphBuilder | None = self
        while builder is not None:
            if name in builder.originals:
                return builder.originals[name]
            builder = builder.outer
        return None

    def write(self, variable: VariableHandle, value: str) -> None:
        """Let ``value`` be a variable's present value."""
        builder: GraphBuilder | None = self
        while builder is not None and variable.key not in builder.current:
            builder = builder.outer
        if builder is not None:
            self.facts.replaced.setdefault(variable.key, set()).add(builder.current[variable.key])
        self.facts.assigned.add(value)
        self.current[variable.key] = value
        self.written[variable.key] = value

    def hold(self, condition: str) -> None:
        """Make the step raise after its run unless ``condition`` is true, also inside branches and loops."""
        held, root = VariableHandle(ASSERTIONS), self
        while root.outer is not None:
            root = root.outer
        if ASSERTIONS not in root.current:
            root.current[ASSERTIONS] = root.constant(True)
        (every,) = self.add("LogicalAnd", [self.read(held), condition], name=ASSERTIONS)
        self.write(held, every)

    def give_if_reached(self, queue: int, names: Sequence[str], empty: Sequence[np.ndarray]) -> None:
        """Let a branch give tensors to a queue in the iterations that reach it. ``empty``: arrays like them."""
        root = self
        while root.outer is not None:
            root = root.outer
        keys = [*(f"outfeed{queue}/{place}" for place in range(len(names))), f"outfeed{queue}/{GIVEN}"]
        if queue not in self.facts.conditional:
            self.facts.conditional[queue] = keys
            for key, array in zip(keys, [*empty, np.array(False)], strict=True):
                root.current[key] = root.constant(array)
            self.facts.not_given[queue] = root.current[keys[-1]]
        if self.read(VariableHandle(keys[-1])) != self.facts.not_given[queue]:
            raise UnsupportedError(
                f"'{self.name}' gives to one queue twice in an iteration.",
                hint="Let each branch give to a queue of its own, or give once behind them.",
            )
        for key, name in zip(keys, [*names, self.constant(True)], strict=True):
            self.write(VariableHandle(key), name)

    def leaving(self) -> dict[str, str]:
        """The variables that are written, without what branches give to queues, which goes to these."""
        for queue, keys in self.facts.conditional.items():
            results = [self.add("Result", [self.current[key]], name=key)[0] for key in keys]
            self.facts.outfeeds[queue] = results
        names = {key for keys in self.facts.conditional.values() for key in keys}
        return {key: name for key, name in self.written.items() if key not in names}

    def graph(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        initial: Mapping[str, Any],
        types: Mapping[str, Any],
    ) -> OperatorGraph:
        """The finished graph. ``initial``: values of variables by name; ``types``: of inputs by name."""
        return OperatorGraph(
            self.name, tuple(self.nodes), tuple(inputs), tuple(outputs), dict(initial), dict(types)
        )
