"""PopART's enumerations with their integer values (source: the PopART Python API reference).

Members are not numbers: they have ``name``, ``value`` and ``int()``, as pybind11's enumerations have.
"""

from __future__ import annotations

from podrun.errors import RecoveryAction
from podrun.popart.enums.data import (
    AnchorReturnTypeId,
    DataType,
    InitType,
    ReplicatedStreamMode,
    ScatterReduction,
    SyntheticDataMode,
    TensorRemapType,
)
from podrun.popart.enums.devices import (
    DeviceConnectionType,
    DeviceSelectionCriterion,
    DeviceType,
    Instrumentation,
    IrSerializationFormat,
    SyncPattern,
)
from podrun.popart.enums.memory import (
    CommGroupType,
    ExchangeStrategy,
    ReplicatedTensorSharding,
    TensorStorage,
    TileSet,
    VariableRetrievalMode,
)
from podrun.popart.enums.placement import (
    AccumulateOuterFragmentSchedule,
    AutodiffStitchStrategy,
    BatchSerializationBatchSchedule,
    BatchSerializationMethod,
    BatchSerializationTransformContext,
    ExecutionPhaseIOSchedule,
    ExecutionPhaseSchedule,
    MergeVarUpdateType,
    PatternsLevel,
    PipelineSchedule,
    RecomputationType,
    RecomputeType,
    SubgraphCopyingStrategy,
    VirtualGraphMode,
)
from podrun.popart.enums.training import (
    AdamMode,
    AdaptiveMode,
    GradientTensorTrackingMethod,
    MeanReductionStrategy,
    ReductionType,
    SGDAccumulatorAndMomentum,
    WeightDecayMode,
)

__all__ = [
    "AccumulateOuterFragmentSchedule",
    "AdamMode",
    "AdaptiveMode",
    "AnchorReturnTypeId",
    "AutodiffStitchStrategy",
    "BatchSerializationBatchSchedule",
    "BatchSerializationMethod",
    "BatchSerializationTransformContext",
    "CommGroupType",
    "DataType",
    "DeviceConnectionType",
    "DeviceSelectionCriterion",
    "DeviceType",
    "ExchangeStrategy",
    "ExecutionPhaseIOSchedule",
    "ExecutionPhaseSchedule",
    "GradientTensorTrackingMethod",
    "InitType",
    "Instrumentation",
    "IrSerializationFormat",
    "MeanReductionStrategy",
    "MergeVarUpdateType",
    "PatternsLevel",
    "PipelineSchedule",
    "RecomputationType",
    "RecomputeType",
    "RecoveryAction",
    "ReductionType",
    "ReplicatedStreamMode",
    "ReplicatedTensorSharding",
    "SGDAccumulatorAndMomentum",
    "ScatterReduction",
    "SubgraphCopyingStrategy",
    "SyncPattern",
    "SyntheticDataMode",
    "TensorRemapType",
    "TensorStorage",
    "TileSet",
    "VariableRetrievalMode",
    "VirtualGraphMode",
    "WeightDecayMode",
]
