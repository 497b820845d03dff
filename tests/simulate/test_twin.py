"""The real service with a fake pool and virtual time decide the same on the same list of requests: also who is taken to
be gone, and who may do what."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import DeniedError, PodrunError
from podrun.core.telemetry import MachineReport
from podrun.partition.host.leases import SignsOfLife
from podrun.partition.machines.pool import MachinePool
from podrun.partition.server.service import Service
from podrun.partition.state import events as ev
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.orphans import HolderWatch
from podrun.partition.state.records import ITSELF, Asker
from podrun.partition.state.store import Store
from podrun.partition.state.values import Requirements


class _Yes:
    """A machine that says yes to everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **options: None

    def telemetry(self, timeout: float | None = None) -> MachineReport:
        return MachineReport("")


class _FakePool(MachinePool):
    """Machines without processes."""

    def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        return [("127.0.0.1:1", None) for _ in agents]

    def _kill(self, machine: Any) -> None:
        pass

    def _connect(self, endpoint: str) -> Any:
        return _Yes()

    def _watch(self, machine: Any) -> Callable[[], None]:
        return lambda: None


ALICE = 7
ALIVE = {"here::1:1:1": True, "here::1:2:1": False, "far::1:3:1": None}
"""Holders of partitions and requests, and whether each runs."""


def _of_alice(partition: str, owner: int) -> None:
    if owner != ALICE:
        raise DeniedError(f"partition {partition} is another user's")


ASKERS = [ITSELF, ITSELF, Asker(check=_of_alice)]


def requests(seed: int, count: int) -> list[Callable[[float, list[str]], ev.Event]]:
    """Requests as functions of the time and the names there are, so that both sides are asked the same."""
    rng = random.Random(seed)
    agents = [agent.id for agent in load_cluster("pod64").agents]
    asked: list[Callable[[float, list[str]], ev.Event]] = []
    for number in range(count):
        kind, pick, agent = rng.random(), rng.random(), rng.choice(agents)
        if kind < 0.45:
            needs = Requirements(
                f"p{number}",
                1 << rng.randrange(7),
                limit_s=rng.choice([0.0, 20.0, 90.0]),
                owner=rng.choice([0, ALICE]),
                holder=rng.choice(["", "", *ALIVE]),
            )
            asked.append(lambda now, names, needs=needs: ev.Enqueue(needs, 0, now))
        elif kind < 0.75:
            asked.append(
                lambda now, names, pick=pick: ev.RemovePartition(
                    names[int(pick * len(names))] if names else "none"
                )
            )
        elif kind < 0.85:
            asked.append(lambda now, names: ev.Tick(now))
        elif kind < 0.9:
            asked.append(lambda now, names, agent=agent: ev.SetMaintenance(agent, False, now))
        elif kind < 0.95:
            asked.append(lambda now, names, agent=agent: ev.EndMaintenance(agent, now))
        else:
            asked.append(lambda now, names, agent=agent: ev.RestartAgent(agent))
    return asked


def settled(allocator: Allocator) -> list[Any]:
    """What was decided, partition by partition, and who waits."""
    partitions = [
        (p.name, p.state.name, p.slices, p.ends, p.operation, p.generation, p.story)
        for p in sorted(allocator.partitions.values(), key=lambda p: p.name)
    ]
    return [partitions, sorted(allocator.queue), sorted(allocator.maintenance)]


Told = tuple[str, float, Any]
"""What the service did, when: ``note`` of a sign of life; ``gone``: it looked for holders that are gone, and what it
said; ``decide``: event, asker, absent requests, what was answered, and the state after it."""


def in_service(seed: int, count: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """The requests through the real service, with its threads, store and workers, and a pool: all events that it
    decided on, also the reports of its workers, in the order in which it did."""
    now = [1000.0]
    pod = load_cluster("pod64")
    service = Service(pod, Store(directory / "state.sqlite", pod.name), _FakePool(pod), clock=lambda: now[0])
    told: list[Told] = []
    decide = service._decide
    watch = HolderWatch(SignsOfLife(lambda: now[0], ALIVE.get))
    look = watch.gone

    def looked(state: Allocator) -> ev.HoldersGone | None:
        gone = look(state)
        told.append(("gone", now[0], gone))
        return gone

    monkeypatch.setattr(watch, "gone", looked)
    monkeypatch.setattr(service, "_holders", watch)

    def noted(event: ev.Event, asker: Asker = ITSELF) -> tuple[ev.MachineOrder, ...]:
        with service._lock:
            allocator, answer = service._allocator, cast("Any", None)
            try:
                answer = decide(event, asker)
            except PodrunError as error:
                answer = str(error)
                raise
            finally:
                told.append(("decide", now[0], (event, asker, allocator.absent, answer, settled(allocator))))
            return answer

    monkeypatch.setattr(service, "_decide", noted)
    service.pool.open(lambda use, why: None, service._lease)
    try:
        rng = random.Random(seed)
        for ask in requests(seed, count):
            now[0] += 5.0
            names = sorted({*service._allocator.partitions, *service._allocator.queue})
            with contextlib.suppress(PodrunError):
                service.handle(ask(now[0], names), rng.choice(ASKERS))
            assert service.wait_idle(60)
            if names and rng.random() < 0.5:
                name = rng.choice(names)
                told.append(("note", now[0], name))
                watch.note(name)
            if rng.random() < 0.6:
                service.look_around()
                assert service.wait_idle(60)
    finally:
        service.stop(grace=0)
    return told


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_service_and_virtual_time_decide_the_same(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = in_service(seed, 80, tmp_path, monkeypatch)
    answers = [facts[3] for what, _, facts in told if what == "decide"]
    assert len(answers) > 120
    assert any(isinstance(answer, str) for answer in answers)
    assert any(what == "gone" and facts is not None for what, _, facts in told)
    virtual, now = Allocator(load_cluster("pod64")), [0.0]
    watch = HolderWatch(SignsOfLife(lambda: now[0], ALIVE.get))
    for number, (what, now[0], facts) in enumerate(told):
        virtual.now = now[0]
        if what == "note":
            watch.note(facts)
            continue
        if what == "gone":
            assert watch.gone(virtual) == facts, f"{number}: who is gone"
            continue
        event, asker, absent, answer, state = facts
        virtual.absent = watch.absent(virtual)
        assert virtual.absent == absent, f"{number}: who does not answer"
        try:
            decision = virtual.propose(event, asker)
            virtual.apply(decision)
            decided: Any = decision.instructions
        except PodrunError as error:
            decided = str(error)
        assert decided == answer, f"event {number}: {event}"
        assert settled(virtual) == state, f"event {number}: {event}"
