"""A Ray that does not start leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from podrun.partition.discovery import ProcessId
from podrun.partition.ray_session import _end, _started_for


def test_what_a_failed_start_has_started_is_found_and_ended(tmp_path: Path) -> None:
    waiting = [sys.executable, "-c", "input()"]
    told = subprocess.Popen([*waiting, f"--session-dir={tmp_path}/r"], stdin=subprocess.PIPE)
    other = subprocess.Popen(waiting, stdin=subprocess.PIPE)  # Such as an instance.
    try:
        found = list(_started_for(tmp_path))
        assert found == [ProcessId.of(told.pid)]
        _end(tuple(found), patience=0.0)
        assert told.wait(10) == -9
        assert other.poll() is None
    finally:
        for process in (told, other):
            process.kill()
            process.communicate()
