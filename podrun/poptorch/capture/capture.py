"""Captures a module: fake parameters, one run of forward, its writes and results.

`loop` and `branch` capture the bodies of ``poptorch.for_loop`` and ``cond`` once, as graphs inside the graph.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.capture.graph import (
    HOST_CALL,
    BlockPlacement,
    CapturedGraph,
    GraphNode,
    GraphValue,
    Origin,
    Structure,
    Subgraph,
    flatten,
    unflatten,
)
from podrun.poptorch.capture.host_tensors import IpuDevice, line_of_user
from podrun.poptorch.capture.mistakes import mistake
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
    """Record ``count`` rounds of a body. Error if its results do not fit its inputs."""
    recorder = _recording[-1]
    values = tuple(recorder.value_of(tensor) for tensor in inputs)
    graph, results = _captured(recorder, body, inputs)
    if [(v.shape, v.dtype) for v in graph.outputs] != [(v.shape, v.dtype) for v in values]:
        raise Error("poptorch.for_loop: the body must return tensors of the shapes and types that it takes")
    return recorder.add_control_flow("podrun.for_loop.default", (count, graph, values, graph.outer), results)


def branch(
    condition: torch.Tensor,
    bodies: tuple[Callable[..., Any], Callable[..., Any]],
    inputs: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Record two bodies, of which one runs. Error if their results do not fit each other."""
    recorder = _recording[-1]
    values = [tuple(recorder.value_of(tensor) for tensor in tensors) for tensors in inputs]
    chosen = recorder.value_of(condition)
    graphs, results = zip(
        *(_captured(recorder, body, tensors) for body, tensors in zip(bodies, inputs, strict=True)),
        strict=True,
    )
    shapes = [[(v.shape, v.dtype) for v in graph.outputs] for graph in graphs]
    if shapes[0] != shapes[1]:
        raise Error("poptorch.cond: both bodies must return as many tensors, of the same shapes and types")
    parts = tuple((graph, taken, graph.outer) for graph, taken in zip(graphs, values, strict=True))
    return recorder.add_control_flow("podrun.cond.default", (chosen, *parts), results[0])


