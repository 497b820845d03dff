"""popdist for PopART programs: session options and the device of this instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from podrun.core.environment import environment
from podrun.popdist import core
from podrun.popdist.core import popdist_error

if TYPE_CHECKING:
    from podrun.session.devices.device import DeviceInfo
    from podrun.session.options.session_options import SessionOptions


def configureSessionOptions(opts: SessionOptions) -> SessionOptions:
    """Set replication as ``podrun`` launched it: local and global replicas, and this instance's offset.

    Outside of ``podrun`` nothing changes. Gives ``opts`` back.
    """
    layout = core.layout()
    if layout is None:
        return opts
    opts.enableReplicatedGraphs = layout.part.local_replicas > 1
    opts.replicatedGraphCount = layout.part.local_replicas
    opts.enableDistributedReplicatedGraphs = True
    opts.globalReplicaOffset = layout.part.first_replica
    opts.globalReplicationFactor = layout.total_replicas
    return opts


def getDevice(ipus_per_replica: int | None = None, connectionType: Any = None, **kwargs: Any) -> DeviceInfo:
    """The device of this instance: all of its replicas' IPUs.

    popdist_error if the program wants another number of IPUs for each replica than ``podrun`` was told.
    """
    from podrun.session.devices.device_manager import DeviceManager
    from podrun.session.enums import DeviceConnectionType

    if kwargs:
        raise TypeError(f"getDevice() has no argument {next(iter(kwargs))!r}.")
    kind = DeviceConnectionType.Always if connectionType is None else connectionType
    layout = core.layout()
    if layout is None:
        return DeviceManager(environment()).acquireAvailableDevice(ipus_per_replica or 1, connectionType=kind)
    if ipus_per_replica is not None and ipus_per_replica != layout.part.ipus_per_replica:
        raise popdist_error(
            f"The program wants {ipus_per_replica} IPUs per replica, but was launched with "
            f"{layout.part.ipus_per_replica}.",
            hint=f"podrun --ipus-per-replica {ipus_per_replica}",
        )
    return DeviceManager(environment()).acquireRange(layout.ipus, connectionType=kind)
