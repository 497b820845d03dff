"""Instances as child processes of one host. Used by the launcher for its own host and by `remote` on others.

Each instance leads a process group of its own, dies with the process that runs this (see `podrun.core.trampoline`), and
is known by its index. Nothing here prints: what happens comes out of `ProcessRunner.poll` as events.

`LaunchResources` is what a launch may leave behind. It is recorded before it exists, so that it is removed whatever
happens: `LaunchResources.end` removes it at an orderly end; after ``kill -9`` instances die with podrun and a guardian
process ends the rest at once; if the guardian is gone too, the next command cleans up
(`podrun.partition.host.discovery`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from podrun.core.environment import PODRUN_LAUNCH_ID
from podrun.core.errors import present
from podrun.core.quick_dataclass import dataclass
from podrun.core.trampoline import tied_words
from podrun.launcher.output import OutputChannel
from podrun.launcher.own_streams import Log
from podrun.partition.host.discovery import (
    LAUNCHER,
    ProcessId,
    Publication,
    Registry,
    ServiceEntry,
    own_process_id,
    remove_scratch,
    scratch_directory,
)
from podrun.partition.host.guardian import Guardian, marked_processes

if TYPE_CHECKING:
    from podrun.launcher.partition import LaunchPartition

CHUNK_BYTES = 1 << 16
LINGER_SECONDS = 0.5
"""Seconds to wait for output after an instance has ended, if one of its child processes still holds the pipe."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Event: an instance printed something."""

    instance: int
    channel: OutputChannel
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """An instance ended; all it printed has been reported. ``code``: exit code, or 128 + signal number."""

    instance: int
    code: int
    signal: int | None = None

    @property
    def in_words(self) -> str:
        """How the instance ended, in words."""
        if self.signal is None:
            return f"exit code {self.code}"
        return f"signal {signal.Signals(self.signal).name} (exit code {self.code})"


InstanceEvent = Printed | Ended


@dataclass(frozen=True, slots=True)
class Command:
    """What to run for one instance."""

    instance: int
    words: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    stdin: int | None = None
    """The file descriptor of its standard input; None: it has no input."""


@dataclass(slots=True)
class _Child:
    instance: int
    process: subprocess.Popen[bytes]
    pidfd: int
    open_channels: set[OutputChannel] = field(default_factory=lambda: set(OutputChannel))
    status: tuple[int, int | None] | None = None
    ended_at: float = 0.0
    reported: bool = False

    def pipe(self, channel: OutputChannel) -> IO[bytes]:
        """The end of the channel that is read here."""
        pipe = self.process.stdout if channel is OutputChannel.STDOUT else self.process.stderr
        return present(pipe, "an instance's output is a pipe")


