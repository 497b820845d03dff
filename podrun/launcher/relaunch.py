"""A recorded launch that starts again, as ``podrun replay`` and ``podrun shrink`` do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from podrun.core.environment import PODRUN_FAULTS
from podrun.core.errors import NotFoundError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.record.events import LaunchHeader, Record

StartWords = Callable[[Sequence[str], Mapping[str, str], str], int]
"""Carries out the words after ``podrun`` with an environment in a folder; the exit code."""
DIFFERENT = 1
"""Exit code of a replay that went differently, and of records that differ."""


@dataclass(frozen=True, slots=True)
class Relaunch:
    """How a recorded launch starts again: with which command, environment and folder (None: its own)."""

    start: StartWords
    environ: Mapping[str, str]
    directory: str | None = None
    each_in_a_new_folder: bool = False
    """Each launch gets a new folder in ``directory``."""
    on_a_fresh_partition: bool = False
    """Each launch resets the partition that it finds: what an earlier one broke must not count against this one."""

    def launch(self, record: Record, faults: Sequence[str], place: Path) -> int:
        """Launch what was recorded with these faults, and record it to ``place``. Raises NotFoundError, UsageError."""
        folder = self._own_folder() if self.directory is not None else record.header.directory
        if not os.path.isdir(folder):
            raise NotFoundError(
                f"the launch was recorded in {folder}, which does not exist",
                hint="Name a folder: --directory DIR",
            )
        words = [
            f"--record={place.absolute()}",
            *(f"--fault={text}" for text in faults),
            *words_in(record.header, folder),
        ]
        if self.on_a_fresh_partition:
            words = fresh_partition(words)
        bare = {name: value for name, value in self.environ.items() if name != PODRUN_FAULTS}
        sys.stdout.flush()
        return self.start(words, bare, folder)

    def _own_folder(self) -> str:
        """The folder that was named, which is made if it is not there, or a new one in it."""
        folder = str(self.directory)
        try:
            os.makedirs(folder, exist_ok=True)
            return tempfile.mkdtemp(prefix="launch-", dir=folder) if self.each_in_a_new_folder else folder
        except OSError as error:
            raise UsageError(
                f"--directory {folder} is no folder to launch in: {error.strerror}",
                hint="Name one where you may write.",
            ) from error


def words_in(header: LaunchHeader, folder: str) -> list[str]:
    """The recorded words for a launch in a folder: files that the launch found in its own folder by relative paths, and
    that are not in this one, get absolute paths.
    """
    if os.path.abspath(folder) == os.path.abspath(header.directory):
        return list(header.words)

    def placed(path: str) -> str:
        there = os.path.join(header.directory, path)
        only_there = (
            not os.path.isabs(path)
            and os.path.isfile(there)
            and not os.path.exists(os.path.join(folder, path))
        )
        return there if only_there else path

    words, script = [], False
    for word in header.words:
        name, equals, value = word.partition("=")
        if script or not word.startswith("--") or not equals:
            words.append(placed(word) if script else word)
        else:
            words.append(f"{name}={placed(value)}")
        script = script or word == "--"
    return words


def fresh_partition(words: Sequence[str]) -> list[str]:
    """The words of a launch that resets the partition it finds."""
    kept = [word for word in words if not word.startswith("--reset-partition")]
    return ["--reset-partition=yes", *kept]


def start_podrun(words: Sequence[str], environ: Mapping[str, str], folder: str) -> int:
    """`StartWords` in a new process."""
    command = [sys.executable, "-m", "podrun.launcher.cli", *words]
    return subprocess.run(command, env=dict(environ), cwd=folder, check=False).returncode


@contextlib.contextmanager
def new_record(keep: str | None) -> Iterator[Path]:
    """The file for the record of a launch that starts again: ``keep``, or one that is removed afterwards."""
    if keep is not None:
        yield Path(keep).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="podrun-replay-") as folder:
        yield Path(folder, "record")
