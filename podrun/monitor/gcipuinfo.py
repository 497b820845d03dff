"""The `gcipuinfo` Python module: attributes of IPUs, application event records, health.

    import gcipuinfo
    info = gcipuinfo.gcipuinfo()
    info.setUpdateMode(True)
    for device in info.getDevices():
        print(device["id"], device[gcipuinfo.IpuPower])

Values are strings; an unknown reading is ``N/A``. The object takes a snapshot when it is made and in `updateData`, and
with ``setUpdateMode(True)`` for each call. Without a partition there are no devices.

Names are the SDK's. Labels other than `IpuPower` follow its rule (the attribute's words, capitalised); that rule and
the severities of events are podrun's, since none are published.
"""

from __future__ import annotations

import enum
import json

from podrun.core import ipu_states
from podrun.core.environment import environment
from podrun.core.errors import NotFoundError, PodrunError, UsageError
from podrun.core.event_record import EVENT_PATH, read_event_record
from podrun.core.telemetry import ATTRIBUTES
from podrun.monitor.devices import attributes_of_ipus, connect_monitor, views


class DeviceDiscoveryMode(enum.Enum):
    """Which IPUs an object sees."""

    DiscoverActivePartitionIPUs = 0
    """The IPUs of the active partition."""
    DiscoverAllPartitionIPUs = 1
    """The IPUs of all partitions."""


DiscoverActivePartitionIPUs = DeviceDiscoveryMode.DiscoverActivePartitionIPUs
DiscoverAllPartitionIPUs = DeviceDiscoveryMode.DiscoverAllPartitionIPUs


def label_name(key: str) -> str:
    """Name of the constant for an attribute: ``ipu power`` is IpuPower."""
    words = "".join(c if c.isalnum() else " " for c in key).split()
    return "".join(word[0].upper() + word[1:] for word in words)


LABELS: dict[str, str] = {label_name(attribute.key): attribute.key for attribute in ATTRIBUTES}
"""Attribute keys by the name of their constant. Each is also an attribute of this module."""
globals().update(LABELS)
IpuPower = LABELS["IpuPower"]
Clock = LABELS["Clock"]

_mode_in_use: list[DeviceDiscoveryMode] = []


class gcipuinfo:
    """A view of the IPUs. Only one discovery mode may be used in a process."""

    def __init__(self, discoveryMode: DeviceDiscoveryMode = DiscoverActivePartitionIPUs) -> None:
        if _mode_in_use and _mode_in_use[0] is not discoveryMode:
            raise UsageError(
                f"this process uses {_mode_in_use[0].name} already; the two modes cannot be mixed",
                hint=f"Make every gcipuinfo object with {_mode_in_use[0].name}, or use two processes.",
            )
        _mode_in_use[:] = [discoveryMode]
        self._everything = discoveryMode is DiscoverAllPartitionIPUs
        self._update_always = False
        self._devices: list[dict[str, str]] = []
        self.updateData()

    def updateData(self) -> bool:
        """Take a new snapshot. False if the service does not answer; the old snapshot stays."""
        try:
            with connect_monitor() as client:
                shown = views(client, everything=self._everything)
        except NotFoundError:
            self._devices = []
            return True
        except PodrunError:
            return False
        self._devices = [values for view in shown for values in attributes_of_ipus(view)]
        return True

    def setUpdateMode(self, automatic: bool) -> None:
        """Take a new snapshot for each call."""
        self._update_always = automatic

    def getDevices(self) -> list[dict[str, str]]:
        """Attributes of each IPU."""
        self._refresh()
        return [dict(device) for device in self._devices]

    def getDevicesAsJSON(self) -> str:
        """`getDevices` as a text in JSON."""
        return json.dumps(self.getDevices())

    def getNamedAttributeForAll(self, label: str) -> list[str]:
        """One attribute of each IPU; ``N/A`` if an IPU does not have it."""
        self._refresh()
        return [device.get(label, "N/A") for device in self._devices]

    def checkHealthOfDevices(self) -> str:
        """JSON: ``{}`` if all IPUs are healthy, else errors by IPU-Machine; plain text if the check cannot run."""
        try:
            with connect_monitor() as client:
                shown = views(client, everything=self._everything)
        except PodrunError as error:
            return error.message
        hosts: dict[str, list[dict[str, str]]] = {}
        for view in shown:
            for device in view.devices:
                unreachable = device.machine.state.is_silent
                if unreachable or device.ipu.error_state is not ipu_states.IpuErrorState.NO_ERRORS:
                    entry = {
                        "error": "connection" if unreachable else "device",
                        "id": str(device.id),
                        "partition": view.info.name,
                        "board ipu index": str(device.number),
                    }
                    hosts.setdefault(device.host, []).append(entry)
        return json.dumps({"hosts": hosts} if hosts else {})

    def getLastAppEventRecord(self, path: str = "") -> dict[str, str]:
        """The event record in a directory (default: the one that IPU_APP_EVENT_RECORD_PATH names), or {}."""
        directory = path or environment().get(EVENT_PATH, "")
        return read_event_record(directory) if directory else {}

    def getLastAppEventRecordAsJSON(self, path: str = "") -> str:
        """`getLastAppEventRecord` as a text in JSON."""
        return json.dumps(self.getLastAppEventRecord(path))

    def _refresh(self) -> None:
        if self._update_always:
            self.updateData()
