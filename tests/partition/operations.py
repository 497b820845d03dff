"""Random operations on the partition service's core and store, in model time: seeded, and replayable by seed and count.

    python -m tests.partition.operations --cluster pod16 --seed 7 --count 100000
    python -m tests.partition.operations --cluster pod16,pod64 --seed 7 --count 100000 --runs 10

With ``--runs`` the operations are shared out to runs of seeds that follow one another, on the clusters in turn: each
starts with an empty POD.

The core decides, a real SQLite file commits, then the decision is applied; machines are a dictionary. Servers are
killed before a commit and between commit and apply, machines are killed, the disk is full, the clock jumps, clients
that wait in the queue vanish. Agents, clusters, allocations and users come and go. After each operation the state must
hold together, and the store must hold the same, row by row; every `RELOAD`th operation, and whenever a server starts,
the store is also read anew. Watchers that break off and come back know what is there whenever they have caught up.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podrun.core.cluster import ROUTINGS, Cluster, LinkTopology
from podrun.core.cluster_file import load_cluster
from podrun.core.errors import InternalError, ServiceError, UsageError
from podrun.partition.server.event_log import EventLog, Mirror, Told
from podrun.partition.server.views import (
    changes_told,
    cluster_info,
    json_by_name,
    partition_info,
    queued_info,
)
from podrun.partition.state import events as ev
from podrun.partition.state.accounts import Account, Accounts, Role
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.codec import value_to_json
from podrun.partition.state.queueing import planned_queue
from podrun.partition.state.records import MachineUse
from podrun.partition.state.store import Store
from podrun.partition.state.stored_rows import plain_row
from podrun.partition.state.stored_state import PLAN_KINDS, layout_rows
from podrun.partition.state.values import PartitionState, Requirements

S = PartitionState

RELOAD = 50
"""Operations between two readings of the whole store."""
WATCHERS = 3
"""Watchers of a world; each comes and goes."""
PATIENT = 80
"""Requests that wait at most: one that comes to so many gives up. More than the queue plans at a time."""


class World:
    """A POD with its store, its machines, and a clock that only operations move."""

    def __init__(self, directory: Path, seed: int, cluster: str = "pod64") -> None:
        self.random = random.Random(seed)
        self.described = load_cluster(cluster)
        self.path = directory / "state.sqlite"
        self.now = 1_700_000_000.0
        self.machines: dict[MachineUse, int] = {}
        self.pending: list[ev.MachineOrder] = []
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.names = 0
        self.kills = 0
        self._rows: dict[tuple[str, str], tuple[object, str]] = {}
        self._layout: tuple[object, set[tuple[str, int, str]]] = (None, set())
        self.users: set[str] = set()
        self.watchers = [(Mirror(), "") for _ in range(WATCHERS)]
        self.store = self._open()
        self.core = self._load()
        self.start_server(None)

    @property
    def cluster(self) -> Cluster:
        """The POD with its agents and clusters as they are now."""
        return self.core.cluster

    def _open(self) -> Store:
        store = Store(self.path, self.described.name)
        store._db.execute("PRAGMA synchronous = OFF")  # Model time needs no disk.
        return store

    def _load(self) -> Allocator:
        state = self.store.load(self.described)
        self.store.lead()
        self.accounts = Accounts(self.store, lambda: self.now)
        self.events = EventLog(self._there, lambda: self.now)
        core = Allocator(
            state.layout or self.described,
            allocations=state.allocations,
            partitions=state.partitions,
            lost=state.lost,
            plans=state.plans,
        )
        core.now = self.now
        return core

    def _there(self) -> list[Told]:
        """What those who begin to watch are told."""
        infos = [partition_info(self.cluster, entry) for entry in self.core.partitions.values()]
        infos += [queued_info(self.cluster, entry) for entry in self.core.queue.values()]
        partitions = [("partition", i.name, json.dumps(value_to_json(i)), i.allocation) for i in infos]
        self.events.tell("cluster", self._clusters())
        return partitions + [("cluster", name, text, "") for name, text in self._clusters().items()]

    def _clusters(self) -> dict[str, str]:
        return json_by_name(map(cluster_info, self.cluster.clusters))

    def watch(self, index: int) -> None:
        """A watcher comes back, catches up, knows what is there, and breaks off."""
        mirror, token = self.watchers[index]
        turns = iter((True, True, False))
        for change in self.events.watch(token, ("partition", "cluster"), lambda: next(turns), patience=0.0):
            mirror.take(change.kind, change.name, change.text, initial=change.initial)
            token = self.events.token(change)
        self.watchers[index] = (mirror, token)
        there = {(kind, name): text for kind, name, text, _ in self._there()}
        known = {
            (kind, name): text for kind in ("partition", "cluster") for name, text in mirror.all(kind).items()
        }
        assert known == there, f"a watcher knows {known.keys() ^ there.keys()}"

    # --- deciding -------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, *, killed: str = "") -> bool:
        """Propose, commit, apply. ``killed``: when the server is killed. Whether the event took effect."""
        self.core.now = self.now
        try:
            decision = self.core.propose(event)
        except InternalError:
            raise
        except UsageError as error:
            self.refused[type(error).__name__] += 1
            return False
        if killed == "before":
            self.restart(lose=())
            return False
        if decision.change:
            try:
                self.store.commit(decision.change)
            except ServiceError:
                self.refused["disk full"] += 1
                return False
        if killed == "between":
            self.restart(lose=())
            return True
        self.core.apply(decision)
        for told in changes_told(self.cluster, decision.change, self.now, {}):
            self.events.add(*told)
        if decision.change.layout is not None:
            self.events.tell("cluster", self._clusters())
        self.pending += decision.instructions
        return True

    def restart(self, lose: tuple[MachineUse, ...]) -> None:
        """The server is killed and starts again; its instructions that were under way are gone."""
        self.pending.clear()
        self.kills += 1
        self.store.close()
        for use in lose:
            self.machines.pop(use, None)
        self.store = self._open()
        self.core = self._load()
        self.start_server(dict(self.machines))

    def start_server(self, machines: dict[MachineUse, int] | None) -> None:
        """Take machines over, as `podrun.partition.server.service.Service` does."""
        adopted = set()
        for partition in list(self.core.partitions.values()):
            uses = [MachineUse(part.agent_id, partition.name) for part in partition.slices]
            if partition.state is not S.ACTIVE or machines is None:
                continue
            if all(machines.get(use) == partition.operation for use in uses):
                adopted.add(partition.name)
            for use in uses:
                if use not in machines:
                    self.handle(ev.AgentLost(use.agent_id, "killed"))
        self.handle(ev.ServerStarted(frozenset(adopted)))
        wanted = {
            MachineUse(part.agent_id, p.name) for p in self.core.partitions.values() for part in p.slices
        }
        self.machines = {use: value for use, value in self.machines.items() if use in wanted}

    def work(self) -> None:
        """Carry one instruction out, in any order, and report how it ended."""
        if not self.pending:
            return
        instruction = self.pending.pop(self.random.randrange(len(self.pending)))
        match instruction:
            case ev.ProvisionMachines(name, number) | ev.ResetMachines(name, number):
                partition = self.core.partitions.get(name)
                if partition is None or partition.operation != number:
                    return
                if not self.handle(ev.OperationStarted(name, number)):
                    self.pending.append(instruction)  # Recorded as soon as there is room.
                    return
                uses = {MachineUse(part.agent_id, name) for part in partition.slices}
                self.machines = {u: o for u, o in self.machines.items() if u.partition != name or u in uses}
                if self.random.random() < 0.05:
                    self._report(instruction, ev.OperationFailed(name, number, "the machine failed."))
                    return
                self.machines |= dict.fromkeys(uses, number)
                self._report(instruction, ev.OperationSucceeded(name, number))
            case ev.ReleaseMachines(name, number, slices):
                for part in slices:
                    self.machines.pop(MachineUse(part.agent_id, name), None)
                self._report(instruction, ev.OperationSucceeded(name, number))
            case ev.StopAgentMachines(agent):
                self.machines = {u: o for u, o in self.machines.items() if u.agent_id != agent}
            case ev.ReplaceAgentMachines(agent, partitions):
                self.machines |= {MachineUse(agent, name): 0 for name in partitions}

    def _report(self, instruction: ev.MachineOrder, event: ev.Event) -> None:
        if not self.handle(event):
            self.pending.append(instruction)

    # --- operations -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """One random operation."""
        kind = self.random.choices(list(OPERATIONS), [weight for weight, _ in OPERATIONS.values()])[0]
        OPERATIONS[kind][1](self)
        self.done[kind] += 1
        self.check()

    def check(self) -> None:
        """What always holds."""
        self.core.validate_state()
        self._check_rows()
        if sum(self.done.values()) % RELOAD == 0:
            stored = self.store.load(self.described)
            assert {p.name: p for p in stored.partitions} == self.core.partitions
            assert stored.lost == self.core.lost
            assert {q.needs.name: q for q in stored.plans.queue} == self.core.queue
            assert {m.agent: m for m in stored.plans.maintenance} == self.core.maintenance
            assert {r.name: r for r in stored.plans.reservations} == self.core.reservations
            assert stored.layout in (None, self.cluster)
            own = self.cluster.allocations if stored.allocations is None else stored.allocations
            assert {a.name: a for a in own} == self.core.allocations
            assert {account.name for account in self.accounts.all()} == set(self.store.users()) == self.users
        held = sum(partition.size for partition in self.core.partitions.values())
        assert int(self.core.table.taken.sum()) == held

    def _check_rows(self) -> None:
        """The store's rows are those of the state; the text of an entry is made once."""
        db, core = self.store._db, self.core
        entries: dict[tuple[str, str], Any] = {("partitions", n): p for n, p in core.partitions.items()}
        for kind, _ in PLAN_KINDS:
            entries |= {(kind, name): entry for name, entry in getattr(core, kind).items()}
        known, self._rows = self._rows, {}
        for key, entry in entries.items():
            row = known.get(key)
            if row is None or row[0] is not entry:
                row = (entry, json.dumps(plain_row(entry)))
            self._rows[key] = row
        stored = {("partitions", n): data for n, data in db.execute("SELECT name, data FROM partitions")}
        stored |= {(kind, n): data for kind, n, data in db.execute("SELECT kind, name, data FROM plans")}
        assert stored == {key: text for key, (_, text) in self._rows.items()}
        assert {row[0] for row in db.execute("SELECT agent FROM lost")} == core.lost
        if self._layout[0] is not core.cluster:
            self._layout = (core.cluster, set(layout_rows(core.cluster)))
        if core.cluster.parts is not None:
            assert set(db.execute("SELECT kind, position, data FROM layout")) == self._layout[1]

    def new_name(self) -> str:
        self.names += 1
        return f"p{self.names}"

    def any_partition(self) -> str:
        return self.random.choice([*self.core.partitions, "nobody"])

    def any_agent(self) -> str:
        return self.random.choice([*(agent.id for agent in self.cluster.agents), "nobody"])

    def any_cluster(self) -> str:
        return self.random.choice([*(cluster.name for cluster in self.cluster.clusters), "nobody"])

    def needs(self) -> Requirements:
        size = self.random.choice([1, 1, 2, 4, 4, 8, 16, 32, 64, 3])
        chance = self.random.random
        return Requirements(
            self.new_name() if chance() < 0.95 else self.any_partition(),
            size,
            reconfigurable=chance() < 0.3,
            limit_s=self.random.choice([0.0, 0.0, 60.0, 600.0]),
            relocatable=chance() < 0.3,
            reservation=self.random.choice([*self.core.reservations, ""]) if chance() < 0.1 else "",
            cluster=self.any_cluster() if chance() < 0.1 else "",
            allocation=self.random.choice([*self.core.allocations, ""]) if chance() < 0.1 else "",
            routing=self.random.choice([*ROUTINGS]) if chance() < 0.1 else "",
            index=self.random.choice([1, 2, 5]) if chance() < 0.1 else 0,
        )

    def killed(self) -> str:
        return self.random.choice(["before", "between"]) if self.random.random() < 0.02 else ""


