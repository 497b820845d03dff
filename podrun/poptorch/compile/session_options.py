"""Translates PopTorch's options to the runtime's settings, by way of PopART's.

``options._Popart.set`` takes every option of PopART by its name, with PopART's types, and PopART's checks hold for
what results; so do setters of PopTorch's that the SDK implements by PopART's options. That is why this module, alone in
this room beside `podrun.poptorch.executor.devices`, imports PopART's front end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podrun.popart import enums as session_enums
from podrun.popart import option_checks
from podrun.popart.dataflow import AnchorReturnType, DataFlow
from podrun.popart.device import DeviceInfo
from podrun.popart.graph_text import ir_text, write_dots
from podrun.popart.patterns import Patterns
from podrun.popart.run_settings import run_settings
from podrun.popart.session_options import SessionOptions
from podrun.poptorch.api.enums import MeanReductionStrategy, OutputMode, OverlapMode, ReductionType
from podrun.poptorch.api.strategies import PHASED, PIPELINED
from podrun.poptorch.errors import Error
from podrun.runtime.assembly import SessionParts
from podrun.runtime.settings import RunSettings


def session_options(
    options: Any, training: bool, ipus_per_replica: int, phases: int, *, clips: bool = False
) -> SessionOptions:
    """The session's options. ``clips``: the optimizer bounds the norm of the gradients. Error for a PopART option that
    the session does not have.
    """
    made = SessionOptions()
    _apply_batches(made, options, training)
    strategy = options._execution_strategy
    if ipus_per_replica > 1:
        if strategy.execution_mode == PHASED:
            made.virtualGraphMode = session_enums.VirtualGraphMode.ExecutionPhases
            made.executionPhaseSettings.phases = phases
            made.executionPhaseSettings.stages = 1 if strategy.serial else 2
        else:
            made.virtualGraphMode = session_enums.VirtualGraphMode.Manual
            made.enablePipelining = strategy.execution_mode == PIPELINED
            if made.enablePipelining and training:
                made.autoRecomputation = session_enums.RecomputationType.Pipeline
            if (
                made.enablePipelining and clips
            ):  # The norm needs the gradients of all stages, so no stage goes first.
                schedule = session_enums.AccumulateOuterFragmentSchedule.Scheduler
                made.accumulateOuterFragmentSettings.schedule = schedule
    made.enableFloatingPointChecks = bool(options.Precision.floating_point_exceptions)
    made.enableStochasticRounding = options.Precision.stochastic_rounding
    if options.extra("enable_synthetic_data"):
        made.syntheticDataMode = session_enums.SyntheticDataMode.RandomNormal
    if training and options.Training.auto_loss_scaling:
        made.automaticLossScalingSettings.enabled = True
    made.enableLoadAndOffloadRNGState = True
    made.instrumentWithHardwareCycleCounter = bool(options.extra("log_cycle_count"))
    made.constantWeights = False
    _apply_locations(made, options)
    for key, value in options._Popart.options.items():
        _set_popart(made, key, value)
    return made


def _apply_batches(made: SessionOptions, options: Any, training: bool) -> None:
    distributed = options.Distributed
    if options.replication_factor > 1:
        made.enableReplicatedGraphs = True
        made.replicatedGraphCount = options.replication_factor
    if distributed.numProcesses > 1:
        made.enableDistributedReplicatedGraphs = True
        made.globalReplicationFactor = options.replication_factor * distributed.numProcesses
        made.globalReplicaOffset = options.replication_factor * distributed.processId
    if not training:
        return
    accumulation = options.Training.gradient_accumulation
    if accumulation > 1:
        made.enableGradientAccumulation = True
        made.accumulationFactor = accumulation
    mean = options.Training.accumulation_and_replication_reduction_type == ReductionType.Mean
    kinds = session_enums.ReductionType
    made.accumulationAndReplicationReductionType = kinds.Mean if mean else kinds.Sum
    running = (
        options.Training.meanAccumulationAndReplicationReductionStrategy == MeanReductionStrategy.Running
    )
    strategies = session_enums.MeanReductionStrategy
    made.meanAccumulationAndReplicationReductionStrategy = strategies.Running if running else strategies.Post


def _apply_locations(made: SessionOptions, options: Any) -> None:
    names = {
        "location_activation": "activationTensorLocationSettings",
        "location_weight": "weightTensorLocationSettings",
        "location_optimizer": "optimizerStateTensorLocationSettings",
        "location_accumulator": "accumulatorTensorLocationSettings",
    }
    for ours, theirs in names.items():
        chosen = options.TensorLocations.exists(ours) and getattr(options.TensorLocations, ours)
        if not chosen:
            continue
        settings = getattr(made, theirs)
        location = settings.location
        if "onChip" in chosen:
            storage = session_enums.TensorStorage
            location.storage = storage.OnChip if chosen["onChip"] else storage.OffChip
        if "useReplicatedTensorSharding" in chosen:
            sharding = session_enums.ReplicatedTensorSharding
            on = chosen["useReplicatedTensorSharding"]
            location.replicatedTensorSharding = sharding.On if on else sharding.Off
        if "minElementsForOffChip" in chosen:
            settings.minElementsForOffChip = chosen["minElementsForOffChip"]
        if "minElementsForReplicatedTensorSharding" in chosen:
            settings.minElementsForReplicatedTensorSharding = chosen["minElementsForReplicatedTensorSharding"]
    if options.TensorLocations.num_io_tiles:
        made.numIOTiles = options.TensorLocations.num_io_tiles


def run_settings_of(
    choices: SessionOptions, plan: DataFlow, device: DeviceInfo, *, training: bool, annotated: bool
) -> RunSettings:
    """The runtime's settings. popart_exception for choices that contradict each other, the plan or the device.
    ``annotated``: the model says itself which results to compute again.
    """
    option_checks.check_options(choices, plan, device, training=training)
    option_checks.check_recomputation(choices, annotated)
    option_checks.check_every_n_with_pipelining(choices, plan)
    return run_settings(choices)


def draw(parts: SessionParts, choices: SessionOptions) -> None:
    """Write the drawings of the graph that ``dotChecks`` or POPART_DOT_CHECKS asks for."""
    write_dots(parts.model.built.lowered.graph, choices)


def ir_of(parts: SessionParts) -> str:
    """The forward graph as JSON (`podrun.popart.graph_text`)."""
    built, settings, training = parts.model.built, parts.source.settings, parts.source.training
    return ir_text(built.lowered.graph, parts.model.placed.graph, built.infos, settings, training=training)


def run_plan(options: Any, returned: Mapping[str, AnchorReturnType]) -> DataFlow:
    """What a run consists of. popart_exception for a period that does not divide the batches."""
    return DataFlow(options.device_iterations, returned)


def check_patterns(options: Any) -> None:
    """popart_exception for names of patterns that PopART does not have. Patterns change no result here."""
    chosen = options._Popart
    made = Patterns(session_enums.PatternsLevel(chosen.patterns_level))
    made.enableRuntimeAsserts(False)
    for name, enabled in chosen.patterns.items():
        made.enablePattern(name, bool(enabled))


_ROUTES = (bool, int, float, str, list, tuple, set, dict)
"""Types of values that PopART's options take."""


