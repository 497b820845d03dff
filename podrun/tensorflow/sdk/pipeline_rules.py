"""What a pipeline is refused for, and its shape: counts, mappings, schedules, outfeeds (semantics section 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import tensorflow as tf

from podrun.runtime.settings import PipelineSchedule
from podrun.tensorflow.capture.places import KEPT_WHOLE, PipelineShape, StateStorage
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.sdk.gradient_accumulation import GradientAccumulationReductionMethod
from podrun.tensorflow.sdk.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue


class RecomputationMode(IntEnum):
    """How activations are computed again."""

    Auto = 0
    RecomputeThenBackpropagate = 1
    RecomputeAndBackpropagateInterleaved = 2


class PipelineStageOptions:
    """Options of a stage for Poplar's libraries: dictionaries."""

    def __init__(
        self,
        convolution_options: Mapping[str, str] | None = None,
        matmul_options: Mapping[str, str] | None = None,
        slice_options: Mapping[str, str] | None = None,
    ) -> None:
        for value in (convolution_options, matmul_options, slice_options):
            if value is not None and not isinstance(value, dict):
                raise TypeError("PipelineStageOptions must be dictionaries.")


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


def flat_mapping(mapping: Sequence[Any]) -> list[int]:
    """The IPU of every stage; a stage over all IPUs counts as one on IPU 0."""
    flat = [m for entry in mapping for m in (entry if isinstance(entry, (list, tuple)) else [entry])]
    return [max(m, 0) for m in flat]


def checked_pipeline(
    stages: object,
    count: int | tf.Tensor | None,
    mapping: object,
    schedule: object,
    training: bool,
    options: dict[str, Any],
) -> tuple[list[Any], PipelineSchedule]:
    """The device mapping and the schedule of a pipeline, defaults filled in. Raises TypeError, ValueError and
    NotImplementedError in the SDK's words for arguments that cannot be."""
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
    check_sharded_state(options)
    _check_stage_options(options, len(stages))
    flat = flat_mapping(mapping)
    if training and schedule is PipelineSchedule.Interleaved and len(set(flat)) != len(flat):
        raise NotImplementedError(
            "The pipelining schedule Interleaved does not support multiple stages on one device."
        )
    return mapping, schedule


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


def wrong_count(count: int, mapping: list[int], schedule: PipelineSchedule, training: bool) -> str:
    """Why so many mini-batches to an update are no pipeline; empty if they are. See rule 4.3 of the SDK's."""
    length = overlap_length(mapping, schedule, training)
    config = DEVICES.config
    least = length
    if config is not None and config.io_tiles.place_ops_on_io_tiles and schedule is PipelineSchedule.Grouped:
        least = length + 2
    if count % length == 0 and count >= least:
        return ""
    return (
        f"The number of iterations of the pipeline must be a multiple of {length}"
        + (f" and at least {least}" if least > length else "")
        + f", but is {count}. Pipeline depth is invalid."
    )


class ThreeState(IntEnum):
    """``threestate_pb2.ThreeState``: an option that may be left open."""

    THREESTATE_UNDEFINED = 0
    THREESTATE_OFF = 1
    THREESTATE_ON = 2

    @classmethod
    def Name(cls, value: int) -> str:
        """The name of a value."""
        return cls(value).name

    @classmethod
    def Value(cls, name: str) -> int:
        """The value of a name."""
        return int(cls[name])

    @classmethod
    def read(cls, option: bool | str | None) -> bool | None:
        """What an option says that may be given by name; None: it is open."""
        if isinstance(option, str):
            return {cls.THREESTATE_OFF: False, cls.THREESTATE_ON: True}.get(cls[option])
        return option


def check_sharded_state(options: Mapping[str, object]) -> None:
    """ValueError for options by which an optimizer's state would be sharded, but not offloaded."""
    if (
        options.get("replicated_optimizer_state_sharding")
        and options.get("offload_weight_update_variables") is False
    ):
        raise ValueError(
            "Replicated optimizer state must be offloaded: leave offload_weight_update_variables unset."
        )


