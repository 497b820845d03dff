"""``pipeline``: stages that share one weight update. Numerically it is gradient accumulation over mini-batches.

The mini-batches run one after the other on the replica's first IPU: schedules, mappings and recomputation are checked
as the SDK checks them, and change no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tensorflow as tf

from podrun.tensorflow.capture.program_graphs import innermost_program
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.sdk.gradient_accumulation import Accumulation, GradientAccumulationReductionMethod
from podrun.tensorflow.sdk.ipu_outfeed_queue import IPUOutfeedMode
from podrun.tensorflow.sdk.loops import repeat_loop

_ALL_DEVICES = -1
_NO_OUTFEED = "The last computational stage has tensor outputs, but no outfeed_queue has been provided."


class PipelineSchedule(IntEnum):
    """The order of forward and backward passes."""

    Grouped = 0
    Interleaved = 1
    Sequential = 2


class RecomputationMode(IntEnum):
    """How activations are computed again."""

    Auto = 0
    RecomputeThenBackpropagate = 1
    RecomputeAndBackpropagateInterleaved = 2


class PipelineStageOptions:
    """Options of a stage for Poplar's libraries: dictionaries."""

    def __init__(
        self, convolution_options: Any = None, matmul_options: Any = None, slice_options: Any = None
    ) -> None:
        for value in (convolution_options, matmul_options, slice_options):
            if value is not None and not isinstance(value, dict):
                raise TypeError("PipelineStageOptions must be dictionaries.")


@dataclass
class OptimizerFunctionOutput:
    """What the optimizer function returns: the optimizer and the loss."""

    opt: Any
    loss: Any
    compute_gradients_args: Any = None
    compute_gradients_kwargs: Any = None
    apply_gradients_args: Any = None
    apply_gradients_kwargs: Any = None
    variables: Any = None
    tape: Any = None
    gradient_capture_context: Any = None
    captured_gradient_outfeed: Any = None

    def __post_init__(self) -> None:
        if not hasattr(self.opt, "apply_gradients"):
            raise TypeError("OptimizerFunctionOutput.opt must be a TensorFlow optimizer.")
        if not isinstance(self.loss, tf.Tensor):
            raise TypeError("OptimizerFunctionOutput.loss must be a Tensor.")


def ipu_recomputation_checkpoint(tensors: Any, name: str | None = None) -> Any:
    """The tensors."""
    return tensors


def overlap_length(mapping: Sequence[int], schedule: PipelineSchedule, training: bool) -> int:
    """The number of which the count of mini-batches must be a multiple."""
    order = [*mapping, *reversed(mapping)] if training else list(mapping)
    if schedule is PipelineSchedule.Sequential:
        return 1
    if schedule is PipelineSchedule.Grouped:
        return len(order)
    chosen: list[list[int]] = []
    for shift in range(len(order)):
        rotated = order[shift:] + order[:shift]
        if all(all(a != b for a, b in zip(rotated, other, strict=True)) for other in chosen):
            chosen.append(rotated)
    return len(chosen)


def _flat_mapping(mapping: Sequence[Any]) -> list[int]:
    return [m for entry in mapping for m in (entry if isinstance(entry, (list, tuple)) else [entry])]


