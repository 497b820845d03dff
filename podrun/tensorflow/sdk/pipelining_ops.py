"""``pipeline``: stages that share one weight update. Numerically it is gradient accumulation over mini-batches.

The mini-batches run one after the other; the tile model reports the pipeline: stages on their IPUs, the schedule,
cycles and memory. `podrun.tensorflow.capture.places` says how Keras' pipelines use the same engine;
`podrun.tensorflow.sdk.pipeline_rules.shape_of_pipeline` gives the shape, checked by the SDK's rules. Functions of a
parallel stage are modelled on its first IPU.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.runtime.settings import PipelineSchedule as PipelineSchedule
from podrun.tensorflow.capture.places import CountOfUpdates, PipelineShape, at_place, shape_pipeline
from podrun.tensorflow.capture.program_graphs import FunctionGraph, TensorStructure
from podrun.tensorflow.sdk.carried_state import GradientCaptureContext
from podrun.tensorflow.sdk.gradient_accumulation import (
    Accumulation,
    AccumulatorType,
    GradientAccumulationReductionMethod,
)
from podrun.tensorflow.sdk.ipu_infeed_queue import IPUInfeedQueue
from podrun.tensorflow.sdk.ipu_outfeed_queue import IPUOutfeedQueue
from podrun.tensorflow.sdk.loops import repeat_loop
from podrun.tensorflow.sdk.pipeline_rules import (
    PipelineStageOptions as PipelineStageOptions,
)
from podrun.tensorflow.sdk.pipeline_rules import (
    RecomputationMode as RecomputationMode,
)
from podrun.tensorflow.sdk.pipeline_rules import (
    check_of_count,
    check_outfeed,
    check_serialization,
    checked_pipeline,
    flat_mapping,
    known_count,
    least_count,
    shape_of_pipeline,
    state_storage,
)
from podrun.tensorflow.sdk.replica_ops import kept_or_recomputed

_ALL_DEVICES = -1
NO_OUTFEED = "The last computational stage has tensor outputs, but no outfeed_queue has been provided."


@dataclass
class OptimizerFunctionOutput:
    """What the optimizer function returns: the optimizer and the loss. TypeError or ValueError if they do not fit."""

    opt: tf.compat.v1.train.Optimizer | tf.keras.optimizers.Optimizer
    loss: tf.Tensor
    compute_gradients_args: Sequence[object] | None = None
    compute_gradients_kwargs: Mapping[str, object] | None = None
    apply_gradients_args: Sequence[object] | None = None
    apply_gradients_kwargs: Mapping[str, object] | None = None
    variables: Sequence[tf.Variable] | None = None
    tape: tf.GradientTape | None = None
    gradient_capture_context: GradientCaptureContext | None = None
    captured_gradient_outfeed: IPUOutfeedQueue | None = None

    def __post_init__(self) -> None:
        first_version = isinstance(self.opt, tf.compat.v1.train.Optimizer)
        if not hasattr(self.opt, "apply_gradients"):
            raise TypeError("OptimizerFunctionOutput.opt must be a TensorFlow optimizer.")
        if not isinstance(self.loss, tf.Tensor):
            raise TypeError("OptimizerFunctionOutput.loss must be a TensorFlow Tensor object.")
        for name in ("compute_gradients_args", "compute_gradients_kwargs"):
            if not first_version and getattr(self, name):
                raise ValueError(
                    f"OptimizerFunctionOutput.{name} may not be used with OptimizerV2 instances."
                )
        if self.tape is not None:
            if not isinstance(self.tape, tf.GradientTape):
                raise TypeError("OptimizerFunctionOutput.tape must be a GradientTape.")
            if first_version:
                raise ValueError("OptimizerFunctionOutput.tape may only be used with OptimizerV2.")
            if self.variables:
                raise ValueError(
                    "OptimizerFunctionOutput.tape may not be used when OptimizerFunctionOutput.variables is nonempty."
                )
        if self.variables and first_version:
            raise ValueError("OptimizerFunctionOutput.variables may only be used with OptimizerV2.")

    def __setattr__(self, name: str, value: object) -> None:
        if name == "variables" and value and getattr(self, "tape", None) is not None:
            raise ValueError(
                "OptimizerFunctionOutput.variables must be empty when OptimizerFunctionOutput.tape is used."
            )
        object.__setattr__(self, name, value)


def ipu_recomputation_checkpoint(tensors: TensorStructure, name: str | None = None) -> TensorStructure:
    """The same tensors, which are kept where activations are computed again: recomputation begins from them."""
    return kept_or_recomputed(tensors, again=False)


def run_pipeline(
    computational_stages: Sequence[Callable[..., Any]],
    gradient_accumulation_count: int | tf.Tensor | None = None,
    gradient_accumulation_dtype: AccumulatorType = None,
    gradient_accumulation_for_captured_grads: bool = True,
    repeat_count: int = 1,
    batch_serialization_iterations: int = 1,
    inputs: Sequence[tf.Tensor] | tf.Tensor | None = None,
    infeed_queue: IPUInfeedQueue | None = None,
    outfeed_queue: IPUOutfeedQueue | None = None,
    optimizer_function: Callable[..., Any] | None = None,
    device_mapping: Sequence[int] | None = None,
    pipeline_schedule: PipelineSchedule | None = None,
    reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.SUM,
    name: str | None = None,
    **options: Any,
) -> tf.Operation:
    """Run ``repeat_count`` updates of ``gradient_accumulation_count`` mini-batches each. Returns an operation."""
    training = optimizer_function is not None
    count = known_count(options.pop("pipeline_depth", gradient_accumulation_count))
    mapping, schedule = checked_pipeline(
        computational_stages, count, device_mapping, pipeline_schedule, training, options
    )
    check_outfeed(training, outfeed_queue, options)
    check_serialization(batch_serialization_iterations, schedule, mapping, reduction_method)
    count *= batch_serialization_iterations
    dynamic = isinstance(count, tf.Tensor)
    shape = shape_of_pipeline(
        least_count(mapping, schedule, training=training) if dynamic else count,
        mapping,
        schedule,
        training=training,
        recomputation_mode=options.get("recomputation_mode"),
        storage=state_storage(options),
    )
    options["sums_captured"] = gradient_accumulation_for_captured_grads
    summed = outfeed_queue if options.get("accumulate_outfeed") else None
    if summed is not None and not dynamic:
        summed.summed_over = count
    constant = [tf.convert_to_tensor(v) for v in _as_list(inputs)]
    step = _MiniBatch(
        computational_stages, mapping, optimizer_function, outfeed_queue, options, len(constant), shape,
        (count, reduction_method, gradient_accumulation_dtype),
        check_of_count(mapping, schedule, training, summed) if dynamic else None,
    )  # fmt: skip
    starts = [tf.cast(count, tf.int32), *constant] if dynamic else constant
    updates = count if repeat_count == 1 else count * repeat_count
    outcome = repeat_loop(updates, step.run, starts, infeed_queue)
    return outcome if isinstance(outcome, tf.Operation) else tf.group(outcome)


@dataclass(frozen=True, slots=True)
class _MiniBatch:
    """One mini-batch through all stages. ``constant``: how many arguments are the same for all; ``reduction``: number
    of gradients of an update, how they are reduced, and the type of their accumulators; ``check``: what is called with
    the number where the program has it when it starts, as its first argument.
    """

    stages: Sequence[Any]
    mapping: Sequence[Any]
    optimizer_function: Callable[..., Any] | None
    outfeed: IPUOutfeedQueue | None
    options: dict[str, Any]
    constant: int
    shape: PipelineShape
    reduction: tuple[Any, Any, Any]
    check: Callable[[int], None] | None

    def run(self, *arguments: Any, **named: Any) -> list[Any]:
        """The body of the pipeline's loop."""
        graph: tf.Graph = tf.compat.v1.get_default_graph()
        shape_pipeline(graph, self.shape)
        if self.check is None:
            return self.trace(arguments, named, Accumulation(*self.reduction))
        count = arguments[0]
        graph.count_of_updates = CountOfUpdates(count, self.check)
        accumulation = Accumulation(count, *self.reduction[1:])
        return [count, *self.trace(arguments[1:], named, accumulation)]

    def trace(self, arguments: Sequence[Any], named: dict[str, Any], accumulation: Accumulation) -> list[Any]:
        """The loop's values after it."""
        values = _through(self.stages, self.mapping, arguments, named)
        effects, output = [], None
        if self.optimizer_function is None:
            results = _leaving(values, summed=bool(self.options.get("accumulate_outfeed")))
        else:
            with self._last_place():
                output = _called(self.optimizer_function, values)
            alone = self.options.get("outfeed_loss")
            results = output.loss if alone else _masked(values, self.options.get("outfeed_mask"))
        if self.outfeed is None and tf.nest.flatten(results):
            raise ValueError(NO_OUTFEED)
        if self.outfeed is not None and results is not None:
            effects.append(self.outfeed.enqueue(_summable(results, self.options)))
        if output is not None:
            with self._last_place():
                effects.append(_update(output, accumulation))
                effects += _outfed_gradients(output, accumulation, self.options.get("sums_captured", True))
        _check_captures(tf.compat.v1.get_default_graph())
        return [*arguments[: self.constant], tf.group(*effects)]

    def _last_place(self) -> AbstractContextManager[None]:
        return at_place(flat_mapping(self.mapping[-1:])[0], len(self.mapping) - 1)


