"""SessionOptions: every option of PopART's sessions with its default, and the checks on their combination.

Options that change numbers or placement act; those that only change how hardware would be used are
accepted, checked and passed on to the compiler's cost model where it uses them.
"""

from __future__ import annotations

import logging
from dataclasses import field
from typing import Any

from podrun.core.quick_dataclass import dataclass
from podrun.popart.options.option_groups import (
    AccumulateOuterFragmentSettings,
    AutomaticLossScalingSettings,
    BatchSerializationSettings,
    ExecutionPhaseSettings,
    ExperimentalSettings,
    ReplicatedCollectivesSettings,
    Strict,
    TensorLocationSettings,
)
from podrun.popart.values.enums import (
    Instrumentation,
    MeanReductionStrategy,
    MergeVarUpdateType,
    PipelineSchedule,
    RecomputationType,
    ReductionType,
    SubgraphCopyingStrategy,
    SyntheticDataMode,
    VirtualGraphMode,
)
from podrun.runtime.environment import cache_directory


def _deprecated(name: str, instead: str) -> None:
    logging.getLogger("podrun.popart").warning("%s has been deprecated: use %s.", name, instead)


def _hidden(name: str) -> Any:
    """The name that the binding's class gives a dictionary of options before Python wraps it: the same dictionary."""

    def read(options: SessionOptions) -> dict[str, Any]:
        value: dict[str, Any] = getattr(options, name)
        return value

    def write(options: SessionOptions, value: dict[str, Any]) -> None:
        setattr(options, name, value)

    return property(read, write)