def _checked(
    stages: Any, count: Any, mapping: Any, schedule: Any, training: bool, options: dict[str, Any]
) -> Any:
    if count is None or (isinstance(count, int) and count < 1):
        raise ValueError("gradient_accumulation_count must be a positive number.")
    if not isinstance(stages, (list, tuple)):
        raise TypeError("computational_stages argument needs to be a list or a tuple.")
    if len(stages) < 2:
        raise ValueError("Pipeline requires at least two computational stages.")
    if mapping is not None and not isinstance(mapping, (list, tuple)):
        raise TypeError("device_mapping argument needs to be a list or a tuple.")
    mapping = list(range(len(stages))) if mapping is None else list(mapping)
    if len(mapping) != len(stages):
        raise ValueError(
            f"Each stage must be mapped to an IPU: {len(mapping)} mappings != {len(stages)} stages"
        )
    schedule = PipelineSchedule.Grouped if schedule is None else schedule
    if not isinstance(schedule, PipelineSchedule):
        raise TypeError("The given pipeline_schedule is not a member of the PipelineSchedule enumeration.")
    mode = options.get("recomputation_mode")
    if mode is not None and not isinstance(mode, RecomputationMode):
        raise TypeError("The given recomputation_mode is not a member of the RecomputationMode enumeration.")
    if options.get("continuous_weight_updates"):
        raise NotImplementedError("Continuous weight updates are currently not supported.")
    if (
        options.get("replicated_optimizer_state_sharding")
        and options.get("offload_weight_update_variables") is False
    ):
        raise ValueError("Replicated optimizer state must be offloaded: optimizer state must be offloaded.")
    _check_stage_options(options, len(stages))
    flat = _flat_mapping(mapping)
    if training and schedule is PipelineSchedule.Interleaved and len(set(flat)) != len(flat):
        raise NotImplementedError(
            "The pipelining schedule Interleaved does not support multiple stages on one device."
        )
    _check_count(count, flat, schedule, training)
    return flat, schedule


def _check_stage_options(options: dict[str, Any], count: int) -> None:
    for name in ("forward_propagation_stages_poplar_options", "backward_propagation_stages_poplar_options"):
        value = options.get(name)
        if value is None:
            continue
        if not isinstance(value, (list, tuple)) or any(
            not isinstance(v, PipelineStageOptions) for v in value
        ):
            raise TypeError(f"{name} must be a list of PipelineStageOptions.")
        if len(value) != count:
            raise ValueError(f"{name} must have an entry for each of the {count} stages.")


def _check_count(count: int, mapping: list[int], schedule: PipelineSchedule, training: bool) -> None:
    length = overlap_length(mapping, schedule, training)
    config = DEVICES.config
    least = length
    if config is not None and config.io_tiles.place_ops_on_io_tiles and schedule is PipelineSchedule.Grouped:
        least = length + 2
    if count % length or count < least:
        raise tf.errors.FailedPreconditionError(
            None,
            None,
            f"The number of iterations of the pipeline must be a multiple of {length}"
            + (f" and at least {least}" if least > length else "")
            + f", but is {count}. Pipeline depth is invalid.",
        )


def _check_outfeed(training: bool, outfeed: Any, options: dict[str, Any]) -> None:
    loss, mask = options.get("outfeed_loss"), options.get("outfeed_mask")
    for name, value in (("outfeed_loss", loss), ("outfeed_mask", mask)):
        if value and not training:
            raise ValueError(f"An optimizer_function must be provided when {name} is set.")
        if value and outfeed is None:
            raise ValueError(f"An outfeed_queue must be provided when {name} is set.")
    if loss and mask:
        raise ValueError("Only one of `outfeed_loss` and `outfeed_mask` can be set.")
    if options.get("accumulate_outfeed"):
        if outfeed is None:
            raise ValueError("An outfeed_queue must be provided when accumulate_outfeed is True")
        if outfeed._mode is IPUOutfeedMode.LAST:
            raise ValueError("To accumulate the outfeed, it must be in IPUOutfeedMode ALL.")


def _take_shards(count: int) -> None:
    """Let the programs that are being traced have so many IPUs for each replica."""
    program: Any = innermost_program()
    while program is not None and hasattr(program, "ordinal"):
        program.shards = max(getattr(program, "shards", 1), count)
        program = program.outer_graph


