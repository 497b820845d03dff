"""Types of host values on the device: 64-bit integers narrow to 32 bits, and what does not fit is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from podrun.core.errors import UnsupportedError
from podrun.core.executable import TensorSpec
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True, slots=True)
class TooWide:
    """Stands for a traced value whose integers do not fit the device. Operators may have it as an input if they only
    use the value while tracing (the ends of a Slice); computing with it is refused in the words kept here.
    """

    reason: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def device_dtype(dtype: np.dtype[Any], x64: bool) -> np.dtype[Any]:
    """The device's type for a host type: 64-bit integers narrow to 32 bits; float64 and complex128 are refused."""
    if x64:
        return dtype
    if dtype in (np.dtype(np.float64), np.dtype(np.complex128)):
        raise UnsupportedError(
            "The data type DOUBLE is not supported in Poplar: IPUs have no 64-bit floating point"
        )
    return {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}.get(
        dtype, dtype
    )


def to_device(value: np.ndarray, name: str, x64: bool) -> np.ndarray:
    """The array in its device type: INT64 as INT32. Raises `UnsupportedError` if a value does not fit or
    is a string.
    """
    if value.dtype.kind in "OUS":
        raise UnsupportedError(f"tensor '{name}' holds strings, which are not computed on IPUs")
    try:
        dtype = device_dtype(value.dtype, x64)
    except UnsupportedError as error:
        raise UnsupportedError(f"tensor '{name}': {error}") from None
    reason = misfit(value, name, x64)
    if reason:
        raise UnsupportedError(reason)
    return value.astype(dtype, copy=False)


def misfit(value: np.ndarray, name: str, x64: bool) -> str | None:
    """Why an integer array does not fit its device type, or None if it does."""
    if value.dtype.kind not in "iu":
        return None
    dtype = device_dtype(value.dtype, x64)
    if dtype == value.dtype:
        return None
    bounds = np.iinfo(dtype)
    if value.size and (value.max() > bounds.max or value.min() < bounds.min):
        worst = value.max() if value.max() > bounds.max else value.min()
        return f"tensor '{name}' holds {worst}, which does not fit {dtype.name.upper()} on the device"
    return None


def spec_of(name: str, value: Any) -> TensorSpec:
    """Type and shape of an array, or of what has the ``dtype`` and ``shape`` of one."""
    return TensorSpec(name, np.dtype(value.dtype).name, tuple(int(d) for d in value.shape))
