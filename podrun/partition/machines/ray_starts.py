"""Where and how processes of machines start: hosts, memory, addresses of Ray clusters, actors. Ray is not imported.

Over several hosts, agents go in blocks in the POD's order to hosts in the order of their addresses: whole IPU-Link
domains if there are at least as many domains as hosts, else equal shares of the machines. Free memory is what the
kernel says is available, or what a control group (version 1 or 2) leaves, whose page cache counts as free. The
address ``auto`` is $RAY_ADDRESS, else the cluster of the last ``ray start`` on this host; Ray's own ``auto`` also
takes any Ray among the host's processes: another program's, a container's, or a private one of podrun's.

Actors start together, all or none. An actor whose process died before it ran is started once more.

A busy cluster sometimes loses a worker process before its actor runs (in one of three runs on two hosts), and goes on
placing actors for seconds on a node that is gone. None of podrun's code has run by then, so a second attempt is safe.
An actor that ran and failed is not started again: it would fail again and hide the first error.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from podrun.core.cluster import Cluster
from podrun.core.environment import PODRUN_MACHINES_PER_PROCESS
from podrun.core.errors import DeadlineError, PodrunError, ServiceError, UsageError
from podrun.core.identity import connect_tcp
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import report_step

if TYPE_CHECKING:
    from ray.actor import ActorHandle

log = logging.getLogger("podrun.partition")

_NEVER_RAN = "The actor never ran"
_EXIT = re.compile(
    r"Worker exit type: (?P<type>\w+) Worker exit detail: (?P<detail>.*?)(?: Some common causes|\n|$)"
)
_NODE_DIED = re.compile(r"its node has died\. Node Id: (?P<id>\w{8})\w*\n\s*(?P<detail>.*)")
_NODE = re.compile(r"^\s*ip: (?P<ip>\S+)$", re.MULTILINE)
_NOT_BY_ITS_CODE = ("SYSTEM_ERROR", "INTENDED_SYSTEM_EXIT")
"""Ray's words for processes that ended for reasons other than the actor's code: broken connections, workers it took for
idle.
"""
_POLL_SECONDS = 0.2
_MEMORY_USE = re.compile(r"IP: (?P<ip>[^,)\s]+).*? was (?P<used>\S+) used / (?P<limit>\S+) limit", re.DOTALL)
_MORE_MEMORY = "free memory there, or start that Ray with RAY_memory_monitor_refresh_ms=0"
WHY_SECONDS = 5.0
"""Longest wait for Ray's answer why an actor ended."""


class RayCalls(Protocol):
    """The calls of Ray that this module uses."""

    exceptions: ModuleType

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """References whose values have arrived, and the others."""

    def get(self, ref: object) -> Any:
        """The value of a reference; raises its error."""

    def kill(self, actor: object) -> None:
        """End an actor."""


@dataclass(frozen=True, slots=True)
class ActorStart:
    """An actor that is starting. ``reply``: Ray's reference to its first answer."""

    actor: ActorHandle
    reply: object


@dataclass(frozen=True, slots=True)
class ActorDeath:
    """A process that ended before its actor ran. ``node``: its address, if Ray names it."""

    node: str
    reason: str


def death_before_running(said: str) -> ActorDeath | None:
    """Parse Ray's message about a dead actor; None unless its process ended before the actor's code ran. An error in
    that code, or a shortage that Ray names, gives None."""
    if _NEVER_RAN not in said:
        return None
    if lost := _NODE_DIED.search(said):
        return ActorDeath(f"node {lost['id']}", lost["detail"])
    exit_ = _EXIT.search(said)
    if exit_ is None or exit_["type"] not in _NOT_BY_ITS_CODE:
        return None
    node = _NODE.search(said)
    return ActorDeath(node["ip"] if node else "a node that Ray does not name", exit_["detail"].rstrip("."))


def death_of_memory(ray: ModuleType, actor: ActorHandle) -> str:
    """Ask Ray whether its memory monitor ended a machine's actor: a phrase that says so, or an empty text."""
    try:
        ray.get(actor.endpoints.remote(), timeout=WHY_SECONDS)
    except ray.exceptions.OutOfMemoryError as error:
        return f"{_ended_by_monitor(error)} ({_MORE_MEMORY})"
    except ray.exceptions.RayError:
        pass
    return ""


def _ended_by_monitor(error: Exception) -> str:
    """What Ray's OutOfMemoryError says, as a phrase; Ray itself says it in 40 lines."""
    use = _MEMORY_USE.search(str(error))
    full = f" when {use['used']} of {use['limit']} were used on {use['ip']}" if use else ""
    return f"Ray's memory monitor ended its process{full}"


