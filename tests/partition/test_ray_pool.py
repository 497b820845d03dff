"""The pool of Ray's actors on a Ray that is only pretended: who ends what, and when Ray may be asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import DeadlineError, ServiceError
from podrun.partition.machines import ray_pool
from podrun.partition.machines.keeper import ListedMachine, MachineList
from podrun.partition.machines.ray_pool import RayMachinePool
from podrun.partition.state.records import Lease, MachineUse

from .conftest import FakeMachine

LEASE = Lease("0123456789abcdef", 3)
AGENTS = [f"ipum{i}" for i in (1, 2, 3, 4)]
USES = [MachineUse(agent, "p") for agent in AGENTS]
WAIT = 60.0


class RayError(Exception):
    pass


class OutOfMemoryError(RayError):
    pass


class ActorOfRay:
    """An actor's handle; ``death``: the error with which Ray answers its calls."""

    def __init__(self, name: str, death: Exception | None = None) -> None:
        self.name, self.death = name, death
        self.endpoints = SimpleNamespace(remote=lambda: self)


class RayOfActors:
    """What the pool uses of Ray. A call without a session fails here; Ray itself starts another cluster."""

    def __init__(self, names: list[str]) -> None:
        self.actors = {name: ActorOfRay(name) for name in names}
        self.killed: list[str] = []
        self.alive = True
        self.exceptions = SimpleNamespace(RayError=RayError, OutOfMemoryError=OutOfMemoryError)
        self.util = SimpleNamespace(list_named_actors=self.list_named_actors)
        self.on_list: Callable[[], None] = lambda: None

    def _asked(self) -> None:
        assert self.alive, "Ray was called after the pool had ended it"

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        self._asked()
        assert all_namespaces
        there = [{"name": name, "namespace": f"podrun-{LEASE.pod}"} for name in self.actors]
        self.on_list()
        return there

    def get_actor(self, name: str, namespace: str) -> ActorOfRay:
        self._asked()
        assert namespace == f"podrun-{LEASE.pod}"
        return self.actors[name]

    def get(self, actor: ActorOfRay, *, timeout: float) -> str:
        self._asked()
        if actor.death is not None:
            raise actor.death
        return actor.name

    def kill(self, actor: ActorOfRay) -> None:
        self._asked()
        self.killed.append(actor.name)


