"""How a step of a recovery is carried out on a partition: real launches and simulated ones share it
(`podrun.launcher.repair`, `podrun.simulate.recovery_run`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from podrun.core.errors import ConflictError
from podrun.launcher.recovery import (
    GoOnWithFewer,
    PowerCycleMachine,
    RecoveryStep,
    ReplaceMachine,
    ResetThePartition,
    ResetTheseIpus,
    TakeSpare,
)


class ImpossibleRecoveryError(ConflictError):
    """This way of recovery is impossible here; the message says why."""


class RepairedPartition(Protocol):
    """The partition of a launch: what a recovery has to know of it, and can do to it. ``created``: the launch made it;
    ``wanted``: its IPUs; ``replicas``: of the launch now; ``replans``: whether it can go on with fewer."""

    @property
    def name(self) -> str: ...

    @property
    def created(self) -> bool: ...

    @property
    def wanted(self) -> int: ...

    @property
    def replicas(self) -> int: ...

    @property
    def replans(self) -> bool: ...

    def usable_ipus(self) -> int:
        """IPUs of machines that are not lost and that no other partition holds."""

    def reset_ipus(self, ipus: tuple[int, ...]) -> None:
        """Reset IPUs by their index in the partition."""

    def replace_machine(self, agent: str) -> None:
        """Put a fresh machine in the place of an agent's."""

    def power_cycle(self, agent: str) -> None:
        """Power-cycle an agent's machine."""

    def reset(self) -> None:
        """Reset the partition, or make it again if an earlier way of the recovery has removed it."""

    def make_anew(self) -> None:
        """Remove the partition and make it again elsewhere. Raises ExhaustedError if there is no room."""

    def make_anew_for(self, replicas: int) -> bool:
        """Make it again for so many replicas; False if there is no room."""


def carry_out_step(step: RecoveryStep, partition: RepairedPartition) -> None:
    """Do a step of a recovery. Raises ImpossibleRecoveryError, ExhaustedError, and what the partition's calls raise."""
    match step:
        case ResetTheseIpus(ipus):
            partition.reset_ipus(ipus)
        case ReplaceMachine(agent):
            partition.replace_machine(agent)
        case PowerCycleMachine(agent):
            partition.power_cycle(agent)
        case ResetThePartition():
            partition.reset()
        case TakeSpare():
            check_created(partition)
            if partition.usable_ipus() < partition.wanted:
                raise ImpossibleRecoveryError("the POD has no spare machine")
            partition.make_anew()
        case GoOnWithFewer(least):
            check_created(partition)
            if not partition.replans:
                raise ImpossibleRecoveryError("the launch keeps its replicas")
            if not any(map(partition.make_anew_for, halves_of(partition.replicas, least))):
                raise ImpossibleRecoveryError(f"no machines for {least} replicas or more are left")


def check_created(partition: RepairedPartition) -> None:
    """Refuse to remove a partition that the launch did not make."""
    if not partition.created:
        raise ImpossibleRecoveryError(f"partition {partition.name} was there before, so that podrun keeps it")


def halves_of(replicas: int, least: int) -> Iterator[int]:
    """Half of the replicas, a quarter, ..., not below ``least``."""
    while replicas % 2 == 0 and replicas // 2 >= least:
        replicas //= 2
        yield replicas
