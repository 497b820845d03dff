"""The IPUs that a model runs on: which exist, and how options and environment choose among them."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from podrun.core.environment import environment
from podrun.core.layout import IpuRange
from podrun.poptorch.api.enums import ConnectionType
from podrun.poptorch.api.logs import logger
from podrun.poptorch.errors import ArgumentError, Error, translated
from podrun.runtime.device import IPU_VERSIONS, DeviceKind, RunDevice
from podrun.runtime.device_pool import DevicePool

if TYPE_CHECKING:
    from podrun.poptorch.api.options import Options

MOST_IPUS = 64
"""IPUs that one process can use."""
WAIT_FOR_IPU = "POPTORCH_WAIT_FOR_IPU"
"""Environment variable: not 0 to wait until IPUs are free."""
SECONDS_BETWEEN_ATTEMPTS = 15.0
MK2 = 2
"""The architecture of the IPUs that podrun emulates."""
_MODEL_VARIABLES = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether a device with that many IPUs exists. False if the environment asks for a model of an IPU."""
    if any(environment().get(name, "0") not in ("", "0") for name in _MODEL_VARIABLES):
        return False
    return bool(DevicePool(environment()).devices(num_ipus))


def ipuHardwareVersion() -> int:
    """The IPUs' architecture: 2. ArgumentError (an AssertionError) without IPUs."""
    if not ipuHardwareIsAvailable():
        raise ArgumentError("There are no IPUs", hint="gc-info --list-devices shows them.")
    return MK2


def uses_ipu_model(options: Options) -> bool:
    """Whether the model runs on a model of an IPU: as the options say, else as the environment does."""
    chosen = options.extra("use_model")
    if chosen is not None:
        return bool(chosen)
    return any(_is_set(name) for name in ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"))


def _is_set(name: str) -> bool:
    return environment().get(name, "0") not in ("", "0")


def acquire(options: Options, ipus: int, sleep: Callable[[float], None] = time.sleep) -> RunDevice:
    """The device that options ask for. Error if it is not available; with POPTORCH_WAIT_FOR_IPU the function waits
    while others have the IPUs.
    """
    if ipus > MOST_IPUS:
        raise Error(
            f"the model needs {ipus} IPUs; a process can use {MOST_IPUS}",
            hint="Divide the replicas over instances: podrun --num-instances N.",
        )
    chosen = options.extra("use_model")
    if chosen is not None:
        logger.info("From the user configuration: Ipu model: %s", "Enabled" if chosen else "Disabled")
    pool = DevicePool(environment())
    if options.connection_type == ConnectionType.Never:
        if options.extra("use_model"):
            raise ArgumentError("useOfflineIpuTarget cannot be used with an IPU model")
        return RunDevice(DeviceKind.OFFLINE, IpuRange(0, _rounded(ipus, options)))
    if uses_ipu_model(options):
        _check_model_version()
        return RunDevice(DeviceKind.MODEL, IpuRange(0, ipus))
    with translated("acquiring a device"):
        while True:
            device = _acquired(pool, options, ipus)
            if device is None:
                # A wrapped model and its executor hold each other: what the program has dropped keeps its IPUs until
                # it is collected.
                gc.collect()
                device = _acquired(pool, options, ipus)
            if device is not None:
                return device
            if ipus > pool.total_ipus:
                per_replica = ipus // options.replication_factor
                words = f"--num-replicas {options.replication_factor} --ipus-per-replica {per_replica}"
                raise Error(
                    f"Failed to acquire {ipus} IPU(s): the partition has {pool.total_ipus}",
                    hint=f"Launch the program with podrun {words}.",
                )
            if not _is_set(WAIT_FOR_IPU):
                raise Error(
                    f"Failed to acquire {ipus} IPU(s): {_refusal(pool, options, ipus)}",
                    hint="detachFromDevice() of a wrapper gives its IPUs back, gc-monitor shows who uses them, "
                    f"{WAIT_FOR_IPU}=1 waits until they are free.",
                )
            sleep(SECONDS_BETWEEN_ATTEMPTS)


def _check_model_version() -> None:
    """Error for an architecture that no model has. Results are the same for all; time and memory are of ipu2."""
    version = environment().get("POPTORCH_IPU_MODEL_VERSION", "ipu2")
    if version not in IPU_VERSIONS and not version.startswith("ipu:"):
        raise Error(f"POPTORCH_IPU_MODEL_VERSION is {version!r}", hint="It is ipu1, ipu2 or ipu21.")


def _acquired(pool: DevicePool, options: Options, ipus: int) -> RunDevice | None:
    """A device, or None if another process has it."""
    attach = options.connection_type != ConnectionType.OnDemand
    if options.extra("ipu_id") is not None:
        return _of_id(pool, options.extra("ipu_id"), ipus, attach=attach)
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
        return pool.acquire_range(layout.ipus, attach=attach)
    return pool.acquire(_rounded(ipus, options), attach=attach).device


def _refusal(pool: DevicePool, options: Options, ipus: int) -> str:
    """Why no device was given: who has the IPUs, or what is wrong with them."""
    identifier = options.extra("ipu_id")
    if identifier is not None:
        return f"device {identifier} is in use"
    refusals = pool.refusals(_rounded(ipus, options))
    if any(f"process {os.getpid()} " in refusal for refusal in refusals):
        refusals.append(f"process {os.getpid()} is this program: call detachFromDevice() of its old wrapper")
    return "; ".join(refusals) or "another model of this program has them, or another process"


def _of_id(pool: DevicePool, identifier: int, ipus: int, *, attach: bool) -> RunDevice | None:
    device = pool.acquire_by_id(identifier, attach=attach)
    if device is None:
        return None
    if device.ipu_count < ipus:
        device.detach()
        raise Error(f"device {identifier} has {device.ipu_count} IPU(s), but the model needs {ipus}")
    if device.ipu_count > ipus:
        warnings.warn(
            f"device {identifier} has {device.ipu_count} IPUs, but the model uses {ipus}: the others are idle",
            stacklevel=2,
        )
    return device


def _rounded(ipus: int, options: Options) -> int:
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
