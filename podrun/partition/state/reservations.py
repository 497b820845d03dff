"""The allocator's part for reservations: agents kept for some time. Functions over its draft."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.errors import ConflictError, ExistsError, UsageError
from podrun.partition.state import events as ev
from podrun.partition.state.candidates import reservations_seen
from podrun.partition.state.events import MachineOrder
from podrun.partition.state.requirements import unknown_name
from podrun.partition.state.values import check_name

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator


def create_reservation(draft: Allocator, event: ev.CreateReservation) -> list[MachineOrder]:
    """Keep agents for some time. Refused if a partition without a limit, or with a later end, holds them."""
    wanted = event.reservation
    check_name(wanted.name, "a reservation")
    if wanted.name in draft.reservations and wanted.name not in reservations_seen(draft):
        raise ExistsError(f"the name {wanted.name} is not available", hint="Choose another name.")
    if wanted.name in draft.reservations:
        raise ExistsError(
            f"reservation {wanted.name} exists already",
            hint=f"Remove it first: vipu-admin remove reservation {wanted.name}",
        )
    if not wanted.agents or not wanted.start < wanted.end or wanted.end <= event.now:
        raise UsageError(
            "a reservation needs agents, and an end after its start and after now",
            hint="--agents ipum1,ipum2 --begin-in 600 --for 3600",
        )
    for agent in wanted.agents:
        draft.check_agent(agent)
        for other in draft.reservations.values():
            if agent in other.agents and other.start < wanted.end and wanted.start < other.end:
                which = f"reservation {other.name}"
                if other.name not in reservations_seen(draft):
                    which = "another reservation"
                raise ConflictError(f"agent {agent} is in {which} at that time", hint="Choose another time.")
        for name in draft.partitions_on(agent):
            holder = draft.partitions[name]
            if holder.busy_until(event.now) > wanted.start:
                which = f"partition {name}" if draft.asker.sees(holder.allocation) else "a partition"
                raise ConflictError(
                    f"{which} may still hold {agent} then",
                    hint=f"Reserve a later time, or drain it first: vipu-admin drain agent {agent}",
                )
    draft.note("reservations", wanted.name, wanted)
    return []


def remove_reservation(draft: Allocator, event: ev.RemoveReservation) -> list[MachineOrder]:
    """End a reservation. Partitions in it stay."""
    known = reservations_seen(draft)
    if event.name not in known:
        raise unknown_name(
            "reservation", event.name, known, "vipu-admin create reservation NAME --agents A,B"
        )
    end_reservation(draft, event.name)
    return []


def end_reservation(draft: Allocator, name: str) -> None:
    """Forget a reservation; requests that wait for it become ordinary ones."""
    draft.note("reservations", name, None)
    for entry in list(draft.queue.values()):
        if entry.needs.reservation == name:
            ordinary = replace(entry, needs=replace(entry.needs, reservation=""))
            draft.note("queue", entry.needs.name, ordinary)
