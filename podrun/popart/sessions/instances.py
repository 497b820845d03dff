"""popdist for PopART programs: session options, the device of this instance, and ``horovod.popart``.

**``horovod.popart``** is for programs written for SDKs up to 3.1: instances, their weights, their training session. The
SDK's extension ran Horovod between the processes that PopRun had started. Here they communicate through
`podrun.popdist`, and replicas reduce their gradients on the IPUs. Reducing them on the host, as
``DistributedOptimizer`` did with the option hostAllReduce, is not part of PopART 3 and is refused by name.
Source of names and meaning: the PopART user guide, "Distributed training with Horovod".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from podrun.core.environment import environment
from podrun.popart.sessions.session import TrainingSession
from podrun.popart.values.exceptions import popart_unsupported
from podrun.popdist import core
from podrun.popdist.core import popdist_error

if TYPE_CHECKING:
    from podrun.popart.devices.device import DeviceInfo
    from podrun.popart.options.session_options import SessionOptions


def configureSessionOptions(opts: SessionOptions) -> SessionOptions:
    """Set replication as ``podrun`` launched it: local and global replicas, and this instance's offset.

    Outside of ``podrun`` nothing changes. Returns ``opts``.
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

    popdist_error if the program asks for another number of IPUs for each replica than ``podrun`` got.
    """
    from podrun.popart.devices.device_manager import DeviceManager
    from podrun.popart.values.enums import DeviceConnectionType

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


def broadcast_weights(session: TrainingSession, root_rank: int = 0) -> None:
    """Give all instances the weights of one, and send them to the IPUs.

    popart_exception if there are several instances but the session is not distributed
    (`popdist.popart.configureSessionOptions`).
    """
    session.broadcastWeights(root_rank)
    if session.parts.program.executable is not None:
        session.weightsFromHost()


class DistributedTrainingSession(TrainingSession):
    """A training session over all instances. Its options must come from `popdist.popart.configureSessionOptions`;
    popdist_error if they do not.

    ``enableEngineCaching`` asks to share compiled programs between instances, which ``podrun`` always does.
    """

    def __init__(self, *args: Any, enableEngineCaching: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self._options
        if core.getNumInstances() > 1 and not options.enableDistributedReplicatedGraphs:
            raise popdist_error(
                f"There are {core.getNumInstances()} instances, but the session's options are those of one.",
                hint="Call popdist.popart.configureSessionOptions(options) before.",
            )


def DistributedOptimizer(*args: object, **kwargs: object) -> None:
    """Refused: gradients are reduced on the IPUs."""
    raise popart_unsupported(
        "horovod.popart.DistributedOptimizer reduces gradients on the host, which PopART 3 does no more.",
        hint="Call popdist.popart.configureSessionOptions(options) and make a "
        "horovod.popart.DistributedTrainingSession of these options: replicas reduce on the IPUs.",
    )
