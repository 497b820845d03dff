"""Fast planning decides as the plain one does (`plain_planning`), on random states and random lists of events."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.core.cluster import Cluster
from podrun.core.cluster_file import load_cluster
from podrun.core.errors import PodrunError
from podrun.partition.state import candidates, maintenance, queueing
from podrun.partition.state import events as ev
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.placement import find_place, ipus_of, least_ilds, slices_of
from podrun.partition.state.records import Reservation
from podrun.partition.state.values import PartitionState, Requirements
from tests.sampling import examples

from . import plain_planning as plain

PODS = [load_cluster(name) for name in ("ipu-m2000", "pod16", "pod64", "pod256")]


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(PODS), st.integers(0, 8), st.integers(0, 2**32), st.sampled_from([0.3, 0.6, 0.9, 0.98])
)
def test_a_place_is_the_one_that_a_plain_search_finds(
    pod: Cluster, power: int, seed: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    blocks = rng.random(pod.ipu_count // 4) < share
    usable = np.repeat(blocks, 4) & (rng.random(pod.ipu_count) < 0.5 + share / 2)
    size = min(1 << power, pod.ipu_count)
    for ilds in {least_ilds(pod, size), min(4, len(pod.ilds), size)}:
        assert find_place(pod, size, ilds, usable) == plain.find_place(pod, size, ilds, usable)


@given(st.sampled_from(PODS), st.integers(0, 8))
def test_slices_are_those_of_the_ipus(pod: Cluster, power: int) -> None:
    size = min(1 << power, pod.ipu_count)
    ipus = find_place(pod, size, least_ilds(pod, size), np.ones(pod.ipu_count, bool))
    assert ipus is not None
    assert ipus_of(pod, slices_of(pod, ipus)) == ipus


class Player:
    """Plays random events on an allocator; the same seed plays the same."""

    def __init__(self, pod: Cluster, seed: int) -> None:
        self.random, self.pod = random.Random(seed), pod
        self.allocator = Allocator(pod)
        self.now, self.number, self.log = 1000.0, 0, list[Any]()

    def step(self) -> None:
        self.now += self.random.choice([0.0, 1.0, 7.0, 40.0])
        self.allocator.now = self.now
        self.allocator.absent = frozenset(
            name for name in sorted(self.allocator.queue) if self.random.random() < 0.1
        )
        event = self._event()
        if event is None:
            return
        try:
            told: Any = self.allocator.handle(event)
        except PodrunError as error:
            told = str(error)
        self.log.append((event, told, sorted(self.allocator.queue)))
        planned = queueing.planned_queue(self.allocator)
        self.log.append([(p.name, tuple(p.ipus), p.at, p.starts) for p in planned])

    def _event(self) -> ev.Event | None:
        rng, allocator = self.random, self.allocator
        partitions = list(allocator.partitions.values())
        kind = rng.choice([*["ask", "done"] * 3, "remove", "remove", "tick", "agent", "make", "keep"])
        if kind in ("ask", "make"):
            self.number += 1
            size = 1 << rng.randrange(0, min(self.pod.ipu_count, 256).bit_length())
            ilds = max(1, size // self.pod.topology.ild_ipus)
            reservation = rng.choice(["", "", *allocator.reservations])
            limit = rng.choice([0.0, 10.0, 30.0, 200.0])
            needs = Requirements(
                f"p{self.number}",
                size,
                num_gcds=ilds,
                limit_s=limit,
                relocatable=rng.random() < 0.3,
                reservation=reservation,
                owner=0,
            )
            return (
                ev.Enqueue(needs, rng.choice([0, 0, 1]), self.now)
                if kind == "ask"
                else ev.CreatePartition(needs, self.now)
            )
        if kind == "done":
            waiting = [p for p in partitions if p.state in (PartitionState.PENDING, PartitionState.REMOVING)]
            partition = rng.choice(waiting) if waiting else None
            return ev.OperationSucceeded(partition.name, partition.operation) if partition else None
        if kind == "remove":
            names = [*allocator.partitions, *allocator.queue]
            return ev.RemovePartition(rng.choice(names)) if names else None
        if kind == "tick":
            return ev.Tick(self.now)
        agent = rng.choice(self.pod.agents).id
        if kind == "keep":
            if rng.random() < 0.5 and allocator.reservations:
                return ev.RemoveReservation(rng.choice(list(allocator.reservations)), self.now)
            self.number += 1
            start = self.now + rng.choice([0.0, 50.0])
            return ev.CreateReservation(
                Reservation(f"r{self.number}", (agent,), start, start + 100), self.now
            )
        choices = [ev.AgentLost(agent, "gone"), ev.RestartAgent(agent), ev.EndMaintenance(agent, self.now)]
        return rng.choice([*choices, ev.SetMaintenance(agent, rng.random() < 0.5, self.now, 20.0)])


QUICK = (0, 1, 2, 6)
"""Seeds that run by default: every POD, and refused reservations."""


def played(pod: Cluster, seed: int, steps: int) -> list[Any]:
    player = Player(pod, seed)
    for _ in range(steps):
        player.step()
    player.allocator.validate_state()
    return player.log


@pytest.mark.parametrize(
    "seed", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in range(200)]
)
def test_decisions_are_those_of_plain_planning(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = PODS[1 + seed % 3]
    fast = played(pod, seed, 120)
    for module in (candidates, maintenance):
        monkeypatch.setattr(module, "find_place", plain.find_place)
    monkeypatch.setattr(queueing, "planned_queue", plain.planned_queue)
    monkeypatch.setattr(queueing, "serve_queue", plain.serve_queue)
    slow = played(pod, seed, 120)
    assert len(fast) > 100
    for one, other in zip(fast, slow, strict=True):
        assert one == other