class Taken:
    """A pool that has taken over four machines of an earlier server; Ray also has a stranger, and a new machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = [f"{agent}-2-{i}" for i, agent in enumerate(AGENTS)]
        self.ray = RayOfActors([*self.names, "ipum1-1-9", "ipum2-3-1"])
        self.lost: list[tuple[str, str]] = []
        self.sessions = 0
        self.joining, self.join = threading.Event(), threading.Event()
        monkeypatch.setattr(ray_pool, "SETTLE_SECONDS", 0.0)
        monkeypatch.setattr(ray_pool, "RaySession", self.session)
        monkeypatch.setattr(RayMachinePool, "_connect", lambda pool, endpoint: self.machine(endpoint))
        monkeypatch.setattr(RayMachinePool, "_watch", lambda pool, machine: lambda: None)
        self.pool = RayMachinePool(load_cluster("pod16"), token="t" * 64)
        self.pool.open(lambda agent, reason: self.lost.append((agent, reason)), LEASE)
        entries = [
            ListedMachine(use.agent_id, f"127.0.0.1:{i}", "p", name, True)
            for i, (use, name) in enumerate(zip(USES, self.names, strict=True))
        ]
        MachineList(self.pool._list._path.parent, LEASE.pod).write(entries)  # type: ignore[union-attr]
        assert set(self.pool.adopt(USES) or ()) == set(USES)

    def machine(self, endpoint: str) -> FakeMachine:
        machine = FakeMachine("", endpoint)
        machine.configured = {"partition": "p", "operation": 1}
        return machine

    def session(self, *args: Any, **options: Any) -> Any:
        """Joins when the test lets it."""
        self.sessions += 1
        self.joining.set()
        assert self.join.wait(WAIT)
        return SimpleNamespace(ray=self.ray, alive=True, close=self.end_ray)

    def end_ray(self) -> None:
        self.ray.alive = False

    def wait_settled(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "podrun-settle":
                thread.join(WAIT)
                assert not thread.is_alive()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Taken]:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    state = Taken(monkeypatch)
    yield state
    state.join.set()
    state.pool.close(leave=True)
    state.wait_settled()


def test_strangers_end_and_listed_machines_stay(taken: Taken) -> None:
    del taken.ray.actors[taken.names[3]]
    taken.join.set()
    taken.pool.settle()
    taken.wait_settled()
    assert taken.ray.killed == ["ipum1-1-9"]  # not ipum2-3-1, which this server starts at the moment
    assert [agent for agent, _ in taken.lost] == ["ipum4"]


def test_closing_while_ray_is_joined_leaves_every_machine(taken: Taken) -> None:
    taken.pool.settle()
    assert taken.joining.wait(WAIT)
    closing = threading.Thread(target=lambda: taken.pool.close(leave=True))
    closing.start()
    assert taken.pool._closing.wait(WAIT)
    taken.join.set()
    closing.join(WAIT)
    taken.wait_settled()
    assert not taken.ray.killed
    assert not taken.lost
    assert not taken.ray.alive


def test_closing_while_actors_are_listed_leaves_every_machine(taken: Taken) -> None:
    closing = threading.Thread(target=lambda: taken.pool.close(leave=True))

    def close_meanwhile() -> None:
        closing.start()
        end = time.monotonic() + WAIT
        while taken.pool._in_use:  # Closing empties the lists, then waits for those who use Ray.
            assert time.monotonic() < end

    taken.ray.on_list = close_meanwhile
    taken.join.set()
    taken.pool.settle()
    taken.wait_settled()
    closing.join(WAIT)
    assert not taken.ray.killed
    assert not taken.lost


def test_a_machine_that_changes_hands_is_no_stranger(taken: Taken) -> None:
    # `release` takes a machine out of use, clears it, and only then makes a spare of it.
    taken.ray.on_list = lambda: taken.pool._in_use.clear()
    taken.join.set()
    taken.pool.settle()
    taken.wait_settled()
    assert taken.ray.killed == ["ipum1-1-9"]


def test_ray_is_never_joined_after_closing(taken: Taken) -> None:
    taken.join.set()
    taken.pool.close(leave=True)
    for call in (lambda: taken.pool.session, taken.pool.places.hosts, lambda: taken.pool._start(["ipum1"])):
        with pytest.raises(ServiceError, match="closed"):
            call()
    taken.pool.settle()
    taken.wait_settled()
    assert taken.sessions == 0


USE_OF_MEMORY = """1 worker(s) were killed due to the node running low on memory. \
Memory on the node (IP: 10.0.0.7, ID: 2f18) was 22.54GB used / 23.54GB limit (0.957519)
OOM kill reason: Memory usage 24202444800B exceeded threshold"""


@pytest.mark.parametrize(
    ("death", "said"),
    [
        (
            OutOfMemoryError(USE_OF_MEMORY),
            "Ray's memory monitor ended its process when 22.54GB of 23.54GB were used on 10.0.0.7",
        ),
        (OutOfMemoryError("other words"), "Ray's memory monitor ended its process"),
        (RayError("the actor died"), "its process at 127.0.0.1:0 ended"),
    ],
)
def test_a_machine_that_rays_memory_monitor_ended_says_so(taken: Taken, death: Exception, said: str) -> None:
    taken.join.set()
    taken.pool.settle()
    taken.wait_settled()
    machine = taken.pool._in_use[USES[0]]
    taken.ray.actors[taken.names[0]].death = death
    taken.pool._gone(machine)
    ((agent, reason),) = taken.lost
    assert agent == "ipum1"
    assert reason.startswith(said)
    assert ("RAY_memory_monitor_refresh_ms=0" in reason) == isinstance(death, OutOfMemoryError)


class BegunEarly:
    """A pool whose Ray a launch begins: it is imported, and then starts when the test lets it, or fails."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, start_timeout: float = WAIT
    ) -> None:
        self.start, self.sessions, self.error = threading.Event(), 0, error
        self.ended = False
        monkeypatch.setattr(ray_pool, "RaySession", self.session)
        self.pool = RayMachinePool(load_cluster("pod16"), token="t" * 64, start_timeout=start_timeout)

    def session(self, *args: Any, on_import: Callable[[], None], **options: Any) -> Any:
        self.sessions += 1
        if self.error is not None:
            raise self.error
        on_import()
        assert self.start.wait(WAIT)
        head = SimpleNamespace(check=lambda: None)
        return SimpleNamespace(ray=None, alive=True, head=head, close=self.end)

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))


@pytest.mark.usefixtures("own_directory")
def test_a_ray_that_is_begun_early_is_the_one_that_machines_get(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = BegunEarly(monkeypatch)
    begun.pool.begin()  # Returns while Ray starts.
    begun.start.set()
    assert begun.pool.session is begun.pool.session
    assert begun.sessions == 1
    begun.pool.close()
    assert begun.ended


@pytest.mark.usefixtures("own_directory")
def test_a_pool_that_closes_ends_a_ray_that_is_still_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = BegunEarly(monkeypatch)
    begun.pool.begin()
    closing = threading.Thread(target=begun.pool.close)
    closing.start()
    assert not begun.ended
    begun.start.set()
    closing.join(WAIT)
    assert begun.ended
    with pytest.raises(ServiceError, match="closed"):
        _ = begun.pool.session


@pytest.mark.usefixtures("own_directory")
def test_whoever_needs_a_ray_that_did_not_begin_gets_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = BegunEarly(monkeypatch, ServiceError("Ray did not start"))
    begun.pool.begin()
    with pytest.raises(ServiceError, match="Ray did not start"):
        _ = begun.pool.session
    begun.error = None
    begun.start.set()
    assert begun.pool.session.alive  # A second attempt starts it anew.
    assert begun.sessions == 2
    begun.pool.close()


class ImportedLate(BegunEarly):
    """Ray's import takes until the test lets it go on. ``over``: what became of the session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over: Queue[str] = Queue()
        super().__init__(monkeypatch, start_timeout=0.05)

    def session(self, *args: Any, on_import: Callable[[], None], **options: Any) -> Any:
        assert self.start.wait(WAIT)
        try:
            on_import()
        except ServiceError as error:
            self.over.put(error.message)
            raise
        self.over.put("started")
        return None


@pytest.mark.usefixtures("own_directory")
def test_an_import_that_does_not_end_has_a_deadline_and_starts_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = ImportedLate(monkeypatch)
    with pytest.raises(DeadlineError, match=r"Ray is not imported after 0\.05 s"):
        late.pool.begin()
    late.pool.close()  # Returns while Ray is imported.
    late.start.set()
    assert "closed" in late.over.get(timeout=WAIT)
