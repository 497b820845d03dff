"""Recordings of what a monitor saw: one JSON object a line in a gzip file, first a header with the version.

A recording that was cut short (a full disk, a kill) is read up to the last whole line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from podrun.core.errors import ConfigError, NotFoundError
from podrun.core.quick_dataclass import dataclass
from podrun.monitor.live.sighting import PodSighting, sighting_from_plain

VERSION = 1
HEADER = "podrun_recording"
LONGEST_LINE = 64 * 2**20
"""Bytes of a sighting at most: a POD of 65,536 IPUs takes 20 MB."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The sightings in order of time. ``whole``: False if the end of the file is missing or damaged."""

    sightings: tuple[PodSighting, ...]
    whole: bool

    def at(self, time_s: float) -> int:
        """The index of the last sighting not after ``time_s``; 0 before the first."""
        later = (i for i, seen in enumerate(self.sightings) if seen.time_s > time_s)
        return max(next(later, len(self.sightings)) - 1, 0)


class RecordingWriter:
    """Appends sightings to a new file; each is on the disk when `add` returns."""

    def __init__(self, file: Path) -> None:
        self._raw: IO[bytes] = file.open("xb")
        self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", mtime=0)
        self._write({HEADER: VERSION})

    def add(self, seen: PodSighting) -> None:
        """Append one. Raises OSError as writing does."""
        self._write(seen.plain())

    def _write(self, plain: dict[str, object]) -> None:
        self._file.write(json.dumps(plain, separators=(",", ":")).encode() + b"\n")
        self._file.flush(zlib.Z_SYNC_FLUSH)
        self._raw.flush()

    def close(self) -> None:
        """Finish the file. Raises OSError as writing does; the file is closed all the same."""
        try:
            self._file.close()
        finally:
            self._raw.close()


def read_recording(file: Path) -> Recording:
    """Read a recording. Raises NotFoundError, ConfigError if it is none, of a newer version or without a sighting."""
    try:
        stream = gzip.open(file, "rb")  # noqa: SIM115 - closed below, after its lines are read
    except OSError as error:
        raise NotFoundError(f"cannot read {file}: {error.strerror}", hint=f"ls -l {file}") from error
    with stream:
        lines = _lines(stream)
        _check_header(file, next(lines, None))
        sightings: list[PodSighting] = []
        whole = True
        for line in lines:
            if line is None:
                whole = False
                break
            sightings.append(sighting_from_plain(line))
    if not sightings:
        raise ConfigError(f"{file} holds no sighting", hint="Record again: podrun record FILE")
    return Recording(tuple(sightings), whole)


def _lines(stream: gzip.GzipFile) -> Iterator[dict[str, object] | None]:
    """The objects of the lines; None, and the end, where the file is cut or damaged."""
    while True:
        try:
            line = stream.readline(LONGEST_LINE)
        except (OSError, EOFError, zlib.error):
            yield None
            return
        if not line:
            return
        try:
            plain = json.loads(line)
        except ValueError:
            plain = None
        if not isinstance(plain, dict):
            yield None
            return
        yield plain


def _check_header(file: Path, header: dict[str, object] | None) -> None:
    version = None if header is None else header.get(HEADER)
    if not isinstance(version, int):
        raise ConfigError(
            f"{file} is no recording of a monitor", hint="They are written by: podrun record FILE"
        )
    if version > VERSION:
        raise ConfigError(
            f"{file} is a recording of version {version}; this podrun reads up to {VERSION}",
            hint="Use the podrun release that wrote it.",
        )
