"""A service on fake machines that the tools find by discovery."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from podrun.core.ipu_states import IpuErrorState
from podrun.core.telemetry import AttachedProcess
from podrun.monitor.live.sighting import PodSighting, look_at_pod
from podrun.partition.host.discovery import LAUNCHER, Registry, ServiceEntry, own_process_id
from tests.partition.conftest import Pod


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    for name in ("VIPU_CLI_API_HOST", "IPUOF_VIPU_API_HOST", "IPUOF_VIPU_API_PARTITION_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    pod = Pod()
    publication = Registry().publish(ServiceEntry(LAUNCHER, "127.0.0.1", pod.port, own_process_id(), "pod16"))
    yield pod
    publication.withdraw()
    pod.stop()


@pytest.fixture
def seen(pod: Pod) -> PodSighting:
    """Two jobs, an IPU in error, a busy one."""
    pod.active("p", 8)
    pod.active("q", 4)
    pod.pool.machine("ipum1", "p").process = AttachedProcess(4711, "justina", "python", 1.0)
    pod.pool.machine("ipum2", "p").ipu_errors[0] = IpuErrorState.TILE_PARITY
    seen = look_at_pod(pod.client, 1000.0)
    first, *rest = seen.machines
    busy = replace(
        first, ipus=tuple(replace(ipu, busy_percent=50.0, power_w=86.0) for ipu in first.ipus), power_w=344.0
    )
    return replace(seen, machines=(busy, *rest))
