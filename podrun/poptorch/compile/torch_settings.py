"""Translates PopTorch's options to the runtime's settings, and the results that a call returns to its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.compiler.program import Beside, Locations
from podrun.core.executable import Retrieval
from podrun.costmodel.settings import Location
from podrun.poptorch.api.enums import MeanReductionStrategy, OutputMode, OverlapMode, ReductionType
from podrun.poptorch.api.strategies import PHASED, PIPELINED
from podrun.poptorch.compile.popart_options import cache_folder, with_popart_options
from podrun.poptorch.errors import Error
from podrun.runtime.rewrites import known_rewrite, similar_rewrite
from podrun.runtime.session_reports import OUTER
from podrun.runtime.settings import (
    AdaptiveLossScale,
    FixedPlan,
    PhaseSettings,
    PlacedBy,
    Recomputation,
    Returned,
    RunSettings,
    SyntheticData,
)
from podrun.runtime.words import Words

if TYPE_CHECKING:
    from podrun.poptorch.api.options import Options

TORCH_WORDS = Words(
    compile_first='Leave out options._Popart.set("compileEngine", False), so that the first call compiles the model.',
    last_value_only="Return its last value (poptorch.OutputMode.Final), with options.Training.gradientAccumulation.",
    pipeline_recomputation='options._Popart.set("autoRecomputation", 3)',
    accumulate="Set options.Training.gradientAccumulation.",
    wide_loss_scale='options._Popart.set("ensureFp32LossScaleTensor", True)',
    folder_option='options._Popart.set("logDir", DIRECTORY)',
)
"""What messages call PopTorch's options; its calls have no names of their own."""


def torch_settings(
    options: Options, *, training: bool, ipus: int, phases: int, clips: bool = False
) -> RunSettings:
    """The settings that options stand for. Error for an option of PopART's that is unknown or has a wrong value.

    ``ipus``: of one replica. ``clips``: the optimizer bounds the norm of the gradients.
    """
    distributed, local = options.Distributed, options.replication_factor
    replicas = local * distributed.numProcesses
    settings = RunSettings(
        replicas=replicas,
        local_replicas=local,
        first_replica=local * distributed.processId,
        clips_serially=True,
        locations=_locations(options, replicas),
        io_tiles=options.TensorLocations.num_io_tiles,
        synthetic=SyntheticData.NORMAL if options.extra("enable_synthetic_data") else SyntheticData.OFF,
        stochastic_rounding=options.Precision.stochastic_rounding,
        floating_point_checks=options.Precision.floating_point_exceptions,
        casting_hint='options._Popart.set("enableSupportedDataTypeCasting", True)',
        loss_scale=AdaptiveLossScale() if training and options.Training.auto_loss_scaling else None,
        cycle_counters=frozenset({OUTER}) if options.extra("log_cycle_count") else None,
        cache_directory=cache_folder(options._Popart.options),
        words=TORCH_WORDS,
    )
    if training:
        settings = _with_updates(settings, options)
    if ipus > 1:
        settings = _divided(settings, options, training=training, phases=phases, clips=clips)
    return with_popart_options(settings, options._Popart.options)


def _with_updates(settings: RunSettings, options: Options) -> RunSettings:
    """How gradients of micro-batches and replicas become one."""
    chosen = options.Training
    mean = chosen.accumulation_and_replication_reduction_type == ReductionType.Mean
    running = chosen.meanAccumulationAndReplicationReductionStrategy == MeanReductionStrategy.Running
    return replace(
        settings,
        accumulates=chosen.gradient_accumulation > 1,
        accumulation=chosen.gradient_accumulation,
        mean=mean,
        running_mean=mean and running,
    )


def _divided(
    settings: RunSettings, options: Options, *, training: bool, phases: int, clips: bool
) -> RunSettings:
    """How a model runs on the IPUs that its blocks name."""
    mode = options._execution_strategy.execution_mode
    if mode == PHASED:
        stages = 1 if options._execution_strategy.backendOptions()["serial_phases_execution"] else 2
        return replace(settings, placement=PlacedBy.IN_PHASES, phases=PhaseSettings(phases, stages))
    pipelined = mode == PIPELINED
    return replace(
        settings,
        placement=PlacedBy.BY_HAND,
        pipelined=pipelined,
        recomputation=Recomputation.PIPELINE if pipelined and training else Recomputation.NOTHING,
        # The norm needs the gradients of all stages, so no stage goes first.
        clips_serially=not (pipelined and clips),
    )


