"""Where the live view gets its sightings: a partition service, or a recording that plays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from podrun.monitor.live.arrangement import clock_time
from podrun.monitor.live.sighting import PodSighting, look_at_pod

if TYPE_CHECKING:
    from podrun.monitor.live.recordings import Recording, RecordingWriter
    from podrun.partition.client.vipu_client import VipuClient


class ServiceSource:
    """Asks a service. A connection that broke is made again at the next look. ``writer`` keeps all that is seen."""

    position = ""

    def launch_folders(self, partition: str) -> tuple[str, ...]:
        """See `SightingSource.launch_folders`."""
        from podrun.partition.host.discovery import LAUNCHER, Registry

        entries = [entry for entry in Registry().entries() if entry.kind == LAUNCHER]
        return next((entry.directories for entry in entries if entry.partition == partition), ())

    def notes(self, after_s: float, until_s: float) -> list[str]:
        """See `SightingSource.notes`: there are none of the present."""
        return []

    def __init__(
        self,
        connect: Callable[[], VipuClient],
        now: Callable[[], float],
        writer: RecordingWriter | None = None,
    ) -> None:
        self._connect, self._now, self._writer = connect, now, writer
        self._client: VipuClient | None = None
        self._lock = threading.Lock()

    def look(self) -> PodSighting:
        """See `SightingSource.look`."""
        from podrun.core.errors import PodrunError

        with self._lock:
            if self._client is None:
                self._client = self._connect()
            try:
                seen = look_at_pod(self._client, self._now())
            except PodrunError:
                self._client.close()
                self._client = None
                raise
            if self._writer is not None:
                self._writer.add(seen)
            return seen

    def jump(self, seconds: float) -> None:
        """The present cannot be moved."""

    def close(self) -> None:
        """End the connection to the partition service."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None


class ReplaySource:
    """Plays a recording ``speed`` times as fast as it was; ``clock``: seconds that go on evenly. ``told``: what else
    happened, in the order of its times (seconds since 1970), as a launch's record has it."""

    def __init__(
        self,
        recording: Recording,
        speed: float,
        clock: Callable[[], float],
        told: Sequence[tuple[float, str]] = (),
    ) -> None:
        self._recording, self._speed, self._clock = recording, speed, clock
        self._told = sorted(told)
        self._origin = recording.sightings[0].time_s
        self._started = clock()
        self._index = -1

    @property
    def _time_s(self) -> float:
        last = self._recording.sightings[-1].time_s
        return min(self._origin + (self._clock() - self._started) * self._speed, last)

    def look(self) -> PodSighting | None:
        """See `SightingSource.look`."""
        index = self._recording.at(self._time_s)
        if index == self._index:
            return None
        self._index = index
        return self._recording.sightings[index]

    def notes(self, after_s: float, until_s: float) -> list[str]:
        """See `SightingSource.notes`."""
        return [
            f"{clock_time(seconds)}  {text}" for seconds, text in self._told if after_s < seconds <= until_s
        ]

    def launch_folders(self, partition: str) -> tuple[str, ...]:
        """See `SightingSource.launch_folders`: a recording has none."""
        return ()

    def jump(self, seconds: float) -> None:
        """Go on ``seconds`` later (or earlier) in the recording."""
        first = self._recording.sightings[0].time_s
        last = self._recording.sightings[-1].time_s
        self._origin = min(max(self._time_s + seconds, first), last)
        self._started = self._clock()

    @property
    def position(self) -> str:
        """Time of the recording, and how much there is."""
        last = self._recording.sightings[-1].time_s
        cut = "" if self._recording.whole else ", its end is missing"
        return f"replay {clock_time(self._time_s)} of {clock_time(last)} at {self._speed:g}x{cut}"
