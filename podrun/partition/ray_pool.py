"""Machines as Ray actors, one for each IPU-M2000.

Actors of one start are created together; those of an IPU-Link domain share a placement group that asks Ray to
keep them on one host. Ray places and supervises; commands to machines go over gRPC.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrun.cluster import IPUS_PER_MACHINE, Cluster
from podrun.errors import DeadlineError, ServiceError
from podrun.partition.machine_pool import BasePool, Control, OnLost, _Machine
from podrun.partition.ray_session import RaySession

CPU_SHARE = 0.01
"""CPUs that an actor books. Machines of a POD are many and mostly wait; they share the CPUs there are."""


class RayMachinePool(BasePool):
    """A pool of Ray actors. ``address``: somebody's Ray cluster to use; None: a private one on this host.

    ``on_session`` is told of Ray once it runs. ``start_timeout``: seconds that machines started together may
    take. ``options`` go to each machine.
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
    ) -> None:
        super().__init__(cluster, keep_spares=keep_spares)
        self._address = address
        self._start_timeout = start_timeout
        self._on_session = on_session
        self._options = dict(options or {})
        self._session: RaySession | None = None
        self._session_lock = threading.Lock()
        self._groups: dict[int, Any] = {}
        self._idle = threading.Condition()
        self._starts = 0

    def open(self, on_lost: OnLost) -> None:
        """See MachinePool. Ray itself starts with the first machine."""
        super().open(on_lost)

    @property
    def session(self) -> RaySession:
        """The Ray behind the pool, started if need be."""
        with self._session_lock:
            if self._session is not None and not self._session.alive:
                # Somebody ended Ray under us; its machines ended with it. A fresh one is for those that are restarted.
                self._session.close()
                self._session = None
                self._groups.clear()
            if self._session is None:
                self._session = RaySession(self._address)
                self._on_session(self._session)
            return self._session

    def close(self) -> None:
        """See MachinePool."""
        super().close()
        with self._idle:
            # Ray must not end under a start that is still going on: it notices soon that the pool is closed.
            self._idle.wait_for(lambda: not self._starts, self._start_timeout)
        with self._session_lock:
            session, self._session = self._session, None
        if session is not None:
            for group in self._groups.values() if self._address is not None else ():
                with contextlib.suppress(Exception):  # Ray forgets its groups when it ends, in the next line.
                    from ray.util.placement_group import remove_placement_group

                    remove_placement_group(group)
            self._groups.clear()
            session.close()

    def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        with self._idle:
            self._starts += 1
        try:
            return self._start_actors(agents)
        finally:
            with self._idle:
                self._starts -= 1
                self._idle.notify_all()

    def _start_actors(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        from podrun.device.server import machine_actor

        ray = self.session.ray
        self._check_open()
        actor = machine_actor()
        handles = [actor.options(**self._place(agent)).remote() for agent in agents]
        starting = [
            handle.start.remote(agent_id=agent, target=self.cluster.target, **self._options)
            for agent, handle in zip(agents, handles, strict=True)
        ]
        try:
            waiting = self._wait(starting)
            if waiting:
                late = ", ".join(agent for agent, ref in zip(agents, starting, strict=True) if ref in waiting)
                raise DeadlineError(
                    f"machines that did not start in {self._start_timeout:g} s: {late}",
                    hint="The host may be short of memory or processes; try a smaller POD.",
                )
            try:
                endpoints = ray.get(starting)
            except ray.exceptions.RayError as error:
                raise ServiceError(f"a machine did not start: {error}") from error
        except ServiceError:
            for handle in handles:
                ray.kill(handle)
            raise
        return list(zip(endpoints, handles, strict=True))

    def _wait(self, starting: Sequence[Any]) -> list[Any]:
        """Those that are not done within the time allowed. ServiceError if the pool is closed."""
        ray = self.session.ray
        end = time.monotonic() + self._start_timeout
        while True:
            _, waiting = ray.wait(list(starting), num_returns=len(starting), timeout=0.2)
            if not waiting or time.monotonic() >= end:
                return list(waiting)
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError("the pool of machines was closed while they started")

    def _place(self, agent: str) -> dict[str, Any]:
        """Where Ray is to put the actor of an agent: with its IPU-Link domain."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        description = self.cluster.agents_by_id[agent]
        with self._session_lock:
            group = self._groups.get(description.ild)
            if group is None:
                members = self.cluster.ilds[description.ild].agents
                # A machine shared by partitions of one IPU has an actor for each, and one spare.
                bundle = {"CPU": CPU_SHARE * (IPUS_PER_MACHINE + 1)}
                group = placement_group([bundle] * len(members), strategy="PACK")
                self._groups[description.ild] = group
        return {
            "num_cpus": CPU_SHARE,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=description.position
            ),
        }

    def _kill(self, machine: _Machine) -> None:
        session = self._session
        if session is None or not session.alive or (self._closed and self._address is None):
            return  # Our own Ray ends with all that runs in it.
        with contextlib.suppress(Exception):  # The actor may be gone already; Ray has no gentler question.
            session.ray.kill(machine.handle)

    def _connect(self, endpoint: str) -> Control:
        from podrun.device.control import MachineControl

        control: Control = MachineControl(endpoint)
        return control
