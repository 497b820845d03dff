"""What the SDK's methods set on a Keras model: accumulation, pipelining, queues, callbacks and metrics.

The options stand on the model as one object. A change takes effect at the next fit, evaluate or predict: programs are
traced for a version of the options.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.sdk.gradient_accumulation import Accumulation, GradientAccumulationReductionMethod

if TYPE_CHECKING:
    from tf_keras import Model

    from podrun.tensorflow.keras.stage_classes import StageAssignment

ReductionName = str | GradientAccumulationReductionMethod
"""A reduction of accumulated gradients, or its name in any case."""

_SET_BY_KERAS = (
    "computational_stages", "repeat_count", "inputs", "infeed_queue", "outfeed_queue", "optimizer_function",
)  # fmt: skip
_OWN_ARGUMENT = {
    "gradient_accumulation_count": "gradient_accumulation_steps_per_replica",
    "device_mapping": "device_mapping",
    "accumulate_outfeed": "accumulate_outfeed",
}
_NOT_WITH_KERAS = ("outfeed_loss", "outfeed_mask", "batch_serialization_iterations")
_PIPELINE_ARGUMENTS = {
    "gradient_accumulation_dtype", "gradient_accumulation_for_captured_grads", "pipeline_schedule",
    "recomputation_mode", "forward_propagation_stages_poplar_options", "backward_propagation_stages_poplar_options",
    "weight_update_poplar_options", "offload_weight_update_variables", "replicated_optimizer_state_sharding",
    "offload_activations", "offload_gradient_accumulation_buffers", "replicated_weight_sharding", "offload_weights",
    "continuous_weight_updates", "accumulate_outfeed_dtype", "name",
}  # fmt: skip
_ACCUMULATION_ARGUMENTS = {
    "offload_weight_update_variables", "replicated_optimizer_state_sharding", "dtype", "name",
}  # fmt: skip


_NOT_ACCUMULATION_ARGUMENTS = {
    "opt": (
        "This is not supported as the optimizer which the model has been compiled with is automatically wrapped."
    ),
    "num_mini_batches": (
        "Set the `gradient_accumulation_steps_per_replica` argument to `set_gradient_accumulation_options` instead."
    ),
    "experimental_normalize_gradients": (
        "This argument has now been removed, use `gradient_accumulation_reduction_method` instead."
    ),
}


class ReplicatedMetricReductionMethod(Enum):
    """How metrics of replicas become one value: the last replica's, a list of all, their sum or their mean."""

    NONE = "NONE"
    LIST = "LIST"
    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, method: str | ReplicatedMetricReductionMethod) -> ReplicatedMetricReductionMethod:
        """The method of that name, in any case. ValueError for another."""
        if isinstance(method, cls):
            return method
        if isinstance(method, str) and method.upper() in cls.__members__:
            return cls[method.upper()]
        raise ValueError(f"Cannot parse {method} as one of ReplicatedMetricReductionMethod.")


@dataclass(slots=True)
class ModelOptions:
    """The options of a model. ``version`` counts changes; ``resets`` counts how often the host reset the metrics."""

    accumulation_steps: int | None = None
    reduction: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM
    accumulation_arguments: Mapping[str, object] = field(default_factory=dict)
    transforms_each: bool = False
    """Whether the optimizer clips the gradients of each step (``use_v2_gradient_accumulation_optimizer``)."""
    pipeline_steps: int | None = None
    device_mapping: list[int] | None = None
    accumulates_outfeed: bool = False
    pipeline_arguments: Mapping[str, object] = field(default_factory=dict)
    asynchronous: bool = False
    metric_reduction: ReplicatedMetricReductionMethod = ReplicatedMetricReductionMethod.NONE
    infeed: Mapping[str, object] = field(default_factory=dict)
    outfeed: Mapping[str, object] = field(default_factory=dict)
    assignment: Sequence[StageAssignment] | None = None
    """The stages of the calls of a model's layers; None: as ``PipelineStage`` says, or no pipeline."""
    assignment_reset: bool = False
    """Whether the program took the stages away that ``PipelineStage`` had given."""
    built_by_program: bool = False
    """Whether the program called ``build`` of a subclass of ``Model``, rather than the model alone."""
    version: int = 0
    resets: int = 0

    def accumulation(self) -> Accumulation | None:
        """The accumulation of a model that is not a pipeline."""
        if not self.accumulation_steps:
            return None
        arguments = self.accumulation_arguments
        return Accumulation(
            self.accumulation_steps,
            self.reduction,
            arguments.get("dtype"),
            arguments,
            sums_captured=True,
            transforms_each=self.transforms_each,
        )

    def pipeline_accumulation(self) -> Accumulation:
        """The accumulation of a pipeline, which `set_pipelining_options` has to have set. ValueError otherwise."""
        if self.pipeline_steps is None:
            raise ValueError(
                "The model which you are attempting to train is pipelined, however "
                "`gradient_accumulation_steps_per_replica` has not been set through `set_pipelining_options()`: "
                "pipelined models accumulate gradients when they are trained."
            )
        dtype = self.pipeline_arguments.get("gradient_accumulation_dtype")
        return Accumulation(
            self.pipeline_steps,
            self.reduction,
            dtype,
            self.pipeline_arguments,
            sums_captured=bool(self.pipeline_arguments.get("gradient_accumulation_for_captured_grads", True)),
        )


