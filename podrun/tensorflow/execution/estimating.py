"""TensorFlow models as `podrun estimate` takes them: traced, not compiled and not run.

``train.py``: the program runs until its first step on an IPU that trains (or infers, as requested); the estimate takes
the step's forward pass, and the program ends there. ``net.py:NAME``: a Keras model, or a class or function without
arguments that gives one. A folder: a SavedModel, by its signature ``serving_default``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from podrun.core.errors import ConfigError, UsageError
from podrun.core.program_files import (
    as_program,
    model_in_file,
    parse_input,
    run_until_compiled,
)
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Model, TensorType
from podrun.tensorflow.execution.modelling import ModelledStep, forward_graph, steps_offered_to
from podrun.tensorflow.operators.table import TensorFlowOperators
from podrun.tensorflow.sdk.served_programs import read_served_step

SIGNATURE = "serving_default"
"""The signature of a SavedModel that is estimated."""


@dataclass
class TracedFunction:
    """A function of tensors whose first dimension is the batch: a `podrun.estimate.tracing.ModelSource`. ``specs``: its
    inputs, with None for a batch of any size.
    """

    function: Callable[..., Any]
    specs: Sequence[tf.TensorSpec]
    _models: dict[int, Model] = field(default_factory=dict)

    @property
    def micro_batch(self) -> int | None:
        """The batch that the inputs have, if that is fixed."""
        return next((spec.shape[0] for spec in self.specs if spec.shape.rank), None)

    def at(self, micro_batch: int) -> Model:
        """The runtime's model for a micro-batch. UsageError for inputs with other open dimensions; what TensorFlow
        raises for a function that takes no such batch.
        """
        if micro_batch not in self._models:
            own = self.micro_batch
            specs = [_sized(spec, own, micro_batch) for spec in self.specs]
            served = read_served_step(self.function, specs)
            self._models[micro_batch] = Model(served.graph(), TensorFlowOperators())
        return self._models[micro_batch]


def _sized(spec: tf.TensorSpec, own: int | None, micro_batch: int) -> tf.TensorSpec:
    """An input with this batch, if its first dimension is the batch."""
    sizes = list(spec.shape)
    if any(size is None for size in sizes[1:]):
        raise UsageError(
            f"input {spec.name!r} leaves a dimension open that is not the first (the batch): {sizes}",
            hint="Give the sizes of all inputs: --input 1x224x224x3",
        )
    if sizes and sizes[0] in (None, own):
        sizes[0] = micro_batch
    return tf.TensorSpec(sizes, spec.dtype, spec.name)


@dataclass(frozen=True)
class ProgramStep:
    """The forward pass of a program's step, which has one micro-batch: a `podrun.estimate.tracing.ModelSource`."""

    step: ModelledStep
    types: Mapping[str, TensorType]
    values: Mapping[str, np.ndarray]

    @property
    def micro_batch(self) -> int | None:
        """The first dimension of the first input of the step."""
        return next((t.shape[0] for t in self.types.values() if t.shape), None)

    @property
    def accumulation(self) -> int | None:
        """Micro-batches of an update of the program; None for one."""
        return self.step.micro_batches if self.step.micro_batches > 1 else None

    def at(self, micro_batch: int) -> Model:
        """The model. UsageError for another micro-batch than the program's."""
        if self.micro_batch not in (None, micro_batch):
            raise UsageError(f"the program computes batches of {self.micro_batch}")
        forward = forward_graph(self.step, self.types, self.values)
        return Model(forward.graph, TensorFlowOperators(), trained=forward.trained or None)


def saved_model_source(folder: Path, inputs: Sequence[str]) -> TracedFunction:
    """The model of a SavedModel. ConfigError for a folder that TensorFlow cannot read or that has no signature."""
    with as_program(folder):
        try:
            loaded = tf.saved_model.load(str(folder))
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise ConfigError(
                f"TensorFlow cannot read {folder}: {error}", hint=f"saved_model_cli show --all --dir {folder}"
            ) from None
    function = loaded.signatures.get(SIGNATURE)
    if function is None:
        known = ", ".join(loaded.signatures) or "none"
        raise ConfigError(
            f"{folder} has no signature {SIGNATURE!r} (it has: {known})",
            hint="Save with signatures={'serving_default': FUNCTION}.",
        )
    specs = list(function.structured_input_signature[1].values())
    names = [spec.name for spec in specs]

    def by_name(*tensors: tf.Tensor) -> list[tf.Tensor]:
        results: dict[str, tf.Tensor] = function(**dict(zip(names, tensors, strict=True)))
        return list(results.values())

    by_name.loaded = loaded  # type: ignore[attr-defined]  # Its variables live as long as it does.
    return TracedFunction(by_name, _replaced(specs, inputs))


def keras_source(path: Path, name: str, inputs: Sequence[str], *, train: bool) -> TracedFunction:
    """A Keras model of a file. UsageError for a wrong name, and where its inputs are not known."""
    with as_program(path):
        model = model_in_file(path, name, tf_keras.Model, "Keras model", "Keras models")
    known = [tf.TensorSpec(t.shape, t.dtype, t.name) for t in (model.inputs or ())]
    if not known and not inputs:
        raise UsageError(
            f"the inputs of {name} are not known", hint="Give one --input for each: --input 8x32x32x3"
        )

    def call(*tensors: tf.Tensor) -> Any:
        return model(tensors[0] if len(tensors) == 1 else list(tensors), training=train)

    return TracedFunction(call, _replaced(known, inputs))


def _replaced(specs: Sequence[tf.TensorSpec], inputs: Sequence[str]) -> Sequence[tf.TensorSpec]:
    """The specs with the shapes and types of a command line, if it has any. UsageError for another number of them."""
    if not inputs:
        return specs
    if specs and len(specs) != len(inputs):
        raise UsageError(f"the model has {len(specs)} inputs, and there are {len(inputs)} --input")
    names = [spec.name for spec in specs] or [f"input_{place}" for place in range(len(inputs))]
    return [tf.TensorSpec(*parse_input(text), name=name) for name, text in zip(names, inputs, strict=True)]


class _Taken(BaseException):
    """Ends a program at its step. Not an Exception, because programs catch those."""


def first_step_source(path: Path, arguments: Sequence[str], *, train: bool) -> ProgramStep:
    """The step that a program runs first, in training or in inference. UsageError if it runs no such step, and for
    errors of its own before.
    """
    taken: list[ProgramStep] = []

    def take(step: ModelledStep, types: Mapping[str, TensorType], values: Mapping[str, np.ndarray]) -> None:
        if (step.differentiated is not None) == train:
            taken.append(ProgramStep(step, types, values))
            raise _Taken

    try:
        with as_program(path, arguments), steps_offered_to(take):
            run_until_compiled(path)
    except _Taken:
        pass
    except UsageError:
        if not taken:  # TensorFlow wraps what ends a function of the host.
            raise
    if taken:
        return taken[0]
    kind, other = ("trains", "leave --train out") if train else ("infers", "give --train")
    raise UsageError(
        f"{path} runs no step on an IPU that {kind}",
        hint=f"Run a step, {other}, or name a Keras model of the file: {path}:NAME",
    )
