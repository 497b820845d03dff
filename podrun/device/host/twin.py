"""Machines inside the calling process: what a script run without ``podrun`` computes on.

The same machines, interpreter and collectives as behind gRPC, one thread each, so the same results to the
bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podrun.cluster import IPUS_PER_MACHINE
from podrun.device.connection import IpuRange
from podrun.device.host.client import PortConnection
from podrun.device.host.ports import LocalPort
from podrun.device.host.split import Site
from podrun.device.job import Place
from podrun.device.machine import Machine
from podrun.device.program.fabric import LocalFabric
from podrun.device.xla.cache_place import writable_cache
from podrun.device.xla.pieces import PieceCache
from podrun.errors import UsageError
from podrun.faults import FaultSpec, parse_faults

DEFAULT_IPUS = 16


class Twin:
    """``ipus`` emulated IPUs in this process: one machine of fewer than four, or machines of four."""

    def __init__(
        self, ipus: int, pieces: PieceCache, faults: Sequence[FaultSpec] = (), *, grace: float = 5.0
    ) -> None:
        if ipus < 1:
            raise UsageError(f"a device needs at least one IPU, not {ipus}")
        each = min(ipus, IPUS_PER_MACHINE)
        count = -(-ipus // each)
        fabric = LocalFabric()
        endpoints = tuple("in process" for _ in range(count))
        self.machines = [
            Machine(Place("", index, index * each, each, endpoints), fabric, pieces, grace=grace)
            for index in range(count)
        ]
        for index, machine in enumerate(self.machines):
            fabric.add(index, machine.offers)
            machine.plan_faults(faults)
        self.sites = [Site(m.place.machine, m.place.endpoint, m.place.range) for m in self.machines]
        self.ipus = IpuRange(0, count * each)

    def connect(self, *, threaded: bool | None = None) -> PortConnection:
        """A connection of one host process. Several in one process have to run in threads of their own."""

        def open_port(site: Site, machines: int) -> LocalPort:
            own_thread = machines > 1 if threaded is None else threaded
            return LocalPort(site, self.machines[site.machine], threaded=own_thread)

        return PortConnection(self.sites, open_port)


def connect_twin(environ: Mapping[str, str], ipus: int | None) -> PortConnection:
    """A connection to fresh machines in this process.

    ``PODRUN_FAULTS``: faults to plan, separated by white space. ``PODRUN_CACHE_DIR``: see
    `pieces.cache_directory`.
    """
    faults = parse_faults(environ.get("PODRUN_FAULTS", ""))
    return Twin(ipus or DEFAULT_IPUS, PieceCache(writable_cache(environ)), faults).connect()
