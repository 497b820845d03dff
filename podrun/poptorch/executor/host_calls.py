"""``poptorch.CPU`` in inference: models that call Python functions of the host on the way.

A compiled program does not return to Python. So the captured graph is cut at every call: each part is a program with
IPUs of its own, and between two parts the function runs on the host, once for each micro-batch. Modelled cycles are
those of the parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NoReturn

import numpy as np
import torch

from podrun.core.errors import InternalError
from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.capture.capture import Capture
from podrun.poptorch.capture.graph import HOST_CALL, CapturedGraph, GraphNode, GraphValue, values_in
from podrun.poptorch.compile.batches import BatchDimensions
from podrun.poptorch.errors import Error
from podrun.poptorch.executor.compiled_model import CompiledModel
from podrun.poptorch.executor.watching import CallStamps

FIRST_CROSSING = 1 << 30
"""Inputs of a part from this position on are values of earlier parts, by their numbers."""


def calls_host(graph: CapturedGraph) -> bool:
    """Whether forward calls functions of the host."""
    return any(node.operator == HOST_CALL for node in graph.nodes)


@dataclass(frozen=True, slots=True)
class GraphPart:
    """Nodes between two calls, as a graph of their own. ``crossing``: the values behind its outputs. ``call``: the call
    on the host that follows; None at the end.
    """

    captured: Capture
    crossing: tuple[GraphValue, ...]
    call: GraphNode | None


def parts_of(captured: Capture) -> Iterator[GraphPart]:
    """The parts of a graph, in order. The last one returns forward's results."""
    graph = captured.graph
    runs: list[list[GraphNode]] = [[]]
    calls: list[GraphNode] = []
    for node in graph.nodes:
        if node.operator == HOST_CALL:
            calls.append(node)
            runs.append([])
        else:
            runs[-1].append(node)
    final = [v for v in graph.outputs if isinstance(v, GraphValue)]
    final += [*graph.updates.values(), *graph.input_updates.values()]
    for place, nodes in enumerate(runs):
        computed = {v.number: v for node in nodes for v in node.results}
        later = [v for run in runs[place + 1 :] for node in run for v in node.reads()]
        later += [v for call in calls[place:] for v in values_in(call.arguments)] + final
        last = place == len(runs) - 1
        crossing = [] if last else list({v.number: v for v in later if v.number in computed}.values())
        yield GraphPart(
            Capture(_graph_of(graph, nodes, graph.outputs if last else crossing), captured.result, {}),
            tuple(crossing),
            None if last else calls[place],
        )


def _graph_of(graph: CapturedGraph, nodes: Sequence[GraphNode], outputs: Sequence[Any]) -> CapturedGraph:
    computed = {v.number for node in nodes for v in node.results}
    known = {v.number for v in graph.parameters.values()} | set(graph.constants) | computed
    places = {v.number: place for place, v in graph.inputs.items()}
    read = [v for node in nodes for v in node.reads()] + [v for v in outputs if isinstance(v, GraphValue)]
    taken = {v.number: v for v in read if v.number not in known}
    return CapturedGraph(
        list(nodes),
        {places.get(number, FIRST_CROSSING + number): v for number, v in taken.items()},
        dict(graph.parameters),
        dict(graph.constants),
        list(outputs),
        {name: v for name, v in graph.updates.items() if v.number in computed},
        {place: v for place, v in graph.input_updates.items() if v.number in computed},
    )


