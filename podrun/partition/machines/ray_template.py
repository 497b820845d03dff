"""How processes of a Ray that podrun starts begin: their environment, and the template that machines are copies of.

What the template imports takes a second of a core, and so does what a launch imports until it starts Ray. With
`early_template` both happen at once. The session that starts Ray takes the template over (`take_template`); a launch
that uses a V-IPU server ends it (`end_early_template`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from podrun.core.access import QUIET_GRPC
from podrun.core.environment import IPUOF_VIPU_API_HOST, VIPU_CLI_API_HOST
from podrun.partition.host.discovery import VIPU_SERVER, Registry, listens
from podrun.partition.machines.ray_head import RECONNECT_SECONDS
from podrun.private_apis.ray_worker import WorkerTemplate

LOOPBACK = "127.0.0.1"
HEAP_ENVIRONMENT = {
    # Machines that share a process share its heap, so one machine's piece reuses what another's freed, still cached.
    # By default glibc gives each thread a heap of its own, and cannot be told otherwise later.
    "MALLOC_ARENA_MAX": "1",
}
EVERY_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # A call after this session has ended is an error. By default it starts another Ray, which listens on the host's
    # address and keeps its files in a directory of mode 0777.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
"""Variables of all processes that use Ray."""
RAY_ON_LOOPBACK = {
    # Despite its name: Ray listens on 127.0.0.1 instead of the host's address, and does not ask for it at that one.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
OWN_RAY = {
    **RAY_ON_LOOPBACK,
    **HEAP_ENVIRONMENT,
    # Machines of a POD start together. Ray's default is one process for each CPU at a time, with a warning.
    "RAY_worker_maximum_startup_concurrency": "64",
    # Ray's monitor ends actors when any process of the host takes memory, and all machines of a POD are actors. What is
    # short of memory is for the kernel to decide, as it is for programs without Ray.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_SECONDS),
}
"""Variables of a Ray that podrun starts and of its machines' processes."""
SERVER_VARIABLES = (IPUOF_VIPU_API_HOST, VIPU_CLI_API_HOST)
"""Variables that name a V-IPU server, whose machines a launch then uses."""
_waiting: list[WorkerTemplate] = []
"""The template that no session has taken over yet, if there is one."""


@contextlib.contextmanager
def early_template(environ: Mapping[str, str], port: int | None = None) -> Iterator[None]:
    """A template starts now, unless a V-IPU server seems to run; one that is not taken over ends with the context.
    ``port``: of this host, where the launch's server will listen. Who listens there is that server, or in its way.
    """
    if _no_server(environ) and (port is None or not listens(f"{LOOPBACK}:{port}")):
        _waiting.append(_new_template(own_workers=True))
    try:
        yield
    finally:
        end_early_template()


def take_template() -> WorkerTemplate:
    """The template that waits, which is the caller's from now on, or else a new one."""
    try:
        return _waiting.pop()
    except IndexError:
        return _new_template()


def end_early_template() -> None:
    """End the template that waits, if there is one. Idempotent."""
    while _waiting:
        _waiting.pop().end()


def _new_template(*, own_workers: bool = False) -> WorkerTemplate:
    return WorkerTemplate(HEAP_ENVIRONMENT | QUIET_GRPC, own_workers=own_workers)


def _no_server(environ: Mapping[str, str]) -> bool:
    if any(environ.get(name) for name in SERVER_VARIABLES):
        return False
    return all(entry.kind != VIPU_SERVER for entry in Registry().entries())
