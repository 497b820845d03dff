"""Machines as Ray actors: one for each IPU-M2000, or one for several if the host cannot hold a process for each.

Actors of one start are created together, where `podrun.partition.machines.ray_places` says. Machines require podrun's
token. Ray places and supervises; commands to machines go over gRPC.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from podrun.core.access import make_token
from podrun.core.cluster import Cluster
from podrun.core.environment import environment, runtime_directory
from podrun.core.errors import DeadlineError, ServiceError
from podrun.core.own_sockets import remove_server_socket, remove_stale_sockets
from podrun.partition.machines.keeper import Keeper, ListedMachine, MachineList
from podrun.partition.machines.pool import (
    ADOPT_SECONDS,
    Control,
    LeftMachine,
    MachinePool,
    OnLost,
    PooledMachine,
)
from podrun.partition.machines.ray_places import ActorMachine, RayPlaces
from podrun.partition.machines.ray_session import RaySession
from podrun.partition.machines.ray_starts import (
    ActorStart,
    death_of_memory,
    start_together,
)
from podrun.partition.state.records import NO_LEASE, Lease

log = logging.getLogger("podrun.partition")

SETTLE_SECONDS = 1.0
"""Seconds from the start of a server until it joins Ray, so that waiting callers are answered first."""
_SHORT = (
    "The host may be short of memory or processes; try a smaller POD or PODRUN_MACHINES_PER_PROCESS=4. "
    "vipu-server --verbose logs what happens."
)
_IS_CLOSED = "the pool of machines was closed"


class RayMachinePool(MachinePool):
    """A pool of Ray actors. ``address``: an existing Ray cluster to use; None: a private one on this host.

    ``on_session`` is called once Ray runs. ``start_timeout``: seconds in which Ray is imported, or machines started
    together are up.
    ``options`` go to each machine. ``token``: the secret that callers of machines prove to know (by default this
    user's). ``keeper``: keeps the private Ray of a pool that is opened with a lease; its machines are detached actors.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        address: str | None = None,
        keep_spares: bool = False,
        on_session: Callable[[RaySession], None] = lambda session: None,
        start_timeout: float = 120.0,
        options: Mapping[str, Any] | None = None,
        token: str = "",
        keeper: Keeper | None = None,
    ) -> None:
        super().__init__(cluster, keep_spares=keep_spares)
        self.keeper = keeper
        self._token = token or make_token(environment(), runtime_directory())
        self._address = address
        self._start_timeout = start_timeout
        self._on_session = on_session
        self.places = RayPlaces(
            cluster, address, lambda: self.session, {**(options or {}), "token": self._token}
        )
        self._session: RaySession | None = None
        self._session_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._idle = threading.Condition()
        self._users_of_ray = 0
        self._list = MachineList(runtime_directory(), "")
        self._watches_keeper = False
        self._taken_over: frozenset[str] | None = None
        self._closing, self._ray_is_closed = threading.Event(), False
        self._ray_is_imported, self._import_is_late = threading.Event(), False
        self._early_error: Exception | None = None

    def open(self, on_lost: OnLost, lease: Lease = NO_LEASE) -> None:
        """Prepare the pool. Ray itself starts with the first machine, or with `begin`."""
        super().open(on_lost, lease)
        self._list = MachineList(runtime_directory(), lease.pod)

    def begin(self) -> None:
        """Start a private Ray in a thread before the first machine is asked for. Returns once Ray is imported: what it
        then waits for, its processes, leaves the core to the caller. An error is raised by whoever needs Ray first,
        but DeadlineError here if the import takes longer than ``start_timeout``.
        """

        def start() -> None:
            try:
                with contextlib.suppress(ServiceError), self._using_ray(), self._session_lock:
                    try:
                        self._usable_session()
                    except Exception as error:
                        self._early_error = error
            finally:
                self._ray_is_imported.set()

        threading.Thread(target=start, name="podrun-ray-begin", daemon=True).start()
        if not self._ray_is_imported.wait(self._start_timeout):
            self._import_is_late = True
            raise DeadlineError(f"Ray is not imported after {self._start_timeout:g} s", hint=_SHORT)

    @property
    def session(self) -> RaySession:
        """The pool's Ray; started if it does not run. Raises ServiceError once the pool has ended it."""
        with self._session_lock:
            if self._early_error is not None:
                error, self._early_error = self._early_error, None
                raise error
            return self._usable_session()

    def _usable_session(self) -> RaySession:
        """See `session`. Called with its lock."""
        if self._ray_is_closed:
            raise ServiceError(_IS_CLOSED)
        if self._session is not None:
            self._session.head.check()
        if self._session is not None and not self._session.alive:
            # Something else ended Ray, and its machines with it. Restarted machines get a new one.
            self._session.close()
            self._session = None
            self.places.forget_groups()
        if self._session is None:
            kept = None
            if self.keeper is not None and self.lease.epoch:
                kept = self.keeper.ensure()
                self._watch_keeper(self.keeper)
            self._session = RaySession(
                self._address,
                keeper=kept,
                on_import=self._imported,
                wanted=lambda: not self._closed,
            )
            self._on_session(self._session)
        return self._session

    def _imported(self) -> None:
        """Let `begin` return. Raises ServiceError if the pool was closed meanwhile: nobody would end that Ray."""
        self._ray_is_imported.set()
        self._check_open()

    def _take_session(self) -> RaySession | None:
        """The session, which nobody gets any more, once no thread uses it; None also while the import is late: the
        thread that imports holds the lock, and starts nothing afterwards."""
        if self._import_is_late and not self._ray_is_imported.is_set():
            return None
        with self._idle:
            # Ray must not end while a thread uses it; the thread soon notices that the pool is closed.
            self._idle.wait_for(lambda: not self._users_of_ray, self._start_timeout)
        with self._session_lock:
            session, self._session, self._ray_is_closed = self._session, None, True
        return session

    def close(self, *, leave: bool = False) -> None:
        """See `MachinePool.close`."""
        self._closing.set()
        super().close(leave=leave)
        session = self._take_session()
        if session is not None:
            self.places.remove_groups(session)
            session.close()
        if not leave:
            self._list.remove()
        if self.keeper is not None and self.lease.epoch and not leave:
            self.keeper.end()
        remove_stale_sockets()  # Of machines that were lost.

    def _watch_keeper(self, keeper: Keeper) -> None:
        if not self._watches_keeper:
            self._watches_keeper = True
            keeper.watch(self._keeper_ended)

    def _find_left(self) -> list[LeftMachine] | None:
        if self.keeper is not None:
            if self.keeper.running() is None:
                return None
            self._watch_keeper(self.keeper)
        listed = self._list.read()
        if listed is None:
            return self._ask_ray()
        self._taken_over = frozenset(entry.actor for entry in listed)
        return [
            LeftMachine(
                entry.agent,
                entry.endpoint,
                ActorMachine(entry.actor, self._namespace, entry.agent, entry.alone),
                entry.partition,
            )
            for entry in listed
        ]

    def settle(self) -> None:
        """Join Ray, and compare its actors with the list by which machines were taken over."""
        if self._taken_over is not None:
            threading.Thread(
                target=self._compare_with_ray, args=[self._taken_over], name="podrun-settle", daemon=True
            ).start()

    def _compare_with_ray(self, listed: frozenset[str]) -> None:
        """Report machines whose actor is gone, and end actors of earlier servers that no list names.

        Machines are compared as the list had them: one that is changing hands, or that closing leaves to the next
        server, is no stranger.
        """
        if self._closing.wait(SETTLE_SECONDS):
            return
        try:
            with self._using_ray():
                self._end_strangers(self.session.ray, listed)
        except Exception as error:
            if not self._closed:
                log.warning("machines could not be compared with Ray's: %s", error)

    def _end_strangers(self, ray: ModuleType, listed: frozenset[str]) -> None:
        there = {
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == self._namespace
        }
        with self._lock:
            machines = [*self._in_use.values(), *self._spares.values()]
        for machine in machines:
            if machine.handle.name in listed - there:
                self._gone(machine)
            elif machine.handle.actor is None:
                # Ray forgets the name of an actor that ends, and so why it did.
                actor = ray.get_actor(machine.handle.name, self._namespace)
                machine.handle = replace(machine.handle, actor=actor)
        for name in sorted(there - listed):
            if name.split("-")[-2:-1] == [str(self.lease.epoch)]:
                continue  # One of this server's own machines, which may be starting.
            self._check_open()
            log.info("actor %s of an earlier server is in no list: it is ended", name)
            ray.kill(ray.get_actor(name, self._namespace))

    def _why_ended(self, machine: PooledMachine) -> str:
        """Ray is asked whether its memory monitor ended the machine: a Ray that podrun did not start has
        one, which ends machines when any process of the host takes memory."""
        ended = super()._why_ended(machine)
        session, actor = self._session, machine.handle.actor
        if session is not None and self._address is not None and not session.alive:
            return f"{ended} after the Ray cluster at {self._address} had stopped answering"
        if session is None or actor is None or not session.alive:
            return ended
        try:
            with self._using_ray():
                return death_of_memory(session.ray, actor) or ended
        except Exception as error:
            # The pool is closed, or Ray does not answer: the machine is lost in any case.
            log.debug("Ray does not say why the machine of %s ended: %s", machine.agent_id, error)
            return ended

    @contextlib.contextmanager
    def _using_ray(self) -> Iterator[None]:
        """The pool does not end Ray in this context. Raises ServiceError if it is closed."""
        with self._idle:
            self._users_of_ray += 1
        try:
            self._check_open()
            yield
        finally:
            with self._idle:
                self._users_of_ray -= 1
                self._idle.notify_all()

    def _note_machines(self) -> None:
        if not self.lease.epoch or self._closed:
            return
        uses = [(use.partition, machine) for use, machine in self._in_use.items()]
        uses += [("", machine) for machine in self._spares.values()]
        self._list.write(
            ListedMachine(
                machine.agent_id, machine.endpoint, partition, machine.handle.name, machine.handle.alone
            )
            for partition, machine in uses
        )

    def _ask_ray(self) -> list[LeftMachine] | None:
        """Ray's actors of machines that an earlier server left; actors that do not answer end."""
        ray = self.session.ray
        names = [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == self._namespace
        ]
        actors = [ray.get_actor(name, self._namespace) for name in names]
        if not actors and self.keeper is None:
            return None
        asked = [actor.endpoints.remote() for actor in actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ADOPT_SECONDS) if asked else ([], [])
        departed: list[LeftMachine] = []
        for name, actor, answer in zip(names, actors, asked, strict=True):
            try:
                machines = ray.get(answer) if answer in answered else {}
            except ray.exceptions.RayError as error:  # The actor's process has ended.
                log.info("an actor of the last server does not answer: %s", error)
                machines = {}
            if not machines:
                ray.kill(actor)
            departed += [
                LeftMachine(
                    agent, endpoint, ActorMachine(name, self._namespace, agent, len(machines) == 1, actor)
                )
                for agent, endpoint in machines.items()
            ]
        return departed

    def _keeper_ended(self) -> None:
        if not self._closed:
            self.on_keeper_ended()

    @property
    def _namespace(self) -> str:
        return f"podrun-{self.lease.pod}"

    def _lasting(self, name: str) -> dict[str, Any]:
        """Options of an actor that outlives this process, if the pool has a lease."""
        if not self.lease.epoch:
            return {}
        return {"name": name, "namespace": self._namespace, "lifetime": "detached"}

    def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        with self._using_ray():
            return self.session.head.call(partial(self._start_actors, agents))

    def _start_actors(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        ray = self.session.ray
        self._check_open()
        groups = self.places.processes_for(agents)
        names = [f"{group[0]}-{self.lease.epoch}-{next(self._numbers)}" for group in groups]
        running = start_together(
            [
                (f"machine {', '.join(group)}", partial(self._begin, group, name))
                for group, name in zip(groups, names, strict=True)
            ],
            ray,
            timeout=self._start_timeout,
            hint=_SHORT,
            check_wanted=self._check_open,
        )
        # In the order requested; an agent may occur more than once.
        started: dict[str, list[tuple[str, Any]]] = {}
        for group, name, (actor, endpoints) in zip(groups, names, running, strict=True):
            for agent, endpoint in zip(group, endpoints, strict=True):
                machine = ActorMachine(name, self._namespace, agent, len(group) == 1, actor)
                started.setdefault(agent, []).append((endpoint, machine))
        return [started[agent].pop(0) for agent in agents]

    def _begin(self, group: list[str], name: str) -> ActorStart:
        """Make Ray start the machines of a group in an actor, without waiting."""
        from podrun.device.service.server import machine_actor

        place = self.places.of_actor(group[0], lasting=bool(self.lease.epoch))
        actor = machine_actor().options(**place, **self._lasting(name)).remote()
        listen = self.places.listening(group[0])
        return ActorStart(actor, actor.start.remote(agent_ids=group, target=self.cluster.target, **listen))

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError(_IS_CLOSED)

    def _kill(self, machine: PooledMachine) -> None:
        remove_server_socket(self._token, machine.endpoint)
        if self._closed and self._address is None:
            return  # A private Ray ends with everything in it; a kept Ray ends with its keeper.
        machine_of_actor: ActorMachine = machine.handle
        try:
            session = self._session
            if session is None and machine_of_actor.actor is None:
                session = self.session  # The machine was taken over before the server joined Ray.
            if session is not None and session.alive:
                session.head.call(partial(machine_of_actor.end, session.ray))
        except Exception as error:  # The actor may have ended already; Ray then raises.
            log.debug("the machine of %s was not ended: %s", machine_of_actor.agent, error)

    def _connect(self, endpoint: str) -> Control:
        from podrun.device.service.control import MachineControl

        control: Control = MachineControl(endpoint, token=self._token, epoch=self.lease.epoch)
        return control
