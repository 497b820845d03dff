"""The IPUs that a model runs on: which exist, and how options and environment choose among them."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

from podrun.core.environment import environment
from podrun.popart.device import DeviceInfo
from podrun.popart.device_manager import DeviceManager
from podrun.popart.enums import DeviceConnectionType
from podrun.poptorch.api.enums import ConnectionType
from podrun.poptorch.errors import Error, translated

MOST_IPUS = 64
"""IPUs that one process can use."""
WAIT_FOR_IPU = "POPTORCH_WAIT_FOR_IPU"
"""Environment variable: not 0 to wait until IPUs are free."""
SECONDS_BETWEEN_ATTEMPTS = 15.0
_VERSIONS = {"ipu1": 1, "ipu2": 2, "ipu21": 21}
_MODEL_VARIABLES = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether a device with that many IPUs exists. False if the environment asks for a model of an IPU."""
    if any(environment().get(name, "0") not in ("", "0") for name in _MODEL_VARIABLES):
        return False
    return bool(DeviceManager(environment()).enumerateDevices(numIpus=num_ipus))


def ipuHardwareVersion() -> int:
    """The IPUs' architecture: 2 or 21; -1 for an unknown one. AssertionError without IPUs."""
    devices = [] if not ipuHardwareIsAvailable() else DeviceManager(environment()).enumerateDevices(numIpus=1)
    assert devices, "There are no IPUs"
    return _VERSIONS.get(devices[0].architecture, -1)


def uses_ipu_model(options: Any) -> bool:
    """Whether the model runs on a model of an IPU: as the options say, else as the environment does."""
    chosen = options.extra("use_model")
    if chosen is not None:
        return bool(chosen)
    return any(_is_set(name) for name in ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"))


def _is_set(name: str) -> bool:
    return environment().get(name, "0") not in ("", "0")


def acquire(options: Any, ipus: int, sleep: Callable[[float], None] = time.sleep) -> DeviceInfo:
    """The device that options ask for. Error if it is not available; with POPTORCH_WAIT_FOR_IPU the function waits
    while others have the IPUs.
    """
    if ipus > MOST_IPUS:
        raise Error(
            f"the model needs {ipus} IPUs; a process can use {MOST_IPUS}",
            hint="Divide the replicas over instances: podrun --num-instances N.",
        )
    manager = DeviceManager(environment())
    if options.connection_type == ConnectionType.Never:
        assert not options.extra("use_model"), "useOfflineIpuTarget cannot be used with an IPU model"
        version = {1: "ipu1", 2: "ipu2", 21: "ipu21"}[options.extra("ipu_version", 2)]
        return manager.createOfflineIPUDevice({"numIPUs": _rounded(ipus, options), "ipuVersion": version})
    if uses_ipu_model(options):
        return manager.createIpuModelDevice(_model_settings(ipus, options))
    with translated("acquiring a device"):
        while True:
            found = _acquired(manager, options, ipus)
            if found is None:
                # A wrapped model and its executor hold each other: what the program has dropped keeps its IPUs until
                # it is collected.
                gc.collect()
                found = _acquired(manager, options, ipus)
            if found is not None:
                return found
            if ipus > manager.total_ipus:
                each = ipus // options.replication_factor
                words = f"--num-replicas {options.replication_factor} --ipus-per-replica {each}"
                raise Error(
                    f"Failed to acquire {ipus} IPU(s): the partition has {manager.total_ipus}",
                    hint=f"Launch the program with podrun {words}.",
                )
            if not _is_set(WAIT_FOR_IPU):
                raise Error(
                    f"Failed to acquire {ipus} IPU(s): {_refusal(manager, options, ipus)}",
                    hint="detachFromDevice() of a wrapper gives its IPUs back, gc-monitor shows who uses them, "
                    f"{WAIT_FOR_IPU}=1 waits until they are free.",
                )
            sleep(SECONDS_BETWEEN_ATTEMPTS)


def _model_settings(ipus: int, options: Any) -> dict[str, Any]:
    version = environment().get("POPTORCH_IPU_MODEL_VERSION", "ipu2")
    if version not in ("ipu1", "ipu2", "ipu21") and not version.startswith("ipu:"):
        raise Error(f"POPTORCH_IPU_MODEL_VERSION is {version!r}", hint="It is ipu1, ipu2 or ipu21.")
    settings: dict[str, Any] = {"numIPUs": ipus}
    if not version.startswith("ipu:"):
        settings["ipuVersion"] = version
    if (
        options.extra("use_model") is None
        and _is_set("POPTORCH_SMALL_IPU_MODEL")
        and not _is_set("POPTORCH_IPU_MODEL")
    ):
        settings["tilesPerIPU"] = 4
    return settings


def _acquired(manager: DeviceManager, options: Any, ipus: int) -> DeviceInfo | None:
    """A device, or None if another process has it."""
    kind = DeviceConnectionType.Always
    if options.connection_type == ConnectionType.OnDemand:
        kind = DeviceConnectionType.OnDemand
    if options.extra("ipu_id") is not None:
        return _of_id(manager, options.extra("ipu_id"), ipus, kind)
    from podrun.popdist import core

    layout = core.layout(environment())
    processes = options.Distributed.numProcesses
    if layout is None and processes > 1:
        raise Error(
            f"options.Distributed says that there are {processes} processes, but podrun has not launched them",
            hint=f"Launch with podrun --num-instances {processes}, or call options.Distributed.disable().",
        )
    if layout is not None and options.Distributed.numProcesses > 1:
        if layout.part.ipus.count < ipus:
            raise Error(
                f"the model needs {ipus} IPUs, but this instance has {layout.part.ipus.count}",
                hint=f"podrun --ipus-per-replica {ipus // options.replication_factor}",
            )
        return manager.acquireRange(layout.ipus, connectionType=kind)
    return manager.tryAcquireAvailableDevice(_rounded(ipus, options), connectionType=kind)


def _refusal(manager: DeviceManager, options: Any, ipus: int) -> str:
    """Why no device was given: who has the IPUs, or what is wrong with them."""
    identifier = options.extra("ipu_id")
    if identifier is not None:
        return f"device {identifier} is in use"
    refusals = manager.refusals(_rounded(ipus, options))
    if any(f"process {os.getpid()} " in refusal for refusal in refusals):
        refusals.append(f"process {os.getpid()} is this program: call detachFromDevice() of its old wrapper")
    return "; ".join(refusals) or "another model of this program has them, or another process"


def _of_id(
    manager: DeviceManager, identifier: int, ipus: int, kind: DeviceConnectionType
) -> DeviceInfo | None:
    device = manager.tryAcquireDeviceById(identifier, connectionType=kind)
    if device is None:
        return None
    if device.numIpus < ipus:
        device.detach()
        raise Error(f"device {identifier} has {device.numIpus} IPU(s), but the model needs {ipus}")
    if device.numIpus > ipus:
        warnings.warn(
            f"device {identifier} has {device.numIpus} IPUs, but the model uses {ipus}: the others are idle",
            stacklevel=2,
        )
    return device


def _rounded(ipus: int, options: Any) -> int:
    """A power of two of IPUs. Error if the model uses another number and the options do not allow rounding."""
    rounded = 1 << (ipus - 1).bit_length()
    if rounded != ipus:
        if not options.auto_round_num_ipus:
            raise Error(
                f"the model uses {ipus} IPUs, which is no power of two",
                hint="Use options.autoRoundNumIPUs(True) to take the next one; some IPUs are idle then.",
            )
        warnings.warn(
            f"the model uses {ipus} IPUs and gets {rounded}: {rounded - ipus} are idle", stacklevel=2
        )
    return rounded
