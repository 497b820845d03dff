"""The template of machines' processes, started before it is known whether a session starts Ray.

What the template imports takes a second of a core, and so does what a launch imports until it starts Ray. With
`early_template` both happen at once. The session that starts Ray takes the template over (`take_template`); a launch
that uses a V-IPU server ends it (`end_early_template`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from podrun.core.access import QUIET_GRPC
from podrun.private_apis.ray_worker import WorkerTemplate

HEAP_ENVIRONMENT = {
    # Machines that share a process share its heap, so one machine's piece reuses what another's freed, still cached.
    # By default glibc gives each thread a heap of its own, and cannot be told otherwise later.
    "MALLOC_ARENA_MAX": "1",
}
SERVER_VARIABLES = ("IPUOF_VIPU_API_HOST", "VIPU_CLI_API_HOST")
"""Variables that name a V-IPU server, whose machines a launch then uses."""
_waiting: list[WorkerTemplate] = []
"""The template that no session has taken over yet, if there is one."""


@contextlib.contextmanager
def early_template(environ: Mapping[str, str]) -> Iterator[None]:
    """A template starts now, unless a V-IPU server seems to run; one that is not taken over ends with the context."""
    if _no_server(environ):
        _waiting.append(_new_template())
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


def _new_template() -> WorkerTemplate:
    return WorkerTemplate(HEAP_ENVIRONMENT | QUIET_GRPC)


def _no_server(environ: Mapping[str, str]) -> bool:
    from podrun.partition.host.discovery import VIPU_SERVER, Registry

    if any(environ.get(name) for name in SERVER_VARIABLES):
        return False
    return all(entry.kind != VIPU_SERVER for entry in Registry().entries())
