"""The IPUoF files of a service: written anew, put aside and removed as its partitions come and go."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.partition.host.ipuof_files import FileMark, marked_files, remove_dead, write_config
from podrun.partition.state.values import IpuofConfig, PartitionState

if TYPE_CHECKING:
    from podrun.partition.state.events import StateChange


log = logging.getLogger("podrun.partition")


class IpuofFiles:
    """The files of one service in a folder; None: it has none. ``aside``: the folder for them while the server is
    stopped and its partitions are stored; None: they go with the server. What the file system refuses is logged.
    """

    def __init__(self, directory: Path | None, aside: Path | None, service: str) -> None:
        self._directory, self._aside, self._service = directory, aside, service

    def sweep(self, epochs: Collection[str]) -> None:
        """Remove files of this service's partitions that are none of these lives, and of services that are gone."""
        if self._directory is not None:
            remove_dead(self._directory)
        for path, mark in self._own():
            if mark.epoch not in epochs:
                self._remove(path)

    def follow(self, change: StateChange, config_of: Callable[[str, int], IpuofConfig]) -> None:
        """Remove the files of partitions that end, and write those of partitions that become active anew.
        ``config_of``: the configuration of a partition's GCD.
        """
        if self._directory is None or not change.partitions:
            return
        for path, mark in self._own(change.partitions):
            partition = change.partitions[mark.partition]
            if partition is None or partition.state is PartitionState.REMOVING:
                self._remove(path)
            elif partition.state is PartitionState.ACTIVE and partition.epoch(self._service) == mark.epoch:
                try:
                    write_config(self._directory / path.name, config_of(mark.partition, mark.gcd))
                except OSError as error:
                    log.warning("%s cannot be written: %s", path, error)
                if path.parent == self._aside:
                    self._remove(path)

    def stopped(self) -> None:
        """Put all files aside, or remove them."""
        for path, _ in self._own():
            if path.parent == self._aside:
                continue
            if self._aside is not None:
                with contextlib.suppress(OSError):
                    self._aside.mkdir(mode=0o700, parents=True, exist_ok=True)
                    (self._aside / path.name).write_bytes(path.read_bytes())
            self._remove(path)

    def _own(self, partitions: Collection[str] | None = None) -> list[tuple[Path, FileMark]]:
        folders = [folder for folder in (self._directory, self._aside) if folder is not None]
        there = [entry for folder in folders for entry in marked_files(folder, partitions)]
        return [(path, mark) for path, mark in there if mark.service == self._service]

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", path, error)
        if path.parent == self._aside:
            with contextlib.suppress(OSError):  # It is not empty yet.
                path.parent.rmdir()
