"""Replicas over two machines each, launched: stages in processes of their own, the same bits for any number of
instances."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT, Commands, tagged
from tests.system.conftest import PARTITION

pytestmark = pytest.mark.system
EXAMPLE = ROOT / "examples/popart/large_replicas.py"


def launched(pod: Commands, instances: int, *words: str) -> tuple[list[str], str]:
    done = pod.run(
        *("podrun", "--num-replicas=2", "--ipus-per-replica=8", f"--num-instances={instances}"),
        *("--vipu-partition", PARTITION, *words, EXAMPLE),
    )
    return tagged(done.stdout, 0), done.stderr


@pytest.mark.slow
def test_eight_stages_on_two_replicas_of_a_pod16(pod: Commands) -> None:
    (one, told), (two, _) = launched(pod, 1), launched(pod, 2)
    assert one[0].startswith("8 stages, 2 replica(s): loss"), told
    assert one[-1].startswith("weights ")
    assert two[-1] == one[-1]
    assert "4 machines" in told
    steps, seconds, speed = re.findall(r"emulation: (\d+) batches in ([\d.]+) s, ([\d,]+) samples/s", told)[0]
    samples = 2 * 32 * 8 * int(steps)  # replicas, micro-batches, samples of each: every sample counts once
    assert abs(float(speed.replace(",", "")) * float(seconds) / samples - 1) < 0.1