def _create(world: World) -> None:
    world.handle(ev.CreatePartition(world.needs(), world.now), killed=world.killed())


def _enqueue(world: World) -> None:
    if len(world.core.queue) >= PATIENT:
        _leave(world)
    world.handle(ev.Enqueue(world.needs(), world.random.randrange(-1, 3), world.now), killed=world.killed())


def _leave(world: World) -> None:
    world.handle(ev.LeaveQueue(world.random.choice([*world.core.queue, "nobody"])))


def _remove(world: World) -> None:
    world.handle(ev.RemovePartition(world.any_partition()), killed=world.killed())


def _reset(world: World) -> None:
    world.handle(ev.ResetPartition(world.any_partition()), killed=world.killed())


def _kill_machine(world: World) -> None:
    if world.machines:
        use = world.random.choice(sorted(world.machines, key=lambda u: (u.agent_id, u.partition)))
        world.machines.pop(use)
        world.handle(ev.AgentLost(use.agent_id, "its process ended"), killed=world.killed())


def _kill_server(world: World) -> None:
    uses = sorted(world.machines, key=lambda u: (u.agent_id, u.partition))
    world.restart(tuple(use for use in uses if world.random.random() < 0.05))


def _full_disk(world: World) -> None:
    """A few operations on a disk that has no room left: each is refused whole, or needed none."""
    db = world.store._db
    db.execute("VACUUM")  # Pages that the file has free would be room.
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages}")
    try:
        for _ in range(3):
            _create(world)
            world.work()
    finally:
        world.store._db.execute("PRAGMA max_page_count = 1073741823")


