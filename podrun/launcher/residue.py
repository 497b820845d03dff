"""What a launch may leave behind. It is recorded before it exists, so that it is removed whatever happens.

At an orderly end `Residue.end` removes it. After ``kill -9`` instances die with podrun (see ``trampoline``) and a
guardian process ends the rest at once. If the guardian is gone too, the next command cleans up
(``podrun.vipu.discovery``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.launcher.instance_environment import LAUNCH_ID
from podrun.launcher.log import Log
from podrun.vipu.discovery import (
    LAUNCHER,
    ProcessId,
    Publication,
    Registry,
    ServiceEntry,
    remove_scratch,
    scratch_directory,
    this_process,
)
from podrun.vipu.guardian import Guardian, marked_processes

if TYPE_CHECKING:
    from podrun.launcher.partition import PartitionSession


class Residue:
    """Processes and directories of one launch. ``launch_id`` marks its processes' environment."""

    def __init__(self, registry: Registry) -> None:
        owner = this_process()
        self.launch_id = f"{owner.pid}-{owner.start_ticks}"
        self.mark = f"{LAUNCH_ID}={self.launch_id}"
        entry = ServiceEntry(LAUNCHER, "", 0, owner, mark=self.mark)
        self._registry = registry
        self._publication: Publication = registry.publish(entry)
        self._guardian = Guardian()
        self._guardian.watch_mark(self.mark)

    @classmethod
    def begin(cls, log: Log) -> Residue:
        """Remove what earlier launches left, then record this one."""
        registry = Registry()
        for entry in registry.sweep():
            log.info(f"cleared up after process {entry.owner.pid}")
        return cls(registry)

    def publish(self, session: PartitionSession) -> None:
        """Publish which partition the launch uses, and the address of podrun's own service to monitors."""
        if session.own_service and session.address is not None and session.pod is not None:
            entry = dataclasses.replace(
                self._publication.entry,
                host=session.address.host,
                port=session.address.port,
                cluster=session.pod.name,
                partition=session.name,
            )
            self._publication.withdraw()
            self._publication = self._registry.publish(entry)
        else:
            self._publication.update(partition=session.name)

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
