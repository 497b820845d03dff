"""Which requests to the partition service carry out a step of a recovery. Pure: real launches and simulated ones share
it (`podrun.launcher.repair`, `podrun.simulate.campaign`).
"""

from __future__ import annotations

from dataclasses import dataclass
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


class RepairFacts(Protocol):
    """What a recovery has to know; each is asked for only where it matters. ``created``: the launch made the partition;
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

    def generation(self) -> int:
        """The generation of the partition: with it a request has its effect once, however often it is made. 0 if an
        earlier way of the recovery has removed it."""

    def usable_ipus(self) -> int:
        """IPUs of machines that are not lost and that no other partition holds."""


@dataclass(frozen=True, slots=True)
class ResetIpusRequest:
    """Reset IPUs of the partition by their index in it."""

    ipus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestartAgentRequest:
    """Put a fresh machine in the place of an agent's."""

    agent: str
    generation: int


@dataclass(frozen=True, slots=True)
class PowerCycleRequest:
    """Power-cycle an agent's machine."""

    agent: str
    generation: int


@dataclass(frozen=True, slots=True)
class ResetPartitionRequest:
    """Reset the partition."""

    generation: int


@dataclass(frozen=True, slots=True)
class MakeAnewRequest:
    """Remove the partition and make it again, for so many replicas; None: for as many as before."""

    replicas: int | None = None


RepairRequest = (
    ResetIpusRequest | RestartAgentRequest | PowerCycleRequest | ResetPartitionRequest | MakeAnewRequest
)


def requests_for(step: RecoveryStep, facts: RepairFacts) -> tuple[RepairRequest, ...]:
    """The requests of a step. For `GoOnWithFewer` they are alternatives, to be tried in their order until one finds
    room. Raises ImpossibleRecoveryError."""
    match step:
        case ResetTheseIpus(ipus):
            return (ResetIpusRequest(ipus),)
        case ReplaceMachine(agent):
            return (RestartAgentRequest(agent, facts.generation()),)
        case PowerCycleMachine(agent):
            return (PowerCycleRequest(agent, facts.generation()),)
        case ResetThePartition():
            return (ResetPartitionRequest(facts.generation()),)
        case TakeSpare():
            _check_created(facts)
            if facts.usable_ipus() < facts.wanted:
                raise ImpossibleRecoveryError("the POD has no spare machine")
            return (MakeAnewRequest(),)
        case GoOnWithFewer(least):
            _check_created(facts)
            if not facts.replans:
                raise ImpossibleRecoveryError("the launch keeps its replicas")
            return tuple(MakeAnewRequest(replicas) for replicas in halves_of(facts.replicas, least))


def _check_created(facts: RepairFacts) -> None:
    """Refuse to remove a partition that the launch did not make."""
    if not facts.created:
        raise ImpossibleRecoveryError(f"partition {facts.name} was there before, so that podrun keeps it")


def halves_of(replicas: int, least: int) -> list[int]:
    """Half of the replicas, a quarter, ..., not below ``least``."""
    halves = []
    while replicas % 2 == 0 and replicas // 2 >= least:
        replicas //= 2
        halves.append(replicas)
    return halves