_WITHOUT_EFFECT = frozenset({"saveInitializersToFile"})
"""Options of PopTorch's lowering that have no effect in podrun, because its models are not limited to 2 GiB."""


def _set_popart(made: SessionOptions, key: str, value: Any) -> None:
    if key in _WITHOUT_EFFECT:
        return
    owner: Any = made
    *path, name = key.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if name.startswith("_") or not hasattr(type(owner), name):
        raise Error(
            f"Unknown PopART option {key!r}",
            hint="dir(popart.SessionOptions()) lists the names.",
        )
    current = getattr(owner, name)
    kind = type(current)
    number = isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, _ROUTES) and type(value) is not kind:
        raise Error(
            f"PopART option {key!r} cannot be {value!r}: use a flag, a number, text, a list or a dictionary"
        )
    try:
        if isinstance(current, dict):
            current.update(value)
        elif number and hasattr(kind, "__members__"):
            setattr(owner, name, kind(value))
        else:
            setattr(owner, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise Error(f"PopART option {key!r} cannot be {value!r}: {error}") from error


def validate_options(values: Mapping[str, Any]) -> None:
    """Error for PopART options in `Options.toDict` that a session does not have, or that have impossible values."""
    made = SessionOptions()
    for key, value in values.get("popart_options", {}).items():
        _set_popart(made, key, value)


STRATEGIES = {
    OverlapMode.NoOverlap: session_enums.ExchangeStrategy.JustInTime,
    OverlapMode.OverlapAccumulationLoop: session_enums.ExchangeStrategy.OverlapInnerLoop,
    OverlapMode.OverlapDeviceIterationLoop: session_enums.ExchangeStrategy.OverlapLoops,
}
"""The session's names of what a transfer overlaps with."""


def anchor_type(
    mode: OutputMode, period: int, overlap: OverlapMode = OverlapMode.NoOverlap
) -> AnchorReturnType:
    """How a session returns a value."""
    strategy = STRATEGIES[overlap]
    if mode == OutputMode.EveryN:
        return AnchorReturnType("EveryN", period, exchangeStrategy=strategy)
    return AnchorReturnType(mode.name, exchangeStrategy=strategy)
