"""Error messages of machines and their clients: which process or machine is missing, lost or in the way."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable, Sequence

from podrun.collectives import ClosedError, MismatchError, RankLostError, RankMissingError
from podrun.core.errors import (
    ApplicationRuntimeError,
    ErrorCause,
    ErrorCode,
    PodrunError,
    PoplarError,
    Remains,
    UnimplementedError,
    UnknownRuntimeError,
    UnrecoverableRuntimeError,
    UnsupportedError,
    UsageError,
)
from podrun.core.layout import IpuRange

log = logging.getLogger("podrun.device")


def ipus_in_words(ipus: Iterable[int] | IpuRange) -> str:
    """IPUs in words: ``IPU 5``, ``IPUs 4-7``, ``IPUs 0, 2``."""
    indices = sorted(ipus)
    if len(indices) == 1:
        return f"IPU {indices[0]}"
    if indices == list(range(indices[0], indices[-1] + 1)):
        return f"IPUs {indices[0]}-{indices[-1]}"
    return f"IPUs {', '.join(map(str, indices))}"


def machine_lost(
    endpoint: str,
    machine: int,
    ipu: int,
    reason: str = "CONNECTION_KILL",
    *,
    doing: str = "",
    fault: str = "",
) -> UnrecoverableRuntimeError:
    """The IPUoF server of a machine is gone. The text follows the SDK's report of this event.

    ``doing``: what the machine was doing, as given by `batches_in_words`. ``fault``: the planned fault that took it, if
    that is known.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    return UnrecoverableRuntimeError(
        "fabric_atomic_increment_hsp_register could not be completed: Fabric error: "
        "connection not established "
        f"({reason}), device {ipu}, IPU-M {endpoint} (machine {machine} of the partition): "
        f"the IPUoF server is unreachable since {now}{doing and f', {doing}'}",
        code=ErrorCode.HOST_LINK_DOWN,
        where=f"machine {machine}",
        cause=ErrorCause(fault=fault, machine=machine, remains=Remains.LOST_MACHINE),
        hint=LOST_HINT,
    )


LOST_HINT = (
    "vipu-admin list agents shows the lost machine's agent, gc-monitor its partition; type with their names: "
    "vipu-admin restart agent, then vipu reset partition"
)
"""Hint about a lost machine whose agent is not known; a client that knows the agent names it."""


def batches_in_words(done: int, running: int) -> str:
    """The batches of a program in words: ``in batch 17``, ``in batches 16 to 19``, ``after 17 batches``.

    ``done``: batches completed since it was loaded; ``running``: batches of the run under way (0: none is).
    """
    if running == 0:
        return f"after {done} {'batch' if done == 1 else 'batches'}"
    return f"in batch {done}" if running == 1 else f"in batches {done} to {done + running - 1}"


def host_sync_timeout(seconds: float, missing: str) -> UnknownRuntimeError:
    """A host process or a machine did not arrive where others wait for it. ``seconds``: how long they waited."""
    return UnknownRuntimeError(
        f"IPUDevice: still waiting for host sync after: {seconds:.0f} seconds. Missing: {missing}",
        code=ErrorCode.HOST_SYNC_TIMEOUT,
        hint="See why that process does not call run or prepareDevice; if it only needs longer, raise the "
        "engine option target.hostSyncTimeout.",
    )


def process_ended(who: str, ipus: Iterable[int], doing: str, instance: int) -> ApplicationRuntimeError:
    """A host process, that of an instance, released its IPUs or died while others of its program still needed it."""
    return ApplicationRuntimeError(
        f"{who}, which held {ipus_in_words(ipus)} of this program, {doing}",
        cause=ErrorCause(instances=(instance,)),
        hint="All instances of a program have to run together: see that process's own output for the reason.",
    )


def different_programs() -> ApplicationRuntimeError:
    """The instances of one job did not load equal Executables."""
    return ApplicationRuntimeError(
        "the instances load different programs on one job",
        hint="Compile the same program with the same options in every instance.",
    )


def instances_on(first_ipus: Sequence[int], rank: int, instance_ipus: int) -> tuple[int, ...]:
    """The instances that hold IPUs of one machine of a program. ``first_ipus``: of its machines, by rank;
    ``instance_ipus``: how many each instance holds (0: unknown, which gives none).
    """
    if not instance_ipus or len(first_ipus) < 2:
        return ()
    first, machine_ipus = first_ipus[rank] - first_ipus[0], first_ipus[1] - first_ipus[0]
    return tuple(range(first // instance_ipus, (first + machine_ipus - 1) // instance_ipus + 1))


def as_poplar_error(
    error: BaseException,
    *,
    endpoints: Sequence[str],
    first_machine: int,
    first_ipus: Sequence[int],
    timeout: float,
    alive: Callable[[int], bool],
    died: Callable[[int, int, str], PoplarError | None] | None = None,
    doing: str = "",
    instance_ipus: int = 0,
) -> PoplarError:
    """The error that the host gets for an exception on a machine.

    ``endpoints`` and ``first_ipus``: of the program's machines, by rank. ``first_machine``: the machine of rank 0.
    ``timeout``: host sync, seconds. ``alive``: whether the machine of an index in the partition still answers.
    ``died``: the crash error of the machine with a rank, index and endpoint, if native code died there. ``doing``: see
    `machine_lost`. ``instance_ipus``: how many each instance of the program holds (0: unknown).
    """
    if isinstance(error, PoplarError):
        return error
    if isinstance(error, RankLostError) and 0 <= error.rank < len(endpoints):
        rank = error.rank
        if alive(first_machine + rank):
            return ApplicationRuntimeError(
                f"the host processes of machine {first_machine + rank} ({endpoints[rank]}) left the program",
                cause=ErrorCause(instances=instances_on(first_ipus, rank, instance_ipus)),
                hint="All instances of a program have to run together: see their own output for the reason.",
            )
        crash = died(rank, first_machine + rank, endpoints[rank]) if died is not None else None
        return crash or machine_lost(endpoints[rank], first_machine + rank, first_ipus[rank], doing=doing)
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
    if not isinstance(error, Exception):
        what = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        return ApplicationRuntimeError(
            f"the program was interrupted on its IPUs ({what})",
            hint="Load the program again (prepareDevice, then weightsFromHost) before the next run.",
        )
    log.error("unexpected error on a machine", exc_info=error)
    return UnknownRuntimeError(
        f"the machine stopped with {type(error).__name__}: {error}",
        hint="This is a bug in podrun, or the host has too little memory for the program: please report it.",
    )