def host_call(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Record a call of a function of the host. The function is called once with zeros, to learn the shapes of its
    results.
    """
    recorder = _recording[-1]
    values = tuple(recorder.value_of(tensor) for tensor in inputs)
    try:
        with private.without_modes():
            zeros = [torch.zeros(tuple(tensor.shape), dtype=tensor.dtype) for tensor in inputs]
            returned = function(*zeros)
    except RuntimeError:  # The function uses parameters of the model, which have no data during capture.
        with recorder.aside():
            returned = function(*(_like(recorder, tensor) for tensor in inputs))
    results = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    if not results or not all(isinstance(result, torch.Tensor) for result in results):
        raise Error("the function of poptorch.CPU must return tensors")
    recorder.graph.functions.append(function)
    number = len(recorder.graph.functions) - 1
    return recorder.add_control_flow(
        HOST_CALL, (number, values), [_like(recorder, result) for result in results]
    )


def _captured(
    recorder: Recorder, body: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> tuple[Subgraph, list[torch.Tensor]]:
    """A body's graph, and tensors like its results."""
    with recorder.aside() as nodes:
        # Made inside, because a body may write in place to its own arguments: it has them by value.
        fresh = [_like(recorder, tensor) for tensor in inputs]
        values = tuple(recorder.value_of(tensor) for tensor in fresh)
        returned = body(*fresh)
        results = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        if not all(isinstance(result, torch.Tensor) for result in results):
            raise Error("the body of a poptorch loop or branch must return tensors")
        outputs = tuple(recorder.value_of(result) for result in results)
    outer = _outer_values(nodes, values, outputs)
    return Subgraph(tuple(nodes), values, outer, outputs), [_like(recorder, result) for result in results]


def _like(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    fake = recorder.fake_like(tensor)
    recorder.bind(fake, recorder.value_like(fake))
    return fake


def _outer_values(
    nodes: Sequence[GraphNode], inputs: Sequence[GraphValue], outputs: Sequence[GraphValue]
) -> tuple[GraphValue, ...]:
    """The values that nodes read or return and that neither the nodes nor the inputs provide."""
    inner = {v.number for v in inputs} | {v.number for node in nodes for v in node.results}
    read = [v for node in nodes for v in node.reads()] + list(outputs)
    return tuple({v.number: v for v in read if v.number not in inner}.values())


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured module: its graph, the structure of forward's results, and operators that the table lacks."""

    graph: CapturedGraph
    result: Structure
    missing: dict[str, int]


def capture(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    supported: Callable[[str], bool],
    placement: Callable[[], BlockPlacement | None] = lambda: None,
    scope: Callable[[], str] = lambda: "",
) -> Capture:
    """Run ``module(*args, **kwargs)`` once on fake tensors and record it.

    ``args`` and ``kwargs`` hold tensors of one micro-batch, anywhere in nested structures; other values are constants.
    ``placement``: returns the place that the annotations give now; ``scope``: the prefix of names. Raises `Error` for
    values that cannot be known while a model is compiled.
    """
    fake = private.fake_mode()
    modules = _ModuleNames(module)

    def location() -> str:
        return f"module '{modules.current}', {line_of_user()}"

    recorder = Recorder(
        supported,
        fake,
        lambda: Origin(modules.current, line_of_user(), placement(), scope()),
        _plain_tensors(module),
        location,
    )
    with _faked_parameters(module, fake, recorder):
        leaves, structure = flatten((tuple(args), kwargs or {}))
        faked = [_fake_input(place, leaf, fake, recorder) for place, leaf in enumerate(leaves)]
        arguments, keywords = unflatten(structure, faked)
        with (
            modules.followed(),
            private.composites_whole(),
            private.quiet_fake_tensors(),
            torch.enable_grad(),
            recording(recorder),
            recorder,
            IpuDevice(recorder.moved, location),
        ):
            with _explained(modules, recorder):
                returned = module(*arguments, **keywords)
            results, result = flatten(returned)
            recorder.graph.outputs = [_returned(leaf, recorder) for leaf in results]
    _note_updates(recorder)
    return Capture(recorder.graph, result, dict(recorder.missing))


@contextlib.contextmanager
def _explained(modules: _ModuleNames, recorder: Recorder) -> Iterator[None]:
    """Raise an error of torch that a known mistake in forward causes as an `Error` that says so."""
    try:
        yield
    except Exception as error:
        shown = mistake(error, modules.names, recorder.failed_operator(error))
        if shown is None or isinstance(error, Error):
            raise
        raise shown from None


def _returned(leaf: object, recorder: Recorder) -> object:
    """A leaf of forward's result: the value of a tensor of the IPU, or what it was."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not recorder.is_host(leaf):
        return recorder.value_of(leaf)
    warnings.warn(
        f"forward returns a tensor of the CPU (shape {list(leaf.shape)}): every call gives it as it was when the "
        "model was compiled",
        stacklevel=2,
    )
    return leaf


def _note_updates(recorder: Recorder) -> None:
    for state in recorder.storages():
        if not state.version:
            continue
        if isinstance(state.name, str):
            recorder.graph.updates[state.name] = state.value
        elif isinstance(state.name, int):
            recorder.graph.input_updates[state.name] = state.value


def _fake_input(place: int, leaf: object, fake: private.FakeMode, recorder: Recorder) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    faked = fake.from_tensor(leaf.detach())
    value = recorder.value_like(faked)
    recorder.graph.inputs[place] = value
    recorder.bind(faked, value, place)
    return faked


@contextlib.contextmanager
def _faked_parameters(module: torch.nn.Module, fake: private.FakeMode, recorder: Recorder) -> Iterator[None]:
    """Put fake parameters and buffers in the places of the real ones. A parameter with two names keeps one value."""
    names = {id(t): name for name, t in reversed([*module.named_parameters(), *module.named_buffers()])}
    saved: list[tuple[dict[str, Any], str, Any]] = []
    fakes: dict[int, torch.Tensor] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            saved += [(table, key, tensor) for key, tensor in table.items() if tensor is not None]
    for _, _, tensor in saved:
        if id(tensor) not in fakes:
            faked = fake.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                faked = torch.nn.Parameter(faked, tensor.requires_grad)
            fakes[id(tensor)] = faked
            value = recorder.value_like(faked)
            recorder.graph.parameters[names[id(tensor)]] = value
            recorder.bind(faked, value, names[id(tensor)])
            recorder.let_stand_for(tensor, faked)
    for owned, key, tensor in saved:
        owned[key] = fakes[id(tensor)]
    try:
        yield
        for owned, key, tensor in saved:
            if owned.get(key) is not fakes[id(tensor)]:
                raise _replaced(names[id(tensor)], tensor, removed=key not in owned)
    finally:
        for owned, key, tensor in saved:
            owned[key] = tensor


def _replaced(name: str, tensor: torch.Tensor, *, removed: bool) -> Error:
    """The error for a parameter or buffer that forward removes, or puts another tensor in the place of."""
    what = f"{'Parameter' if isinstance(tensor, torch.nn.Parameter) else 'Buffer'} {name}"
    if removed:
        return Error(f"{what} is removed from the model when calling the forward method.")
    return Error(
        f"{what} is reassigned within the model when calling the forward method. This is not supported. Consider using "
        f"self.{name}.copy_(src) to copy data from a source tensor, where src is the name of the source tensor."
    )


def _plain_tensors(module: torch.nn.Module) -> frozenset[int]:
    """Storages of tensors that modules hold as plain attributes: constants of the compiled model."""
    return frozenset(
        private.storage_of(leaf)
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, (torch.Tensor, list, tuple, dict))
        for leaf in flatten(value)[0]
        if isinstance(leaf, torch.Tensor)
    )


class _ModuleNames:
    """Follows, by torch's global hooks, which module's forward runs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.names = {id(part): name for name, part in module.named_modules()}
        self._stack: list[str] = [""]

    @property
    def current(self) -> str:
        """Dotted name of the innermost module."""
        return self._stack[-1]

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Keep `current` right while modules run."""
        hooks = torch.nn.modules.module

        def enter(part: torch.nn.Module, args: object) -> None:
            self._stack.append(self.names.get(id(part), self._stack[-1]))

        def leave(part: torch.nn.Module, args: object, result: object) -> None:
            self._stack.pop()

        before = hooks.register_module_forward_pre_hook(enter)
        after = hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._stack[1:] = []
