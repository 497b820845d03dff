"""The two 8-bit floating point formats of IPUs: stored numbers times two to the power of a scale.

F143 has 4 bits of exponent with bias 8 and 3 of mantissa, F152 has 5 with bias 16 and 2. Both have neither infinities
nor a negative zero, whose pattern is the only NaN: they are ONNX's FLOAT8E4M3FNUZ and FLOAT8E5M2FNUZ. A value is
``stored * 2**scale``. Numbers are rounded to the nearest (ties to even); those too large become the largest.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from onnx import TensorProto

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

_TYPES: dict[str, tuple[int, np.dtype, float]] = {
    "F143": (TensorProto.FLOAT8E4M3FNUZ, np.dtype(ml_dtypes.float8_e4m3fnuz), 240.0),
    "F152": (TensorProto.FLOAT8E5M2FNUZ, np.dtype(ml_dtypes.float8_e5m2fnuz), 57344.0),
}
FLOAT8_FORMATS = tuple(_TYPES)
SCALES = range(-32, 32)
"""Scales that an IPU has: 6 bits with sign."""


@dataclass(frozen=True, slots=True)
class Float8Format:
    """A format with its scale."""

    name: str
    scale: int

    def __post_init__(self) -> None:
        if self.name not in _TYPES:
            raise UsageError(f"there is no 8-bit float {self.name!r}", hint="The formats are F143 and F152.")
        if (
            isinstance(self.scale, bool)
            or not isinstance(self.scale, (int, np.integer))
            or self.scale not in SCALES
        ):
            raise UsageError(f"a scale of 8-bit floats is a number from -32 to 31, not {self.scale!r}")

    @property
    def element(self) -> int:
        """ONNX's number of the type."""
        return int(_TYPES[self.name][0])

    @property
    def dtype(self) -> np.dtype:
        """NumPy's type, of the package ml_dtypes."""
        return _TYPES[self.name][1]

    @property
    def largest(self) -> float:
        """The largest value, the scale included."""
        return float(_TYPES[self.name][2] * 2.0**self.scale)

    def stored(self, value: np.ndarray) -> np.ndarray:
        """Numbers as they are stored."""
        wide = np.asarray(value, np.float32) * np.float32(2.0**-self.scale)
        limit = np.float32(_TYPES[self.name][2])
        small: np.ndarray = np.clip(wide, -limit, limit).astype(self.dtype)
        return small

    def value(self, stored: np.ndarray) -> np.ndarray:
        """What stored numbers stand for, in float32."""
        result: np.ndarray = np.asarray(stored).astype(np.float32) * np.float32(2.0**self.scale)
        return result

    def simulated(self, value: np.ndarray) -> np.ndarray:
        """Numbers as they come back from storage, in float32."""
        return self.value(self.stored(value))

    def __str__(self) -> str:
        return f"{self.name} * 2^{self.scale}"


def parse_float8(text: object, option: str = "fp8_params") -> tuple[Float8Format, Float8Format]:
    """Formats of inputs and of weights, from ``INPUT,WEIGHT,INPUT SCALE,WEIGHT SCALE``. UsageError if it is none."""
    words = [word.strip() for word in text.split(",")] if isinstance(text, str) else []
    if len(words) != 4 or not all(word.lstrip("-").isdecimal() for word in words[2:]):
        raise UsageError(
            f"{option}: {text!r} is not formats and scales of inputs and weights",
            hint="As in F143,F143,-1,-1.",
        )
    return Float8Format(words[0], int(words[2])), Float8Format(words[1], int(words[3]))
