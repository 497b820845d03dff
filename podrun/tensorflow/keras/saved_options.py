"""Options of a model in its saved form: ``get_config`` writes them, and a model that is loaded under an IPU strategy
has them again. Keyword arguments of pipelines and accumulation are not saved, as in the SDK.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from podrun.tensorflow.keras.accumulating_optimizers import REPLACED, Replacement, on_ipu, replace_method
from podrun.tensorflow.keras.model_options import ReplicatedMetricReductionMethod, options_of
from podrun.tensorflow.keras.stage_assignment import (
    built_specs,
    casts_its_inputs,
    is_built_subclass,
    unassigned_entries,
)
from podrun.tensorflow.keras.stage_classes import StageAssignment
from podrun.tensorflow.keras.stage_tracing import pipeline_assignment
from podrun.tensorflow.sdk.gradient_accumulation import GradientAccumulationReductionMethod

if TYPE_CHECKING:
    from tf_keras import Model
    from tf_keras.src.saving.legacy.saved_model.load import KerasObjectLoader

KEY = "ipu_options"
"""The key of the options in a model's configuration."""
_VALUES = {
    "gradient_accumulation_steps_per_replica": "accumulation_steps",
    "pipelining_gradient_accumulation_steps_per_replica": "pipeline_steps",
    "pipelining_device_mapping": "device_mapping",
    "pipelining_accumulate_outfeed": "accumulates_outfeed",
    "asynchronous_callbacks": "asynchronous",
    "infeed_kwargs": "infeed",
    "outfeed_kwargs": "outfeed",
}
"""Name in the configuration -> attribute of the options."""


def _stages(assignment: Sequence[StageAssignment]) -> list[object]:
    """The stages of entries, with a list for a model inside."""
    return [
        _stages(entry.pipeline_stage_assignments)
        if hasattr(entry, "pipeline_stage_assignments")
        else getattr(entry, "pipeline_stage", None)
        for entry in assignment
    ]


def _staged(assignment: Sequence[StageAssignment], stages: Sequence[object]) -> None:
    for entry, stage in zip(assignment, stages, strict=True):
        if isinstance(stage, list):
            _staged(getattr(entry, "pipeline_stage_assignments", []), stage)
        else:
            entry.pipeline_stage = stage  # type: ignore[attr-defined]


def _entries_as_saved(model: Model, stages: Sequence[object]) -> list[StageAssignment]:
    """The entries of a model. A subclass inside has entries of its own where its stages are a list: loading builds
    every model, also what the program only called.
    """
    for entry, stage in zip(unassigned_entries(model), stages, strict=True):
        layer, inside = entry.called, isinstance(stage, list)
        if entry.is_nested_model != inside:
            options_of(layer).built_by_program = inside
        if isinstance(stage, list):
            _entries_as_saved(layer, stage)
    return unassigned_entries(model)


def written_options(model: Model) -> dict[str, object]:
    """The options of a model as values of JSON."""
    options = options_of(model)
    values: dict[str, object] = {name: getattr(options, attribute) for name, attribute in _VALUES.items()}
    values["gradient_accumulation_reduction_method"] = options.reduction.name
    values["replicated_metric_reduction_method"] = options.metric_reduction.name
    assignment = pipeline_assignment(model)
    if assignment is not None:
        values["pipeline_stage_assignment"] = _stages(assignment)
    return values


def take_options(model: Model, values: Mapping[str, object]) -> None:
    """Give a model options that `written_options` wrote."""
    options = options_of(model)
    for name, attribute in _VALUES.items():
        if values.get(name) is not None:
            setattr(options, attribute, values[name])
    reduction = str(values.get("gradient_accumulation_reduction_method", "SUM"))
    options.reduction = GradientAccumulationReductionMethod.parse(reduction)
    metric = str(values.get("replicated_metric_reduction_method", "NONE"))
    options.metric_reduction = ReplicatedMetricReductionMethod.parse(metric)
    stages = values.get("pipeline_stage_assignment")
    if isinstance(stages, list):
        options.assignment = _entries_as_saved(model, stages)
        _staged(options.assignment, stages)
    options.version += 1


