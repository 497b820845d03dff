"""What the metadata of a PopEF file say, as values, and their JSON form.

The names of fields are those of the SDK's library. An *anchor* is a tensor that crosses between the host and the
device, its *handle* the stream that carries it; ``programs`` of an anchor are the indices of the programs that move
it; ``programFlow`` says which programs load the device, which one is run for data and which bring results back.
Reading checks every field and raises ValueError with the field's name; nothing is taken on trust.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

import numpy as np

from podrun.core.executable import numpy_dtype
from podrun.core.names import ASSERTED_ANCHOR
from podrun.core.quick_dataclass import dataclass

MOST_AXES = 64
"""Most axes of a tensor: NumPy's own limit."""
MOST_BYTES = 1 << 40
"""Most bytes of one tensor."""


class ElementType(enum.Enum):
    """The type of a tensor's elements: the SDK's name, with NumPy's as value."""

    BOOL = "bool"
    S8 = "int8"
    U8 = "uint8"
    S16 = "int16"
    U16 = "uint16"
    S32 = "int32"
    U32 = "uint32"
    S64 = "int64"
    U64 = "uint64"
    F8_143 = "float8_e4m3fnuz"
    F8_152 = "float8_e5m2fnuz"
    F16 = "float16"
    BF16 = "bfloat16"
    F32 = "float32"
    F64 = "float64"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy's dtype (that of ml_dtypes for the small floats)."""
        return numpy_dtype(self.value)


class AnchorDirection(enum.Enum):
    """Which way an anchor crosses."""

    INPUT = "input"
    OUTPUT = "output"
    BOTH = "both"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PopefTensor:
    """Element type and shape of a tensor."""

    dataType: ElementType
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def sizeInBytes(self) -> int:
        """Bytes of the tensor."""
        return self.size * self.dataType.numpy_dtype.itemsize

    @staticmethod
    def of(array: np.ndarray) -> PopefTensor:
        """The form of an array. ValueError for a type that files do not hold, such as strings."""
        return PopefTensor(ElementType(array.dtype.name), array.shape)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"dataType": self.dataType.name, "shape": list(self.shape)}

    @staticmethod
    def from_json(item: object, where: str) -> PopefTensor:
        """The value of what `to_json` gave. ValueError names ``where``."""
        entry = typed(item, dict, where)
        name = typed(entry.get("dataType"), str, f"{where}.dataType")
        if name not in ElementType.__members__:
            raise ValueError(f"{where}.dataType {name!r} is no element type")
        shape = tuple(
            typed(n, int, f"{where}.shape") for n in typed(entry.get("shape"), list, f"{where}.shape")
        )
        if len(shape) > MOST_AXES or any(n < 0 for n in shape):
            raise ValueError(f"{where}.shape {list(shape)[:8]} is no shape")
        tensor = PopefTensor(ElementType[name], shape)
        if tensor.sizeInBytes > MOST_BYTES:
            raise ValueError(f"{where}.shape {list(shape)} has more than {MOST_BYTES} bytes")
        return tensor


@dataclass(frozen=True, slots=True)
class PopefAnchor:
    """A tensor that crosses. ``tensorInfo``: of one micro-batch of one replica."""

    name: str
    handle: str
    tensorInfo: PopefTensor
    isPerReplica: bool = True
    type: AnchorDirection = AnchorDirection.UNKNOWN
    programs: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "handle": self.handle,
            "tensorInfo": self.tensorInfo.to_json(),
            "isPerReplica": self.isPerReplica,
            "type": self.type.value,
            "programs": list(self.programs),
        }

    @staticmethod
    def from_json(item: object, where: str) -> PopefAnchor:
        """The value of what `to_json` gave. ValueError names the field."""
        entry = typed(item, dict, where)
        name = typed(entry.get("name"), str, f"{where}.name")
        where = f"anchor {name!r}"
        return PopefAnchor(
            name,
            typed(entry.get("handle"), str, f"{where}.handle"),
            PopefTensor.from_json(entry.get("tensorInfo"), f"{where}.tensorInfo"),
            typed(entry.get("isPerReplica"), bool, f"{where}.isPerReplica"),
            AnchorDirection(typed(entry.get("type"), str, f"{where}.type")),
            _indices(entry.get("programs"), f"{where}.programs"),
        )


@dataclass(frozen=True, slots=True)
class ProgramFlow:
    """Indices of programs by when they run: to ``load`` the device, for every run (``main``), to ``save``."""

    load: tuple[int, ...] = ()
    main: tuple[int, ...] = ()
    save: tuple[int, ...] = ()

    @staticmethod
    def from_json(item: object) -> ProgramFlow:
        """The value of its fields as a dictionary."""
        entry = typed(item, dict, "programFlow")
        return ProgramFlow(
            *(_indices(entry.get(f.name), f"programFlow.{f.name}") for f in fields(ProgramFlow))
        )


