"""DeviceManager: acquiring, enumerating and describing devices.

Source of calls and errors: graphcore/popart, willow/src/devicemanager.cpp and popx/devicexmanager.cpp.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

from podrun.core.kept_files import version_beside
from podrun.core.layout import IpuRange
from podrun.popart.devices.device import KINDS, MODEL_TILES, TILES_PER_IPU, DeviceInfo
from podrun.popart.values.enums import DeviceConnectionType, DeviceSelectionCriterion, DeviceType, SyncPattern
from podrun.popart.values.exceptions import incompatible, popart_exception, surfacing
from podrun.private_apis.lean_imports import import_onnx
from podrun.runtime.device import IPU_VERSIONS, RunDevice, held_here
from podrun.runtime.device_pool import Acquisition, Candidates, DevicePool

_log = logging.getLogger("podrun.popart.device")

_TARGETS = {"ipu21": "c600"}
"""The tile model's chips by version, where it is not the GC200."""
_MODEL_KEYS = ("numIPUs", "tilesPerIPU", "compileIPUCode", "ipuVersion")
_SIM_KEYS = ("numIPUs", "tilesPerIPU")
_OFFLINE_KEYS = ("numIPUs", "tilesPerIPU", "ipuVersion", "syncPattern", "gatewayMode")


