"""Error messages of machines and their clients: which process or machine is missing, lost or in the way."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable

from podrun.collectives import ClosedError, MismatchError, RankLostError, RankMissingError
from podrun.core.errors import (
    ApplicationRuntimeError,
    ErrorCause,
    ErrorCode,
    IpusTakenError,
    PodrunError,
    PoplarError,
    Remains,
    TakenBy,
    UnimplementedError,
    UnknownRuntimeError,
    UnrecoverableRuntimeError,
    UnsupportedError,
    UsageError,
)
from podrun.core.fault_spec import FaultSpec
from podrun.core.layout import IpuRange
from podrun.core.quick_dataclass import dataclass

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
    fault: FaultSpec | None = None,
) -> UnrecoverableRuntimeError:
    """The IPUoF server of a machine is gone. The text follows the SDK's report of this event.

    ``doing``: what the machine was doing, as given by `batches_in_words`. ``fault``: the planned fault that took it, if
    that is known.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    return UnrecoverableRuntimeError(
        "fabric_atomic_increment_hsp_register could not be completed: Fabric error: connection not established "
        f"({reason}), device {ipu}, IPU-M {endpoint} (machine {machine} of the partition): the IPUoF server is "
        f"unreachable since {now}{doing and f', {doing}'}",
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


def ipus_taken_away(taken_by: TakenBy, partition: str) -> IpusTakenError:
    """The error of a process whose IPUs were taken away."""
    hints = {
        TakenBy.REMOVAL: "Start the program again on another partition: vipu create partition NAME --size N.",
        TakenBy.MOVE: f"Start the program again: it finds partition {partition} where it is now. "
        "podrun --max-restarts 3 does so by itself.",
    }
    return IpusTakenError(
        f"this process holds no IPUs any more: {taken_by.value}",
        cause=ErrorCause(remains=Remains.NOTHING) if taken_by is TakenBy.MOVE else None,
        hint=hints.get(taken_by, "Attach to the device again, and load the program (prepareDevice)."),
    )


def different_programs() -> ApplicationRuntimeError:
    """The instances of one job did not load equal Executables."""
    return ApplicationRuntimeError(
        "the instances load different programs on one job",
        hint="Compile the same program with the same options in every instance.",
    )


@dataclass(frozen=True, slots=True)
class JobMachines:
    """The machines of a job, for messages about them.

    ``endpoints`` and ``first_ipus``: by rank. ``first``: the machine of rank 0. ``timeout``: host sync, seconds.
    ``alive``: whether the machine of an index in the partition still answers. ``died``: the crash error of the machine
    with a rank, index and endpoint, if native code died there. ``doing``: see `machine_lost`. ``instance_ipus``: how
    many each instance of the program holds (0: unknown).
    """

    endpoints: tuple[str, ...]
    first: int
    first_ipus: tuple[int, ...]
    timeout: float
    alive: Callable[[int], bool]
    died: Callable[[int, int, str], PoplarError | None] | None = None
    doing: str = ""
    instance_ipus: int = 0

    def name(self, rank: int) -> str:
        """The machine of a rank, in words: ``machine 3 (ENDPOINT)``."""
        return f"machine {self.first + rank} ({self.endpoints[rank]})"

    def instances_on(self, rank: int) -> tuple[int, ...]:
        """The instances that hold IPUs of a machine; none if that is unknown."""
        if not self.instance_ipus or len(self.first_ipus) < 2:
            return ()
        begin = self.first_ipus[rank] - self.first_ipus[0]
        end = begin + self.first_ipus[1] - self.first_ipus[0]
        return tuple(range(begin // self.instance_ipus, (end - 1) // self.instance_ipus + 1))


def as_poplar_error(error: BaseException, machines: JobMachines) -> PoplarError:
    """The error that the host gets for an exception on a machine of a job."""
    if isinstance(error, PoplarError):
        return error
    if isinstance(error, RankLostError | RankMissingError | MismatchError | ClosedError):
        return _error_of_group(error, machines)
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


def _error_of_group(
    error: RankLostError | RankMissingError | MismatchError | ClosedError, machines: JobMachines
) -> PoplarError:
    """The error for one of the group of collectives that the machines of a job form."""
    if isinstance(error, RankLostError):
        return _lost_or_left(error, machines)
    if isinstance(error, RankMissingError):
        return host_sync_timeout(
            machines.timeout, ", ".join(map(machines.name, error.ranks)) or error.message
        )
    if isinstance(error, MismatchError):
        return ApplicationRuntimeError(
            f"the machines of the program do not run the same Executable: {error.message}",
            hint="Compile the same program with the same options in every instance.",
        )
    return ApplicationRuntimeError("the program is no longer loaded", hint="Load the program again.")


def _lost_or_left(error: RankLostError, machines: JobMachines) -> PoplarError:
    rank = error.rank
    if not 0 <= rank < len(machines.endpoints):
        return UnknownRuntimeError(error.message, hint=error.hint)
    index, endpoint = machines.first + rank, machines.endpoints[rank]
    if machines.alive(index):
        return ApplicationRuntimeError(
            f"the host processes of {machines.name(rank)} left the program",
            cause=ErrorCause(instances=machines.instances_on(rank)),
            hint="All instances of a program have to run together: see their own output for the reason.",
        )
    crash = machines.died(rank, index, endpoint) if machines.died is not None else None
    return crash or machine_lost(endpoint, index, machines.first_ipus[rank], doing=machines.doing)
