"""PopTorch's enumerations. Values are the SDK's; programs compare and store them."""

from __future__ import annotations

import enum
from typing import Any


class _SavedByValue:
    """Members are pickled as their class and value, by every Python.

    Python 3.11.2 pickles a member of an enumeration as a call of getattr, which `poptorch.load` refuses to read.
    """

    value: Any  # Any, as in enum: each enumeration has values of its own type.

    def __reduce_ex__(self, protocol: Any) -> Any:  # Any, as in enum.
        return type(self), (self.value,)


class OutputMode(_SavedByValue, enum.IntEnum):
    """Which results a call returns."""

    Final = 0
    """The last micro-batch of every replica."""
    EveryN = 1
    """Every N-th device iteration."""
    All = 2
    """Every micro-batch."""
    Sum = 3
    """The sum over device iterations and accumulation, for every replica."""
    Default = 4
    """Final in training, All in inference."""


class DataLoaderMode(_SavedByValue, enum.IntEnum):
    """Where a DataLoader loads."""

    Sync = 0
    """In the process that asks."""
    Async = 1
    """In a process of its own."""
    AsyncRebatched = 2
    """In a process of its own, which also forms the batches."""


class SharingStrategy(_SavedByValue, enum.IntEnum):
    """How a process of a data loader is started and shares tensors."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OverlapMode(_SavedByValue, enum.Enum):
    """What transfers of data overlap with."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class ConnectionType(_SavedByValue, enum.IntEnum):
    """When a model takes its IPUs."""

    Always = 0
    """Before it is compiled."""
    OnDemand = 1
    """When it first runs."""
    Never = 2
    """Not at all: it is compiled for later."""


class HalfFloatCastingBehavior(_SavedByValue, enum.IntEnum):
    """Deprecated: types are promoted as torch does."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class ReductionType(_SavedByValue, enum.IntEnum):
    """How values of several replicas or micro-batches become one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(_SavedByValue, enum.IntEnum):
    """When a mean of gradients is divided."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class SyncPattern(_SavedByValue, enum.IntEnum):
    """Which IPUs wait for each other."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class Liveness(_SavedByValue, enum.IntEnum):
    """When a phase's tensors leave the tiles."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class AutoStage(_SavedByValue, enum.IntEnum):
    """How blocks become pipeline stages."""

    SameAsIpu = 0
    """A stage for each IPU."""
    AutoIncrement = 1
    """A stage for each block."""


class MatMulSerializationMode(_SavedByValue, enum.Enum):
    """Which dimension of a product is computed in parts."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class MultiConvPlanType(_SavedByValue, enum.IntEnum):
    """How grouped convolutions run."""

    Parallel = 0
    Serial = 1


class CommGroupType(_SavedByValue, enum.IntEnum):
    """Which replicas form a group."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(_SavedByValue, enum.IntEnum):
    """Which replicas' values of a parameter the host reads."""

    OnePerGroup = 0
    AllReplicas = 2


__all__ = [
    "AutoStage",
    "CommGroupType",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "OutputMode",
    "OverlapMode",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
    "VariableRetrievalMode",
]
