"""The IPUoF configuration files that programs find in ``~/.ipuof.conf.d``, and when they go.

`vipu create partition` writes one for each GCD. A file says in its attributes whose it is: ``Service`` (the id of the
service: of its state file, or of its process if it has none), ``Partition`` and ``Epoch`` (this life of the partition).
The server removes files of a partition that ends, whoever ended it, writes them anew where its machines listen
elsewhere, and puts them aside while it is stopped. Files without these attributes are a user's own and are left alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.environment import environment
from podrun.partition.host.holders import lives
from podrun.partition.state.values import IpuofConfig, PartitionState

if TYPE_CHECKING:
    from podrun.partition.state.events import StateChange

log = logging.getLogger("podrun.partition")

MOST_BYTES = 16 << 20
"""A file of more bytes is none of podrun's."""


@dataclass(frozen=True, slots=True)
class FileMark:
    """Whose a file is: see the module."""

    service: str
    partition: str
    epoch: str
    gcd: int


def ipuof_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The folder in the user's home."""
    return Path((environ or environment()).get("HOME") or Path.home(), ".ipuof.conf.d")


def read_mark(path: Path) -> FileMark | None:
    """Whose a file is; None for one that no podrun has written, or that cannot be read."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
        attributes = json.loads(text[text.index("{") :])["attributes"]
        service, name, epoch = (attributes[key] for key in ("Service", "Partition", "Epoch"))
        return FileMark(str(service), str(name), str(epoch), int(attributes["GCD Id"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def marked_files(
    directory: Path, partitions: Collection[str] | None = None
) -> Iterator[tuple[Path, FileMark]]:
    """The files of a folder that a podrun has written: all, or those of partitions, which have their names."""
    begins = "" if partitions is None else tuple(f"{name}_" for name in partitions)
    with contextlib.suppress(OSError):
        for path in sorted(path for path in directory.glob("*.conf") if path.name.startswith(begins)):
            mark = read_mark(path)
            if mark is not None and (partitions is None or mark.partition in partitions):
                yield path, mark


def remove_dead(directory: Path) -> None:
    """Remove files of services without a state file whose process is gone: nobody else will."""
    for path, mark in marked_files(directory):
        with contextlib.suppress(
            ValueError, OSError
        ):  # ValueError: the service has a state file, and comes back.
            if lives(mark.service) is False:
                path.unlink(missing_ok=True)


def ipuof_json(config: IpuofConfig) -> dict[str, Any]:
    """An IPUoF configuration in the shape of the files."""
    return {"devices": [asdict(device) for device in config.devices], "attributes": dict(config.attributes)}


def write_config(path: Path, config: IpuofConfig) -> None:
    """Write a file, whole or not at all. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(ipuof_json(config), indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


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
