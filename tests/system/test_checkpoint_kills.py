"""Processes that are killed while they save leave a checkpoint to go on from, each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.system, pytest.mark.slow]
KILLS = 12

PROGRAM = """
import sys
import numpy as np
from podrun.checkpoint import Checkpoints

class Program:
    batch = 0
    def _checkpoint_state(self):
        return {f"w{k}": np.full(200_000, self.batch, np.int64) for k in range(4)}, {"batch": self.batch}
    def _restore_checkpoint(self, tensors, values):
        assert all((tensor == values["batch"]).all() for tensor in tensors.values())
        self.batch = values["batch"]

program = Program()
with Checkpoints(sys.argv[1]) as checkpoints:
    resumed = checkpoints.resume(program)
    print("resumed", resumed.batch if resumed else 0, flush=True)
    while True:
        program.batch += 1
        checkpoints.save(program, program.batch)
        print("saving", program.batch, flush=True)
"""


def test_a_killed_process_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    saved = 0
    for _ in range(KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            word, resumed = process.stdout.readline().split()
            assert word == "resumed"
            assert int(resumed) >= saved  # Nothing that was on the disk before is lost.
            for _ in range(int(random.integers(2, 6))):
                saved = int(process.stdout.readline().split()[1]) - 1  # The one before had been written.
            process.kill()
            process.communicate(timeout=120)
    assert saved > KILLS
    assert len(list(tmp_path.iterdir())) <= 4