def start_together(
    begin: Sequence[tuple[str, Callable[[], ActorStart]]],
    ray: RayCalls,
    *,
    timeout: float,
    hint: str,
    check_wanted: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[Any, Any]]:
    """Start actors and wait for their first answers; returns actor and answer of each.

    ``begin``: the name of each in messages, and the function that starts it. ``check_wanted`` raises ServiceError if
    the result is no longer wanted. If one fails, all are ended and ``hint`` comes with the error: DeadlineError after
    ``timeout`` seconds, else ServiceError.
    """
    starts = [start() for _, start in begin]
    end = clock() + timeout

    def wait() -> None:
        while True:
            check_wanted()
            replies = [start.reply for start in starts]
            _, waiting = ray.wait(replies, num_returns=len(replies), timeout=_POLL_SECONDS)
            report_step("machine processes up", len(replies) - len(waiting), len(replies))
            if not waiting:
                return
            if clock() >= end:
                late = ", ".join(
                    name for (name, _), reply in zip(begin, replies, strict=True) if reply in waiting
                )
                raise DeadlineError(f"not up after {timeout:g} s: {late}", hint=hint)

    try:
        wait()
        for i, (name, again) in enumerate(begin):
            death = _death(starts[i], ray)
            if death is not None:
                log.warning(
                    "the process of %s on %s ended before it ran (%s); starting it once more",
                    *(name, death.node, death.reason),
                )
                starts[i] = again()
        wait()
        named = zip(begin, starts, strict=True)
        return [(start.actor, _answer(name, start, ray, hint)) for (name, _), start in named]
    except PodrunError:
        for start in starts:
            ray.kill(start.actor)
        raise


def _death(start: ActorStart, ray: RayCalls) -> ActorDeath | None:
    try:
        ray.get(start.reply)
    except ray.exceptions.RayError as error:
        return death_before_running(str(error))
    return None


def _answer(name: str, start: ActorStart, ray: RayCalls, hint: str) -> Any:
    try:
        return ray.get(start.reply)
    except ray.exceptions.OutOfMemoryError as error:
        raise ServiceError(
            f"{name} did not start: {_ended_by_monitor(error)}",
            hint=f"{_MORE_MEMORY[0].upper()}{_MORE_MEMORY[1:]}.",
        ) from error
    except ray.exceptions.RayError as error:
        death = death_before_running(str(error))
        why = (
            f"its process on {death.node} ended twice before it ran ({death.reason})" if death else str(error)
        )
        raise ServiceError(f"{name} did not start: {why}", hint=hint) from error


MACHINE_BYTES = 220 << 20
"""Memory of a machine's process without a program: Python, Ray's worker, gRPC, JAX. Measured with
`benchmarks/weak_scaling.py`."""
PROCESSES_PER_CORE = 2
"""Up to this many machines a core have a process each, so that what kills one leaves the others. More of them share one
process for each core and compute in turn: they start sooner, take less memory and run faster."""
MOST_TOGETHER = 32
"""Largest number of machines in a process: each has threads for its server and its sessions."""
MEMORY_SHARE = 0.5
"""Share of a host's free memory for the processes of machines; the rest is for programs."""


@dataclass(frozen=True, slots=True)
class Host:
    """A node of the Ray cluster: its id there, its address, its cores, and its free memory in bytes."""

    node: str
    address: str
    cores: int
    memory: int


