"""PopART's enumerations with their integer values (source: the PopART Python API reference).

Members are not numbers: they have ``name``, ``value`` and ``int()``, as pybind11's enumerations have.
"""

from __future__ import annotations

import enum

from podrun.core.errors import RecoveryAction as RecoveryAction
from podrun.runtime.settings import PipelineSchedule as PipelineSchedule

# fmt: off
__all__ = [
    "AccumulateOuterFragmentSchedule", "AdamMode", "AdaptiveMode", "AnchorReturnTypeId",
    "AutodiffStitchStrategy", "BatchSerializationBatchSchedule", "BatchSerializationMethod",
    "BatchSerializationTransformContext", "CommGroupType", "DataType", "DeviceConnectionType",
    "DeviceSelectionCriterion", "DeviceType", "ExchangeStrategy", "ExecutionPhaseIOSchedule",
    "ExecutionPhaseSchedule", "GradientTensorTrackingMethod", "InitType", "Instrumentation",
    "IrSerializationFormat", "MeanReductionStrategy", "MergeVarUpdateType", "PatternsLevel",
    "PipelineSchedule", "RecomputationType", "RecomputeType", "RecoveryAction",
    "ReductionType", "ReplicatedStreamMode", "ReplicatedTensorSharding",
    "SGDAccumulatorAndMomentum", "ScatterReduction", "SubgraphCopyingStrategy", "SyncPattern",
    "SyntheticDataMode", "TensorRemapType", "TensorStorage", "TileSet",
    "VariableRetrievalMode", "VirtualGraphMode", "WeightDecayMode",
]
# fmt: on


class PopartEnum(enum.Enum):
    """An enumeration whose members convert with ``int()`` and print as ``Class.Member``."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"


class DataType(PopartEnum):
    """Element types; the order is PopART's, not ONNX's."""

    UINT8 = 0
    INT8 = 1
    FLOAT8_143 = 2
    FLOAT8_152 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    UINT32 = 8
    UINT64 = 9
    BOOL = 10
    FLOAT = 11
    FLOAT16 = 12
    BFLOAT16 = 13
    DOUBLE = 14
    COMPLEX64 = 15
    COMPLEX128 = 16
    STRING = 17
    UNDEFINED = 18


class InitType(PopartEnum):
    """What a new tensor holds."""

    NoInit = 0
    Zero = 1


class ScatterReduction(PopartEnum):
    """How values that are scattered to the same element combine."""

    Sum = 0
    Max = 1
    Min = 2
    Mul = 3
    NoReduction = 4


class TensorRemapType(PopartEnum):
    """Directions a remapping acts in."""

    FwdBwdReverse = 0
    FwdBwd = 1
    Fwd = 2


class AnchorReturnTypeId(PopartEnum):
    """Which values of an anchor come back."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3


class ReplicatedStreamMode(PopartEnum):
    """Whether replicas get the same input data."""

    Broadcast = 0
    Replicate = 1


class SyntheticDataMode(PopartEnum):
    """What replaces host data."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class DeviceType(PopartEnum):
    """Kinds of devices."""

    IpuModel = 0
    Cpu = 1
    Ipu = 2
    OfflineIpu = 3
    Sim = 4

    def __str__(self) -> str:
        return {"IpuModel": "ipu-model", "OfflineIpu": "offline-ipu"}.get(self.name, self.name.lower())


class DeviceConnectionType(PopartEnum):
    """When a device is attached."""

    Always = 0
    OnDemand = 1
    Never = 2


class DeviceSelectionCriterion(PopartEnum):
    """Which of several free devices is taken."""

    First = 0
    Random = 1


class SyncPattern(PopartEnum):
    """How IPUs synchronise."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class Instrumentation(PopartEnum):
    """What cycle counters count."""

    Outer = 0
    Inner = 1


class IrSerializationFormat(PopartEnum):
    """Formats of the serialised IR."""

    JSON = 0


class TensorStorage(PopartEnum):
    """On-chip or in streaming memory."""

    OnChip = 0
    OffChip = 1


class ReplicatedTensorSharding(PopartEnum):
    """Whether a tensor is spread over replicas."""

    Off = 0
    On = 1


class TileSet(PopartEnum):
    """Tiles for computing or for input and output."""

    Compute = 0
    IO = 1


class ExchangeStrategy(PopartEnum):
    """When stream data is exchanged."""

    JustInTime = 0
    OverlapInnerLoop = 1
    OverlapLoops = 2
    OverlapStep = 3


class CommGroupType(PopartEnum):
    """How replicas are grouped."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    Ungrouped = 3


class VariableRetrievalMode(PopartEnum):
    """Which replicas' copies of a variable the host reads."""

    OnePerGroup = 0
    AllReduceReplicas = 1
    AllReplicas = 2


class VirtualGraphMode(PopartEnum):
    """How operators get to IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


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


class AdamMode(PopartEnum):
    """Members of the Adam family."""

    Adam = 0
    AdamNoBias = 1
    AdaMax = 2
    Lamb = 3
    LambNoBias = 4


class AdaptiveMode(PopartEnum):
    """Members of the adaptive family."""

    AdaGrad = 0
    RMSProp = 1
    CenteredRMSProp = 2
    AdaDelta = 3


class WeightDecayMode(PopartEnum):
    """Decay of the weight itself, or a term of the gradient."""

    Decay = 0
    L2Regularization = 1


class SGDAccumulatorAndMomentum(PopartEnum):
    """One tensor for accumulator and momentum, or two."""

    Combined = 0
    Separate = 1


class ReductionType(PopartEnum):
    """How a loss or a gradient is reduced."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(PopartEnum):
    """A running mean, or a division after the sum."""

    Running = 0
    Post = 1


class GradientTensorTrackingMethod(PopartEnum):
    """Gradients that automatic loss scaling watches."""

    AllNonViewChangingGradientTensors = 0
    ConvAndMatmulGradients = 1
    GradientsOfUserSpecifiedTensors = 2
