"""From SessionOptions to the runtime's settings."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.compiler.program import Locations
from podrun.core.names import gradient_buffer
from podrun.costmodel.settings import Location
from podrun.onnx_models.annotations import SOFTMAX_AXIS
from podrun.popart.options.option_groups import TensorLocation, TensorLocationSettings
from podrun.popart.values.enums import (
    AccumulateOuterFragmentSchedule,
    ExecutionPhaseIOSchedule,
    ExecutionPhaseSchedule,
    GradientTensorTrackingMethod,
    Instrumentation,
    MeanReductionStrategy,
    RecomputationType,
    ReductionType,
    ReplicatedTensorSharding,
    SyntheticDataMode,
    TensorStorage,
    VirtualGraphMode,
)
from podrun.runtime.graph import Node, OperatorGraph
from podrun.runtime.planner_options import KNOWN, partials_of
from podrun.runtime.session_reports import INNER, OUTER
from podrun.runtime.settings import (
    AdaptiveLossScale,
    PhaseSettings,
    PlacedBy,
    Recomputation,
    RunSettings,
    SyntheticData,
    TrackedGradients,
)
from podrun.runtime.tensor_names import PREFIXES, gradient
from podrun.runtime.words import SessionCall, Words

if TYPE_CHECKING:
    from podrun.popart.options.session_options import SessionOptions

_PLACEMENTS = {
    VirtualGraphMode.Off: PlacedBy.ONE_IPU,
    VirtualGraphMode.Manual: PlacedBy.BY_HAND,
    VirtualGraphMode.Auto: PlacedBy.AUTOMATIC,
    VirtualGraphMode.ExecutionPhases: PlacedBy.IN_PHASES,
}
_RECOMPUTATIONS = {
    RecomputationType.NoRecompute: Recomputation.NOTHING,
    RecomputationType.Standard: Recomputation.STANDARD,
    RecomputationType.NormOnly: Recomputation.NORMS,
    RecomputationType.Pipeline: Recomputation.PIPELINE,
    RecomputationType.RecomputeAll: Recomputation.ALL,
}
_SYNTHETIC = {
    SyntheticDataMode.Off: SyntheticData.OFF,
    SyntheticDataMode.Zeros: SyntheticData.ZEROS,
    SyntheticDataMode.RandomNormal: SyntheticData.NORMAL,
    SyntheticDataMode.RandomUniform: SyntheticData.UNIFORM,
}
_COUNTERS = {Instrumentation.Outer: OUTER, Instrumentation.Inner: INNER}
_PARTIALS = {"float": "float32", "half": "float16"}

POPART_WORDS = Words(
    calls={
        SessionCall.SEND_WEIGHTS: "Devicex::weightsFromHost()",
        SessionCall.FETCH_WEIGHTS: "Devicex::weightsToHost()",
        SessionCall.WRITE_WEIGHTS: "writeWeights",
        SessionCall.RESET_WEIGHTS: "resetHostWeights",
        SessionCall.SET_SEED: "Devicex::setRandomSeedFromHost(uint64_t)",
        SessionCall.READ_SEED: "getRandomSeed",
        SessionCall.SET_RANDOM_STATE: "setRNGState",
        SessionCall.READ_RANDOM_STATE: "getRNGState",
        SessionCall.REPORT: "getReport",
        SessionCall.SAVE_PROGRAM: "saveExecutable",
        SessionCall.CONNECT_STREAM: "connectStreamToCallback",
        SessionCall.UPDATE_CACHE: "updateEngineCache",
    },
    not_compiled="Devicex::prepare() must be called before {call} is called.",
    compile_first="session.prepareDevice()",
    no_report="Session must have been prepared before a report can be fetched",
    nothing_to_load="Cannot load an engine onto the device: there is no compiled engine.",
    compiled_already="loadExecutable comes before prepareDevice.",
    weights_not_sent="Must call weightsFromHost before run as the model has initializers",
    constant_weights=(
        "Cannot call {call} when constantWeights is set. Set `constantWeights` to False in the `SessionOption`s when "
        "initialising the session to enable this behaviour."
    ),
    no_random_state="{call} needs SessionOptions.enableLoadAndOffloadRNGState.",
    random_state_size=(
        "Devicex::setRngStateValue received rngState of size {size}; was expecting size {expected}"
    ),
    unused_seed="The program draws no random numbers: setRandomSeed does nothing.",
    cycles_not_counted=(
        "SessionOption 'instrumentWithHardwareCycleCounter' must be set to True in order to measure cycles."
    ),
    cycles_before_run="Must call run before getCycleCount.",
    counters_option="Make sure you have set SessionOption::hardwareInstrumentations correctly.",
    step_data="the stepIO",
    last_value_only='Use AnchorReturnType("Final"), with enableGradientAccumulation in a pipeline.',
    input_shape="give its shape, for example with popart.InputShapeInfo.add",
    folder_option="SessionOptions.logDir",
    pipeline_recomputation="SessionOptions::autoRecomputation == RecomputationType::Pipeline",
    serial_clipping=(
        "Gradient clipping of a pipelined program needs another accumulateOuterFragmentSettings.schedule than Serial."
    ),
    accumulate="Set enableGradientAccumulation and accumulationFactor.",
    wide_loss_scale="ensureFp32LossScaleTensor",
)
"""What messages of the runtime call PopART's calls and options: programs match the SDK's texts.

