"""The settings classes that SessionOptions holds, and the meaning of memory options to the compiler.

Settings are plain values with PopART's names and defaults. Attributes that do not exist are refused, with the nearest
name that does; so are values of another type.

Options and annotations about memory (recomputation, locations) change no number. They change what tiles hold, and the
cycles of recomputed work.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.popart.values.enums import (
    AccumulateOuterFragmentSchedule,
    AutodiffStitchStrategy,
    BatchSerializationBatchSchedule,
    BatchSerializationMethod,
    BatchSerializationTransformContext,
    ExecutionPhaseIOSchedule,
    ExecutionPhaseSchedule,
    GradientTensorTrackingMethod,
    ReplicatedTensorSharding,
    TensorStorage,
    TileSet,
)
from podrun.popart.values.exceptions import incompatible
from podrun.popart.values.tensor_info import boolean, integer, number
from podrun.popart.values.variables import CommGroup

_PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = ((bool, boolean), (int, integer), (float, number))


def _converted(current: object, value: object) -> Any:
    """``value`` in the form that may replace ``current``. TypeError where pybind11 has no conversion."""
    for kind, convert in _PLAIN:
        if isinstance(current, kind) and not isinstance(current, Enum):
            return convert(value)
    if isinstance(current, (list, set)) and isinstance(value, (list, tuple, set, frozenset, np.ndarray)):
        return type(current)(value.tolist() if isinstance(value, np.ndarray) else value)
    if not isinstance(value, type(current)):
        raise TypeError(f"{value!r} is no {type(current).__name__}")
    return value


class Strict:
    """Base of settings classes: assignment is checked against the names and the types of the defaults.

    ``RETIRED``: names that earlier SDKs had, and what to do about them.
    """

    __slots__ = ()
    RETIRED: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # Type checkers must still report unknown names.

        def __getattr__(self, name: str) -> Any:
            """Called only for names that do not exist, and for fields before __init__ has set them."""
            if name.startswith("__") or name in type(self).__dataclass_fields__:
                raise AttributeError(name)
            raise self._unknown(name)

    def _unknown(self, name: str) -> AttributeError:
        """The error for an unknown name. No full stop at the end, because Python may add a guess of its own."""
        owner = type(self).__name__
        if name in self.RETIRED:
            return AttributeError(
                f"{owner!r} object has no attribute {name!r}. {self.RETIRED[name].rstrip('.')}"
            )
        near = difflib.get_close_matches(name, [*type(self).__dataclass_fields__, *dir(type(self))], n=1)  # type: ignore[attr-defined]
        guess = f". Did you mean {near[0]!r}?" if near else ""
        return AttributeError(f"{owner!r} object has no attribute {name!r}{guess}")

    def __setattr__(self, name: str, value: object) -> None:
        fields = type(self).__dataclass_fields__  # type: ignore[attr-defined]
        known = name in fields or isinstance(getattr(type(self), name, None), property)
        if not known:
            raise self._unknown(name)
        try:
            current = getattr(self, name)
        except AttributeError:  # The first assignment, by __init__.
            object.__setattr__(self, name, value)
            return
        try:
            object.__setattr__(self, name, _converted(current, value))
        except TypeError as error:
            raise incompatible(
                "", f"{type(self).__name__}.{name} takes {type(current).__name__}, not {value!r}."
            ) from error


class TensorLocation:
    """Where a tensor lives: on chip or in streaming memory, whole or spread over replicas. Changes no number."""

    __slots__ = ("loadTileSet", "replicatedTensorSharding", "shardingDomain", "storage", "storageTileSet")

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.storage = TensorStorage.OnChip
        self.loadTileSet = TileSet.Compute
        self.storageTileSet = TileSet.Compute
        self.replicatedTensorSharding = ReplicatedTensorSharding.Off
        self.shardingDomain = CommGroup()
        tile_sets = ["loadTileSet", "storageTileSet"]
        for value in args:
            if isinstance(value, TensorStorage):
                self.storage = value
            elif isinstance(value, TileSet) and tile_sets:
                setattr(self, tile_sets.pop(0), value)
            elif isinstance(value, ReplicatedTensorSharding):
                self.replicatedTensorSharding = value
            elif isinstance(value, CommGroup):
                self.shardingDomain = value
            else:
                raise incompatible("__init__", f"TensorLocation got {value!r}.")
        for name, value in kwargs.items():
            if name not in self.__slots__ or not isinstance(value, type(getattr(self, name))):
                raise incompatible("__init__", f"TensorLocation got {name}={value!r}.")
            setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLocation) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__slots__))

    def __repr__(self) -> str:
        return f"TensorLocation({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"


class TensorLocationSettings:
    """A TensorLocation, and the sizes from which on it applies."""

    __slots__ = ("location", "minElementsForOffChip", "minElementsForReplicatedTensorSharding")

    def __init__(
        self,
        location: TensorLocation | TensorStorage | None = None,
        minElementsForOffChip: int = 2,
        minElementsForReplicatedTensorSharding: int = 8192,
        *,
        storage: TensorStorage | None = None,
    ) -> None:
        where = location if location is not None else storage
        self.location = (
            TensorLocation(where) if isinstance(where, TensorStorage) else where or TensorLocation()
        )
        self.minElementsForOffChip = minElementsForOffChip
        self.minElementsForReplicatedTensorSharding = minElementsForReplicatedTensorSharding


@dataclass(slots=True)
class AutomaticLossScalingSettings(Strict):
    """When and how the loss scale follows the sizes of gradients (`podrun.runtime.loss_scaling`)."""

    enabled: bool = False
    toTrackTensors: list[str] | None = None
    binEdgeLocation: float = 0.125
    thresholdUpperCountProportion: float = 1e-7
    updatePeriod: int = 1
    gradientTensorTrackingMethod: GradientTensorTrackingMethod = (
        GradientTensorTrackingMethod.AllNonViewChangingGradientTensors
    )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "toTrackTensors":  # A default of None would allow only None.
            object.__setattr__(self, name, None if value is None else list(value))
        else:
            Strict.__setattr__(self, name, value)


@dataclass(slots=True)
class BatchSerializationSettings(Strict):
    """Cutting a batch into pieces. Changes no number beyond rounding."""

    factor: int = 0
    concatOnVirtualGraphChange: bool = True
    concatOnExecutionPhaseChange: bool = True
    concatOnPipelineStageChange: bool = True
    transformContext: BatchSerializationTransformContext = BatchSerializationTransformContext.Fwd
    method: BatchSerializationMethod = BatchSerializationMethod.UnrollDynamic
    batchSchedule: BatchSerializationBatchSchedule = BatchSerializationBatchSchedule.Isomorphic


@dataclass(slots=True)
class ExecutionPhaseSettings(Strict):
    """Execution in phases. Changes no number."""

    phases: int = 0
    stages: int = 2
    weightIOSchedule: ExecutionPhaseIOSchedule = ExecutionPhaseIOSchedule.Preload
    activationIOSchedule: ExecutionPhaseIOSchedule = ExecutionPhaseIOSchedule.Preload
    optimizerStateIOSchedule: ExecutionPhaseIOSchedule = ExecutionPhaseIOSchedule.OnDemand
    accumulatorIOSchedule: ExecutionPhaseIOSchedule = ExecutionPhaseIOSchedule.Preload
    schedule: ExecutionPhaseSchedule = ExecutionPhaseSchedule.Interleaving


@dataclass(slots=True)
class AccumulateOuterFragmentSettings(Strict):
    """Order of the fragment after accumulation. Changes no number."""

    schedule: AccumulateOuterFragmentSchedule = AccumulateOuterFragmentSchedule.Serial
    excludedVirtualGraphs: list[int] = field(default_factory=list)


@dataclass(slots=True)
class AutodiffSettings(Strict):
    """How gradient graphs get forward tensors. Changes no number."""

    stitchStrategy: AutodiffStitchStrategy = AutodiffStitchStrategy.RecomputeAllNonInputs


@dataclass(slots=True)
class ExperimentalSettings(Strict):
    """Settings that PopART calls experimental."""

    customTransformApplierSettings: dict[Any, Any] = field(default_factory=dict)
    createHostTransferableTensorWithOffset: bool = False


@dataclass(slots=True)
class ReplicatedCollectivesSettings(Strict):
    """Merging of collectives. Changes no number."""

    prepareScheduleForMergingCollectives: bool = False
    mergeAllReduceCollectives: bool = False
    mergeReduceScatterCollectives: bool = False
    mergeAllGatherCollectives: bool = False


class NumIOTiles:
    """Number of tiles set aside for input and output."""

    __slots__ = ("value",)

    def __init__(self, numIOTiles: int = 0) -> None:
        self.value = numIOTiles
