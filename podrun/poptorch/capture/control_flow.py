"""Bodies of loops and branches: captured once, as graphs inside the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from podrun.poptorch.capture.graph import GraphNode, GraphValue, Subgraph
from podrun.poptorch.capture.recorder import Recorder
from podrun.poptorch.errors import Error
from podrun.private_apis import torch as private

_recording: list[Recorder] = []


class recording:
    """Let `loop` and `branch` reach the recorder: ``with recording(recorder): ...``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        _recording.append(self._recorder)

    def __exit__(self, *error: object) -> None:
        _recording.pop()


def loop(count: int, body: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Record ``count`` rounds of a body. Error if it does not give what it takes."""
    recorder = _recording[-1]
    values = tuple(recorder.value_of(each) for each in inputs)
    graph, made = _captured(recorder, body, inputs)
    if [(v.shape, v.dtype) for v in graph.outputs] != [(v.shape, v.dtype) for v in values]:
        raise Error("poptorch.for_loop: the body must return tensors of the shapes and types that it takes")
    return recorder.add_control_flow("podrun.for_loop.default", (count, graph, values, graph.outer), made)


def branch(
    condition: torch.Tensor,
    bodies: tuple[Callable[..., Any], Callable[..., Any]],
    inputs: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Record two bodies, of which one runs. Error if they do not give the same."""
    recorder = _recording[-1]
    values = [tuple(recorder.value_of(each) for each in given) for given in inputs]
    chosen = recorder.value_of(condition)
    graphs, results = zip(
        *(_captured(recorder, body, given) for body, given in zip(bodies, inputs, strict=True)), strict=True
    )
    shapes = [[(v.shape, v.dtype) for v in graph.outputs] for graph in graphs]
    if shapes[0] != shapes[1]:
        raise Error("poptorch.cond: both bodies must return as many tensors, of the same shapes and types")
    parts = tuple((graph, given, graph.outer) for graph, given in zip(graphs, values, strict=True))
    return recorder.add_control_flow("podrun.cond.default", (chosen, *parts), results[0])


def _captured(
    recorder: Recorder, body: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> tuple[Subgraph, list[torch.Tensor]]:
    """A body's graph, and tensors like those that it gave."""
    fresh = [_like(recorder, each) for each in inputs]
    values = tuple(recorder.value_of(each) for each in fresh)
    with recorder.aside() as nodes:
        given = body(*fresh)
        results = list(given) if isinstance(given, (list, tuple)) else [given]
        if not all(isinstance(each, torch.Tensor) for each in results):
            raise Error("the body of a poptorch loop or branch must return tensors")
        outputs = tuple(recorder.value_of(each) for each in results)
    outer = _outer_values(nodes, values, outputs)
    return Subgraph(tuple(nodes), values, outer, outputs), [_like(recorder, each) for each in results]


def _like(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    with private.without_modes():
        made = recorder.fake_like(tensor)
    recorder.bind(made, recorder.value_like(made))
    return made


def _outer_values(
    nodes: Sequence[GraphNode], inputs: Sequence[GraphValue], outputs: Sequence[GraphValue]
) -> tuple[GraphValue, ...]:
    """What the nodes read, or what is given as it is, that neither they nor the inputs give."""
    inner = {v.number for v in inputs} | {v.number for node in nodes for v in node.results}
    read = [v for node in nodes for v in node.reads()] + list(outputs)
    return tuple({v.number: v for v in read if v.number not in inner}.values())