def run_pipeline(
    computational_stages: Sequence[Callable[..., Any]],
    gradient_accumulation_count: Any = None,
    gradient_accumulation_dtype: Any = None,
    gradient_accumulation_for_captured_grads: bool = True,
    repeat_count: int = 1,
    batch_serialization_iterations: int = 1,
    inputs: Any = None,
    infeed_queue: Any = None,
    outfeed_queue: Any = None,
    optimizer_function: Callable[..., Any] | None = None,
    device_mapping: Any = None,
    pipeline_schedule: Any = None,
    reduction_method: Any = GradientAccumulationReductionMethod.SUM,
    name: str | None = None,
    **options: Any,
) -> Any:
    """Run the stages for ``repeat_count`` weight updates of ``gradient_accumulation_count`` mini-batches each. Returns
    an operation.
    """
    training = optimizer_function is not None
    count = options.pop("pipeline_depth", gradient_accumulation_count)
    mapping, _ = _checked(computational_stages, count, device_mapping, pipeline_schedule, training, options)
    _check_outfeed(training, outfeed_queue, options)
    _take_shards(max(mapping) + 1)
    count *= batch_serialization_iterations
    accumulation = Accumulation(count, reduction_method, gradient_accumulation_dtype)
    if outfeed_queue is not None and options.get("accumulate_outfeed"):
        outfeed_queue.summed_over = count
    constant = [] if inputs is None else list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    constant = [tf.convert_to_tensor(v) for v in constant]

    def mini_batch(*arguments: Any, **named: Any) -> Any:
        values = _through(computational_stages, arguments, named)
        effects = []
        results = values
        if optimizer_function is not None:
            output = _called(optimizer_function, values)
            effects.append(_update(output, accumulation))
            results = (
                output.loss if options.get("outfeed_loss") else _masked(values, options.get("outfeed_mask"))
            )
        if outfeed_queue is not None and results is not None:
            effects.append(outfeed_queue.enqueue(results))
        elif not training and tf.nest.flatten(results):
            raise ValueError(_NO_OUTFEED)
        return [*arguments[: len(constant)], tf.group(*effects)]

    outcome = repeat_loop(count * repeat_count, mini_batch, constant, infeed_queue)
    return outcome if isinstance(outcome, tf.Operation) else tf.group(outcome)


def _through(stages: Sequence[Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    values: Any = stages[0](*arguments, **named)
    for stage in stages[1:]:
        values = (
            [f(*_positional(values)) for f in stage]
            if isinstance(stage, (list, tuple))
            else _called(stage, values)
        )
    return values


def _positional(values: Any) -> list[Any]:
    if values is None:
        return []
    items = list(values) if isinstance(values, (list, tuple)) else [values]
    return [v for v in items if not isinstance(v, tf.Operation)]


def _called(stage: Callable[..., Any], values: Any) -> Any:
    return stage(**values) if isinstance(values, dict) else stage(*_positional(values))


def _masked(values: Any, mask: Any) -> Any:
    items = _positional(values)
    if mask is None:
        return items or None
    if len(mask) != len(items):
        raise ValueError(f"The mask has {len(mask)} entries, but the last stage has {len(items)} outputs.")
    return [v for v, hidden in zip(items, mask, strict=True) if not hidden]


def _update(output: Any, accumulation: Accumulation) -> Any:
    """Gradients of the loss, accumulated, and the optimizer's update with them."""
    opt = output.opt
    args, kwargs = output.apply_gradients_args or (), output.apply_gradients_kwargs or {}
    if isinstance(opt, tf.compat.v1.train.Optimizer):
        pairs = opt.compute_gradients(
            output.loss, *(output.compute_gradients_args or ()), **(output.compute_gradients_kwargs or {})
        )
        variables = [v for g, v in pairs if g is not None]
        _make_slots(opt, variables)
    else:
        variables = output.variables or output.tape.watched_variables()
        pairs = list(zip(tf.gradients(output.loss, variables), variables, strict=True))
    if not variables:
        raise RuntimeError("No variables to optimize.")
    return accumulation.apply(pairs, lambda ready: opt.apply_gradients(ready, *args, **kwargs))


def _make_slots(opt: Any, variables: Sequence[Any]) -> None:
    """Make an optimizer's slots outside of the branch that updates."""
    while hasattr(opt, "_opt"):
        opt = opt._opt
    with tf.init_scope():
        opt._create_slots(variables)