def _reserve(world: World) -> None:
    agents = tuple({world.any_agent(): None for _ in range(world.random.choice([1, 1, 2]))})
    start = world.now + world.random.choice([0.0, 300.0, 3000.0])
    reservation = ev.Reservation(world.new_name(), agents, start, start + 600.0)
    world.handle(ev.CreateReservation(reservation, world.now))


def _maintain(world: World) -> None:
    drain = world.random.random() < 0.5
    deadline = world.random.choice([0.0, 120.0]) if drain else 0.0
    world.handle(ev.SetMaintenance(world.any_agent(), drain, world.now, deadline), killed=world.killed())


def _create_agent(world: World) -> None:
    number = len(world.cluster.agents)
    if number >= 2 * len(world.described.agents):
        return
    name = world.new_name() if world.random.random() < 0.9 else world.any_agent()
    world.handle(ev.CreateAgent(name, f"host-{name}", 8080), killed=world.killed())


def _create_cluster(world: World) -> None:
    """Of agents that are in none, mostly."""
    free = [agent.id for agent in world.cluster.agents if agent.id not in world.cluster.clusters_by_agent]
    if world.random.random() < 0.1:
        free.append(world.any_agent())
    count = min(len(free), world.random.choice([1, 2, 4, 8, 16, 3]))
    agents = tuple(world.random.sample(free, count))
    ilds = world.random.choice([1, 1, 1, 2, 4])
    links = world.random.choice(list(LinkTopology))
    world.handle(ev.CreateCluster(world.new_name(), agents, ilds, links), killed=world.killed())


