"""A session's compiled program and the device it is for: what the other parts of a session read, write and ask."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import numpy as np

from podrun.core.executable import Executable
from podrun.session.devices.device import DeviceInfo
from podrun.session.enums import DeviceType
from podrun.session.exceptions import popart_exception, poplar_exception, surfaced


class DeviceProgram:
    """The program of a session. ``session``: the object by which the device knows whose program it holds."""

    def __init__(self, device: DeviceInfo, session: object) -> None:
        self.device = device
        self.executable: Executable | None = None
        """None before prepareDevice."""
        self._session = weakref.ref(session)  # A session that nobody refers to lets its device go at once.

    def prepared(self, call: str) -> Executable:
        """The compiled program. popart_exception before prepareDevice, which names ``call``."""
        if self.executable is None:
            raise popart_exception(
                f"Devicex::prepare() must be called before {call} is called.", hint="session.prepareDevice()"
            )
        return self.executable

    def profiled(self) -> Executable:
        """The compiled program for a report. popart_exception before prepareDevice, poplar_exception on a device
        without profiling."""
        if self.executable is None:
            raise popart_exception("Session must have been prepared before a report can be fetched")
        if self.device.type is DeviceType.Cpu:
            raise poplar_exception("Profiling is disabled for current device type.")
        return self.executable

    @property
    def on_device(self) -> bool:
        """Whether the device holds this program, and not another session's."""
        return self.device._loaded is self._session()

    @on_device.setter
    def on_device(self, value: bool) -> None:
        self.device._loaded = self._session() if value else None

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Write variables on the device."""
        if values:
            with surfaced():
                self.device.connection.write_variables(values)

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Variables as they stand on the device."""
        with surfaced():
            return self.device.connection.read_variables(list(names))
