"""DeviceManager: acquiring, enumerating and describing devices.

Source of calls and errors: graphcore/popart, willow/src/devicemanager.cpp and popx/devicexmanager.cpp.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

from podrun.core.layout import IpuRange
from podrun.popart.device import MODEL_TILES, STANDALONE_IPUS, TILES_PER_IPU, DeviceInfo
from podrun.popart.enums import DeviceConnectionType, DeviceSelectionCriterion, DeviceType, SyncPattern
from podrun.popart.exceptions import popart_exception, poplar_exception, surfaced, surfacing
from podrun.runtime.device import device_ids, held_here, open_connection, partition_configured
from podrun.runtime.environment import ours


def _power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0


_log = logging.getLogger("podrun.popart.device")

_VERSIONS = ("ipu1", "ipu2", "ipu21")
_MODEL_KEYS = ("numIPUs", "tilesPerIPU", "compileIPUCode", "ipuVersion")
_SIM_KEYS = ("numIPUs", "tilesPerIPU")
_OFFLINE_KEYS = ("numIPUs", "tilesPerIPU", "ipuVersion", "syncPattern", "gatewayMode")


@surfacing
class DeviceManager:
    """Gives devices: ``DeviceManager().acquireAvailableDevice(4)``. Holds nothing itself."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = dict(ours(environ))
        self._timeout = 0

    def setOnDemandAttachTimeout(self, attachTimeout: int) -> None:
        """Seconds that OnDemand devices acquired from here wait for their IPUs."""
        self._timeout = attachTimeout

    @property
    def total_ipus(self) -> int:
        """IPUs of the partition, or of this process where there is none."""
        if not partition_configured(self._environ):
            text = self._environ.get("PODRUN_STANDALONE_IPUS", str(STANDALONE_IPUS))
            if not text.isdecimal() or not _power_of_two(int(text)):
                raise popart_exception(
                    f"PODRUN_STANDALONE_IPUS is {text!r}, not a power of two.",
                    hint=f"As in: export PODRUN_STANDALONE_IPUS={STANDALONE_IPUS}",
                )
            return int(text)
        connection = open_connection(self._environ, 0)
        try:
            return connection.total_ipus
        finally:
            connection.close()

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
        device, refusals = self._acquire(
            numIpus, tilesPerIPU or tilesPerIpu, pattern, connectionType, selectionCriterion
        )
        if device is None:
            why = (
                f" ({'; '.join(dict.fromkeys(refusals))})"
                if refusals
                else f" (the partition has {self.total_ipus} IPUs)"
            )
            raise popart_exception(
                f"Failed to acquire device with {numIpus} IPUs. Ensure that there are sufficient IPUs "
                f"available: gc-monitor shows who uses them{why}.",
                hint="gc-monitor",
            )
        return device

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
        return self._acquire(
            numIpus, tilesPerIPU or tilesPerIpu, pattern, connectionType, selectionCriterion
        )[0]

    def refusals(self, numIpus: int = 1) -> list[str]:
        """Why no device with ``numIpus`` IPUs can be acquired now, each reason once; empty if one can."""
        device, found = self._acquire(
            numIpus, 0, SyncPattern.Full, DeviceConnectionType.Always, DeviceSelectionCriterion.First
        )
        if device is not None:
            device.detach()
        return list(dict.fromkeys(found))

    def _acquire(
        self,
        count: int,
        tiles: int,
        pattern: SyncPattern,
        connection_type: DeviceConnectionType,
        criterion: DeviceSelectionCriterion,
    ) -> tuple[DeviceInfo | None, list[str]]:
        if not isinstance(count, int):
            raise TypeError(f"(): incompatible function arguments. numIpus is an int, not {count!r}.")
        if not _power_of_two(count):
            raise popart_exception(f"A device has a power of two of IPUs; {count} were asked for.")
        _check_attachable(connection_type)
        total = self.total_ipus
        candidates = [pair for pair in device_ids(total).items() if pair[1].count == count]
        if criterion is DeviceSelectionCriterion.Random:
            # An OnDemand device attaches nothing before a session is prepared. So a device that another device of
            # this process holds is chosen only if there is nothing else.
            random.SystemRandom().shuffle(candidates)
            candidates.sort(key=lambda pair: held_here(pair[1]))
        refusals: list[str] = []
        for identifier, ipus in self._own_first(candidates):
            device = self._device(identifier, ipus, tiles, pattern, connection_type)
            refusal = _taken(device)
            if refusal is None:
                return device, []
            refusals.append(refusal)
            device.device.connection.close()
        return None, refusals

    def _own_first(self, candidates: list[tuple[int, IpuRange]]) -> list[tuple[int, IpuRange]]:
        """Under PopRun, the IPUs that belong to this instance come first, so that instances do not race for
        them.
        """
        from podrun.popdist import core

        layout = core.layout(self._environ)
        if layout is None:
            return candidates
        first = layout.ipus.first
        return sorted(candidates, key=lambda pair: pair[1].first != first)

    def _device(
        self,
        identifier: int,
        ipus: IpuRange,
        tiles: int,
        pattern: SyncPattern,
        connection_type: DeviceConnectionType,
    ) -> DeviceInfo:
        device = DeviceInfo(
            DeviceType.Ipu,
            ipus,
            identifier=identifier,
            connection_type=connection_type,
            tiles=tiles or TILES_PER_IPU,
            environ=self._environ,
            pattern=pattern,
            job=self._job(ipus),
        )
        device.setOnDemandAttachTimeout(self._timeout)
        return device

    def _job(self, ipus: IpuRange) -> IpuRange:
        """The IPUs of the whole program: under PopRun those of all instances, if ``ipus`` are this instance's."""
        from podrun.popdist import core

        layout = core.layout(self._environ)
        if layout is None or ipus != layout.ipus:
            return ipus
        return layout.job

    def acquireRange(
        self, ipus: IpuRange, connectionType: DeviceConnectionType = DeviceConnectionType.Always
    ) -> DeviceInfo:
        """The device that is exactly these IPUs of the partition, which need not be a power of two or
        aligned.

        popart_exception if somebody else has one of them.
        """
        total = self.total_ipus
        if ipus.stop > total:
            raise popart_exception(f"IPUs {ipus.first} to {ipus.stop - 1} go beyond the partition's {total}.")
        identifiers = {held: identifier for identifier, held in device_ids(total).items()}
        device = self._device(identifiers.get(ipus, -1), ipus, 0, SyncPattern.Full, connectionType)
        refusal = _taken(device)
        if refusal is not None:
            raise popart_exception(
                f"Failed to acquire device with IPUs {ipus.first} to {ipus.stop - 1}: {refusal}. gc-monitor shows who "
                "uses them.",
                hint="gc-monitor",
            )
        return device

    def acquireDeviceById(
        self,
        id: int,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
    ) -> DeviceInfo:
        """The device with an id. poplar_exception if there is none of that id, popart_exception if it is
        busy.
        """
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
        _check_attachable(connectionType)
        ids = device_ids(self.total_ipus)
        if id not in ids:
            raise poplar_exception(f"No such device set id: '{id}'")
        device = self._device(id, ids[id], 0, pattern, connectionType)
        return device if _taken(device) is None else None

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
        return [
            self._device(identifier, ipus, tilesPerIPU, pattern, connectionType)
            for identifier, ipus in device_ids(self.total_ipus).items()
            if ipus.count == numIpus
        ]

    # -- devices that are not hardware ------------------------------------------------------------

    def createCpuDevice(self) -> DeviceInfo:
        """A device of one IPU computed on the CPU."""
        return DeviceInfo(DeviceType.Cpu, IpuRange(0, 1), tiles=1)

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