def _as_list(inputs: Sequence[tf.Tensor] | tf.Tensor | None) -> list[Any]:
    if inputs is None:
        return []
    return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]


def _leaving(values: TensorStructure, *, summed: bool) -> TensorStructure:
    """What leaves an inference pipeline. One tensor leaves by itself; in a list where it is summed, and in programs for
    the SDK's TensorFlow 1, whose ``tensorflow`` is version 1 itself.
    """
    old = hasattr(sys.modules["tensorflow"], "contrib")
    return [values] if isinstance(values, tf.Tensor) and (summed or old) else values


def _summable(results: TensorStructure, options: dict[str, Any]) -> TensorStructure:
    """The results in the type in which the outfeed adds them up."""
    dtype = options.get("accumulate_outfeed_dtype")
    if not options.get("accumulate_outfeed") or dtype is None:
        return results
    chosen = dtype if callable(dtype) and not isinstance(dtype, type) else lambda _: dtype
    return tf.nest.map_structure(lambda t: tf.cast(t, chosen(t)), results)


def _check_captures(graph: FunctionGraph) -> None:
    """ValueError for tensors from outside that are no variables."""
    for outer, _ in graph.captures:
        if outer.dtype != tf.resource and not hasattr(outer, "numpy") and outer.op.type != "Const":
            raise ValueError(
                f"Trying to capture the tensor {outer.name} which is not a resource. This tensor needs to be passed "
                "as either part of the `input` or `infeed_queue` of the pipeline."
            )


