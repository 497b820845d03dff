"""A launch's place in a shared partition: other launches see it, and the last one leaves no file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from podrun.launcher.holds import IpuReservation

OTHER_LAUNCH = """
import sys
from pathlib import Path
from podrun.launcher.holds import IpuReservation

place = IpuReservation.take(Path(sys.argv[1]), "p", 4, 4)
print("taken" if place else "refused", flush=True)
sys.stdin.readline()
if place:
    place.release()
"""


def test_the_last_launch_removes_the_file(tmp_path: Path) -> None:
    mine = IpuReservation.take(tmp_path, "p", 0, 4)
    assert mine is not None
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_LAUNCH, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        assert IpuReservation.take(tmp_path, "p", 4, 4) is None
        mine = IpuReservation.take(tmp_path, "p", 0, 4)
        assert mine is not None
        mine.release()
        assert [path.name for path in tmp_path.iterdir()] == ["p.ipus"]
        other.communicate("\n", timeout=60)
    again = IpuReservation.take(tmp_path, "p", 4, 4)
    assert again is not None
    again.release()
    again.release()
    assert list(tmp_path.iterdir()) == []
