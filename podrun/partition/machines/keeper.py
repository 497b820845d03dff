"""The keeper of a POD: the process that holds a private Ray, and so the machines in it, while servers come and go.

A `vipu-server` that stores its partitions starts a keeper with its first machine, joins the keeper's Ray, and starts
machines there as detached, named actors. If the server is killed, keeper and machines go on; the next server of the
same state finds the keeper in the runtime directory and takes the machines over. A server that is stopped ends the
keeper, which ends Ray and everything in it. If the keeper itself is killed, its guardian does that.

Beside the keeper, each server keeps a list of the machines it has started, whole after every change. The next server
takes the machines over from it: joining Ray takes longer than the rest of a start, and Ray cannot tell which partition
a machine works for while that machine does not answer. A list that is missing or cannot be read only costs time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from podrun.core.documents import parse_json, read_text
from podrun.core.environment import PODRUN_RUNTIME_DIR, environment
from podrun.core.errors import ConfigError, NotFoundError, PodrunError, ServiceError, present
from podrun.core.quick_dataclass import dataclass
from podrun.core.stop_signals import StopRequest
from podrun.partition.host.discovery import POD, Publication, Registry, ServiceEntry, own_process_id

log = logging.getLogger("podrun.partition")

PROTOCOL = 1
"""The agreement of servers and machines about proofs, calls and Ray. It is raised when a server can no longer command
machines that an earlier build started."""
START_SECONDS = 90.0
"""Longest wait for a keeper: Ray may start twice on a busy host."""
END_SECONDS = 30.0
"""Longest wait until a keeper has ended Ray."""


class Keeper:
    """A server's hold on the keeper of a POD. ``pod``: the id of the state whose machines it keeps."""

    def __init__(self, registry: Registry, cluster: str, pod: str) -> None:
        self._registry, self._cluster, self._pod, self._port = registry, cluster, pod, 0
        self._known: ServiceEntry | None = None

    def running(self) -> ServiceEntry | None:
        """The POD's keeper, if one is up. A keeper that never came up is ended, and so is one of another build whose
        machines this one cannot command: nobody else would end them, and they hold memory and IPUs."""
        own = [entry for entry in keepers(self._registry) if entry.pod == self._pod]
        for entry in own:
            if entry.address and entry.protocol == PROTOCOL:
                self._known = entry
                return entry
            if entry.address:
                log.warning(
                    "the machines of %s were started by %s build of podrun, which this one cannot command: they end "
                    "with their keeper (process %d), and the partitions get new ones",
                    *(
                        self._cluster,
                        "an earlier" if entry.protocol < PROTOCOL else "a later",
                        entry.owner.pid,
                    ),
                )
            end_keeper(entry)
        return None

    def ensure(self) -> ServiceEntry:
        """The POD's keeper, started if none runs. Raises ServiceError if Ray does not start."""
        entry = self.running() or self._start()
        self._note_port(entry)
        return entry

    def used_at(self, port: int) -> None:
        """Note the server's port in the keeper's entry, now and when one starts: ``vipu-server stop --port``."""
        self._port = port
        entry = self.running()
        if entry is not None:
            self._note_port(entry)

    def _note_port(self, entry: ServiceEntry) -> None:
        if entry.last_port != self._port:
            path = self._registry.directory / f"{POD}-{entry.owner.pid}-0.json"
            Publication(path, entry).update(last_port=self._port)

    def watch(self, gone: Callable[[], None]) -> None:
        """Call ``gone`` from a thread when the keeper ends. Its Ray ends with it, and Ray then ends the processes that
        use it.
        """
        entry = self.running()
        if entry is None:
            return
        try:
            handle = os.pidfd_open(entry.owner.pid)
        except OSError:
            gone()
            return

        def wait() -> None:
            select.select([handle], [], [])
            os.close(handle)
            gone()

        threading.Thread(target=wait, name="podrun-keeper-watch", daemon=True).start()

    def end(self) -> None:
        """End the keeper and all machines, also when the runtime directory with its entry is gone. Idempotent."""
        own = [entry for entry in keepers(self._registry) if entry.pod == self._pod]
        if self._known is not None and self._known.owner not in [entry.owner for entry in own]:
            own.append(self._known)
        for entry in own:
            end_keeper(entry)

    def _start(self) -> ServiceEntry:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "podrun.partition.machines.keeper",
                "--pod",
                self._pod,
                "--cluster",
                self._cluster,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**environment(), PODRUN_RUNTIME_DIR: str(self._registry.directory)},
        )
        with present(process.stdout, "the keeper's output is a pipe") as answer:
            ready, _, _ = select.select([answer], [], [], START_SECONDS)
            said = answer.readline() if ready else b""
        entry = self.running() if said == b"{}\n" else None
        if entry is not None:
            return entry
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        plain = json.loads(said or b"null") or {"message": "Ray did not start: its keeper does not answer"}
        raise ServiceError(plain["message"], hint=plain.get("hint"))


