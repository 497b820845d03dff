"""Modules of PyTorch programs as `podrun estimate` takes them: captured, not compiled and not run.

``train.py``: the program runs until it compiles a model (a training model, or an inference model, as requested);
the estimate takes the model, and the program ends there. ``net.py:NAME``: a module, or a class or function without
arguments that gives one, with the shapes of its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from podrun.core.errors import UsageError
from podrun.core.program_files import as_program, model_in_file, parse_input, run_until_compiled
from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.api.options import Options
from podrun.poptorch.api.user_modules import untracked
from podrun.poptorch.capture.capture import Capture
from podrun.poptorch.capture.graph import GraphValue, flatten, unflatten
from podrun.poptorch.capture.torch_names import to_numpy
from podrun.poptorch.compile import module_capture
from podrun.poptorch.compile.graph_checks import find_loss
from podrun.poptorch.compile.session_model import PlacedGraph, model_of_graph
from podrun.runtime.graph import Model


class _Taken(BaseException):
    """Ends a program at its first compile. Not an Exception, because programs catch those."""

    def __init__(self, request: module_capture.CompileRequest, call: tuple[Any, Any]) -> None:
        super().__init__()
        self.request, self.call = request, call


@dataclass
class ModuleSource:
    """A module and a call of it with one micro-batch. ``program_layout``: the accumulation that the program itself
    sets. ``loss``: training differentiates forward's loss if there is one, otherwise its first output.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    options: Options
    loss: bool = False
    accumulation: int | None = None
    _models: dict[int, Model] = field(default_factory=dict)

    @property
    def micro_batch(self) -> int | None:
        """Samples of the call: dimension 0 of its first tensor."""
        return next((int(t.shape[0]) for t in self._tensors() if t.dim()), None)

    def _tensors(self) -> list[torch.Tensor]:
        leaves, _ = flatten((self.args, self.keywords))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def at(self, micro_batch: int) -> Model:
        """The runtime's model for a micro-batch of this size; its inputs have fixed shapes.

        Raises what capture raises, for forward passes that take no such batch.
        """
        if micro_batch not in self._models:
            self._models[micro_batch] = self._captured(micro_batch)
        return self._models[micro_batch]

    def _captured(self, micro_batch: int) -> Model:
        own = self.micro_batch
        leaves, structure = flatten((self.args, self.keywords))
        sized = [
            leaf.new_zeros((micro_batch, *leaf.shape[1:]))
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == own
            else leaf
            for leaf in leaves
        ]
        args, keywords = unflatten(structure, sized)
        with untracked():
            captured = module_capture.capture_module(self.module, args, dict(keywords), self.options)
            return _model(captured, self.module, self.loss)


def _model(captured: Capture, module: torch.nn.Module, loss: bool) -> Model:
    wanted = [find_loss(captured.graph)] if loss else []
    wanted += [leaf for leaf in captured.graph.outputs if isinstance(leaf, GraphValue)]
    if not wanted:
        raise UsageError("forward returns no tensor", hint="Return the logits or the loss.")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {name: to_numpy(tensors[name]) for name in captured.graph.parameters}
    trained = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
    placed = PlacedGraph(captured.graph, values, trained, placed=False)
    return model_of_graph(placed, wanted, type(module).__name__).model


def program_source(path: Path, arguments: Sequence[str], *, train: bool) -> ModuleSource:
    """The model that a program compiles first, in training or in inference. UsageError if it compiles no such model,
    and for errors of its own before.
    """
    try:
        with as_program(path, arguments), module_capture.instead_of_compiling(_take(train)):
            run_until_compiled(path)
    except _Taken as taken:
        request, (args, keywords) = taken.request, taken.call
        factor = request.options.Training.gradient_accumulation if train else None
        return ModuleSource(request.module, tuple(args), dict(keywords), request.options, train, factor)
    kind = "training" if train else "inference"
    other = "leave --train out" if train else "give --train"
    raise UsageError(
        f"{path} compiles no poptorch.{kind}Model",
        hint=f"Call the wrapped model, {other}, or name a module of the file: {path}:NAME --input 8x3x32x32",
    )


def _take(train: bool) -> module_capture.Taker:
    def take(captured: Capture, request: module_capture.CompileRequest, call: tuple[Any, Any]) -> None:
        if request.training == train:
            raise _Taken(request, call)

    return take


def module_source(path: Path, name: str, inputs: Sequence[str]) -> ModuleSource:
    """A module of a file, with inputs like ``8x3x32x32`` or ``4x128:int64``; dimension 0 is the batch. UsageError for a
    wrong name or wrong inputs.
    """
    with as_program(path):
        module = model_in_file(path, name, torch.nn.Module, "torch.nn.Module", "Modules")
    if not inputs:
        raise UsageError(
            f"the inputs of {name} are not known", hint="Give one --input for each: --input 8x3x32x32"
        )
    return ModuleSource(module, tuple(_input(text) for text in inputs), {}, Options())


def _input(text: str) -> torch.Tensor:
    shape, kind = parse_input(text)
    return torch.zeros(shape, dtype=getattr(torch, kind))
