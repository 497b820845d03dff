"""A partition of a real partition service for tests of serving."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podrun.partition.host.discovery import Registry
from tests.conftest import Commands, run_and_check_for_leaks, wait_until

START_SECONDS = 180.0
PARTITION = "served"
ROOT = Path(__file__).parents[2]


@contextmanager
def partition_of_eight() -> Iterator[tuple[Commands, dict[str, str]]]:
    """Commands beside a `vipu-server`, and the variables of a partition of eight IPUs on its two machines."""
    home = Path(tempfile.mkdtemp(prefix="pod-"))
    try:
        for commands in run_and_check_for_leaks(home):
            server = commands.start("vipu-server", "--cluster=pod16", "--port=0", "--no-state")
            wait_until(
                lambda: server.poll() is not None or _port(commands) is not None,  # noqa: B023
                START_SECONDS,
                "vipu-server starts",
            )
            words = ["vipu", "create", "partition", PARTITION, "--size=8", "--no-ipuof-files"]
            created = commands.run(*words, timeout=START_SECONDS)
            assert created.returncode == 0, created.stderr
            yield (
                commands,
                {
                    "IPUOF_VIPU_API_HOST": "localhost",
                    "IPUOF_VIPU_API_PORT": str(_port(commands)),
                    "IPUOF_VIPU_API_PARTITION_ID": PARTITION,
                    "PYTHONPATH": str(ROOT),
                },
            )
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=300)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _port(commands: Commands) -> int | None:
    entry = Registry(commands.runtime).find() if commands.runtime.exists() else None
    return None if entry is None else entry.port
