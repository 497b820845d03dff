"""``popdist.poptorch.Options``: options of one instance among those that ``podrun`` has launched."""

from __future__ import annotations

from typing import Any, NoReturn

from podrun.popdist import core
from podrun.poptorch.option_parts import DistributedOptions
from podrun.poptorch.options import Options


def _refused(name: str) -> RuntimeError:
    return RuntimeError(
        f"Cannot call `{name}` with popdist.poptorch.Options: podrun sets it for each instance. Use "
        "poptorch.Options to set it yourself."
    )


class _InstanceDistributed(DistributedOptions):
    """Which instance this is; it cannot be changed."""

    def disable(self) -> NoReturn:
        """Refused."""
        raise _refused("Distributed.disable")

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> NoReturn:
        """Refused."""
        raise _refused("Distributed.setEnvVarNames")

    def configureProcessId(self, process_id: int, num_processes: int) -> NoReturn:
        """Refused."""
        raise _refused("Distributed.configureProcessId")


class InstanceOptions(Options):
    """poptorch.Options whose replication factor, process and device are those of this instance.

    ``ipus_per_replica``: IPUs of the model; popdist_error if ``podrun`` was told another number. Without ``podrun``
    there is one process with one replica. RuntimeError for setters of what ``podrun`` decides.
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        self.__dict__["_ipus_per_replica"] = ipus_per_replica
        distributed = _InstanceDistributed()
        distributed.set(
            num_distributed_processes=core.getNumInstances(), distributed_process_id=core.getInstanceIndex()
        )
        self.add_part("_distributed", distributed)
        self.set(replication_factor=core.getNumLocalReplicas())
        self._check_ipus()

    def _check_ipus(self) -> None:
        if self._ipus_per_replica is not None and core.isPopdistEnvSet():
            core.getDeviceId(self._ipus_per_replica)

    def replicationFactor(self, replication_factor: int) -> NoReturn:
        """Refused."""
        raise _refused("replicationFactor")

    def useIpuId(self, ipu_id: int) -> NoReturn:
        """Refused."""
        raise _refused("useIpuId")

    def toDict(self) -> dict[str, Any]:
        """All values in one dictionary, with the device of this instance where the number of its IPUs is known."""
        made = super().toDict()
        if core.isPopdistEnvSet():
            made["ipu_id"] = core.getDeviceId(self._ipus_per_replica or 0)
        return made