class ProcessRunner:
    """Starts processes, reports what they print and how they end, signals their groups. Use from one thread,
    which must outlive the processes; `wake` may be called from any."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)

    def start(self, command: Command) -> int:
        """Start an instance; returns its process id. Raises OSError if its directory does not exist."""
        process = subprocess.Popen(
            tied_words(list(command.words)),
            cwd=command.directory,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL if command.stdin is None else command.stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        child = _Child(command.instance, process, os.pidfd_open(process.pid))
        self._children[command.instance] = child
        for channel in (OutputChannel.STDOUT, OutputChannel.STDERR):
            pipe = child.pipe(channel)
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (child, channel))
        self._selector.register(child.pidfd, selectors.EVENT_READ, (child, None))
        return process.pid

    def poll(self, timeout: float) -> list[InstanceEvent]:
        """Wait at most ``timeout`` seconds for events; returns them in order for each instance."""
        lingering = any(child.status and not child.reported for child in self._children.values())
        events: list[InstanceEvent] = []
        for key, _ in self._selector.select(min(timeout, 0.05) if lingering else timeout):
            if key.data is None:
                self._drain_wake()
                continue
            child, channel = key.data
            if channel is None:
                self._note_end(child)
            else:
                events += self._read(child, channel)
        for child in self._children.values():
            events += self._report_end(child)
        return events

    def running(self) -> list[int]:
        """Instances that have not been reported as ended."""
        return [index for index, child in self._children.items() if not child.reported]

    def signal(self, number: int, instances: Sequence[int] | None = None) -> None:
        """Send a signal to the process groups of instances (default: all), whether or not their leader has ended."""
        for index, child in self._children.items():
            if instances is None or index in instances:
                # The leader has not been reaped (see `_note_end`), so the number still names this group.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.process.pid, number)

    def wake(self) -> None:
        """End a `poll` that waits. No-op after `close`."""
        if self._wake_write >= 0:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"x")

    def close(self) -> None:
        """Kill what is left of every group and let go of everything."""
        self.signal(signal.SIGKILL)
        for child in self._children.values():
            for channel in list(child.open_channels):
                self._close_channel(child, channel)
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.pidfd)
            child.process.wait()
            os.close(child.pidfd)
        self._children = {}
        self._selector.close()
        os.close(self._wake_read)
        # A signal handler may call this at any moment, also when the number already names another file.
        wake, self._wake_write = self._wake_write, -1
        os.close(wake)

    # --- inside -----------------------------------------------------------------------------------------------

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 512):
                pass

    def _read(self, child: _Child, channel: OutputChannel) -> list[InstanceEvent]:
        pipe = child.pipe(channel)
        try:
            data = os.read(pipe.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return []
        if data:
            return [Printed(child.instance, channel, data)]
        self._close_channel(child, channel)
        return []

    def _close_channel(self, child: _Child, channel: OutputChannel) -> None:
        if channel not in child.open_channels:
            return
        child.open_channels.discard(channel)
        pipe = child.pipe(channel)
        self._selector.unregister(pipe)
        pipe.close()

    def _note_end(self, child: _Child) -> None:
        """See how the leader ended without reaping it: as long as it is a zombie, its group's number is not reused."""
        result = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if result is None:
            return
        killed = result.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        child.status = (128 + result.si_status, result.si_status) if killed else (result.si_status, None)
        child.ended_at = time.monotonic()
        self._selector.unregister(child.pidfd)

    def _report_end(self, child: _Child) -> list[InstanceEvent]:
        if child.status is None or child.reported:
            return []
        if child.open_channels and time.monotonic() - child.ended_at < LINGER_SECONDS:
            return []
        for channel in list(child.open_channels):
            self._close_channel(child, channel)
        child.reported = True
        code, number = child.status
        return [Ended(child.instance, code, number)]


class LaunchResources:
    """The processes and directories of one launch. ``launch_id`` marks the environment of its processes."""

    def __init__(self, registry: Registry) -> None:
        owner = own_process_id()
        self.launch_id = f"{owner.pid}-{owner.start_ticks}"
        self.mark = f"{PODRUN_LAUNCH_ID}={self.launch_id}"
        entry = ServiceEntry(LAUNCHER, "", 0, owner, mark=self.mark)
        self._registry = registry
        self._publication: Publication = registry.publish(entry)
        self._guardian = Guardian()
        self._guardian.watch_mark(self.mark)

    @classmethod
    def begin(cls, log: Log) -> LaunchResources:
        """Remove what earlier launches left, then record this one."""
        registry = Registry()
        for entry in registry.sweep():
            log.info(f"cleared up after process {entry.owner.pid}")
        return cls(registry)

    def publish(self, partition: LaunchPartition) -> None:
        """Publish which partition the launch uses, and for monitors the address of podrun's own service."""
        server = partition.server
        if server.own and server.address is not None and server.pod is not None:
            entry = dataclasses.replace(
                self._publication.entry,
                host=server.address.host,
                port=server.address.port,
                cluster=server.pod.name,
                partition=partition.name,
            )
            self._publication.withdraw()
            self._publication = self._registry.publish(entry)
        else:
            self._publication.update(partition=partition.name)

    def cache_directory(self) -> str:
        """A new directory for compiled programs, removed at the end of the launch."""

        def announce(path: str) -> None:
            self._guardian.watch_directory(path)
            self._publication.update(directories=(*self._publication.entry.directories, path))

        return str(scratch_directory(announce))

    def watch(self, pid: int) -> None:
        """Record an instance that was started."""
        process = ProcessId.of(pid)
        if process is not None:
            self._guardian.watch_process(process.pid, process.start_ticks)
            self._publication.update(processes=(*self._publication.entry.processes, process))

    def end(self) -> None:
        """Remove everything. Processes of the launch that escaped their group are killed."""
        for process in marked_processes(self.mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        for directory in self._publication.entry.directories:
            remove_scratch(Path(directory))
        self._publication.withdraw()
        self._guardian.dismiss()