@dataclass(slots=True)
class SessionOptions(Strict):
    """Options of a session: ``opts = SessionOptions(); opts.enableReplicatedGraphs = True``.

    Unknown names raise AttributeError, values of a wrong type TypeError; combinations are checked when a
    session is made (`podrun.popart.sessions.option_checks`).
    """

    RETIRED = {  # noqa: RUF012
        **dict.fromkeys(
            ("enableGroupedMatmuls", "enableSerializedMatmuls"),
            "PopART 3.4 has no such option any more: delete the line.",
        ),
        **dict.fromkeys(
            ("hostAllReduce", "hostAllReduceRemoteBuffer", "hostWeightUpdate"),
            "PopART 3.4 reduces over instances on the IPUs: use popdist.popart.configureSessionOptions(options).",
        ),
        "enableVirtualGraphs": "Use virtualGraphMode = popart.VirtualGraphMode.Manual.",
        "autoVirtualGraph": "Use virtualGraphMode = popart.VirtualGraphMode.Auto.",
        "explicitPipelining": "Call enableExplicitIR(True) beside enablePipelining.",
        "accumulationReductionType": "Use accumulationAndReplicationReductionType.",
        "batchSerializationFactor": "Use batchSerializationSettings.factor.",
        "ignoreData": "Use syntheticDataMode = popart.SyntheticDataMode.Zeros.",
        "pingPongPhases": "Use executionPhaseSettings.phases.",
    }

    # Replication and accumulation.
    enableReplicatedGraphs: bool = False
    replicatedGraphCount: int = 1
    enableDistributedReplicatedGraphs: bool = False
    globalReplicationFactor: int = 1
    globalReplicaOffset: int = 0
    enableGradientAccumulation: bool = False
    accumulationFactor: int = 1
    accumulationAndReplicationReductionType: ReductionType = ReductionType.Sum
    meanAccumulationAndReplicationReductionStrategy: MeanReductionStrategy = MeanReductionStrategy.Post
    # Placement and pipelining.
    virtualGraphMode: VirtualGraphMode = VirtualGraphMode.Off
    virtualGraphSplitRatios: list[float] = field(default_factory=list)
    enablePipelining: bool = False
    pipelineSchedule: PipelineSchedule = PipelineSchedule.Grouped
    createImplicitPipeliningFwdOnlyProgram: bool = False
    stashAllTensorsInferencePipeline: bool = False
    # Recomputation.
    autoRecomputation: RecomputationType = RecomputationType.NoRecompute
    explicitRecomputation: bool = False
    # Weights and data.
    constantWeights: bool = True
    syntheticDataMode: SyntheticDataMode = SyntheticDataMode.Off
    enablePrefetchDatastreams: bool = True
    defaultBufferingDepth: int = 1
    bufferingDepthMap: dict[str, int] = field(default_factory=dict)
    rearrangeAnchorsOnHost: bool = True
    rearrangeStreamsOnHost: bool = False
    disableGradAccumulationTensorStreams: bool = False
    disableOptimizerStateTensorStreams: bool = False
    updatableNamedBuffers: list[str] = field(default_factory=list)
    updatableBuffers: list[str] = field(default_factory=list)
    useHostCopyOps: bool = False
    enableExplicitMainLoops: bool = False
    groupHostSync: bool = False
    # Numbers.
    enableStochasticRounding: bool = False
    enableFloatingPointChecks: bool = False
    enableLoadAndOffloadRNGState: bool = False
    _enableRngStateManagement: bool = False
    enableNonStableSoftmax: bool = False
    enableStableNorm: bool = False
    decomposeGradSum: bool = False
    partialsTypeMatMuls: str = ""
    enableSupportedDataTypeCasting: bool = True
    ensureFp32LossScaleTensor: bool = False
    throwIfLog2ScaleTensorNotInRange: bool = True
    automaticLossScalingSettings: AutomaticLossScalingSettings = field(
        default_factory=AutomaticLossScalingSettings
    )
    groupNormStridedChannelGrouping: bool = False
    # Memory.
    weightTensorLocationSettings: TensorLocationSettings = field(default_factory=TensorLocationSettings)
    optimizerStateTensorLocationSettings: TensorLocationSettings = field(
        default_factory=TensorLocationSettings
    )
    accumulatorTensorLocationSettings: TensorLocationSettings = field(default_factory=TensorLocationSettings)
    activationTensorLocationSettings: TensorLocationSettings = field(default_factory=TensorLocationSettings)
    tensorLocationSettingsOverride: dict[str, Any] = field(default_factory=dict)
    executionPhaseSettings: ExecutionPhaseSettings = field(default_factory=ExecutionPhaseSettings)
    batchSerializationSettings: BatchSerializationSettings = field(default_factory=BatchSerializationSettings)
    accumulateOuterFragmentSettings: AccumulateOuterFragmentSettings = field(
        default_factory=AccumulateOuterFragmentSettings
    )
    replicatedCollectivesSettings: ReplicatedCollectivesSettings = field(
        default_factory=ReplicatedCollectivesSettings
    )
    numIOTiles: int = 0
    mergeVarUpdate: MergeVarUpdateType = MergeVarUpdateType.Off
    mergeVarUpdateMemThreshold: int = 1000000
    looseThresholdAtPeak: int = 8000
    delayVarUpdates: bool = True
    scheduleNonWeightUpdateGradientConsumersEarly: bool = False
    # Graph rewrites and scheduling.
    enableOutlining: bool = True
    enableOutliningCopyCostPruning: bool = True
    outlineThreshold: float = 1.0
    outlineSequenceBreakCost: float = 10000.0
    separateCallOpPdfs: bool = True
    subgraphCopyingStrategy: SubgraphCopyingStrategy = SubgraphCopyingStrategy.OnEnterAndExit
    aliasZeroCopy: bool = False
    useLoopCandidateCreator: bool = False
    enableFullyConnectedPass: bool = True
    enableMergeExchange: bool = True
    enableEfficientOverlapIOTopoCons: bool = False
    enableConstantFoldingOfMultipleConsumers: bool = True
    enableConstantFoldingOfReductions: bool = False
    enableInplaceAmbiguityChecking: bool = False
    strictOpVersions: bool = True
    opxAliasChecking: bool = False
    opxModifyChecking: bool = False
    kahnTieBreaker: str = "greedy"
    swapLimitScheduler: int = int(1e9)
    timeLimitScheduler: float = 1e9
    transitiveClosureOptimizationThreshold: int = 100000
    # Engine, reports, caches.
    compileEngine: bool = True
    enableEngineCaching: bool = field(default_factory=lambda: bool(cache_directory()))
    cachePath: str = field(default_factory=lambda: cache_directory() or "session_cache")
    enableVariablesCaching: bool = True
    engineOptions: dict[str, str] = field(default_factory=dict)
    reportOptions: dict[str, str] = field(default_factory=dict)
    convolutionOptions: dict[str, str] = field(default_factory=dict)
    matmulOptions: dict[str, str] = field(default_factory=dict)
    lstmOptions: dict[str, str] = field(default_factory=dict)
    gclOptions: dict[str, str] = field(default_factory=dict)
    instrumentWithHardwareCycleCounter: bool = False
    hardwareInstrumentations: set[Instrumentation] = field(default_factory=lambda: {Instrumentation.Outer})
    customCodelets: list[str] = field(default_factory=list)
    customCodeletCompileFlags: str = ""
    experimentalSettings: ExperimentalSettings = field(default_factory=ExperimentalSettings)
    # Files for those who look inside.
    logDir: str = ""
    dotChecks: set[str] = field(default_factory=set)
    dotOpNames: bool = False
    firstDotOp: int = 0
    finalDotOp: int = 10000
    exportPoplarComputationGraph: bool = False
    exportPoplarVertexGraph: bool = False
    serializedPoprithmsShiftGraphsDir: str = ""
    serializedPoprithmsAnnealGraphsDir: str = ""

    _engineOptions = _hidden("engineOptions")
    _reportOptions = _hidden("reportOptions")
    _convolutionOptions = _hidden("convolutionOptions")
    _matmulOptions = _hidden("matmulOptions")
    _lstmOptions = _hidden("lstmOptions")
    _gclOptions = _hidden("gclOptions")
    _tensorLocationSettingsOverride = _hidden("tensorLocationSettingsOverride")

    @property
    def defaultPrefetchBufferingDepth(self) -> int:
        """The former name of ``defaultBufferingDepth``; setting it warns."""
        return self.defaultBufferingDepth

    @defaultPrefetchBufferingDepth.setter
    def defaultPrefetchBufferingDepth(self, depth: int) -> None:
        _deprecated("defaultPrefetchBufferingDepth", "defaultBufferingDepth")
        self.defaultBufferingDepth = depth

    @property
    def prefetchBufferingDepthMap(self) -> dict[str, int]:
        """The former name of ``bufferingDepthMap``; setting it warns."""
        return self.bufferingDepthMap

    @prefetchBufferingDepthMap.setter
    def prefetchBufferingDepthMap(self, depths: dict[str, int]) -> None:
        _deprecated("prefetchBufferingDepthMap", "bufferingDepthMap")
        self.bufferingDepthMap = depths

    def enableExplicitIR(self, enable: bool) -> None:
        """Switch host copy operators, explicit main loops and explicit recomputation on or off together."""
        self.useHostCopyOps = enable
        self.enableExplicitMainLoops = enable
        self.explicitRecomputation = enable

    def getGlobalReplicationFactor(self) -> int:
        """Replicas over all instances."""
        if self.enableDistributedReplicatedGraphs:
            return self.globalReplicationFactor
        return self.local_replicas

    @property
    def local_replicas(self) -> int:
        """Replicas of this process."""
        return self.replicatedGraphCount if self.enableReplicatedGraphs else 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a batch."""
        return self.accumulationFactor if self.enableGradientAccumulation else 1

    @property
    def overlaps(self) -> bool:
        """True iff micro-batches overlap in a pipeline."""
        return self.enablePipelining and self.pipelineSchedule is not PipelineSchedule.Sequential

    @property
    def overlaps_batches(self) -> bool:
        """True iff the batches of a step overlap in a pipeline: inference, or no accumulation."""
        return self.overlaps and not self.enableGradientAccumulation

    def copy(self) -> SessionOptions:
        """A copy that keeps later changes away from an existing session."""
        import copy

        return copy.deepcopy(self)