@dataclass(slots=True)
class ChainedModel:
    """Compiled parts, and the calls on the host between them; the executor uses it like a `CompiledModel`.

    ``functions``: those of the host, by the number in a call.
    """

    captured: Capture
    parts: Sequence[tuple[GraphPart, CompiledModel | None]]
    functions: Sequence[Callable[..., Any]]
    batches: BatchDimensions
    stamps: CallStamps | None = None
    last_anchors: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def graph(self) -> CapturedGraph:
        """The captured graph."""
        return self.captured.graph

    @property
    def models(self) -> list[CompiledModel]:
        """The parts that compute something."""
        return [model for _, model in self.parts if model is not None]

    def run(self, inputs: Mapping[int, torch.Tensor]) -> list[Any]:
        """The leaves of what forward returns, for inputs by position, with all micro-batches."""
        held = dict(inputs)
        held |= {FIRST_CROSSING + v.number: inputs[place] for place, v in self.graph.inputs.items()}
        leaves: list[Any] = []
        for part, model in self.parts:
            leaves = [] if model is None else model.run(held)
            if part.call is not None:
                for value, leaf in zip(part.crossing, leaves, strict=True):
                    held[FIRST_CROSSING + value.number] = leaf
                self._call(part.call, held)
        models = self.models
        self.last_anchors = {name: value for model in models for name, value in model.last_anchors.items()}
        first, last = models[0].stamps, models[-1].stamps
        if first is not None and last is not None:
            self.stamps = replace(
                last, asked=first.asked, arrived=first.arrived, inputs=len(self.graph.inputs)
            )
        return leaves

    def _call(self, call: GraphNode, held: dict[int, torch.Tensor]) -> None:
        """Run a function of the host for every micro-batch."""
        number, taken = call.arguments
        if not isinstance(number, int):
            raise InternalError("a call of the host begins with the number of its function")
        count = self.batches.inputs
        rows = [held[FIRST_CROSSING + v.number].reshape(count, *v.shape).unbind(0) for v in values_in(taken)]
        outputs: list[list[torch.Tensor]] = []
        for tensors in zip(*rows, strict=True):
            with torch.no_grad():
                outputs.append(results_of(self.functions[number], tensors))
        for value, results in zip(call.results, zip(*outputs, strict=True), strict=True):
            if any(tuple(result.shape) != value.shape for result in results):
                raise Error(
                    f"poptorch.CPU gave a tensor of shape {list(results[0].shape)}; it gave {list(value.shape)} while "
                    "the model was compiled",
                    location=call.origin.line,
                    hint="The shapes of the function's results may not depend on data.",
                )
            stacked = torch.stack(results)
            held[FIRST_CROSSING + value.number] = stacked.flatten(0, 1) if value.shape else stacked

    def read_weights(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Values of parameters and buffers as the IPUs have them."""
        return {name: v for model in self.models for name, v in model.read_weights(names).items()}

    def write_weights(self, values: Mapping[str, np.ndarray]) -> None:
        """Send parameters and buffers to all IPUs that have them."""
        for model in self.models:
            model.write_weights(values)

    def bring_weights(self) -> None:
        """Copy weights from the devices to the sessions' own copies."""
        for model in self.models:
            model.bring_weights()

    @property
    def needs_weights(self) -> bool:
        """Whether a device has no weights, because its program was loaded again."""
        return any(model.needs_weights for model in self.models)

    @property
    def attached(self) -> bool:
        """Whether all parts hold their IPUs."""
        return all(model.attached for model in self.models)

    def attach(self) -> None:
        """Take IPUs and load the programs."""
        for model in self.models:
            model.attach()

    def detach(self) -> None:
        """Release the IPUs of all parts. Their executables stay."""
        for model in self.models:
            model.detach()

    @property
    def random_state(self) -> list[int]:
        """The first part's random state."""
        return self.models[0].random_state

    @random_state.setter
    def random_state(self, state: Sequence[int]) -> None:
        for model in self.models:
            model.random_state = list(state)

    def cycles(self) -> int | None:
        """Modelled cycles of the last run, of all parts; None before one."""
        counts = [model.cycles() for model in self.models]
        return None if None in counts else sum(count or 0 for count in counts)

    def tensor_names(self) -> list[str]:
        """All tensors of all parts."""
        return sorted({name for model in self.models for name in model.tensor_names()})

    def report(self) -> NoReturn:
        """Error: each part is a program with a report of its own."""
        raise Error(
            "a model that calls poptorch.CPU is several programs, which have no report in common",
            hint="options.enableProfiling(folder) writes one report for each.",
        )

    def ir_text(self) -> str:
        """The forward graphs of the parts as JSON."""
        graphs = [next(iter(json.loads(model.ir_text()).values())) for model in self.models]
        return json.dumps({f"part{i}": graph for i, graph in enumerate(graphs)})

    def executable(self) -> bytes:
        """Error: functions of the host are not part of a file."""
        raise Error(
            "a model that calls poptorch.CPU cannot be saved: its functions are Python of this program"
        )


def results_of(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a host function for copies of tensors, as a list. Error for anything but tensors."""
    returned = function(*(tensor.detach().clone() for tensor in tensors))
    listed = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if not all(isinstance(result, torch.Tensor) for result in listed):
        raise Error("the function of poptorch.CPU must return tensors")
    return [result.detach() for result in listed]
