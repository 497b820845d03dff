"""Where tensors are kept: ``poptorch.TensorLocationSettings`` and ``Options.TensorLocations``."""

from __future__ import annotations

from typing import Any, ClassVar

from podrun.poptorch.api.option_group import OptionGroup
from podrun.poptorch.api.signatures import checks_methods
from podrun.poptorch.errors import ArgumentError


@checks_methods()
class TensorLocationSettings:
    """Where one kind of tensor is kept and how it gets there. Every setter returns the settings themselves.

    AssertionError for a value of another type.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def _set(self, key: str, value: object, kind: type) -> TensorLocationSettings:
        if not isinstance(value, kind):
            raise ArgumentError(f"{key} takes {kind.__name__}, not {value!r}")
        self._values[key] = value
        return self

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Keep smaller tensors on the chip."""
        return self._set("minElementsForOffChip", min_elements, int)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not shard smaller tensors."""
        return self._set("minElementsForReplicatedTensorSharding", min_elements, int)

    def useOnChipStorage(self, use: bool | None = True) -> TensorLocationSettings:
        """Keep tensors on the tiles (True) or in streaming memory (False); None: as PopART decides."""
        if use is None:
            self._values.pop("onChip", None)
            return self
        return self._set("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Give every replica a part of each tensor."""
        return self._set("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load through I/O tiles."""
        return self._set("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store through I/O tiles."""
        return self._set("useIOTilesToStore", use, bool)

    def toDict(self) -> dict[str, Any]:
        """All settings made so far."""
        return dict(self._values)

    def __repr__(self) -> str:
        return f"TensorLocationSettings({self._values})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLocationSettings) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]


@checks_methods()
class TensorLocationOptions(OptionGroup):
    """Options for the locations of tensors: ``Options.TensorLocations``."""

    _defaults: ClassVar[dict[str, Any]] = {
        "location_activation": {},
        "location_weight": {},
        "location_optimizer": {},
        "location_accumulator": {},
        "num_io_tiles": 0,
    }

    def _locate(self, name: str, location: TensorLocationSettings) -> TensorLocationOptions:
        return self.set(**{name: location.toDict()})

    def setActivationLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Set where activations are kept."""
        return self._locate("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Set where weights are kept."""
        return self._locate("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Set where optimizer state is kept."""
        return self._locate("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Set where accumulated gradients are kept."""
        return self._locate("location_accumulator", location)

    def numIOTiles(self, num_tiles: int) -> TensorLocationOptions:
        """Set the number of tiles that only move data: an even number from 32 to 192."""
        if not isinstance(num_tiles, int) or num_tiles not in range(32, 193, 2):
            raise ArgumentError("numIOTiles takes an even number from 32 to 192")
        return self.set(num_io_tiles=num_tiles)
