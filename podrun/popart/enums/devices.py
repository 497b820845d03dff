"""Devices, and what a session tells about itself."""

from __future__ import annotations

from podrun.popart.enums.base import PopartEnum


class DeviceType(PopartEnum):
    """Kinds of devices."""

    IpuModel = 0
    Cpu = 1
    Ipu = 2
    OfflineIpu = 3
    Sim = 4

    def __str__(self) -> str:
        return {"IpuModel": "ipu-model", "OfflineIpu": "offline-ipu"}.get(self.name, self.name.lower())


class DeviceConnectionType(PopartEnum):
    """When a device is attached."""

    Always = 0
    OnDemand = 1
    Never = 2


class DeviceSelectionCriterion(PopartEnum):
    """Which of several free devices is taken."""

    First = 0
    Random = 1


class SyncPattern(PopartEnum):
    """How IPUs synchronise."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class Instrumentation(PopartEnum):
    """What cycle counters count."""

    Outer = 0
    Inner = 1


class IrSerializationFormat(PopartEnum):
    """Formats of the serialised IR."""

    JSON = 0
