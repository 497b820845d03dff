"""``ipu.serving``: steps, pipelines and Keras models exported for servers (`podrun.tensorflow.sdk.served_programs`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from podrun.runtime.settings import PipelineSchedule
from podrun.tensorflow.capture.places import at_place
from podrun.tensorflow.sdk.pipeline_rules import flat_mapping
from podrun.tensorflow.sdk.served_programs import (
    ServedSteps,
    StatedSignature,
    checked_folder,
    chosen_signature,
    under_strategy,
    write_folder,
)


def _steps(
    predict: Callable[..., Any],
    signature: StatedSignature,
    dataset: tf.data.Dataset | None,
    output_names: str | Sequence[str] | None,
    before: Callable[..., Any] | None = None,
    before_signature: StatedSignature = None,
    after: Callable[..., Any] | None = None,
) -> ServedSteps:
    specs = chosen_signature(predict, signature, dataset)
    first = None if before is None else chosen_signature(before, before_signature, None, "preprocessing_step")
    names = [output_names] if isinstance(output_names, str) else output_names
    return ServedSteps(predict, specs, before, first, after, names)


def export_single_step(
    predict_step: Callable[..., Any],
    export_dir: str,
    iterations: int,
    predict_step_signature: StatedSignature = None,
    input_dataset: tf.data.Dataset | None = None,
    output_names: str | Sequence[str] | None = None,
    preprocessing_step: Callable[..., Any] | None = None,
    preprocessing_step_signature: StatedSignature = None,
    postprocessing_step: Callable[..., Any] | None = None,
    postprocessing_step_signature: StatedSignature = None,
    purge_export_dir: bool = False,
) -> Callable[..., Any] | None:
    """Write a step, which runs ``iterations`` times in a call of the device, to a folder. Returns the function of the
    SavedModel, or None where the host cannot compute the step.

    ValueError for a folder that is not empty, and for no signature or two; TypeError for what is no signature.
    """
    steps = _steps(
        predict_step,
        predict_step_signature,
        input_dataset,
        output_names,
        preprocessing_step,
        preprocessing_step_signature,
        postprocessing_step,
    )
    return write_folder(steps, checked_folder(export_dir, purge_export_dir), iterations)


def export_pipeline(
    computational_stages: Sequence[Callable[..., Any]],
    export_dir: str,
    iterations: int,
    inputs: Sequence[Any] | None = None,
    device_mapping: Sequence[int] | None = None,
    pipeline_schedule: PipelineSchedule | None = None,
    poplar_options: object = None,
    name: str | None = None,
    predict_step_signature: StatedSignature = None,
    input_dataset: tf.data.Dataset | None = None,
    output_names: str | Sequence[str] | None = None,
    preprocessing_step: Callable[..., Any] | None = None,
    preprocessing_step_signature: StatedSignature = None,
    postprocessing_step: Callable[..., Any] | None = None,
    postprocessing_step_signature: StatedSignature = None,
    purge_export_dir: bool = False,
) -> Callable[..., Any] | None:
    """Write a pipeline of stages to a folder, as `export_single_step`. ``inputs`` are constants that the first stage
    gets before the others.
    """
    mapping = flat_mapping(device_mapping if device_mapping is not None else range(len(computational_stages)))
    constants = [tf.constant(value) for value in inputs or ()]

    def predict(*values: tf.Tensor) -> Any:
        current: Any = [*constants, *values]
        for number, (stage, ipu) in enumerate(zip(computational_stages, mapping, strict=True)):
            with at_place(ipu, number):
                current = stage(*(current if isinstance(current, (list, tuple)) else [current]))
        return current

    signature = predict_step_signature
    if signature is None and input_dataset is None:
        raise ValueError("Either predict_step_signature or input_dataset must be set.")
    steps = _steps(
        predict,
        signature,
        input_dataset,
        output_names,
        preprocessing_step,
        preprocessing_step_signature,
        postprocessing_step,
    )
    return write_folder(steps, checked_folder(export_dir, purge_export_dir), iterations)


def _inputs_of(model: tf.keras.Model) -> Any:
    """The symbolic inputs of a graph of layers, or specs of the inputs with which a subclass was built or called."""
    if model.inputs:
        return model.inputs if len(model.inputs) > 1 else model.inputs[0]
    assignment = importlib.import_module("podrun.tensorflow.keras.stage_assignment")
    if not assignment.is_built_subclass(model):
        raise ValueError(
            f"Model {model.name} has not been built, so that the shapes of its inputs are not known: call `build` with "
            "them before it is exported."
        )
    specs = model._saved_model_inputs_spec
    if specs is None and not assignment.casts_its_inputs(model):
        raise ValueError(
            f"Model {model.name} has a layer that takes values as they come, such as an Embedding, so that the types "
            "of its inputs are not known: call the model once, or make it of `keras.Input`s, before it is exported."
        )
    return assignment.built_specs(model) if specs is None else specs


def export_keras(
    model: tf.keras.Model,
    export_dir: str,
    batch_size: int | None = None,
    output_names: str | Sequence[str] | None = None,
    preprocessing_step: Callable[..., Any] | None = None,
    preprocessing_step_signature: StatedSignature = None,
    postprocessing_step: Callable[..., Any] | None = None,
    postprocessing_step_signature: StatedSignature = None,
    purge_export_dir: bool = False,
) -> Callable[..., Any] | None:
    """Write a Keras model to a folder, as `export_single_step` with ``steps_per_execution`` iterations. ValueError for
    a model that was not made under an IPU strategy, and where its inputs or the batch size are not known.
    """
    under_strategy(model)
    signature, inputs = [], _inputs_of(model)
    for place, tensor in enumerate(tf.nest.flatten(inputs)):
        shape = tensor.shape.as_list()
        shape[0] = batch_size or shape[0]
        if shape[0] is None:
            raise ValueError("The model's batch size is not known: set batch_size.")
        name = (getattr(tensor, "name", None) or f"input_{place}").split(":")[0].replace("/", "_")
        signature.append(tf.TensorSpec(shape, tensor.dtype, name))
    steps = getattr(model, "_steps_per_execution", None)
    iterations = 1 if steps is None else int(steps.numpy())

    def predict(*values: tf.Tensor) -> Any:
        return model(tf.nest.pack_sequence_as(inputs, values), training=False)

    served = _steps(
        predict,
        signature,
        None,
        output_names,
        preprocessing_step,
        preprocessing_step_signature,
        postprocessing_step,
    )
    return write_folder(served, checked_folder(export_dir, purge_export_dir), iterations)
