"""Scripts written for the SDK find `gcipuinfo` through podrun's compat folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import podrun.compat


def test_a_script_finds_labels_and_no_devices_without_a_partition(tmp_path: Path) -> None:
    folder = str(Path(podrun.compat.__file__).parent)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IPUOF_", "VIPU_"))}
    environment |= {"PYTHONPATH": folder, "PODRUN_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    code = "import gcipuinfo as g; print(g.IpuPower, g.Clock, len(g.gcipuinfo().getDevices()))"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["ipu", "power", "clock", "0"]
