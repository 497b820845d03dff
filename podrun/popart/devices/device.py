"""DeviceInfo: a device under PopART's names."""

from __future__ import annotations

import builtins
from types import TracebackType

from podrun.popart.values.enums import DeviceConnectionType, DeviceType, SyncPattern
from podrun.popart.values.exceptions import surfaced
from podrun.runtime.device import DeviceKind, RunDevice

TILES_PER_IPU = 1472
"""Tiles of a Mk2 IPU (GC200 and Bow)."""

MODEL_TILES = 4
"""Tiles of an IPU model by default, as in PopART."""

KINDS = {
    DeviceType.Ipu: DeviceKind.IPU,
    DeviceType.OfflineIpu: DeviceKind.OFFLINE,
    DeviceType.IpuModel: DeviceKind.MODEL,
    DeviceType.Sim: DeviceKind.MODEL,
    DeviceType.Cpu: DeviceKind.CPU,
}
"""The runtime's kinds of devices, by PopART's."""


class DeviceInfo:
    """A device: IPUs, a model of them, or a description to compile for. A context manager that detaches at its end."""

    def __init__(
        self,
        kind: DeviceType,
        device: RunDevice,
        connection_type: DeviceConnectionType = DeviceConnectionType.Always,
        tiles: int = TILES_PER_IPU,
        pattern: SyncPattern = SyncPattern.Full,
        version: str = "ipu2",
    ) -> None:
        self._kind, self._connection_type, self._tiles = kind, connection_type, tiles
        self._pattern, self._version = pattern, version
        self.device = device
        """The runtime's device: podrun's own, not part of PopART's interface."""

    @property
    def type(self) -> DeviceType:
        """The kind of device."""
        return self._kind

    @property
    def connectionType(self) -> DeviceConnectionType:
        """When the device takes its IPUs."""
        return self._connection_type

    @property
    def id(self) -> int:
        """The device id."""
        return self.device.identifier

    @property
    def numIpus(self) -> int:
        """How many IPUs it has."""
        return self.device.ipu_count

    @property
    def tilesPerIPU(self) -> int:
        """How many tiles each IPU has."""
        return self._tiles

    tilesPerIpu = tilesPerIPU

    @property
    def driverIds(self) -> list[int]:
        """The partition's numbers of its IPUs."""
        return list(self.device.ipus)

    @property
    def numWorkerContexts(self) -> int:
        """Worker threads of a tile."""
        return 1 if self._kind is DeviceType.Cpu else 6

    @property
    def ipuVersion(self) -> str:
        """The architecture: ``ipu2``, or the name of what replaces hardware."""
        return self.version

    @property
    def architecture(self) -> str:
        """The architecture of its IPUs, attached or not: ``ipu2``."""
        return self._version

    @property
    def version(self) -> str:
        """The architecture in PopART's form, which knows it of attached IPUs only."""
        if self._kind is DeviceType.Cpu:
            return "<unknown-cpu>"
        if self._kind is DeviceType.OfflineIpu:
            return "<offline-ipu>"
        if self._kind is DeviceType.Ipu and not self.isAttached:
            return "<unknown-ipu-unattached>"
        return self._version

    @property
    def isAttached(self) -> bool:
        """True iff this process holds the device. A partition reset takes it away."""
        with surfaced():
            return self.device.is_attached

    def attach(self) -> bool:
        """Take the IPUs; False if another process has them. Does not wait: `tryAttachUntilTimeout` does."""
        with surfaced():
            return self.device.attach()

    def refusal(self) -> str | None:
        """Try to attach. Returns None on success, otherwise who or what prevents it."""
        with surfaced():
            return self.device.refusal()

    def tryAttachUntilTimeout(self) -> bool:
        """Try to attach once a second until the time of `setOnDemandAttachTimeout` is over."""
        with surfaced():
            return self.device.attach_in_time()

    def setOnDemandAttachTimeout(self, attachTimeout: int) -> None:
        """Seconds to wait for the IPUs when a session loads its program."""
        self.device.attach_seconds = float(attachTimeout)

    def getOnDemandAttachTimeout(self) -> int:
        """Seconds that an OnDemand device waits for its IPUs."""
        return int(self.device.attach_seconds)

    def detach(self) -> None:
        """Release the IPUs. What they held is gone."""
        with surfaced():
            self.device.detach()

    def __enter__(self) -> DeviceInfo:
        return self

    def __exit__(
        self,
        kind: builtins.type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._kind is not DeviceType.OfflineIpu:
            self.detach()

    def __str__(self) -> str:
        return (
            f"DeviceInfo(type={self._kind.name}, id={self.id}, numIpus={self.numIpus}, "
            f"tilesPerIPU={self._tiles}, version={self.version})"
        )

    __repr__ = __str__
