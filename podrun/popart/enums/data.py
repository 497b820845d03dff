"""Types of elements, what operators do with them, and data between host and device."""

from __future__ import annotations

from podrun.popart.enums.base import PopartEnum


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
    """How scattered values meet."""

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
    """What stands in for host data."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3
