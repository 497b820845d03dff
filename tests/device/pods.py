"""Machines behind gRPC for tests: in threads of this process, or in processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from podrun.core.layout import IpuRange
from podrun.core.telemetry import MachineReport
from podrun.device.host.client import PortConnection
from podrun.device.host.ports import Site
from podrun.device.host.remote import RemotePort, RemotePorts
from podrun.device.machine import Machine
from podrun.device.service.control import MachineControl
from podrun.device.service.reporting import report_and_heat
from podrun.device.service.server import MachineServer
from tests.copies import CopiedProcess

SERVER = """
import sys
from podrun.device.service.server import MachineServer, kill_own_process
server = MachineServer(agent_id=sys.argv[1], on_lost=kill_own_process, own_process=True)
print(server.start(), flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass
class Pod:
    """Machines of four IPUs, configured as one partition."""

    endpoints: list[str]
    controls: list[MachineControl]
    processes: Sequence[subprocess.Popen[str] | CopiedProcess]

    @property
    def ipus(self) -> IpuRange:
        return IpuRange(0, 4 * len(self.endpoints))

    def connect(self, *, shared: bool = True) -> PortConnection:
        """A connection over gRPC; not ``shared``: as from another host."""
        sites = [Site(i, endpoint, IpuRange(4 * i, 4)) for i, endpoint in enumerate(self.endpoints)]
        return PortConnection(sites, RemotePorts(partial(RemotePort, probe=shared)))

    def configure(self) -> None:
        for index, control in enumerate(self.controls):
            control.configure(
                partition="p", first_ipu=4 * index, machine_index=index, endpoints=self.endpoints
            )


@contextlib.contextmanager
def threads(machines: int, cache: Path) -> Iterator[Pod]:
    """Servers in threads of this process."""
    environ = {"PODRUN_CACHE_DIR": str(cache), "PODRUN_RUNTIME_DIR": os.environ["PODRUN_RUNTIME_DIR"]}
    servers = [MachineServer(agent_id=f"agent{i}", environ=environ) for i in range(machines)]
    pod = Pod([server.start() for server in servers], [], [])
    pod.controls = [MachineControl(endpoint) for endpoint in pod.endpoints]
    try:
        pod.configure()
        yield pod
    finally:
        for control in pod.controls:
            control.close()
        for server in servers:
            server.stop()


@contextlib.contextmanager
def processes(machines: int, cache: Path, before: str = "", *, fresh: int = 0) -> Iterator[Pod]:
    """Each machine a process, ended when its standard input closes, as an actor ends with its owner.

    ``before``: what each runs before it is a machine. ``fresh``: so many of them, the first ones, import for themselves
    and share no memory.
    """
    environ = {**os.environ, "PODRUN_CACHE_DIR": str(cache)}
    started: list[subprocess.Popen[str] | CopiedProcess] = []
    pod = Pod([], [], started)
    with contextlib.ExitStack() as ends:
        for i in range(machines):
            process = _start(before + SERVER, f"agent{i}", environ, fresh=i < fresh)
            ends.callback(_end, process)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            pod.endpoints.append(process.stdout.readline().strip())
        for endpoint in pod.endpoints:
            pod.controls.append(MachineControl(endpoint))
            ends.callback(pod.controls[-1].close)
        pod.configure()
        yield pod


def _start(
    code: str, agent: str, environ: Mapping[str, str], *, fresh: bool
) -> subprocess.Popen[str] | CopiedProcess:
    if not fresh:
        return CopiedProcess(code, [agent], env=environ)
    return subprocess.Popen(
        [sys.executable, "-c", code, agent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )


def _end(process: subprocess.Popen[str] | CopiedProcess) -> None:
    """Close its standard input and wait for its end, which fails a test if it does not come."""
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(60)


def machine_report(machine: Machine, bare: MachineReport) -> MachineReport:
    """``bare`` (the report of a machine in no partition) completed from the machine, as if it had been as busy as it is
    now for long."""
    return report_and_heat(machine, bare, ())[0]
