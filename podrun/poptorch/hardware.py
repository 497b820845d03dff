"""Which IPUs there are: ``poptorch.ipuHardwareIsAvailable`` and ``ipuHardwareVersion``."""

from __future__ import annotations

from podrun.core.environment import environment
from podrun.session.devices.device_manager import DeviceManager

_VERSIONS = {"ipu1": 1, "ipu2": 2, "ipu21": 21}
_MODEL_VARIABLES = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether there is a device with that many IPUs. False where the environment asks for a model of an IPU."""
    if any(environment().get(name, "0") not in ("", "0") for name in _MODEL_VARIABLES):
        return False
    return bool(DeviceManager(environment()).enumerateDevices(numIpus=num_ipus))


def ipuHardwareVersion() -> int:
    """The IPUs' architecture: 2 or 21; -1 for an unknown one. AssertionError where there are none."""
    devices = [] if not ipuHardwareIsAvailable() else DeviceManager(environment()).enumerateDevices(numIpus=1)
    assert devices, "There are no IPUs"
    return _VERSIONS.get(devices[0].ipuVersion, -1)
