"""Functions of ``poptorch`` itself: wrappers (``trainingModel``, ``inferenceModel``, ``load``), printing annotated
modules, comparing results, reading exported files.
"""

from __future__ import annotations

import builtins
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from podrun.poptorch.api.annotations import module_repr
from podrun.poptorch.api.enums import ConnectionType
from podrun.poptorch.api.optim import ProgramOptimizer
from podrun.poptorch.api.options import Options
from podrun.poptorch.api.signatures import checks_arguments
from podrun.poptorch.api.strategies import PIPELINED
from podrun.poptorch.errors import ArgumentError, Error
from podrun.poptorch.executor.executor import PoplarExecutor
from podrun.poptorch.executor.saved_models import EXPORT_VERSION, read_export, read_metadata

ModelOrWrapper = torch.nn.Module | PoplarExecutor
"""A module, or a wrapper whose module is wrapped once more."""


def trainingModel(
    model: ModelOrWrapper, options: Options | None = None, optimizer: ProgramOptimizer | None = None
) -> PoplarExecutor:
    """Wrap a module for training on IPUs: forward, backward and update in one call. The default optimizer is SGD with a
    learning rate of 0.01.

    RuntimeError for a module that is wrapped for training already; Error for options of another class and for buffers
    that are not plain tensors.
    """
    return PoplarExecutor(_unwrapped(model), options, True, optimizer)


def inferenceModel(model: ModelOrWrapper, options: Options | None = None) -> PoplarExecutor:
    """Wrap a module whose forward pass runs on IPUs. Error for options that accumulate gradients."""
    if isinstance(options, Options) and options.Training.gradient_accumulation != 1:
        pipelined = options._execution_strategy.execution_mode == PIPELINED
        hint = "Use options.deviceIterations to run several micro-batches in one call."
        if pipelined:
            hint = "Use options.deviceIterations, at least as many as the pipeline has stages."
        raise Error("gradient accumulation must be 1 in inference: there are no gradients", hint=hint)
    return PoplarExecutor(_unwrapped(model), options, False)


@checks_arguments
def load(
    filename: str | os.PathLike[str], edit_opts_fn: Callable[[Options], Any] | None = None
) -> PoplarExecutor:
    """The wrapper in a file, compiled and with its weights. ``edit_opts_fn`` may change the options first.

    AssertionError for a file of another version and for one that was saved without the model.
    """
    exported = read_export(os.fspath(filename))
    version = exported.metadata.get("version")
    if version != EXPORT_VERSION:
        raise ArgumentError(f"{filename} was written by version {version!r}; this is {EXPORT_VERSION!r}")
    if not exported.metadata.get("exported_model"):
        raise ArgumentError(
            f"{filename} was saved with export_model=False: use loadExecutable() of a wrapper that you make"
        )
    payload = exported.payload
    options = payload["options"].clone()
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
        options._extra.pop("ipu_version", None)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    model = payload["model"]
    model.train(payload["model_training"])
    executor = PoplarExecutor(model, options, bool(exported.metadata["training"]), payload["optimizer"])
    executor._take_export(exported)
    return executor


def _unwrapped(model: ModelOrWrapper) -> torch.nn.Module:
    if isinstance(model, PoplarExecutor):
        return model._user_model
    if not callable(model):
        raise TypeError(f"poptorch: a model is a torch.nn.Module, not {model!r}")
    return model


BlockId = str
"""The identity of a block in stages and phases."""


def print(m: object) -> None:
    """Print a module with the blocks that its parts begin, then the object itself."""
    if isinstance(m, torch.nn.Module):
        builtins.print(module_repr(m))
    builtins.print(m)


def allclose(ref: object, other: object) -> bool:
    """Whether two results have the same structure and are close. AssertionError for other types and lengths."""
    if type(ref) is not type(other):
        raise ArgumentError(f"{type(ref).__name__} and {type(other).__name__} cannot be compared")
    if isinstance(ref, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(ref) != len(other):
            raise ArgumentError(f"{len(ref)} and {len(other)} results")
        return all(allclose(a, b) for a, b in zip(ref, other, strict=True))
    if not isinstance(ref, torch.Tensor) or not isinstance(other, torch.Tensor):
        raise ArgumentError(f"results of type {type(ref).__name__} cannot be compared")
    return torch.allclose(ref, other)


@checks_arguments
def importPoptorchMetadataFromFile(filename: str | os.PathLike[str]) -> bytes:
    """The metadata of a file that `PoplarExecutor.save` wrote. Error for another file."""
    return read_metadata(os.fspath(filename))


def registerGeometricCustomArgParsers() -> None:
    """Let batches of poptorch_geometric be arguments of models, where that library is installed."""
    try:
        importlib.import_module("poptorch_geometric.types")
    except ImportError:
        return
