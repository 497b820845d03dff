"""``horovod.popart`` as programs for SDKs up to 3.1 import it: instances, their weights, their training session.

The SDK's extension ran Horovod between the processes that PopRun had started. Here these meet through
`podrun.popdist`, and replicas reduce their gradients on the IPUs. Reducing them on the host, as
``DistributedOptimizer`` did with the option hostAllReduce, is no more in PopART 3 and is refused by name.

Source of names and meaning: the PopART user guide, "Distributed training with Horovod".
"""

from __future__ import annotations

from typing import Any

from podrun.core.environment import environment
from podrun.popdist import backend, core
from podrun.popdist.core import popdist_error
from podrun.session.exceptions import popart_unsupported
from podrun.session.session import TrainingSession

_up = False


def init() -> None:
    """Start. May be called again."""
    global _up
    _up = True
    backend.init()


def shutdown() -> None:
    """End."""
    global _up
    _up = False


def is_initialized() -> bool:
    """True iff started."""
    return _up


def _started(number: int) -> int:
    if not _up:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return number


def size() -> int:
    """Number of instances. ValueError before `init`."""
    return _started(core.getNumInstances())


def rank() -> int:
    """This instance among all. ValueError before `init`."""
    return _started(core.getInstanceIndex())


def local_size() -> int:
    """Number of instances on this host. ValueError before `init`."""
    return _started(int(environment().get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")))


def local_rank() -> int:
    """This instance among those of its host. ValueError before `init`."""
    return _started(core.getLocalInstanceIndex())


def broadcast_weights(session: TrainingSession, root_rank: int = 0) -> None:
    """Give all instances the weights of one, and send them to the IPUs. popart_exception if the session is not
    distributed (`popdist.popart.configureSessionOptions`) but the instances are several.
    """
    session.broadcastWeights(root_rank)
    if session._executable is not None:
        session.weightsFromHost()


class DistributedTrainingSession(TrainingSession):
    """A training session over all instances: its options are to be those of
    `popdist.popart.configureSessionOptions`. popdist_error if they are not.

    ``enableEngineCaching`` switches the caching of compiled programs between instances, which ``podrun`` always does.
    """

    def __init__(self, *args: Any, enableEngineCaching: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self._options
        if core.getNumInstances() > 1 and not options.enableDistributedReplicatedGraphs:
            raise popdist_error(
                f"There are {core.getNumInstances()} instances, but the session's options are those of one.",
                hint="Call popdist.popart.configureSessionOptions(options) before.",
            )


def DistributedOptimizer(*args: Any, **kwargs: Any) -> None:
    """Refused: gradients are reduced on the IPUs."""
    raise popart_unsupported(
        "horovod.popart.DistributedOptimizer reduces gradients on the host, which PopART 3 does no more.",
        hint="Call popdist.popart.configureSessionOptions(options) and make a "
        "horovod.popart.DistributedTrainingSession of these options: replicas reduce on the IPUs.",
    )
