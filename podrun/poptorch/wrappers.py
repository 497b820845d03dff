"""Making wrappers: ``poptorch.trainingModel``, ``inferenceModel`` and ``load``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from podrun.poptorch.enums import ConnectionType
from podrun.poptorch.errors import Error
from podrun.poptorch.executor import PoplarExecutor
from podrun.poptorch.export_file import EXPORT_VERSION, read_export
from podrun.poptorch.options import Options
from podrun.poptorch.strategies import PIPELINED


def trainingModel(model: Any, options: Options | None = None, optimizer: Any = None) -> PoplarExecutor:
    """A module that trains on IPUs: forward, backward and update in one call. The default optimizer is SGD with a
    learning rate of 0.01.

    RuntimeError for a module that is wrapped for training already; Error for options of another class and for buffers
    that are no plain tensors.
    """
    return PoplarExecutor(_unwrapped(model), options, True, optimizer)


def inferenceModel(model: Any, options: Options | None = None) -> PoplarExecutor:
    """A module whose forward pass runs on IPUs. Error for options that accumulate gradients."""
    if isinstance(options, Options) and options.Training.gradient_accumulation != 1:
        pipelined = options._execution_strategy.execution_mode == PIPELINED
        hint = "Use options.deviceIterations to run several micro-batches in one call."
        if pipelined:
            hint = "Use options.deviceIterations, at least as many as the pipeline has stages."
        raise Error("gradient accumulation must be 1 in inference: there are no gradients", hint=hint)
    return PoplarExecutor(_unwrapped(model), options, False)


def load(filename: str, edit_opts_fn: Callable[[Options], Any] | None = None) -> PoplarExecutor:
    """The wrapper that a file holds, compiled and with its weights. ``edit_opts_fn`` may change the options before.

    AssertionError for a file of another version and for one that was saved without the model.
    """
    found = read_export(filename)
    version = found.metadata.get("version")
    assert version == EXPORT_VERSION, (
        f"{filename} was written by version {version!r}; this is {EXPORT_VERSION!r}"
    )
    assert found.metadata.get("exported_model"), (
        f"{filename} was saved with export_model=False: use loadExecutable() of a wrapper that you make"
    )
    payload = found.payload
    options = payload["options"].clone()
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
        options._extra.pop("ipu_version", None)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    model = payload["model"]
    model.train(payload["model_training"])
    made = PoplarExecutor(model, options, bool(found.metadata["training"]), payload["optimizer"])
    made._take_export(found)
    return made


def _unwrapped(model: Any) -> Any:
    return model._user_model if isinstance(model, PoplarExecutor) else model
