"""The models of a repository and their versions, as TensorFlow Serving keeps them: the newest version of each serves.

`ServedVersions.look` compares the repository with what is loaded: a newer version is loaded first and then takes the
place of the older one, which answers what it has taken and gives its IPUs back. A version that cannot be loaded is
told with its reason; the one before goes on. Nothing is read again before a file of it changes.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from podrun.core.errors import NotFoundError, PodrunError, ServiceError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.loaded_model import DataDescription
from podrun.serving.model_folder import MODEL_FILE, NAMES_FILE, versions_of
from podrun.serving.repository import check_repository
from podrun.serving.runtime.requests import QueuedRequest

log = logging.getLogger("podrun.serving")


class VersionState(enum.IntEnum):
    """What a version is doing; the values are the protocol's."""

    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


class ServableRunner(Protocol):
    """A version on IPUs: `podrun.serving.tfserving.answers.VersionOnIpus`, or what a test puts in its place."""

    inputs: dict[str, DataDescription]
    outputs: dict[str, DataDescription]

    def enqueue(
        self, inputs: Mapping[str, np.ndarray], wanted: Iterable[str], label: str = ""
    ) -> QueuedRequest: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class ModelVersion:
    """A version of a model. ``files``: names, sizes and times of what was read; ``error``: why it is not served."""

    model: str
    number: int
    state: VersionState
    files: tuple[tuple[str, int, int], ...]
    runner: ServableRunner | None = None
    error: PodrunError | None = None


class ServedVersions:
    """The models of a repository and their versions, of which the newest serve. ``load``: makes a version's folder a
    runner, or raises why not. Thread-safe.
    """

    def __init__(self, repository: Path, load: Callable[[str, Path], ServableRunner]) -> None:
        self._repository, self._load = repository, load
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._versions: dict[str, dict[int, ModelVersion]] = {}

    def look(self) -> None:
        """Load what is new, and unload what a newer version has replaced or whose folder is gone."""
        with self._looking:
            there = {folder.name: versions_of(folder) for folder in check_repository(self._repository)}
            for name, folders in there.items():
                for number in sorted(folders, reverse=True):
                    if self._serves(name, number, folders[number]):
                        self._retire(name, [held for held in self._versions[name] if held < number])
                        break
            for name in list(self._versions):
                folders = there.get(name, {})
                self._retire(name, [held for held in self._versions[name] if held not in folders])

    def version(self, model: str, number: int | None = None) -> ModelVersion:
        """A version that serves: of that number, or the newest. NotFoundError if there is none, ServiceError for one
        that is not ready.
        """
        with self._lock:
            held = self._versions.get(model, {})
            ready = [v for v in held.values() if v.state is VersionState.AVAILABLE]
            wanted = [v for v in ready if number in (None, v.number)]
            if wanted:
                return max(wanted, key=lambda v: v.number)
            asked = f"{model} version {number}" if number is not None else model
            if not held or (number is not None and number not in held):
                raise NotFoundError(
                    f"Servable not found for request: {asked}",
                    hint=f"The models are {', '.join(sorted(self._versions)) or 'none'}.",
                )
            reasons = [v.error.message for v in held.values() if v.error is not None]
            raise ServiceError(f"{asked} is not ready{': ' if reasons else ''}{'; '.join(reasons)}")

    def statuses(self, model: str, number: int | None = None) -> list[ModelVersion]:
        """The versions of a model, newest first. NotFoundError if there is none."""
        with self._lock:
            held = [v for v in self._versions.get(model, {}).values() if number in (None, v.number)]
        if not held:
            raise NotFoundError(f"Could not find any versions of model {model}")
        return sorted(held, key=lambda v: -v.number)

    def close(self) -> None:
        """Unload all versions of all models."""
        with self._looking:
            for name in list(self._versions):
                self._retire(name, list(self._versions[name]))

    def _serves(self, name: str, number: int, folder: Path) -> bool:
        """True iff a version is loaded, after an attempt unless its files failed before."""
        files = _files(folder)
        held = self._versions.get(name, {}).get(number)
        if held is not None and (held.state is VersionState.AVAILABLE or held.files == files):
            return held.state is VersionState.AVAILABLE
        version = ModelVersion(name, number, VersionState.LOADING, files)
        with self._lock:
            self._versions.setdefault(name, {})[number] = version
        try:
            version.runner = self._load(name, folder)
        except PodrunError as error:
            version.error, version.state = error, VersionState.END
            log.warning("model %s version %d cannot be served: %s", name, number, error.message)
            return False
        version.state = VersionState.AVAILABLE
        log.info("model %s version %d is on its IPUs", name, number)
        return True

    def _retire(self, name: str, numbers: Sequence[int]) -> None:
        with self._lock:
            versions = [self._versions[name][number] for number in numbers]
            for version in versions:
                version.state = VersionState.UNLOADING
        for version in versions:
            if version.runner is not None:
                version.runner.close()
        with self._lock:
            for version in versions:
                self._versions[name].pop(version.number, None)
            if name in self._versions and not self._versions[name]:
                del self._versions[name]


def _files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What tells one state of a version's folder from another."""
    facts = []
    for path in sorted([folder / MODEL_FILE, folder / NAMES_FILE, *folder.glob("*.onnx")]):
        try:
            stat = path.stat()
        except OSError:
            continue
        facts.append((path.name, stat.st_size, stat.st_mtime_ns))
    return tuple(facts)
