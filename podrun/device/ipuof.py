"""How a host process gets at its IPUs: over IPUoF to a partition's machines, or to machines inside the
process.
"""

from __future__ import annotations

from collections.abc import Mapping

from podrun.access import quiet_grpc
from podrun.device.connection import Connection
from podrun.errors import UsageError


def connect(environ: Mapping[str, str], *, standalone_ipus: int | None = None) -> Connection:
    """A connection to the partition that ``environ`` names, else to ``standalone_ipus`` IPUs inside this
    process.

    A partition is named by ``IPUOF_VIPU_API_HOST`` and ``IPUOF_VIPU_API_PARTITION_ID``; besides, ``_PORT``
    (8090), ``_GCD_ID`` (0) and ``_TIMEOUT`` (120, seconds) are read. A partition that is on its way is
    waited for, at most that long. Nothing is attached yet.

    Raises ServiceError if the partition service or the partition does not answer, NotFoundError for a
    partition that does not exist, UsageError if the program was launched without IPUs (podrun
    --offline-mode).
    """
    if environ.get("PODRUN_OFFLINE_MODE") == "1":
        raise UsageError(
            "this program was launched without IPUs (podrun --offline-mode), and wants to attach to some",
            hint="Launch it without --offline-mode, or let it use an offline device.",
        )
    if environ.get("IPUOF_VIPU_API_HOST") and environ.get("IPUOF_VIPU_API_PARTITION_ID"):
        quiet_grpc()
        from podrun.device.host.partition_config import connect_partition

        return connect_partition(environ)
    from podrun.device.host.twin import connect_twin

    return connect_twin(environ, standalone_ipus)
