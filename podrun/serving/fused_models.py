"""One model of a fused program: what a runner of its own sees of it.

A fused program (`podrun.serving.convert.model_fusion`) has the tensors ``graphI/NAME`` of model I, and an input
``index`` that says which model computes. `FusedGraph` is a `LoadedModel` with the tensors of one model: it fills in
``index`` and zeros for the inputs of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from podrun.core.errors import PodrunError
from podrun.serving.loaded_model import LoadedModel, ModelledTime, NamedArrays, StartedBatches

INDEX = "index"
"""The input that says which model computes."""
_GRAPH = re.compile(r"graph(\d+)/")


def graph_of(name: str) -> int | None:
    """The model that a tensor of a fused program belongs to."""
    match = _GRAPH.match(name)
    return int(match[1]) if match else None


def fused_graphs(inputs: Iterable[str]) -> list[int]:
    """The numbers of the models of a program, by its inputs; none if it is no fused program."""
    names = set(inputs)
    numbers = {graph_of(name) for name in names - {INDEX}}
    if INDEX not in names or None in numbers:
        return []
    return sorted(number for number in numbers if number is not None)


class FusedBatches:
    """Micro-batches of one model in flight."""

    def __init__(self, started: StartedBatches, share: float) -> None:
        self._started, self._share = started, share

    def wait(self) -> tuple[dict[str, np.ndarray], ModelledTime]:
        """The results of all models, and what the one that computed has cost."""
        results, cost = self._started.wait()
        return results, replace(cost, compute_s=cost.compute_s * self._share)


class FusedGraph:
    """Model ``number`` of a loaded fused program. The program stays the caller's."""

    def __init__(self, loaded: LoadedModel, number: int) -> None:
        self.loaded, self.number = loaded, number
        self.inputs = {n: d for n, d in loaded.inputs.items() if graph_of(n) == number}
        self.outputs = {n: d for n, d in loaded.outputs.items() if graph_of(n) == number}
        self.group = loaded.group
        self._share = share_of_graph(loaded.tile_report, number)

    @property
    def failure(self) -> PodrunError | None:
        """The error that ended the program's use: of all its models."""
        return self.loaded.failure

    @failure.setter
    def failure(self, error: PodrunError | None) -> None:
        self.loaded.failure = error

    def start(
        self,
        inputs: NamedArrays,
        count: int,
        outputs: NamedArrays | None = None,
        *,
        depth: int = 2,
        checked: int | None = None,
    ) -> FusedBatches:
        """As `LoadedModel.start`, with inputs and outputs of this model."""
        whole = {
            name: np.zeros(told.whole_shape(count), told.dtype)
            for name, told in self.loaded.inputs.items()
            if name not in inputs
        }
        whole[INDEX][...] = self.number
        return FusedBatches(
            self.loaded.start(whole | dict(inputs), count, outputs, depth=depth, checked=checked), self._share
        )

    def run(self, inputs: NamedArrays, count: int) -> tuple[dict[str, np.ndarray], ModelledTime]:
        """Run micro-batches, and wait for them."""
        return self.start(inputs, count, depth=1).wait()

    def close(self) -> None:
        """Nothing: the program is the caller's."""


def share_of_graph(report: Mapping[str, Any], number: int) -> float:
    """The part of a fused program's modelled computation that one of its models takes. The report counts the branches
    of all models; a run takes one.
    """
    total = others = 0.0
    for segment in report.get("segments", ()):
        for scope, cycles in segment["report"]["by_scope"].items():
            total += cycles
            owner = graph_of(scope)
            branch = owner is not None and scope.startswith(f"graph{owner}/If/")
            others += cycles if branch and owner != number else 0.0
    return 1.0 - others / total if total else 1.0