def _through(
    stages: Sequence[Any], mapping: Sequence[Any], arguments: Sequence[Any], named: dict[str, Any]
) -> Any:
    """The results of the last stage, each stage at its place."""
    values: Any = None
    for number, (stage, ipu) in enumerate(zip(stages, mapping, strict=True)):
        with at_place(flat_mapping([ipu])[0], number):
            if isinstance(stage, (list, tuple)):
                own = list(arguments) if number == 0 else _positional(values)
                values = [v for function in stage for v in _positional(function(*own))]
            else:
                values = stage(*arguments, **named) if number == 0 else _called(stage, values)
    return values


def _positional(values: Any) -> list[Any]:
    if values is None:
        return []
    items = list(values) if isinstance(values, (list, tuple)) else [values]
    return [v for v in items if not isinstance(v, tf.Operation)]


def _called(stage: Callable[..., Any], values: Any) -> Any:
    return stage(**values) if isinstance(values, dict) else stage(*_positional(values))


def _masked(values: Any, mask: Sequence[bool] | None) -> list[Any] | None:
    items = _positional(values)
    if mask is None:
        return items or None
    if len(mask) != len(items):
        raise ValueError(f"The mask has {len(mask)} entries, but the last stage has {len(items)} outputs.")
    return [v for v, hidden in zip(items, mask, strict=True) if not hidden]


def _update(output: OptimizerFunctionOutput, accumulation: Accumulation) -> tf.Operation:
    """Gradients of the loss, accumulated, and the optimizer's update with them."""
    opt = output.opt
    args, kwargs = output.apply_gradients_args or (), output.apply_gradients_kwargs or {}
    if isinstance(opt, tf.compat.v1.train.Optimizer):
        pairs = opt.compute_gradients(
            output.loss, *(output.compute_gradients_args or ()), **(output.compute_gradients_kwargs or {})
        )
        if all(g is None for g, _ in pairs):
            # Right where this training keeps all weights as they are; else the loss is cut off from them by mistake.
            warnings.warn(
                f"The loss {output.loss.name!r} of the pipeline depends on no weight, so that its training changes "
                "none. Compute it from the weights in the stages, without tf.stop_gradient between them.",
                stacklevel=2,
            )
            pairs = [(tf.zeros_like(v), v) for _, v in pairs]
        variables = [v for g, v in pairs if g is not None]
        _make_slots(opt, variables)
    else:
        watched = () if output.tape is None else output.tape.watched_variables()
        variables = list(output.variables or watched)
        pairs = list(zip(tf.gradients(output.loss, variables), variables, strict=True))
    if not variables:
        raise RuntimeError("No variables to optimize.")
    return accumulation.apply(pairs, lambda ready: opt.apply_gradients(ready, *args, **kwargs))


def _outfed_gradients(
    output: OptimizerFunctionOutput, accumulation: Accumulation, sums: bool
) -> list[tf.Operation]:
    """Give the gradients that the program captured to their outfeed: reduced as those of a weight update, or each
    mini-batch's own.
    """
    context = output.gradient_capture_context or output.tape
    captured = getattr(context, "captured_gradients", {})
    outfeed = output.captured_gradient_outfeed
    if outfeed is None or not captured:
        return []
    if sums:
        outfeed.summed_over = accumulation.count
        if accumulation.method is not GradientAccumulationReductionMethod.SUM:
            captured = {tag: gradient / accumulation.count for tag, gradient in captured.items()}
    return [outfeed.enqueue(dict(captured))]


def _to_flat_list(values: object) -> list[object]:
    """The values of lists in lists, in order. Programs and tests call it by this name."""
    if not isinstance(values, (list, tuple, range)):
        return [values]
    return [item for part in values for item in _to_flat_list(part)]


def _make_slots(opt: tf.compat.v1.train.Optimizer, variables: Sequence[Any]) -> None:
    """Make an optimizer's slots outside of the branch that updates."""
    while hasattr(opt, "_opt"):
        opt = opt._opt
    with tf.init_scope():
        opt._create_slots(variables)
