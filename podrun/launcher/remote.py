"""Instances on other hosts: one Ray actor for each host runs the same `ProcessRunner` and hands its events back.

Hosts are nodes of an existing Ray cluster (``ray start`` on each): the one of $RAY_ADDRESS, else the one this host
belongs to. On this host instances are started directly: joining Ray costs seconds and would gain nothing.

`parse_hosts` and `read_hostfile` read the names of hosts.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from podrun.core.errors import DeadlineError, NotFoundError, ServiceError
from podrun.launcher.output import OutputChannel
from podrun.launcher.own_streams import Log
from podrun.launcher.process import Command, Ended, InstanceEvent, Printed, ProcessRunner
from podrun.partition.host.discovery import remove_scratch
from podrun.partition.host.guardian import Guardian, end_marked
from podrun.partition.machines.ray_starts import ActorStart, start_together

if TYPE_CHECKING:
    from ray.actor import ActorHandle

START_SECONDS = 60.0
"""Seconds for a host to start its actor."""
POLL_SECONDS = 0.2
SILENCE_SECONDS = 30.0
"""Seconds without an answer to a poll after which a host counts as lost."""
LOST_EXIT_CODE = 1
_LOOK = "Look at the cluster (ray status); podrun must be installed at the same path on all its nodes."
HOST_MARK = "PODRUN_HOST_MARK"
"""Variable that marks all processes of a launch on a remote host."""


class HostActor:
    """Runs inside the Ray actor: plain values in and out. Its methods run one at a time, on one thread.

    ``scratch``: a directory for temporary files of instances on this host, removed with the launch. If this process or
    podrun is killed, a guardian removes it and the processes that instances have started.
    """

    def __init__(self, scratch: str) -> None:
        self._runner = ProcessRunner()
        self._scratch = scratch
        self._mark = secrets.token_hex(8)
        self._guardian = Guardian(adopted=True)
        self._guardian.watch_mark(f"{HOST_MARK}={self._mark}")
        self._guardian.watch_directory(scratch)

    def start(
        self, instance: int, words: Sequence[str], directory: str, environment: Mapping[str, str]
    ) -> int:
        """See `ProcessRunner.start`."""
        marked = {**environment, HOST_MARK: self._mark}
        return self._runner.start(Command(instance, tuple(words), directory, marked))

    def poll(self, timeout: float) -> list[tuple[Any, ...]]:
        """See `ProcessRunner.poll`; events as tuples."""
        return [plain_event(event) for event in self._runner.poll(timeout)]

    def signal(self, number: int, instances: Sequence[int]) -> None:
        """See `ProcessRunner.signal`."""
        self._runner.signal(number, instances)

    def close(self) -> None:
        """See `ProcessRunner.close`. Also removes everything that the instances left on this host."""
        self._runner.close()
        end_marked(f"{HOST_MARK}={self._mark}")
        remove_scratch(Path(self._scratch))
        self._guardian.dismiss()


def plain_event(event: InstanceEvent) -> tuple[Any, ...]:
    """An event as a tuple of plain values."""
    match event:
        case Printed(instance, channel, data):
            return ("printed", instance, channel.value, data)
        case Ended(instance, code, number):
            return ("ended", instance, code, number)


def event_of(plain: Sequence[Any]) -> InstanceEvent:
    """The event that `plain_event` described."""
    if plain[0] == "printed":
        return Printed(plain[1], OutputChannel(plain[2]), plain[3])
    return Ended(plain[1], plain[2], plain[3])


class RemoteRunner:
    """The launcher's end of one host: a `supervise.Runner`. A thread fetches events and calls ``wake``."""

    def __init__(
        self, ray: ModuleType, actor: ActorHandle, host: str, wake: Callable[[], None], log: Log
    ) -> None:
        self.host = host
        self._ray, self._actor, self._wake, self._log = ray, actor, wake, log
        self._events: queue.SimpleQueue[InstanceEvent] = queue.SimpleQueue()
        self._running: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name=f"podrun-host-{host}", daemon=True)

    def start(self, command: Command) -> int:
        """Start an instance on the host. Raises OSError as `ProcessRunner.start` does, ServiceError if the host is
        gone.
        """
        call = self._actor.start.remote(
            command.instance, command.words, command.directory, dict(command.environment)
        )
        try:
            pid = int(self._ray.get(call, timeout=START_SECONDS))
        except self._ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"host {self.host} did not start an instance in {START_SECONDS:g} s", hint=_LOOK
            ) from None
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, OSError):
                raise cause from None
            raise ServiceError(
                f"host {self.host} could not start an instance: {error}", hint=_LOOK
            ) from error
        self._running.add(command.instance)
        if not self._thread.is_alive():
            self._thread.start()
        return pid

    def poll(self, timeout: float) -> list[InstanceEvent]:
        """The events that have arrived, without waiting."""
        events = []
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, Ended):
                self._running.discard(event.instance)
            events.append(event)
        return events

    def running(self) -> list[int]:
        """See Runner."""
        return sorted(self._running)

    def signal(self, number: int, instances: Sequence[int] | None = None) -> None:
        """See Runner. Does not wait for the host."""
        self._actor.signal.remote(int(number), list(self._running if instances is None else instances))

    def close(self) -> None:
        """End the instances that are left on the host."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(SILENCE_SECONDS)
        try:
            self._ray.get(self._actor.close.remote(), timeout=5.0)
        except self._ray.exceptions.RayError as error:
            self._log.debug(f"host {self.host} did not close its processes: {error}")
        self._ray.kill(self._actor)

    def _fetch(self) -> None:
        """Fetch events until told to stop. If the host is lost, all its instances end."""
        while not self._stop.is_set():
            try:
                plain = self._ray.get(self._actor.poll.remote(POLL_SECONDS), timeout=SILENCE_SECONDS)
            except self._ray.exceptions.RayError as error:
                text = f"podrun: host {self.host} is lost: {type(error).__name__}\n".encode()
                for instance in sorted(self._running):
                    self._events.put(Printed(instance, OutputChannel.STDERR, text))
                    self._events.put(Ended(instance, LOST_EXIT_CODE))
                self._wake()
                return
            for item in plain:
                self._events.put(event_of(item))
            if plain:
                self._wake()


def connect_hosts(
    hosts: Sequence[str],
    log: Log,
    wake: Callable[[], None],
    *,
    address: str,
    environ: Mapping[str, str],
    scratch: str,
) -> list[RemoteRunner]:
    """A runner for each host, a node of the Ray cluster at ``address`` (see `podrun.partition.machines.ray_starts`).

    ``scratch``: as for `HostActor`. Raises NotFoundError that names hosts that are no nodes of the Ray cluster,
    ServiceError if there is no such cluster or a host's actor dies, and DeadlineError if an actor does not start.
    """
    from podrun.partition.machines.ray_session import RaySession
    from podrun.partition.machines.ray_starts import resolve

    try:
        ray = RaySession(resolve(address, environ)).ray
    except ServiceError as error:
        raise NotFoundError(
            f"instances on {', '.join(hosts)} need a Ray cluster, and there is none: {error.message}",
            hint="On this host: ray start --head. On each other one: ray start --address=HOST:6379",
        ) from error
    nodes_of(hosts, ray.nodes())
    ready = start_together(
        [(f"host {host}", partial(_begin_on, ray, host, scratch)) for host in hosts],
        ray,
        timeout=START_SECONDS,
        hint=_LOOK,
    )
    log.debug(f"hosts ready: {', '.join(hosts)}")
    return [RemoteRunner(ray, actor, host, wake, log) for host, (actor, _) in zip(hosts, ready, strict=True)]


def nodes_of(hosts: Sequence[str], nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The node id of each host. Raises NotFoundError that names hosts without a node. ``nodes``: as Ray lists them."""
    alive = [node for node in nodes if node["Alive"]]
    node_ids = {host: str(node["NodeID"]) for host in hosts for node in alive if host in names_of(node)}
    if missing := [host for host in hosts if host not in node_ids]:
        known = sorted({f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in alive})
        raise NotFoundError(
            f"{', '.join(missing)}: no node of the Ray cluster has that name",
            hint=f"Its nodes are: {', '.join(known)}. Add one: ray start --address=HOST:6379 on it.",
        )
    return node_ids


def names_of(node: Mapping[str, Any]) -> set[str]:
    """The names that a user may give a Ray node: its host name (short, too), its address, its Ray name."""
    full = str(node.get("NodeManagerHostname", ""))
    return {
        full,
        full.partition(".")[0],
        str(node.get("NodeManagerAddress", "")),
        str(node.get("NodeName", "")),
    } - {""}


def _begin_on(ray: ModuleType, host: str, scratch: str) -> ActorStart:
    """Have Ray start a host's actor, without waiting. A host whose node ended and came back is another node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id=nodes_of([host], ray.nodes())[host], soft=False)
    actor = ray.remote(HostActor).options(num_cpus=0, scheduling_strategy=strategy).remote(scratch)
    return ActorStart(actor, actor.poll.remote(0.0))
