"""Where tensors are kept: `TensorLocationSettings`."""

from __future__ import annotations

from typing import Any


class TensorLocationSettings:
    """Where one kind of tensor is kept and how it gets there. Every setter returns the settings themselves.

    AssertionError for a value of another type.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def _set(self, key: str, value: Any, kind: type) -> TensorLocationSettings:
        assert isinstance(value, kind), f"{key} takes {kind.__name__}, not {value!r}"
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
        """All settings that were made."""
        return dict(self._values)

    def __repr__(self) -> str:
        return f"TensorLocationSettings({self._values})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLocationSettings) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]