@surfacing
class DeviceManager:
    """Gives devices: ``DeviceManager().acquireAvailableDevice(4)``. Holds nothing itself."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._pool = DevicePool(environ)
        self._timeout = 0

    def setOnDemandAttachTimeout(self, attachTimeout: int) -> None:
        """Seconds that OnDemand devices acquired from here wait for their IPUs."""
        self._timeout = attachTimeout

    @property
    def total_ipus(self) -> int:
        """IPUs of the partition, or of this process where there is none."""
        return self._pool.total_ipus

    # -- acquiring --------------------------------------------------------------------------------

    def acquireAvailableDevice(
        self,
        numIpus: int = 1,
        tilesPerIPU: int = 0,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
        selectionCriterion: DeviceSelectionCriterion = DeviceSelectionCriterion.First,
        *,
        tilesPerIpu: int = 0,
    ) -> DeviceInfo:
        """A free device with ``numIpus`` IPUs. popart_exception if there is none."""
        acquisition = self._acquire(numIpus, connectionType, selectionCriterion)
        if acquisition.device is None:
            refusals = "; ".join(dict.fromkeys(acquisition.refusals))
            why = refusals or f"the partition has {self.total_ipus} IPUs"
            raise popart_exception(
                f"Failed to acquire device with {numIpus} IPUs. Ensure that there are sufficient IPUs "
                f"available: gc-monitor shows who uses them ({why}).",
                hint="gc-monitor",
            )
        return self._described(acquisition.device, connectionType, pattern, tilesPerIPU or tilesPerIpu)

    def tryAcquireAvailableDevice(
        self,
        numIpus: int = 1,
        tilesPerIPU: int = 0,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
        selectionCriterion: DeviceSelectionCriterion = DeviceSelectionCriterion.First,
        *,
        tilesPerIpu: int = 0,
    ) -> DeviceInfo | None:
        """A free device with ``numIpus`` IPUs, or None."""
        device = self._acquire(numIpus, connectionType, selectionCriterion).device
        if device is None:
            return None
        return self._described(device, connectionType, pattern, tilesPerIPU or tilesPerIpu)

    def refusals(self, numIpus: int = 1) -> list[str]:
        """Why no device with ``numIpus`` IPUs can be acquired now, each reason once; empty if one can."""
        return self._pool.refusals(numIpus)

    def _acquire(
        self, count: int, connection_type: DeviceConnectionType, criterion: DeviceSelectionCriterion
    ) -> Acquisition:
        if not isinstance(count, int):
            raise incompatible("", f"numIpus is an int, not {count!r}.")
        _import_models()
        order = _shuffled if criterion is DeviceSelectionCriterion.Random else list
        return self._pool.acquire(count, attach=_attaches(connection_type), order=order)

    def _described(
        self,
        device: RunDevice,
        connection_type: DeviceConnectionType,
        pattern: SyncPattern = SyncPattern.Full,
        tiles: int = 0,
    ) -> DeviceInfo:
        """The runtime's device under PopART's names."""
        info = DeviceInfo(DeviceType.Ipu, device, connection_type, tiles or TILES_PER_IPU, pattern)
        info.setOnDemandAttachTimeout(self._timeout)
        return info

    def acquireRange(
        self, ipus: IpuRange, connectionType: DeviceConnectionType = DeviceConnectionType.Always
    ) -> DeviceInfo:
        """The device that is exactly these IPUs of the partition, which need not be a power of two or aligned.

        popart_exception if somebody else has one of them.
        """
        _import_models()
        attach = connectionType is not DeviceConnectionType.OnDemand
        return self._described(self._pool.acquire_range(ipus, attach=attach), connectionType)

    def acquireDeviceById(
        self,
        id: int,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
    ) -> DeviceInfo:
        """The device with an id. poplar_exception if there is none of that id, popart_exception if it is busy."""
        device = self.tryAcquireDeviceById(id, pattern, connectionType)
        if device is None:
            raise popart_exception(
                f"Failed to acquire device with id '{id}': it is in use. gc-monitor shows by whom."
            )
        return device

    def tryAcquireDeviceById(
        self,
        id: int,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
    ) -> DeviceInfo | None:
        """The device with an id, or None if it is busy. poplar_exception if there is none of that id."""
        _import_models()
        device = self._pool.acquire_by_id(id, attach=_attaches(connectionType))
        return None if device is None else self._described(device, connectionType, pattern)

    def enumerateDevices(
        self,
        pattern: SyncPattern = SyncPattern.Full,
        numIpus: int = 1,
        deviceType: DeviceType = DeviceType.Ipu,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
        tilesPerIPU: int = 0,
    ) -> list[DeviceInfo]:
        """Devices of that kind and size, free or taken."""
        if deviceType is not DeviceType.Ipu:
            return []
        devices = self._pool.devices(numIpus)
        return [self._described(device, connectionType, pattern, tilesPerIPU) for device in devices]

    # -- devices that are not hardware ------------------------------------------------------------

    def createCpuDevice(self) -> DeviceInfo:
        """A device of one IPU computed on the CPU."""
        return DeviceInfo(DeviceType.Cpu, _unattached(DeviceType.Cpu, 1), tiles=1)

    def createIpuModelDevice(self, options: Mapping[str, Any]) -> DeviceInfo:
        """IPUs as a model: ``createIpuModelDevice({"numIPUs": 2})``."""
        return _described(DeviceType.IpuModel, _options(options, _MODEL_KEYS, "IPU model"))

    def createSimDevice(self, options: Mapping[str, Any]) -> DeviceInfo:
        """IPUs as Poplar's instruction simulator would be; computed as all others."""
        return _described(DeviceType.Sim, _options(options, _SIM_KEYS, "simulator"))

    def createOfflineIPUDevice(self, opts: Mapping[str, Any]) -> DeviceInfo:
        """A description to compile for. It cannot be attached or run on."""
        return _described(DeviceType.OfflineIpu, _options(opts, _OFFLINE_KEYS, "offline IPU"))

    createOfflineIpuDevice = createOfflineIPUDevice

    def createOfflineIpuFromDeviceInfo(self, deviceInfo: DeviceInfo) -> DeviceInfo:
        """An offline device like ``deviceInfo``."""
        return self.createOfflineIPUDevice(
            {"numIPUs": deviceInfo.numIpus, "tilesPerIPU": deviceInfo.tilesPerIPU}
        )

    def createOfflineIpuFromSystemString(self, system: str, numIpus: int) -> DeviceInfo:
        """An offline device of a named system; Mk2 machines are known."""
        if not any(kind in system.lower() for kind in ("ipu2", "ipu-pod", "m2000", "mk2", "bow", "pod")):
            raise popart_exception(
                f"Unknown system {system!r}: this emulator knows Mk2 systems, for example 'ipu-pod16'."
            )
        device = self.createOfflineIPUDevice({"numIPUs": numIpus})
        device.device.target = "bow" if "bow" in system.lower() else "gc200"
        return device