def _config(model: Model, plain: Callable[..., dict[str, object]]) -> dict[str, object]:
    config = plain(model)
    if on_ipu(model) and _has_options(model):
        config[KEY] = written_options(model)
    return config


def _has_options(model: Model) -> bool:
    return written_options(model) != written_options(_PLAIN)


class _Plain:
    """A model without options."""


_PLAIN = _Plain()


def _from_config(owner: type) -> None:
    """Let ``from_config`` of a class give models their options."""
    method = vars(owner)["from_config"]
    REPLACED.append((owner, "from_config", method))

    def from_config(
        cls: type, config: dict[str, object], custom_objects: dict[str, object] | None = None
    ) -> Model:
        values = config.get(KEY) if isinstance(config, dict) else None
        if values is not None:
            config = {name: value for name, value in config.items() if name != KEY}
        model = method.__func__(cls, config, custom_objects)
        if isinstance(values, dict) and on_ipu(model):
            take_options(model, values)
        return model

    from_config.__module__, from_config.__doc__ = method.__func__.__module__, method.__func__.__doc__
    owner.from_config = classmethod(from_config)  # type: ignore[attr-defined]


def _reconstructed(
    loader: KerasObjectLoader, plain: Replacement, model_id: int, model: Model, layers: object
) -> object:
    """A model of a SavedModel, once its layers are in place."""
    result = plain(loader, model_id, model, layers)
    config = json.loads(loader._metadata[model_id].metadata).get("config") or {}
    if KEY in config and on_ipu(model):
        take_options(model, config[KEY])
    return result


def _revived(
    loader: KerasObjectLoader, plain: Replacement, metadata: Mapping[str, object], node_id: int
) -> object:
    """A layer of a SavedModel that its class made again. A class of a program leaves the options out."""
    model = plain(loader, metadata, node_id)
    config = metadata.get("config")
    values = config.get(KEY) if isinstance(config, dict) else None
    if model is not None and isinstance(values, dict) and on_ipu(model) and is_built_subclass(model):
        take_options(model, values)
    return model


def _saved(model: Model, plain: Replacement, *args: object, **kwargs: object) -> object:
    """Save a model. RuntimeError for a ``get_config`` of its own that loses the options."""
    unspecified = on_ipu(model) and is_built_subclass(model) and model._saved_model_inputs_spec is None
    if unspecified and casts_its_inputs(model):
        model._set_save_spec(built_specs(model))
    own = not type(model).get_config.__module__.startswith(("tf_keras.", "keras."))
    if own and on_ipu(model) and _has_options(model) and KEY not in model.get_config():
        raise RuntimeError(
            f"The function `get_config` of the model {model.name} does not give what that of its base class gives, so "
            "that its options for IPUs would be lost: let it call `super().get_config()` and add to the result."
        )
    return plain(model, *args, **kwargs)


def install_saving() -> None:
    """Let models of Keras be saved with their options, and be loaded with the SDK's optimizers."""
    importlib.import_module("podrun.tensorflow.addons.capturing").register_wrapping_optimizers()
    engine = "tf_keras.src.engine."
    model = importlib.import_module(engine + "training").Model
    sequential = importlib.import_module(engine + "sequential").Sequential
    functional = importlib.import_module(engine + "functional").Functional
    loader = importlib.import_module("tf_keras.src.saving.legacy.saved_model.load").KerasObjectLoader
    for owner in (sequential, functional, model):
        replace_method(owner, "get_config", _config)
    for owner in (sequential, model):
        _from_config(owner)
    replace_method(loader, "_reconstruct_model", _reconstructed)
    replace_method(loader, "_revive_layer_or_model_from_config", _revived)
    replace_method(model, "save", _saved)
