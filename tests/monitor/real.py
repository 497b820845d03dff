"""A V-IPU service on real machines in threads of this process: what the test tools attach to."""

from __future__ import annotations

from pathlib import Path

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.host.discovery import VIPU_SERVER, Registry, ServiceEntry, own_process_id
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.server.service import Service
from podrun.partition.state.store import Store
from podrun.partition.state.values import Requirements


class RealPod:
    """A service, published in ``directory``, whose machines keep compiled code in ``cache``."""

    def __init__(self, directory: Path, cache: Path, cluster: str = "pod16") -> None:
        self.directory = directory
        pod = load_cluster(cluster)
        options = {"environ": {"PODRUN_CACHE_DIR": str(cache), "PODRUN_RUNTIME_DIR": str(directory)}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PODRUN_RUNTIME_DIR", str(directory))  # where the secret is that tools must know
            pool = LocalMachinePool(pod, keep_spares=True, options=options)
            self.service = Service(pod, Store(None, cluster), pool)
            self.port = self.service.start("127.0.0.1", 0)
            self.client = VipuClient("127.0.0.1", self.port, timeout=60)
        self._published = Registry(directory).publish(
            ServiceEntry(VIPU_SERVER, "127.0.0.1", self.port, own_process_id(), cluster)
        )

    def active(self, name: str, size: int, **needs: object) -> None:
        """Create a partition and wait until it is active."""
        self.client.create_partition(Requirements(name, size, **needs))  # type: ignore[arg-type]
        assert self.service.wait_idle(60)

    def stop(self) -> None:
        """End it."""
        self._published.withdraw()
        self.client.close()
        self.service.stop(grace=0)