def state_storage(options: Mapping[str, object]) -> StateStorage:
    """Where a program keeps what, as the options of a pipeline or of an accumulating optimizer say. Sharded state is
    offloaded, as in the SDK; what they leave open (None) stays on the chip. ValueError as in `check_sharded_state`.
    """
    check_sharded_state(options)
    config = DEVICES.config
    sharded = {kind for name, kind in _SHARDED.items() if options.get(name)}
    offloaded = {kind for name, kind in _OFFLOADED.items() if options.get(name)}
    least = 128 if config is None else int(config.optimizations.minimum_remote_tensor_size)
    return StateStorage(frozenset(offloaded | sharded), frozenset(sharded), least)


_OFFLOADED = {
    "offload_weight_update_variables": "optimizer_state",
    "offload_gradient_accumulation_buffers": "accumulators",
    "offload_activations": "activations",
    "offload_weights": "weights",
}
_SHARDED = {"replicated_optimizer_state_sharding": "optimizer_state", "replicated_weight_sharding": "weights"}


def shape_of_pipeline(
    count: int,
    mapping: Sequence[Any],
    schedule: PipelineSchedule = PipelineSchedule.Grouped,
    *,
    training: bool,
    recomputation_mode: RecomputationMode | None = None,
    storage: StateStorage = KEPT_WHOLE,
) -> PipelineShape:
    """The shape of a pipeline of ``count`` mini-batches to an update, whose stages lie on the IPUs of ``mapping``. What
    is wrong with the count stands in it, and is raised when the program runs.
    """
    flat = flat_mapping(mapping)
    config = DEVICES.config
    return PipelineShape(
        count,
        schedule.order,
        tuple(flat),
        recomputation_mode is not None or DEVICES.recomputes,
        config.io_tiles.num_io_tiles if config is not None else 0,
        wrong_count(count, flat, schedule, training),
        storage,
    )


def check_outfeed(training: bool, outfeed: IPUOutfeedQueue | None, options: dict[str, Any]) -> None:
    """Raise ValueError, in the SDK's words, for options of outfeeds that need an outfeed or an optimizer, or exclude
    each other."""
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


def known_count(count: int | tf.Tensor) -> int | tf.Tensor:
    """The number of mini-batches, or the tensor that has it when the program starts."""
    known = tf.get_static_value(count) if isinstance(count, tf.Tensor) else None
    return count if known is None else int(known)


def least_count(mapping: Sequence[Any], schedule: PipelineSchedule, *, training: bool) -> int:
    """The smallest number of mini-batches of an update."""
    config = DEVICES.config
    length = overlap_length(flat_mapping(mapping), schedule, training)
    with_io_tiles = config is not None and config.io_tiles.place_ops_on_io_tiles
    return 2 * length if with_io_tiles and schedule is PipelineSchedule.Grouped else length


def check_of_count(
    mapping: Sequence[Any], schedule: PipelineSchedule, training: bool, summed: IPUOutfeedQueue | None
) -> Callable[[int], None]:
    """What is called with the number of mini-batches when a program starts that takes it as an input: InternalError for
    one that is no pipeline. ``summed``: the outfeed that adds so many elements up, if any.
    """

    def check(count: int) -> None:
        wrong = wrong_count(count, flat_mapping(mapping), schedule, training)
        if wrong or count < 1:
            raise tf.errors.InternalError(None, None, wrong or f"Pipeline depth is invalid: {count}.")
        if summed is not None:
            summed.summed_over = count

    return check


def check_serialization(
    iterations: int,
    schedule: PipelineSchedule,
    mapping: Sequence[Any],
    method: GradientAccumulationReductionMethod | str,
) -> None:
    """Serialised mini-batches need the Sequential schedule, one IPU and the reduction SUM. Raises
    NotImplementedError for another schedule or more IPUs, ValueError for another reduction."""
    if iterations == 1:
        return
    if schedule is not PipelineSchedule.Sequential:
        raise NotImplementedError("Batch serialization is only supported with the Sequential schedule.")
    if len(set(flat_mapping(mapping))) > 1:
        raise NotImplementedError("Batch serialization is only supported with all stages on one IPU.")
    summed = GradientAccumulationReductionMethod.SUM
    if GradientAccumulationReductionMethod.parse(method) is not summed:
        raise ValueError("Batch serialization is only supported with the reduction method SUM.")