def _take_apart(world: World) -> None:
    """Empty a cluster, then remove it, and sometimes an agent of it."""
    name = world.any_cluster()
    agents = {a.id for c in world.cluster.clusters if c.name == name for a in c.agents}
    for partition in list(world.core.partitions.values()):
        if agents & {part.agent_id for part in partition.slices}:
            world.handle(ev.RemovePartition(partition.name))
    while world.pending:
        world.work()
    inside = {n for n, a in world.core.allocations.items() if agents & set(a.agents)}
    for entry in list(world.core.queue.values()):
        if entry.needs.cluster == name or entry.needs.allocation in inside:
            world.handle(ev.LeaveQueue(entry.needs.name))
    for allocation in sorted(inside - {name}):
        world.handle(ev.RemoveAllocation(allocation))
    if world.handle(ev.RemoveCluster(name), killed=world.killed()) and world.random.random() < 0.5:
        world.handle(ev.RemoveAgent(world.random.choice(sorted(agents))), killed=world.killed())


def _allocate(world: World) -> None:
    agents = tuple({world.any_agent(): None for _ in range(world.random.choice([1, 2]))})
    world.handle(ev.CreateAllocation(world.new_name(), agents), killed=world.killed())


def _remove_allocation(world: World) -> None:
    name = world.random.choice([*world.core.allocations, "nobody"])
    world.handle(ev.RemoveAllocation(name), killed=world.killed())


def _users(world: World) -> None:
    """A user comes or goes; the last administrator stays."""
    try:
        if not world.users or world.random.random() < 0.5:
            name = world.new_name()
            world.accounts.create(Account(name, world.random.choice(list(Role))))
            world.users.add(name)
        else:
            name = world.random.choice(sorted(world.users))
            world.accounts.remove(name)
            world.users.discard(name)
    except UsageError as error:
        world.refused[type(error).__name__] += 1