def options_of(model: Model) -> ModelOptions:
    """The options of a model, which are its own from the first use on."""
    options: ModelOptions | None = model.__dict__.get("_podrun_options")
    if options is None:
        options = ModelOptions()
        # Keras' own assignment would track the object as a part of the model.
        object.__setattr__(model, "_podrun_options", options)
    return options


def _checked_steps(steps: int | None) -> int | None:
    if steps is None:
        return None
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(
            f"Expected `gradient_accumulation_steps_per_replica` to be a positive integer, but got {steps} instead."
        )
    return steps


def _check_queue_options(names: Sequence[str], arguments: Mapping[str, object], *, automatic: bool) -> None:
    for argument in names:
        if argument in arguments:
            why = "automatically set by" if automatic else "not compatible with"
            raise ValueError(f"Found `{argument}` key in `kwargs`. This argument is {why} Keras.")


def _check_pipeline_arguments(arguments: Mapping[str, object]) -> None:
    for name in arguments:
        key_text = f"Found `{name}` key in `pipelining_kwargs`."
        if name in _OWN_ARGUMENT:
            raise ValueError(
                f"{key_text} Set the `{_OWN_ARGUMENT[name]}` argument to `set_pipelining_options` instead."
            )
        if name in _SET_BY_KERAS:
            raise ValueError(f"{key_text} This argument is automatically set by Keras.")
        if name in _NOT_WITH_KERAS:
            raise ValueError(f"{key_text} This argument is not compatible with Keras.")
        if name == "experimental_normalize_gradients":
            raise ValueError(
                f"Found `{name}` argument to `set_pipelining_options`. {_NOT_ACCUMULATION_ARGUMENTS[name]}"
            )
        if name not in _PIPELINE_ARGUMENTS:
            raise TypeError(f"set_pipelining_options got an unexpected keyword argument {name!r}")