def _import_models() -> None:
    """Import ONNX before a program that acquires a device, and so will run a model, connects to machines: a connection
    has threads, beside which the model's builder would import all of ONNX.
    """
    import_onnx(version_beside("onnx"))


def _attaches(connection_type: DeviceConnectionType) -> bool:
    """True iff a device is attached when it is acquired. popart_exception for one that never is."""
    if connection_type is DeviceConnectionType.Never:
        raise popart_exception(
            "A device that is never attached cannot be acquired: use createOfflineIPUDevice."
        )
    return connection_type is not DeviceConnectionType.OnDemand


def _shuffled(candidates: Candidates) -> Candidates:
    """Candidates in random order, those that this process holds last.

    An OnDemand device attaches nothing before a session is prepared. So a device that another device of this process
    holds is chosen only if there is nothing else.
    """
    random.SystemRandom().shuffle(candidates)
    return sorted(candidates, key=lambda pair: held_here(pair[1]))


def _unattached(kind: DeviceType, ipus: int, target: str = "gc200") -> RunDevice:
    """A device that is not of the partition."""
    return RunDevice(KINDS[kind], IpuRange(0, ipus), target=target)


def _described(kind: DeviceType, values: Mapping[str, str]) -> DeviceInfo:
    """A device without hardware, as its options describe it."""
    count = int(values.get("numIPUs", 1))
    if count < 1:
        raise popart_exception(f"A device has at least one IPU; {count} were asked for.")
    offline = kind is DeviceType.OfflineIpu
    version = _version(values)
    return DeviceInfo(
        kind,
        _unattached(kind, count, _TARGETS.get(version, "gc200")),
        connection_type=DeviceConnectionType.Never if offline else DeviceConnectionType.Always,
        tiles=int(values.get("tilesPerIPU", TILES_PER_IPU if offline else MODEL_TILES)),
        version=version,
    )


def _version(values: Mapping[str, str]) -> str:
    """The architecture that an IPU model's options ask for. popart_exception for an unknown one."""
    name = values.get("ipuVersion", "ipu2")
    if name not in IPU_VERSIONS:
        raise popart_exception(f"Unknown ipuVersion {name!r}: it is one of {', '.join(IPU_VERSIONS)}.")
    if name == "ipu1":
        _log.warning("ipuVersion ipu1: results are the same; time and memory are modelled as of ipu2.")
    return name


def _options(options: Mapping[str, Any], allowed: tuple[str, ...], what: str) -> dict[str, str]:
    if not isinstance(options, Mapping):
        raise incompatible("", f"Options of the {what} are a dict, not {options!r}.")
    unknown = [key for key in options if key not in allowed]
    if unknown:
        raise popart_exception(
            f"Invalid option {unknown[0]!r} for the {what}; the options are {', '.join(allowed)}."
        )
    for key in ("numIPUs", "tilesPerIPU"):
        if not str(options.get(key, 1)).lstrip("-").isdecimal():
            raise popart_exception(
                f"Option {key!r} for the {what} is a number of them, not {options[key]!r}."
            )
    return {key: str(value) for key, value in options.items()}


def syncPatternFromString(name: str) -> SyncPattern:
    """The SyncPattern that PopART writes as ``full``, ``singlePipeline`` or ``replicaAndLadder``."""
    for pattern, text in _PATTERNS.items():
        if text.lower() == name.lower():
            return pattern
    raise popart_exception(f"Unknown sync pattern {name!r}; it is one of {', '.join(_PATTERNS.values())}.")


def syncPatternToString(pattern: SyncPattern) -> str:
    """PopART's text for a SyncPattern."""
    return _PATTERNS[pattern]


_PATTERNS = {
    SyncPattern.Full: "full",
    SyncPattern.SinglePipeline: "singlePipeline",
    SyncPattern.ReplicaAndLadder: "replicaAndLadder",
}