def _pass_time(world: World, seconds: float) -> None:
    world.now += seconds
    world.handle(ev.Tick(world.now))
    assert not any(planned.starts for planned in planned_queue(world.core))


OPERATIONS: dict[str, tuple[float, Callable[[World], None]]] = {
    "work": (40, World.work),
    "create": (14, _create),
    "queue": (8, _enqueue),
    "leave": (1, _leave),
    "remove": (14, _remove),
    "reset": (5, _reset),
    "restart agent": (5, lambda w: _ignore(w.handle(ev.RestartAgent(w.any_agent())))),
    "power cycle": (1, lambda w: _ignore(w.handle(ev.PowerCycleAgent(w.any_agent())))),
    "kill machine": (2, _kill_machine),
    "kill server": (1, _kill_server),
    "full disk": (1, _full_disk),
    "maintain": (1, _maintain),
    "return": (3, lambda w: _ignore(w.handle(ev.EndMaintenance(w.any_agent(), w.now)))),
    "reserve": (0.5, _reserve),
    "create agent": (0.5, _create_agent),
    "remove agent": (0.3, lambda w: _ignore(w.handle(ev.RemoveAgent(w.any_agent()), killed=w.killed()))),
    "create cluster": (1.5, _create_cluster),
    "remove cluster": (
        0.3,
        lambda w: _ignore(w.handle(ev.RemoveCluster(w.any_cluster()), killed=w.killed())),
    ),
    "take a cluster apart": (0.2, _take_apart),
    "create allocation": (0.5, _allocate),
    "remove allocation": (0.3, _remove_allocation),
    "users": (0.3, _users),
    "watch": (6, lambda w: w.watch(w.random.randrange(WATCHERS))),
    "time passes": (6, lambda w: _pass_time(w, w.random.expovariate(1 / 30))),
    "clock jumps": (0.5, lambda w: _pass_time(w, w.random.choice([-3600.0, 3600.0]))),
}


def _ignore(took_effect: bool) -> None:
    """Refused or not: both are right."""


def run(seed: int, count: int, directory: Path, cluster: str = "pod64") -> World:
    """``count`` operations of a seed; an error names both."""
    world = World(directory, seed, cluster)
    try:
        for number in range(count):
            try:
                world.step()
            except Exception as error:
                error.add_note(f"operation {number + 1} of seed {seed}")
                raise
        empty(world)
    finally:
        world.store.close()
    return world


def empty(world: World) -> None:
    """Remove everything: every IPU is free again."""
    while world.core.queue:  # Who leaves may make room for the next.
        assert world.handle(ev.LeaveQueue(min(world.core.queue)))
    for name in list(world.core.reservations):
        assert world.handle(ev.RemoveReservation(name, world.now))
    for name in list(world.core.partitions):
        assert world.handle(ev.RemovePartition(name))
    while world.pending:
        world.work()
    world.check()
    for index in range(WATCHERS):
        world.watch(index)
    assert world.core.partitions == {}
    assert not world.core.table.taken.any()


def main() -> None:
    parser = argparse.ArgumentParser(description="Random operations on the V-IPU core, in model time.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--cluster", default="pod64", help="names, separated by commas, taken in turn")
    parser.add_argument("--runs", type=int, default=1, help="share the operations out to so many seeds")
    options = parser.parse_args()
    clusters = options.cluster.split(",")
    done: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    kills = 0
    for number in range(options.runs):
        with tempfile.TemporaryDirectory() as directory:
            begin, seed, cluster = time.monotonic(), options.seed + number, clusters[number % len(clusters)]
            count = options.count // options.runs
            world = run(seed, count, Path(directory), cluster)
        took = time.monotonic() - begin
        print(f"{count} operations on {cluster}, seed {seed}: all held, in {took:.0f} s", flush=True)
        done, refused, kills = done + world.done, refused + world.refused, kills + world.kills
    print(f"{done.total()} operations, {kills} servers killed; SQLite {sqlite3.sqlite_version}")
    print("done:", dict(done.most_common()))
    print("refused:", dict(refused.most_common()))


if __name__ == "__main__":
    main()
