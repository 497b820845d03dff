"""A service on fake machines that the tools find by discovery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