Source: graphcore/popart, willow/src/session.cpp, popx/devicex.cpp and transforms/pipeline.cpp.
"""


def run_settings(options: SessionOptions) -> RunSettings:
    """The settings that options stand for, after `option_checks.check_options`."""
    from podrun.onnx_models.ops.sdk import Sdk

    mean = options.accumulationAndReplicationReductionType is ReductionType.Mean
    strategy = options.meanAccumulationAndReplicationReductionStrategy
    scaling = options.automaticLossScalingSettings
    counted = frozenset(_COUNTERS[kind] for kind in options.hardwareInstrumentations if kind in _COUNTERS)
    return RunSettings(
        replicas=options.getGlobalReplicationFactor(),
        local_replicas=options.local_replicas,
        first_replica=options.globalReplicaOffset if options.enableDistributedReplicatedGraphs else 0,
        accumulates=options.enableGradientAccumulation,
        accumulation=options.accumulationFactor,
        mean=mean,
        running_mean=mean and strategy is MeanReductionStrategy.Running,
        placement=_PLACEMENTS[options.virtualGraphMode],
        split_ratios=tuple(options.virtualGraphSplitRatios),
        phases=_phases(options),
        pipelined=options.enablePipelining,
        order=options.pipelineSchedule.order,
        checks_restores=not (options.enableExplicitMainLoops or options.explicitRecomputation),
        clips_serially=options.accumulateOuterFragmentSettings.schedule
        is AccumulateOuterFragmentSchedule.Serial,
        recomputation=_RECOMPUTATIONS[options.autoRecomputation],
        outlining=options.enableOutlining,
        locations=locations_of(options),
        io_tiles=options.numIOTiles,
        partials=_PARTIALS.get(options.partialsTypeMatMuls) or partials_of(options.matmulOptions),
        convolution_partials=partials_of(options.convolutionOptions),
        constant_weights=options.constantWeights,
        synthetic=_SYNTHETIC[options.syntheticDataMode],
        stochastic_rounding=options.enableStochasticRounding,
        floating_point_checks=options.enableFloatingPointChecks,
        keeps_random_state=options.enableLoadAndOffloadRNGState,
        keeps_replica_state=options.createImplicitPipeliningFwdOnlyProgram,
        casting=options.enableSupportedDataTypeCasting,
        casting_hint="SessionOptions.enableSupportedDataTypeCasting",
        loss_scale=_loss_scale(options) if scaling.enabled else None,
        wide_loss_scale=options.ensureFp32LossScaleTensor,
        cache_directory=options.cachePath if options.enableEngineCaching else "",
        engine_options=dict(options.engineOptions),
        planner_options={name: dict(getattr(options, name)) for name in KNOWN},
        cycle_counters=counted if options.instrumentWithHardwareCycleCounter else None,
        dialect=Sdk(strided_groups=options.groupNormStridedChannelGrouping),
        rewrite=None if scaling.enabled else joined_losses,
        words=POPART_WORDS,
    )


_TRACKED = {
    GradientTensorTrackingMethod.AllNonViewChangingGradientTensors: TrackedGradients.ALL_BUT_VIEWS,
    GradientTensorTrackingMethod.ConvAndMatmulGradients: TrackedGradients.PRODUCTS,
    GradientTensorTrackingMethod.GradientsOfUserSpecifiedTensors: TrackedGradients.NAMED,
}


def _loss_scale(options: SessionOptions) -> AdaptiveLossScale:
    scaling = options.automaticLossScalingSettings
    return AdaptiveLossScale(
        tracked=_TRACKED[scaling.gradientTensorTrackingMethod],
        names=None if scaling.toTrackTensors is None else tuple(scaling.toTrackTensors),
        edge=scaling.binEdgeLocation,
        threshold=scaling.thresholdUpperCountProportion,
        period=scaling.updatePeriod,
    )


def _phases(options: SessionOptions) -> PhaseSettings:
    settings = options.executionPhaseSettings
    wanted = (settings.weightIOSchedule, settings.activationIOSchedule)
    return PhaseSettings(
        settings.phases,
        settings.stages,
        preload=all(schedule is ExecutionPhaseIOSchedule.Preload for schedule in wanted),
        batched=settings.schedule is not ExecutionPhaseSchedule.Interleaving,
    )


def joined_losses(graph: OperatorGraph, anchors: Collection[str]) -> OperatorGraph:
    """The graph in which every Nll whose probabilities come from a Softmax has the logits as a third input.

    PopART's default patterns do the same, unless the gradient of the probabilities is anchored.
    """
    makers = {output: node for node in graph.nodes for output in node.outputs}

    def joined(node: Node) -> Node:
        maker = makers.get(node.inputs[0]) if node.op_type == "Nll" and len(node.inputs) == 2 else None
        if maker is None or maker.op_type != "Softmax" or gradient(node.inputs[0]) in anchors:
            return node
        if node.get("inputIsLogProbability") or node.place != maker.place:
            return node
        axis = maker.get("axis", -1 if maker.opset >= 13 else 1)
        return replace(
            node, inputs=(*node.inputs, maker.inputs[0]), attributes={**node.attributes, SOFTMAX_AXIS: axis}
        )

    return graph.each_node(joined)


def locations_of(options: SessionOptions) -> Locations:
    """Where a session's variables live. Sharding is over the replicas of the sharding domain (default: all)."""
    replicas = options.getGlobalReplicationFactor()
    if replicas == 1:
        _warn_of_sharding(options)
    return Locations(
        _location(options.weightTensorLocationSettings, replicas),
        _location(options.optimizerStateTensorLocationSettings, replicas),
        _location(options.accumulatorTensorLocationSettings, replicas),
        _location(options.activationTensorLocationSettings, replicas),
        {
            _own_name(name): _place(where, replicas, 0, 0)
            for name, where in sorted(options.tensorLocationSettingsOverride.items())
            if isinstance(where, TensorLocation)
        },
    )


