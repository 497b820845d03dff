"""Machines in threads of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podrun.core.access import make_token
from podrun.core.cluster import Cluster
from podrun.core.environment import environment, runtime_directory
from podrun.partition.machines.pool import Control, MachinePool, PooledMachine


class LocalMachinePool(MachinePool):
    """Machines in threads of this process, each behind its own gRPC server on 127.0.0.1."""

    def __init__(
        self, cluster: Cluster, *, keep_spares: bool = False, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(cluster, keep_spares=keep_spares)
        self._token = make_token(environment(), runtime_directory())
        self._options = {"token": self._token, **(options or {})}

    def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        from podrun.device.service.server import MachineServer

        started = []
        for agent in agents:
            server = MachineServer(agent_id=agent, target=self.cluster.target, **self._options)
            started.append((server.start(), server))
        return started

    def _kill(self, machine: PooledMachine) -> None:
        machine.handle.stop()

    def _connect(self, endpoint: str) -> Control:
        from podrun.device.service.control import MachineControl

        control: Control = MachineControl(endpoint, token=self._token)
        return control