def _check_attachable(connection_type: DeviceConnectionType) -> None:
    if connection_type is DeviceConnectionType.Never:
        raise popart_exception(
            "A device that is never attached cannot be acquired: use createOfflineIPUDevice."
        )


def _taken(device: DeviceInfo) -> str | None:
    """Attach now, unless the device attaches on demand. Returns None on success, otherwise who or what prevents it."""
    if device.connectionType is DeviceConnectionType.OnDemand:
        return None
    with surfaced():
        return device.refusal()


def _described(kind: DeviceType, values: Mapping[str, str]) -> DeviceInfo:
    """A device without hardware, as its options describe it."""
    count = int(values.get("numIPUs", 1))
    if count < 1:
        raise popart_exception(f"A device has at least one IPU; {count} were asked for.")
    offline = kind is DeviceType.OfflineIpu
    return DeviceInfo(
        kind,
        IpuRange(0, count),
        connection_type=DeviceConnectionType.Never if offline else DeviceConnectionType.Always,
        tiles=int(values.get("tilesPerIPU", TILES_PER_IPU if offline else MODEL_TILES)),
        version=_version(values),
    )


def _version(values: Mapping[str, str]) -> str:
    """The architecture that an IPU model's options ask for. popart_exception for an unknown one."""
    name = values.get("ipuVersion", "ipu2")
    if name not in _VERSIONS:
        raise popart_exception(f"Unknown ipuVersion {name!r}: it is one of {', '.join(_VERSIONS)}.")
    if name == "ipu1":
        _log.warning("ipuVersion ipu1: results are the same; time and memory are modelled as of ipu2.")
    return name


def _options(options: Mapping[str, Any], allowed: tuple[str, ...], what: str) -> dict[str, str]:
    if not isinstance(options, Mapping):
        raise TypeError(
            f"(): incompatible function arguments. Options of the {what} are a dict, not {options!r}."
        )
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