@dataclass(frozen=True, slots=True)
class PopefMetadata:
    """What has to be known to load and run the executable of that name. ``hash``: the release that compiled it
    (`podrun.popef.container.PACKAGE`)."""

    executable: str
    anchors: tuple[PopefAnchor, ...]
    programsMap: Mapping[int, str] = field(default_factory=dict)
    programFlow: ProgramFlow = ProgramFlow()
    replicationFactor: int = 1
    numIpus: int = 1
    ipuVersion: str = "ipu2"
    isPOD: bool = False
    numProcesses: int = 1
    isInference: bool = True
    engineOptions: Mapping[str, str] = field(default_factory=dict)
    deviceOptions: Mapping[str, str] = field(default_factory=dict)
    seedHandle: str = ""
    deviceIterations: int = 1
    hash: str = ""

    def inputs(self) -> tuple[PopefAnchor, ...]:
        """Anchors that the host gives for every run."""
        return tuple(a for a in self.anchors if a.type is AnchorDirection.INPUT and self._moved_by_main(a))

    def outputs(self) -> tuple[PopefAnchor, ...]:
        """Anchors that come back from every run, but what a program says of its own assertions."""
        return tuple(a for a in self._from_device() if a.name != ASSERTED_ANCHOR)

    def asserted(self) -> PopefAnchor | None:
        """The anchor that says of every batch whether the assertions of the program held; None where it has none."""
        return next((a for a in self._from_device() if a.name == ASSERTED_ANCHOR), None)

    def _from_device(self) -> tuple[PopefAnchor, ...]:
        return tuple(a for a in self.anchors if a.type is AnchorDirection.OUTPUT and self._moved_by_main(a))

    def _moved_by_main(self, anchor: PopefAnchor) -> bool:
        return bool(set(anchor.programs) & set(self.programFlow.main))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        flow = {f.name: list(getattr(self.programFlow, f.name)) for f in fields(ProgramFlow)}
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return plain | {
            "anchors": [anchor.to_json() for anchor in self.anchors],
            "programsMap": {str(index): name for index, name in self.programsMap.items()},
            "programFlow": flow,
            "engineOptions": dict(self.engineOptions),
            "deviceOptions": dict(self.deviceOptions),
        }

    @staticmethod
    def from_json(item: object) -> PopefMetadata:
        """The value of what `to_json` gave. ValueError names the first field that is wrong."""
        entry = typed(item, dict, "the metadata")
        plain: dict[str, Any] = {
            f.name: typed(entry.get(f.name), _KINDS[str(f.type)], f.name)
            for f in fields(PopefMetadata)
            if str(f.type) in _KINDS
        }
        for name in ("replicationFactor", "numIpus", "numProcesses", "deviceIterations"):
            if not 1 <= plain[name] < 1 << 31:
                raise ValueError(f"{name} cannot be {plain[name]}")
        programs = typed(entry.get("programsMap"), dict, "programsMap")
        anchors = typed(entry.get("anchors"), list, "anchors")
        metadata = PopefMetadata(
            **plain,
            anchors=tuple(PopefAnchor.from_json(a, f"anchors[{i}]") for i, a in enumerate(anchors)),
            programsMap={int(k): typed(v, str, "programsMap") for k, v in programs.items()},
            programFlow=ProgramFlow.from_json(entry.get("programFlow")),
            engineOptions=_strings(entry.get("engineOptions"), "engineOptions"),
            deviceOptions=_strings(entry.get("deviceOptions"), "deviceOptions"),
        )
        _check_names(metadata)
        return metadata


_KINDS: Mapping[str, type[Any]] = {"str": str, "int": int, "bool": bool}


def _check_names(metadata: PopefMetadata) -> None:
    """ValueError for a name that occurs twice in one direction, or a program that does not exist."""
    keys = [(anchor.name, anchor.type) for anchor in metadata.anchors]
    if len(set(keys)) != len(keys):
        raise ValueError("an anchor's name occurs twice")
    flow = metadata.programFlow
    used = {*flow.load, *flow.main, *flow.save, *(i for anchor in metadata.anchors for i in anchor.programs)}
    if unknown := sorted(used - metadata.programsMap.keys()):
        raise ValueError(f"program {unknown[0]} is not in programsMap")


def typed(value: object, kind: type[Any], where: str) -> Any:
    """``value``, which is of ``kind``. ValueError names ``where`` otherwise; a bool is no int."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} is {type(value).__name__}, not {kind.__name__}")
    return value


def _indices(value: object, where: str) -> tuple[int, ...]:
    return tuple(typed(item, int, where) for item in typed(value, list, where))


def _strings(value: object, where: str) -> dict[str, str]:
    return {key: typed(text, str, where) for key, text in typed(value, dict, where).items()}