def host_of_agents(cluster: Cluster, hosts: Sequence[Host]) -> dict[str, Host]:
    """A host for each agent of the POD; see the module docstring."""
    ordered = sorted(hosts, key=lambda host: _sortable(host.address))
    domains = [ild.agents for part in cluster.clusters for ild in part.ilds]
    alone = [(agent,) for agent in cluster.agents if agent.id not in cluster.clusters_by_agent]
    blocks: list[tuple[str, ...]] = [tuple(agent.id for agent in agents) for agents in (*domains, *alone)]
    if len(blocks) < len(ordered):
        blocks = [(agent,) for block in blocks for agent in block]
    return {
        agent: ordered[index * len(ordered) // len(blocks)]
        for index, block in enumerate(blocks)
        for agent in block
    }


def own_machines_per_process(environ: Mapping[str, str]) -> int | None:
    """The user's number of machines in a process; None if they leave it to podrun. Raises UsageError."""
    text = environ.get(PODRUN_MACHINES_PER_PROCESS, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 2 or not 1 <= int(text) <= 64:
        raise UsageError(
            f"{PODRUN_MACHINES_PER_PROCESS} is {text!r}; it can be 1 to 64", hint="Unset it, or correct it."
        )
    return int(text)


def machines_per_process(machines: int, cores: int, memory: int, own: int | None = None) -> int:
    """How many of a host's ``machines`` share a process: 1 if the host has room for a process each, else the least
    power of two that leaves at most one process for each core, or fewer if memory is short. ``own``: the number of
    `own_machines_per_process`."""
    if own is not None:
        return own
    room = max(int(memory * MEMORY_SHARE) // MACHINE_BYTES, 1)
    if machines <= min(PROCESSES_PER_CORE * cores, room):
        return 1
    together = 1
    while -(-machines // together) > max(min(cores, room), 1) and together < MOST_TOGETHER:
        together *= 2
    return together


def in_processes(
    agents: Sequence[str], host_of: dict[str, Host], most_on: dict[Host, int]
) -> list[list[str]]:
    """Agents by process, in the order given. A process holds agents of one host, each at most once."""
    groups: list[list[str]] = []
    open_group: dict[Host, list[str]] = {}
    for agent in agents:
        host = host_of[agent]
        group = open_group.get(host)
        if group is None or len(group) >= most_on[host] or agent in group:
            group = open_group[host] = []
            groups.append(group)
        group.append(agent)
    return groups


def _sortable(address: str) -> tuple[int, ...] | tuple[str]:
    parts = address.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (address,)


_FILES = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""For each version: controller in /proc/self/cgroup, mount point, files with limit and use, and the name of the page
cache in the statistics."""


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can take before the host swaps. ``root``: the directory of ``proc`` and ``sys``."""
    import psutil

    return min([psutil.virtual_memory().available, *_left(root)])


def _left(root: Path) -> Iterator[int]:
    """Bytes that each limited control group of this process has left."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller, mount, limit, used, cached in _FILES:
            if controller not in controllers.split(","):
                continue
            # In a container the path may be the host's, while the mount shows the container's own group as its root.
            own = root / mount / path.lstrip("/")
            for group in (own, *own.parents):
                limited, use = _text(group / limit).strip(), _text(group / used).strip()
                if limited.isdecimal() and use.isdecimal():
                    yield max(0, int(limited) - int(use) + _statistic(group / "memory.stat", cached))
                if group == root / mount:
                    break


def _statistic(file: Path, name: str) -> int:
    fields = (line.split() for line in _text(file).splitlines())
    return next((int(words[1]) for words in fields if words[0] == name), 0)


def _text(file: Path) -> str:
    """A file's text; empty if it cannot be read: an unknown limit counts as none."""
    try:
        return file.read_text()
    except OSError:
        return ""


AUTO = "auto"
HEAD_SECONDS = 10.0
"""Longest wait until what listens at an address has answered as the head of a Ray cluster."""
CONNECT_SECONDS = 5.0
_HOST_PORT = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


def check_form(address: str, option: str = "--ray-address") -> None:
    """Raises UsageError unless it is ``HOST:PORT`` or ``auto``."""
    if address == AUTO:
        return
    match = _HOST_PORT.fullmatch(address)
    if match is not None and 1 <= int(match["port"]) <= 65535:
        return
    hint = f"As in {option} 10.0.0.1:6379: what ray start --head prints."
    if address.startswith("ray://"):
        hint = f"ray:// is Ray's client server. Machines want the cluster itself: {hint}"
    raise UsageError(f"{option} {address} is no address of a Ray cluster", hint=hint)


def resolve(address: str, environ: Mapping[str, str]) -> str:
    """``HOST:PORT`` of a cluster that accepts connections.

    Raises UsageError for a malformed address, ServiceError if no cluster is known or none answers.
    """
    check_form(address)
    if address == AUTO:
        address = environ.get("RAY_ADDRESS") or AUTO
        check_form(address, "RAY_ADDRESS")
    if address == AUTO:
        address = _last_started()
    match = _HOST_PORT.fullmatch(address)
    host, port = (match["six"] or match["host"], int(match["port"])) if match else (address, 0)
    try:
        connect_tcp(host, port, CONNECT_SECONDS).close()
    except OSError as error:
        raise ServiceError(
            f"no Ray cluster: nobody answers at {address} ({error.strerror or error})",
            hint="Start one there (ray start --head), or name another: --ray-address HOST:PORT",
        ) from error
    check_head(address)
    return address


def check_head(address: str, seconds: float = HEAD_SECONDS) -> None:
    """Raise ServiceError unless the head of a Ray cluster answers there: Ray would wait for it without an end."""
    from podrun.private_apis.ray import head_at

    instead = head_at(address, seconds)
    if instead:
        raise ServiceError(
            f"no Ray cluster: what listens at {address} {instead}",
            hint="Start one (ray start --head says its address), and name it: --ray-address HOST:PORT",
        )


def _last_started() -> str:
    """Address of the cluster that the last ``ray start`` on this host belongs to."""
    from podrun.private_apis.ray import last_started_address

    address = last_started_address()
    if not address:
        raise ServiceError(
            "no Ray cluster: RAY_ADDRESS is not set, and this host belongs to none",
            hint="Start one (ray start --head), or name one: --ray-address HOST:PORT",
        )
    return address
