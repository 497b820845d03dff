"""What ends with processes that are gone: requests in the queue, and partitions (`podrun.partition.host.holders`).

`HolderWatch` looks at the holders in the allocator's state; the other functions are the allocator's part, over its
draft.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.partition.host.holders import parse_holder
from podrun.partition.host.leases import SignsOfLife
from podrun.partition.state import events as ev
from podrun.partition.state.events import MachineOrder
from podrun.partition.state.queueing import QUEUE_DEPTH
from podrun.partition.state.values import PartitionState

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator

log = logging.getLogger("podrun.partition")


class HolderWatch:
    """What the allocator has to know of the holders in its state."""

    def __init__(self, signs: SignsOfLife) -> None:
        self._signs = signs
        self.note = signs.note

    def absent(self, draft: Allocator) -> frozenset[str]:
        """Requests at the head of the queue that must not be served now."""
        if not draft.queue:
            return frozenset()
        ranked = sorted(draft.queue.values(), key=lambda entry: entry.rank)[:QUEUE_DEPTH]
        return self._signs.absent({entry.needs.name: entry.needs.holder for entry in ranked})

    def gone(self, state: Allocator) -> ev.HoldersGone | None:
        """The report that holders are gone; None if all are there."""
        waiting = {name: entry.needs.holder for name, entry in state.queue.items()}
        held = {
            name: partition.holder
            for name, partition in state.partitions.items()
            if partition.holder and partition.state is not PartitionState.REMOVING
        }
        self._signs.forget({*waiting, *held})
        requests = {name: waiting[name] for name in self._signs.vanished(waiting)}
        partitions = {name: held[name] for name in self._signs.orphans(held)}
        for name in requests:
            log.info("request %s leaves the queue: its client has vanished", name)
        for name, holder in partitions.items():
            log.info(
                "partition %s is removed: %s, with which it ends, is gone",
                name,
                parse_holder(holder).in_words,
            )
        return ev.HoldersGone(requests, partitions) if requests or partitions else None


# --- the allocator's part: functions over its draft ---------------------------------------------------------------


def end_with_holders(draft: Allocator, event: ev.HoldersGone) -> list[MachineOrder]:
    """Remove what ends with holders that are gone, all in one decision: no request is served whose client is gone."""
    for name, holder in event.requests.items():
        if name in draft.queue and draft.queue[name].needs.holder == holder:
            draft.note("queue", name, None)
    instructions: list[MachineOrder] = []
    for name, holder in event.partitions.items():
        if name in draft.partitions and draft.partitions[name].holder == holder:
            instructions += draft.remove(name, "the process with which it ends is gone")
    return instructions


def keep(draft: Allocator, event: ev.KeepPartition) -> list[MachineOrder]:
    """Release a partition, or a queued request, from its holder: it stays until it is removed."""
    entry = draft.queue.get(event.partition)
    if entry is not None:
        if entry.needs.holder == event.holder:
            draft.note("queue", event.partition, replace(entry, needs=replace(entry.needs, holder="")))
        return []
    partition = draft.partition(event.partition)
    return draft.put(replace(partition, holder="")) if partition.holder == event.holder else []
