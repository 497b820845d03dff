"""Which memory and which tiles tensors are in, and what replicas share."""

from __future__ import annotations

from podrun.popart.enums.base import PopartEnum


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
