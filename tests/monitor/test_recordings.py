"""``podrun record`` and what ``podrun top --replay`` makes of it: kept, cut off, refused, played."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from podrun.core.errors import ConfigError, NotFoundError, ServiceError
from podrun.monitor.commands.record import record_looks, record_verb
from podrun.monitor.commands.top import top_verb
from podrun.monitor.devices import connect_monitor
from podrun.monitor.live.recordings import HEADER, Recording, RecordingWriter, read_recording
from podrun.monitor.live.sighting import PodSighting
from podrun.monitor.live.sources import ReplaySource, ServiceSource
from tests.partition.conftest import Pod

DEADLINE_S = 60


def write_recording(file: Path, seen: PodSighting, count: int = 5) -> Recording:
    writer = RecordingWriter(file)
    for second in range(count):
        writer.add(replace(seen, time_s=1000.0 + second))
    writer.close()
    return read_recording(file)


def test_a_recording_gives_back_what_was_written(tmp_path: Path, seen: PodSighting) -> None:
    recording = write_recording(tmp_path / "r", seen)
    assert recording.whole
    assert [one.time_s for one in recording.sightings] == [1000.0, 1001.0, 1002.0, 1003.0, 1004.0]
    assert recording.sightings[0] == seen
    assert [recording.at(time_s) for time_s in (0.0, 1000.0, 1002.9, 9999.0)] == [0, 0, 2, 4]


def test_a_recording_that_was_cut_is_read_up_to_its_last_whole_line(
    tmp_path: Path, seen: PodSighting
) -> None:
    file = tmp_path / "r"
    write_recording(file, seen)
    file.write_bytes(file.read_bytes()[:-40])
    recording = read_recording(file)
    assert not recording.whole
    assert 1 <= len(recording.sightings) < 5


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"no gzip", ConfigError),
        (gzip.compress(b'{"a": 1}\n'), ConfigError),
        (gzip.compress(json.dumps({HEADER: 99}).encode() + b"\n"), ConfigError),
        (gzip.compress(json.dumps({HEADER: 1}).encode() + b"\n"), ConfigError),
        (gzip.compress(json.dumps({HEADER: 1}).encode() + b'\n{"time_s": "x"}\n'), ConfigError),
        (None, NotFoundError),
    ],
)
def test_a_file_that_is_no_recording_is_refused(
    tmp_path: Path, content: bytes | None, error: type[Exception]
) -> None:
    if content is not None:
        (tmp_path / "r").write_bytes(content)
    with pytest.raises(error):
        read_recording(tmp_path / "r")


def test_a_replay_goes_at_its_speed_and_jumps(tmp_path: Path, seen: PodSighting) -> None:
    now = [0.0]
    source = ReplaySource(write_recording(tmp_path / "r", seen), 2.0, lambda: now[0])
    first = source.look()
    assert first is not None
    assert first.time_s == 1000.0
    assert source.look() is None  # Nothing new.
    now[0] = 1.5
    later = source.look()
    assert later is not None
    assert later.time_s == 1003.0
    source.jump(-100)
    begin = source.look()
    assert begin is not None
    assert begin.time_s == 1000.0
    now[0] = 1e6
    end = source.look()
    assert end is not None
    assert end.time_s == 1004.0
    assert source.position.startswith("replay 00:16:44 of 00:16:44 at 2x")


def test_record_keeps_what_top_replays(pod: Pod, tmp_path: Path) -> None:
    pod.active("p", 4)
    file = tmp_path / "r"
    done = CliRunner().invoke(record_verb, [str(file), "--for", "0"], standalone_mode=False)
    assert done.exception is None
    assert done.stdout == f"1 sightings in {file}. To see them: podrun top --replay {file}\n"
    done = CliRunner().invoke(top_verb, ["--once", "--replay", str(file)], standalone_mode=False)
    assert "p: 4 IPUs, ACTIVE" in done.stdout
    done = CliRunner().invoke(record_verb, [str(file)], standalone_mode=False)
    assert "is there already" in str(done.exception)


def test_recording_goes_on_while_the_service_is_away(pod: Pod, tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "r")
    tries = 0

    def try_connect() -> object:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ServiceError("away", hint="wait")
        return connect_monitor()

    now = [0.0]
    source = ServiceSource(try_connect, lambda: 1000.0 + now[0], writer)  # type: ignore[arg-type]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    assert record_looks(source, 2.0, 1.0, lambda: now[0], sleep) == 2
    source.close()
    writer.close()
    assert len(read_recording(tmp_path / "r").sightings) == 2


def test_a_launch_is_told_at_its_times_in_a_replay(seen: PodSighting) -> None:
    recording = Recording((seen, replace(seen, time_s=seen.time_s + 10)), whole=True)
    source = ReplaySource(
        recording, 1.0, lambda: 0.0, [(seen.time_s + 12, "late"), (seen.time_s + 3, "error")]
    )
    assert source.notes(seen.time_s, seen.time_s + 10) == ["00:16:43  error"]
    assert source.notes(seen.time_s + 10, seen.time_s + 20) == ["00:16:52  late"]
