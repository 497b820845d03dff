"""How a host process connects to IPUs: those of a partition, those that files describe, or some inside the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from podrun.core.access import quiet_grpc
from podrun.core.environment import (
    IPUOF_CONFIG_PATH,
    IPUOF_VIPU_API_HOST,
    IPUOF_VIPU_API_PARTITION_ID,
    PODRUN_FAULTS,
    PODRUN_LAUNCH_ID,
    PODRUN_OFFLINE_MODE,
)
from podrun.core.errors import UsageError
from podrun.core.garbage import without_garbage_collection
from podrun.device.connection import Connection
from podrun.private_apis.lean_imports import import_grpc


def config_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The IPUoF configuration files that describe IPUs when no partition service is named: that of
    ``IPUOF_CONFIG_PATH``, else all of ``~/.ipuof.conf.d``; empty if there are none. Files of that folder whose
    partition is gone are passed over, which is said in one line.
    """
    if environ.get(IPUOF_VIPU_API_HOST) and environ.get(IPUOF_VIPU_API_PARTITION_ID):
        return ()
    if named := environ.get(IPUOF_CONFIG_PATH):
        return (Path(named),)
    home = environ.get("HOME")
    there = sorted(Path(home, ".ipuof.conf.d").glob("*.conf")) if home else []
    if not there:
        return ()
    with _importing_grpc():
        from podrun.device.host.stale_files import still_described

    return still_described(there, environ)


def connect(environ: Mapping[str, str], *, standalone_ipus: int | None = None) -> Connection:
    """A connection to the partition that ``environ`` or an IPUoF configuration file names (`config_files`), else to
    ``standalone_ipus`` IPUs inside this process.

    ``IPUOF_VIPU_API_HOST`` and ``IPUOF_VIPU_API_PARTITION_ID`` name a partition; ``_PORT`` (8090), ``_GCD_ID`` (0)
    and ``_TIMEOUT`` (120, seconds) are optional. If the partition is being created or reset, this waits at most the
    timeout. Nothing is attached yet.

    Raises ServiceError if the partition service or the partition does not answer, NotFoundError for a
    partition that does not exist, UsageError if the program was launched without IPUs (podrun
    --offline-mode).
    """
    if environ.get(PODRUN_OFFLINE_MODE) == "1":
        raise UsageError(
            "this program was launched without IPUs (podrun --offline-mode), but it attaches to IPUs",
            hint="Launch it without --offline-mode, or let it use an offline device.",
        )
    if environ.get(IPUOF_VIPU_API_HOST) and environ.get(IPUOF_VIPU_API_PARTITION_ID):
        _refuse_faults_of_the_process(environ, f"partition {environ[IPUOF_VIPU_API_PARTITION_ID]}")
        with _importing_grpc():
            from podrun.device.host.partition_config import connect_partition

        return connect_partition(environ)
    if paths := config_files(environ):
        _refuse_faults_of_the_process(environ, f"the partition of {paths[0]}")
        with _importing_grpc():
            from podrun.device.host.partition_config import connect_files

        return connect_files(environ, paths)
    from podrun.device.host.client import connect_in_process

    return connect_in_process(environ, standalone_ipus)


@contextmanager
def _importing_grpc() -> Iterator[None]:
    """Import gRPC, and then what needs it. The first time this is done without looking for garbage: the program's
    objects become old by it, which is not worth it for less.
    """
    quiet_grpc()
    with nullcontext() if "grpc" in sys.modules else without_garbage_collection():
        import_grpc()
        yield


def _refuse_faults_of_the_process(environ: Mapping[str, str], partition: str) -> None:
    """Raise UsageError for faults that are planned for machines inside this process, where the program uses others:
    they would never strike. A launch plans its faults itself."""
    if environ.get(PODRUN_LAUNCH_ID):
        return
    from podrun.faults import parse_faults
    from podrun.faults.plan_file import simulated_soc_errors

    planned = (*parse_faults(environ.get(PODRUN_FAULTS, "")), *simulated_soc_errors(environ))
    lost = [fault.text for fault in planned if not fault.in_program and not fault.optional]
    if lost:
        raise UsageError(
            f"{', '.join(lost)}: planned for machines inside the program, which uses {partition}",
            hint="Plan it there while the program runs (podrun inject), or launch the program: podrun --fault ...",
        )