def keepers(registry: Registry) -> list[ServiceEntry]:
    """Keepers that run for this user on this host."""
    return [entry for entry in registry.entries() if entry.kind == POD]


def end_keeper(entry: ServiceEntry, patience: float = END_SECONDS) -> None:
    """End a keeper and everything in its Ray; kill it if that takes too long (its guardian ends the rest)."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if entry.owner.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.owner.pid, number)
        end = time.monotonic() + patience
        while entry.owner.alive and time.monotonic() < end:
            time.sleep(0.02)


def main() -> int:
    """Keep Ray until SIGTERM. Prints one line of JSON once it is up: an object that is empty, or the error."""
    from podrun.partition.machines.ray_session import RaySession

    parser = argparse.ArgumentParser(description="Keeps the machines of a POD; started by vipu-server.")
    parser.add_argument("--pod", required=True)
    parser.add_argument("--cluster", required=True)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stop = StopRequest()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    entry = ServiceEntry(POD, "", 0, own_process_id(), options.cluster, pod=options.pod, protocol=PROTOCOL)
    published = Registry().publish(entry)
    try:
        session = RaySession()
    except PodrunError as error:
        published.withdraw()
        _say({"message": error.message, "hint": error.hint})
        return 1
    try:
        published.update(
            address=str(session.address),
            token_file=session.token_file,
            processes=session.processes,
            directories=(str(session.directory),),
        )
        _say({})
        stop.wait()
    finally:
        session.close()
        published.withdraw()
    return 0


def _say(answer: dict[str, str | None]) -> None:
    with contextlib.suppress(OSError):  # The server may be gone already.
        print(json.dumps(answer), flush=True)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


if __name__ == "__main__":
    code = main()
    # Everything has ended by now. Ray's exit handler can wait a minute for processes that have ended.
    os._exit(code)


VERSION = 1


@dataclass(frozen=True, slots=True)
class ListedMachine:
    """A machine: its agent, where it listens, the partition that it works for (empty: a spare), the name of the actor
    that runs it, and whether that actor runs no other machine."""

    agent: str
    endpoint: str
    partition: str
    actor: str
    alone: bool


class MachineList:
    """The list of one POD. ``pod``: the id of its state; without an id there is no list."""

    def __init__(self, directory: Path, pod: str) -> None:
        self._path = directory / f"{pod}.machines" if pod else None

    def read(self) -> list[ListedMachine] | None:
        """The machines; None if there is no list that can be read."""
        if self._path is None:
            return None
        try:
            plain = parse_json(read_text(self._path), str(self._path))
            if plain["version"] != VERSION:
                return None
            return [ListedMachine(**entry) for entry in plain["machines"]]
        except NotFoundError:
            return None
        except (ConfigError, KeyError, TypeError) as error:
            log.warning("the list of machines %s cannot be read: %s", self._path, error)
            return None

    def write(self, machines: Iterable[ListedMachine]) -> None:
        """Replace the list. A list that cannot be written is removed, because no list is better than an old one."""
        if self._path is None:
            return
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            plain = {"version": VERSION, "machines": [asdict(machine) for machine in machines]}
            fresh.write_text(json.dumps(plain), encoding="utf-8")
            fresh.replace(self._path)
        except OSError as error:
            log.warning("the list of machines cannot be written: %s", error)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            self.remove()

    def remove(self) -> None:
        """Remove the list. Idempotent."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
