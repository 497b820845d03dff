"""``podrun ps`` and ``podrun stop``: whose run holds which IPUs since when, and how one's own is ended.

A *run* is a launch by ``podrun`` or a partition of a server. Launches of this user publish themselves
(`podrun.partition.host.discovery`); partitions come from every server of this user that runs here, and from the one
that the environment names. `stop_run` ends a launch as Ctrl-C does, and nothing else: a partition without a launch is
removed by ``vipu remove partition``, another user's run by that user.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.core.errors import ConflictError, DeadlineError, DeniedError, NotFoundError, PodrunError, present
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import attached_processes
from podrun.partition.host.discovery import LAUNCHER, ProcessId, Registry, ServiceEntry

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient

TIMEOUT_S = 5.0
PATIENCE_SECONDS = 20.0
"""Time for a launch to end its instances and give its IPUs back."""
LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """One run. ``name``: of its partition, or ``podrun-PID`` for a launch without IPUs. ``ipus`` is 0 there.

    ``since``: seconds since 1970 when it began; None: unknown. ``owner`` is the launch's process, None for a partition
    that no launch of this user goes with. ``held_by``: processes on its IPUs, as ``PID COMMAND``.
    """

    name: str
    user: str
    ipus: int
    state: str
    since: float | None
    program: str
    server: str
    owner: ProcessId | None = None
    held_by: tuple[str, ...] = field(default=())

    @property
    def is_launch(self) -> bool:
        """Whether a launch of this user makes the run: `stop_run` can end it."""
        return self.owner is not None


def all_runs(registry: Registry, servers: Sequence[tuple[str, int, bool]]) -> tuple[list[Run], list[str]]:
    """All runs, oldest first, and the servers that did not answer.

    ``servers``: further servers (host, port, whether it must be this user's own), beside those that the registry knows.
    """
    own = launches(registry)
    addresses = _addresses(registry, servers)
    runs: list[Run] = []
    silent: list[str] = []
    for (host, port), is_own in addresses.items():
        try:
            runs += _of_server(host, port, is_own, own)
        except PodrunError as error:
            silent.append(f"{host}:{port} does not answer: {error.message}")
    seen = {run.name for run in runs}
    runs += [_of_launch(name, entry) for name, entry in own.items() if name not in seen]
    return sorted(runs, key=lambda run: (run.since is None, run.since or 0.0, run.name)), silent


def _addresses(registry: Registry, servers: Sequence[tuple[str, int, bool]]) -> dict[tuple[str, int], bool]:
    """Where servers are to be asked, and whether they must be this user's own."""
    addresses = {(entry.host, entry.port): True for entry in registry.entries() if entry.port}
    for host, port, own in servers:
        addresses.setdefault((host, port), own)
    return addresses


def changes(registry: Registry, servers: Sequence[tuple[str, int, bool]]) -> Iterator[None]:
    """Yields at once, and again after each change that a server tells (`VipuClient.watch`), without end. Servers that
    start later are found by the next change, or within `PATIENCE_SECONDS`."""
    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    followed: set[tuple[str, int]] = set()

    def follow(host: str, port: int, own: bool) -> None:
        from podrun.partition.client.vipu_client import VipuClient

        with contextlib.suppress(PodrunError), VipuClient(host, port, TIMEOUT_S, own=own) as client:
            for change in client.watch(("partition", "machine")):
                if not change.initial:
                    told.put(None)
        followed.discard((host, port))
        told.put(None)

    while True:
        for (host, port), own in _addresses(registry, servers).items():
            if (host, port) not in followed:
                followed.add((host, port))
                threading.Thread(target=follow, args=(host, port, own), daemon=True).start()
        yield None
        with contextlib.suppress(queue.Empty):
            told.get(timeout=PATIENCE_SECONDS)
            while True:  # What has happened at once is told once.
                told.get_nowait()


def launches(registry: Registry) -> dict[str, ServiceEntry]:
    """This user's launches on this host, by name."""
    launchers = (entry for entry in registry.entries() if entry.kind == LAUNCHER)
    return {entry.partition or f"podrun-{entry.owner.pid}": entry for entry in launchers}


def _of_launch(name: str, entry: ServiceEntry) -> Run:
    program, since = program_of_process(entry.owner.pid)
    state = "starting or offline" if not entry.partition else "starting"
    return Run(name, _me(), 0, state, since, program, "", entry.owner)


def _of_server(host: str, port: int, own: bool, launches: Mapping[str, ServiceEntry]) -> Iterator[Run]:
    from podrun.partition.client.vipu_client import VipuClient

    with VipuClient(host, port, TIMEOUT_S, own=own) as client:
        for info in client.list_partitions():
            entry = launches.get(info.name)
            program, since = ("", None) if entry is None else program_of_process(entry.owner.pid)
            holders = _holders(client, info.name)
            yield Run(
                info.name,
                info.owner or _me(),
                info.size,
                info.state.name,
                since or info.created or None,
                program or ", ".join(holders) or "idle",
                f"{host}:{port}",
                None if entry is None else entry.owner,
                holders,
            )
        for waiting in client.list_queue():
            entry = launches.get(waiting.name)
            program = "" if entry is None else program_of_process(entry.owner.pid)[0]
            yield Run(
                waiting.name,
                waiting.owner or _me(),
                waiting.size,
                f"waits, place {waiting.position}",
                waiting.since,
                program,
                f"{host}:{port}",
                None if entry is None else entry.owner,
            )


def _holders(client: VipuClient, partition: str) -> tuple[str, ...]:
    """The processes on a partition's IPUs; none if they are another user's, or the server does not say."""
    with contextlib.suppress(PodrunError):
        held = attached_processes(client.machine_reports(partition))
        by_instance = {(process.host, process.pid): process for process in held.values()}
        known = [process for _, process in sorted(by_instance.items())]
        return tuple(f"{one.pid} {one.command}" if one.pid else "of another user" for one in known)
    return ()


def program_of_process(pid: int) -> tuple[str, float | None]:
    """The program that a launch's process runs, and since when it runs (seconds since 1970)."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        ticks = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()
            if line.startswith("btime ")
        )
    except (OSError, ValueError, StopIteration, IndexError):
        return "", None
    while words and Path(words[0]).name.startswith("python"):
        words.pop(0)
    words = [Path(words[0]).name, *words[1:]] if words else []
    return " ".join(word for word in words if word), boot + ticks / os.sysconf("SC_CLK_TCK")


def _me() -> str:
    from podrun.core.identity import user_name

    return user_name(os.getuid())


def find_run(runs: Sequence[Run], name: str) -> Run:
    """The run of that name (or process number) that `stop_run` may end.

    Raises NotFoundError if there is none, ConflictError for a partition without a launch, DeniedError for another
    user's run.
    """
    for run in runs:
        if name not in (run.name, str(run.owner.pid) if run.owner else ""):
            continue
        if run.is_launch:
            return run
        if run.user != _me():
            raise DeniedError(
                f"{name} belongs to {run.user}",
                hint=f"Ask {run.user} to end it, or wait until its IPUs are free: podrun --wait yes waits.",
            )
        raise ConflictError(
            f"{name} is a partition, which stays until it is removed",
            hint=f"To give its IPUs back: vipu remove partition {name}",
        )
    own = [run.name for run in runs if run.is_launch]
    raise NotFoundError(
        f"no run of yours is called {name!r}",
        hint=f"Yours: {', '.join(own)}." if own else "None of yours is running: podrun ps shows all.",
    )


def stop_run(
    run: Run,
    *,
    force: bool = False,
    patience: float = PATIENCE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    kill: Callable[[int, int], None] = os.kill,
) -> str:
    """End a launch by SIGTERM, on which it clears up as on Ctrl-C, and wait for its end. Returns how it ended, in
    words.

    ``force``: kill it if it has not ended after ``patience`` seconds; its instances and machines end with it. Raises
    DeadlineError otherwise.
    """
    owner = present(run.owner, "only launches are stopped")
    _signal(owner, signal.SIGTERM, kill)
    if _ended(owner, patience, sleep, clock):
        return "ended"
    if not force:
        raise DeadlineError(
            f"{run.name} (process {owner.pid}) has not ended within {patience:.0f} s",
            hint=f"Wait, or kill it: podrun stop {run.name} --force",
        )
    _signal(owner, signal.SIGKILL, kill)
    if not _ended(owner, patience, sleep, clock):
        raise DeadlineError(
            f"{run.name} (process {owner.pid}) was killed and is still there",
            hint=f"See what holds it: cat /proc/{owner.pid}/stack",
        )
    return "killed"


def _signal(process: ProcessId, number: int, kill: Callable[[int, int], None]) -> None:
    """Send a signal only if the process is still the same, because another process may have its number by now."""
    if process.alive:
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, number)


def _ended(
    process: ProcessId, seconds: float, sleep: Callable[[float], None], clock: Callable[[], float]
) -> bool:
    deadline = clock() + seconds
    while process.alive:
        if clock() >= deadline:
            return False
        sleep(LOOK_SECONDS)
    return True
