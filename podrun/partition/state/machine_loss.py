"""The allocator's part for machines that are lost, restarted or power-cycled. Functions over its draft."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.errors import ConflictError
from podrun.partition.state import events as ev
from podrun.partition.state import maintenance
from podrun.partition.state.events import MachineOrder
from podrun.partition.state.partition_life import is_later
from podrun.partition.state.values import PartitionState

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator


S = PartitionState


def lose_agent(draft: Allocator, event: ev.AgentLost) -> list[MachineOrder]:
    """A machine is gone: its partitions move or are in ERROR, and what is left of it ends."""
    draft.check_agent(event.agent)
    if event.agent in draft.lost:
        return []
    draft.lost.add(event.agent)
    restart = f"vipu-admin restart agent {event.agent}"
    error = f"machine {event.agent} is lost: {event.reason}. First {restart}, then reset it."
    return [ev.StopAgentMachines(event.agent), *_break(draft, event.agent, "machine lost", error)]


def restart_agent_of(draft: Allocator, event: ev.RestartAgent) -> list[MachineOrder]:
    """Replace a machine by a fresh one; its partitions need a reset."""
    draft.check_agent(event.agent)
    if _have_begun_anew(draft, event.agent, event.generation):
        return []
    draft.lost.discard(event.agent)
    error = f"machine {event.agent} was restarted. Reset the partition (vipu reset partition {{name}})."
    broken = _break(draft, event.agent, "agent restarted", error)
    return [*broken, ev.ReplaceAgentMachines(event.agent, draft.partitions_on(event.agent))]


def power_cycle_machines(draft: Allocator, event: ev.PowerCycleAgent) -> list[MachineOrder]:
    """Power-cycle a machine; its partitions need a reset. Raises ConflictError for one that is lost."""
    draft.check_agent(event.agent)
    if _have_begun_anew(draft, event.agent, event.generation):
        return []
    if event.agent in draft.lost:
        raise ConflictError(
            f"machine {event.agent} is lost; a power cycle cannot reach it",
            hint=f"Replace it: vipu-admin restart agent {event.agent}",
        )
    error = f"machine {event.agent} was power-cycled. Reset the partition (vipu reset partition {{name}})."
    return [*_break(draft, event.agent, "agent power-cycled", error), ev.PowerCycleMachines(event.agent)]


def _have_begun_anew(draft: Allocator, agent: str, generation: int) -> bool:
    """True iff an agent's partitions are all past a generation, so that the requested work was done."""
    names = draft.partitions_on(agent)
    return bool(names) and all(is_later(draft.partitions[name], generation) for name in names)


def _break(draft: Allocator, agent: str, why: str, error: str) -> list[MachineOrder]:
    """Put the partitions on an agent into ERROR; their current operations become stale."""
    instructions: list[MachineOrder] = []
    for name in draft.partitions_on(agent):
        partition = draft.partitions[name]
        moved_away = maintenance.relocate(draft, partition) if agent in draft.lost else None
        if moved_away is not None:
            instructions += moved_away
        elif partition.state is not S.REMOVING:
            moved = partition.moved(S.ERROR, why, error=error.replace("{name}", name))
            instructions += draft.put(replace(moved, operation=draft.next_operation()))
    return instructions