class ModelExtension:
    """The methods of the SDK that set options, which Keras' model class gets."""

    def set_gradient_accumulation_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        gradient_accumulation_reduction_method: ReductionName = "sum",
        use_v2_gradient_accumulation_optimizer: bool = False,
        **gradient_accumulation_optimizer_kwargs: object,
    ) -> None:
        """Make one weight update for so many steps of a replica, with the sum or mean of their gradients."""
        for name, advice in _NOT_ACCUMULATION_ARGUMENTS.items():
            if name in gradient_accumulation_optimizer_kwargs:
                raise ValueError(f"Found `{name}` key in `gradient_accumulation_optimizer_kwargs`. {advice}")
        unknown = sorted(gradient_accumulation_optimizer_kwargs.keys() - _ACCUMULATION_ARGUMENTS)
        if unknown:
            raise TypeError(
                f"set_gradient_accumulation_options got an unexpected keyword argument {unknown[0]!r}"
            )
        options = options_of(self)
        reduction = GradientAccumulationReductionMethod.parse(gradient_accumulation_reduction_method)
        steps = _checked_steps(gradient_accumulation_steps_per_replica)
        options.reduction = reduction
        options.accumulation_arguments = gradient_accumulation_optimizer_kwargs
        options.transforms_each = use_v2_gradient_accumulation_optimizer
        options.accumulation_steps = options.accumulation_steps if steps is None else steps
        options.version += 1

    def set_pipelining_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        device_mapping: list[int] | None = None,
        accumulate_outfeed: bool | None = None,
        gradient_accumulation_reduction_method: ReductionName = "sum",
        **pipelining_kwargs: object,
    ) -> None:
        """How a model with stages is run as a pipeline. ``device_mapping``: the IPU of each stage."""
        options = options_of(self)
        reduction = GradientAccumulationReductionMethod.parse(gradient_accumulation_reduction_method)
        steps = _checked_steps(gradient_accumulation_steps_per_replica)
        if device_mapping is not None and (
            not isinstance(device_mapping, list)
            or any(not isinstance(ipu, int) or isinstance(ipu, bool) for ipu in device_mapping)
        ):
            raise ValueError("Expected `device_mapping` to be a list of integers.")
        _check_pipeline_arguments(pipelining_kwargs)
        options.reduction, options.pipeline_arguments = reduction, pipelining_kwargs
        options.pipeline_steps = options.pipeline_steps if steps is None else steps
        options.device_mapping = options.device_mapping if device_mapping is None else device_mapping
        if accumulate_outfeed is not None:
            options.accumulates_outfeed = bool(accumulate_outfeed)
        options.version += 1

    @property
    def _gradient_accumulation_steps_per_replica(self) -> int | None:
        return options_of(self).accumulation_steps

    @property
    def _gradient_accumulation_reduction_method(self) -> GradientAccumulationReductionMethod:
        return options_of(self).reduction

    @property
    def _gradient_accumulation_optimizer_kwargs(self) -> Mapping[str, object]:
        return options_of(self).accumulation_arguments

    @property
    def _pipelining_gradient_accumulation_steps_per_replica(self) -> int | None:
        return options_of(self).pipeline_steps

    @property
    def _pipelining_device_mapping(self) -> list[int] | None:
        return options_of(self).device_mapping

    @property
    def _pipelining_accumulate_outfeed(self) -> bool:
        return options_of(self).accumulates_outfeed

    @property
    def _asynchronous_callbacks(self) -> bool:
        return options_of(self).asynchronous

    def set_asynchronous_callbacks(self, asynchronous: bool = False) -> None:
        """Whether callbacks for batches are called for every step, in a thread of their own."""
        options_of(self).asynchronous = bool(asynchronous)

    def export_for_ipu_serving(
        self,
        export_dir: str,
        batch_size: int | None = None,
        output_names: str | Sequence[str] | None = None,
        preprocessing_step: Callable[..., object] | None = None,
        preprocessing_step_signature: object = None,
        postprocessing_step: Callable[..., object] | None = None,
        postprocessing_step_signature: object = None,
        purge_export_dir: bool = False,
    ) -> object:
        """Write the model to a folder that is served: `ipu.serving.export_keras`, with its arguments."""
        exported = importlib.import_module("podrun.tensorflow.sdk.exported_models")
        return exported.export_keras(
            self,
            export_dir,
            batch_size=batch_size,
            output_names=output_names,
            preprocessing_step=preprocessing_step,
            preprocessing_step_signature=preprocessing_step_signature,
            postprocessing_step=postprocessing_step,
            postprocessing_step_signature=postprocessing_step_signature,
            purge_export_dir=purge_export_dir,
        )

    def set_infeed_queue_options(self, **kwargs: object) -> None:
        """Options of the infeed; they change no numbers."""
        _check_queue_options(("dataset", "infeed_spec", "element_spec"), kwargs, automatic=True)
        options_of(self).infeed = kwargs

    def set_outfeed_queue_options(self, **kwargs: object) -> None:
        """Options of the outfeed; they change no numbers."""
        _check_queue_options(("outfeed_mode", "device_ordinal"), kwargs, automatic=False)
        options_of(self).outfeed = kwargs

    def set_replication_options(
        self, replicated_metric_reduction_method: str | ReplicatedMetricReductionMethod = "NONE"
    ) -> None:
        """How metrics of replicas are reduced: NONE, the default, gives the last replica's."""
        method = ReplicatedMetricReductionMethod.parse(replicated_metric_reduction_method)
        options_of(self).metric_reduction = method
