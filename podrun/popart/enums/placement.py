"""Where operators and tensors lie, and in which order the work is done."""

from __future__ import annotations

from podrun.popart.enums.base import PopartEnum


class VirtualGraphMode(PopartEnum):
    """How operators get to IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


class PipelineSchedule(PopartEnum):
    """The order of a pipeline's work (podrun's own; names as in TensorFlow for IPUs). PopART's is Grouped."""

    Grouped = 0
    Interleaved = 1
    Sequential = 2


class ExecutionPhaseIOSchedule(PopartEnum):
    """When phases load tensors."""

    Preload = 0
    OnDemand = 1


class ExecutionPhaseSchedule(PopartEnum):
    """Order within phases."""

    Interleaving = 0
    Batch = 1
    BatchClusteredIO = 2


class BatchSerializationBatchSchedule(PopartEnum):
    """Order of serialised batches."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class BatchSerializationTransformContext(PopartEnum):
    """Pass that is serialised."""

    Fwd = 0
    Bwd = 1
    Forward = 0
    Backward = 1


class BatchSerializationMethod(PopartEnum):
    """How batches are serialised."""

    UnrollDynamic = 0
    UnrollStatic = 1
    Loop = 2


class RecomputationType(PopartEnum):
    """Which activations are computed again for the backward pass."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class RecomputeType(PopartEnum):
    """What happens to one output in the backward pass."""

    Undefined = 0
    Checkpoint = 1
    Recompute = 2
    Recomputed = 3


class AccumulateOuterFragmentSchedule(PopartEnum):
    """Order of the fragment after accumulation."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class MergeVarUpdateType(PopartEnum):
    """Merging of weight updates."""

    Off = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class SubgraphCopyingStrategy(PopartEnum):
    """When arguments of subgraphs are copied."""

    OnEnterAndExit = 0
    JustInTime = 1


class AutodiffStitchStrategy(PopartEnum):
    """How gradient graphs get forward tensors."""

    RecomputeMinimal = 0
    RecomputeAllNonInputs = 1
    AddFwdOutputs = 2
    SafeAddFwdOutputs = 3


class PatternsLevel(PopartEnum):
    """Sets of graph rewrites."""

    NoPatterns = 0
    Minimal = 1
    Default = 2
    All = 3
