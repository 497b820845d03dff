"""Machine processes for benchmarks: started, configured as one partition, ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest
from podrun.device.host.client import PortConnection
from podrun.device.host.ports import Site
from podrun.device.host.remote import RemotePort
from podrun.device.service.control import MachineControl

_SERVER = """
import sys
from podrun.device.service.server import MachineServer
server = MachineServer(agent_id=sys.argv[1], own_process=True)
print(server.start(), flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass
class Machines:
    """Machine processes of four IPUs each."""

    processes: list[subprocess.Popen[str]]
    endpoints: list[str]

    def attach(self, ipus: IpuRange | None = None) -> PortConnection:
        """A connection of this process that holds these IPUs, or all."""
        sites = [Site(i, endpoint, IpuRange(4 * i, 4)) for i, endpoint in enumerate(self.endpoints)]
        connection = PortConnection(sites, lambda site, machines: RemotePort(site))
        everything = ipus or IpuRange(0, 4 * len(sites))
        refusal = connection.try_attach(
            AttachRequest(everything, everything, os.getpid(), "benchmark", sys.argv[0])
        )
        if refusal is not None:
            raise RuntimeError(refusal)
        return connection


@contextlib.contextmanager
def machines(count: int) -> Iterator[Machines]:
    """Start ``count`` machines; end them afterwards."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SERVER, f"agent{i}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    try:
        endpoints = []
        for process in processes:
            assert process.stdout is not None
            endpoints.append(process.stdout.readline().strip())
        for index, endpoint in enumerate(endpoints):
            control = MachineControl(endpoint)
            control.configure(
                partition="benchmark", first_ipu=4 * index, machine_index=index, endpoints=endpoints
            )
            control.close()
        yield Machines(processes, endpoints)
    finally:
        for process in processes:
            process.communicate(timeout=30)