def _warn_of_sharding(options: SessionOptions) -> None:
    """Warn once, as PopART does, that sharding over one replica cuts nothing."""
    settings = {
        name: getattr(options, name).location
        for name in (
            "weightTensorLocationSettings",
            "optimizerStateTensorLocationSettings",
            "accumulatorTensorLocationSettings",
        )
    }
    chosen = [
        n for n, where in settings.items() if where.replicatedTensorSharding is ReplicatedTensorSharding.On
    ]
    if chosen:
        logging.getLogger("podrun.popart").warning(
            "%s ask for replicated tensor sharding, but the session has one replica: tensors stay whole.",
            ", ".join(chosen),
        )


def _own_name(name: str) -> str:
    """The compiler's name of an accumulator that PopART's name stands for; any other name unchanged."""
    accumulator = PREFIXES["Accum"]
    return gradient_buffer(name.removeprefix(accumulator)) if name.startswith(accumulator) else name


def _location(settings: TensorLocationSettings, replicas: int) -> Location:
    return _place(
        settings.location,
        replicas,
        settings.minElementsForOffChip,
        settings.minElementsForReplicatedTensorSharding,
    )


def _place(where: TensorLocation, replicas: int, off_chip: int, sharded: int) -> Location:
    """popart_exception for a sharding domain that does not divide the replicas."""
    shards = 1
    if where.replicatedTensorSharding is ReplicatedTensorSharding.On:
        shards = where.shardingDomain.toReplicaGrouping(replicas).groupSize
    return Location(where.storage is TensorStorage.OffChip, shards, off_chip, sharded)