def _locations(options: Options, replicas: int) -> Locations:
    chosen = options.TensorLocations
    return Locations(
        _location(chosen.location_weight, replicas),
        _location(chosen.location_optimizer, replicas),
        _location(chosen.location_accumulator, replicas),
        _location(chosen.location_activation, replicas),
    )


def _location(chosen: Mapping[str, int], replicas: int) -> Location:
    """Where tensors live: as `TensorLocationSettings` says, else on the tiles and whole."""
    default = Location()
    return Location(
        not chosen.get("onChip", True),
        replicas if chosen.get("useReplicatedTensorSharding", False) else 1,
        chosen.get("minElementsForOffChip", default.min_off_chip),
        chosen.get("minElementsForReplicatedTensorSharding", default.min_sharded),
    )


def check_annotated(settings: RunSettings, options: Options, annotated: bool) -> None:
    """Error if both the options and the model (``annotated``) say which results are computed again."""
    recomputation = settings.recomputation
    explicit = bool(options._Popart.options.get("explicitRecomputation", False))
    if annotated and (
        (settings.pipelined and not explicit)
        or recomputation not in (Recomputation.NOTHING, Recomputation.ALL)
    ):
        raise Error(
            "the model says itself which results to compute again, and so does the option autoRecomputation "
            f"({recomputation.value!r})",
            hint='Use one of them: options._Popart.set("autoRecomputation", 0) leaves it to the model.',
        )


_BESIDE = {
    OverlapMode.NoOverlap: Beside.NOTHING,
    OverlapMode.OverlapAccumulationLoop: Beside.MICRO_BATCHES,
    OverlapMode.OverlapDeviceIterationLoop: Beside.BATCHES,
}
_RETRIEVALS = {
    OutputMode.All: Retrieval.ALL,
    OutputMode.Final: Retrieval.FINAL,
    OutputMode.Sum: Retrieval.SUM,
    OutputMode.EveryN: Retrieval.EVERY_N,
}


def returned_as(mode: OutputMode, period: int, overlap: OverlapMode = OverlapMode.NoOverlap) -> Returned:
    """Which values of a tensor come back in an output mode. ``period``: of EveryN."""
    return Returned(_RETRIEVALS[mode], period if mode == OutputMode.EveryN else 1, _BESIDE[overlap])


def run_plan(options: Options, returned: Mapping[str, Returned], *, pipelined: bool) -> FixedPlan:
    """What a call consists of. Error for a period that does not divide the iterations, or EveryN in a pipeline."""
    batches = options.device_iterations
    for name, values in sorted(returned.items()):
        if values.retrieval is not Retrieval.EVERY_N:
            continue
        if batches % values.period:
            raise Error(
                f"{name!r} returns every {values.period} iterations, which does not divide the {batches} "
                "deviceIterations",
                hint="Give outputMode another output_return_period.",
            )
        if pipelined:
            raise Error(
                f"{name!r}: OutputMode.EveryN does not go with pipelining",
                hint="Use another output mode, or poptorch.ShardedExecution.",
            )
    return FixedPlan(batches, dict(sorted(returned.items())))


_LEVELS = range(4)
"""Levels of patterns: none, those without which nothing runs, the default, all."""


def check_patterns(options: Options) -> None:
    """Error for names of patterns that PopART does not have. Patterns change no result here."""
    chosen = options._Popart
    if chosen.patterns_level not in _LEVELS:
        raise Error(f"the level of patterns is a number from 0 to 3, not {chosen.patterns_level}")
    for name in chosen.patterns:
        if known_rewrite(name) is None:
            near = similar_rewrite(name)
            raise Error(
                f"Invalid pattern name {name!r}", hint="" if near is None else f"Did you mean {near!r}?"
            )
