"""What a machine or its client says when something outside the program goes wrong: who is missing, lost or in
the way.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable, Sequence

from podrun.collectives import ClosedError, MismatchError, RankLostError, RankMissingError
from podrun.device.connection import IpuRange
from podrun.errors import (
    ApplicationRuntimeError,
    ErrorCode,
    PodrunError,
    PoplarError,
    UnimplementedError,
    UnknownRuntimeError,
    UnrecoverableRuntimeError,
    UnsupportedError,
    UsageError,
)

log = logging.getLogger("podrun.device")


def span(ipus: Iterable[int] | IpuRange) -> str:
    """IPUs in words: ``IPU 5``, ``IPUs 4-7``, ``IPUs 0, 2``."""
    indices = sorted(ipus)
    if len(indices) == 1:
        return f"IPU {indices[0]}"
    if indices == list(range(indices[0], indices[-1] + 1)):
        return f"IPUs {indices[0]}-{indices[-1]}"
    return f"IPUs {', '.join(map(str, indices))}"


def machine_lost(
    endpoint: str, machine: int, ipu: int, cause: str = "CONNECTION_KILL"
) -> UnrecoverableRuntimeError:
    """The IPUoF server of a machine is gone (the words follow the SDK's report of the same event)."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    return UnrecoverableRuntimeError(
        "fabric_atomic_increment_hsp_register could not be completed: Fabric error: "
        "connection not established "
        f"({cause}), device {ipu}, IPU-M {endpoint} (machine {machine} of the partition): "
        f"the IPUoF server is unreachable since {now}",
        code=ErrorCode.HOST_LINK_DOWN,
        where=f"machine {machine}",
        hint="vipu-admin list agents shows the lost machine's agent, gc-monitor its partition; type with their names: "
        "vipu-admin restart agent, then vipu reset partition",
    )


def host_sync_timeout(seconds: float, missing: str) -> UnknownRuntimeError:
    """Somebody did not come to a meeting of host processes and machines."""
    return UnknownRuntimeError(
        f"IPUDevice: still waiting for host sync after: {seconds:.0f} seconds. Missing: {missing}",
        code=ErrorCode.HOST_SYNC_TIMEOUT,
        hint="See why that process does not call run or prepareDevice; if it only needs longer, raise the "
        "engine option target.hostSyncTimeout.",
    )


def process_ended(who: str, ipus: Iterable[int], doing: str) -> ApplicationRuntimeError:
    """A host process let its IPUs go, or died, while others of its program still needed it."""
    return ApplicationRuntimeError(
        f"{who}, which held {span(ipus)} of this program, {doing}",
        hint="All instances of a program have to run together: see that process's own output for the reason.",
    )


def different_programs() -> ApplicationRuntimeError:
    """The instances of one job did not load equal Executables."""
    return ApplicationRuntimeError(
        "the instances load different programs on one job",
        hint="Compile the same program with the same options in every instance.",
    )


def as_poplar_error(
    error: BaseException,
    *,
    endpoints: Sequence[str],
    first_machine: int,
    first_ipus: Sequence[int],
    timeout: float,
    alive: Callable[[int], bool],
) -> PoplarError:
    """What the host is told about an exception on a machine.

    ``endpoints`` and ``first_ipus``: of the program's machines by rank; ``first_machine``: that of rank 0;
    ``timeout``: host sync, seconds; ``alive``: whether the machine of an index in the partition still
    answers.
    """
    if isinstance(error, PoplarError):
        return error
    if isinstance(error, RankLostError) and 0 <= error.rank < len(endpoints):
        rank = error.rank
        if alive(first_machine + rank):
            return ApplicationRuntimeError(
                f"the host processes of machine {first_machine + rank} ({endpoints[rank]}) left the program",
                hint="All instances of a program have to run together: see their own output for the reason.",
            )
        return machine_lost(endpoints[rank], first_machine + rank, first_ipus[rank])
    if isinstance(error, RankMissingError):
        names = ", ".join(f"machine {first_machine + rank} ({endpoints[rank]})" for rank in error.ranks)
        return host_sync_timeout(timeout, names or error.message)
    if isinstance(error, MismatchError):
        return ApplicationRuntimeError(
            f"the machines of the program do not run the same Executable: {error.message}",
            hint="Compile the same program with the same options in every instance.",
        )
    if isinstance(error, ClosedError):
        return ApplicationRuntimeError("the program is no longer loaded", hint="Load the program again.")
    if isinstance(error, UsageError | UnsupportedError | UnimplementedError):
        return ApplicationRuntimeError(error.message, hint=error.hint)
    if isinstance(error, PodrunError):
        return UnknownRuntimeError(error.message, hint=error.hint)
    log.error("unexpected error on a machine", exc_info=error)
    return UnknownRuntimeError(
        f"the machine stopped with {type(error).__name__}: {error}",
        hint="This is a bug in podrun, or the host has too little memory for the program: please report it.",
    )
