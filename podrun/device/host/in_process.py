"""In-process machines: what a script computes on that is run without ``podrun``.

Machines, interpreter and collectives are the same as behind gRPC, one thread each, and so are all bits of results.
"""

from __future__ import annotations

from collections.abc import Mapping

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import UsageError
from podrun.core.layout import IpuRange
from podrun.device.crash_records import report_fatal_signals
from podrun.device.host.client import PortConnection
from podrun.device.host.ports import LocalPort, Site
from podrun.device.machine import Machine
from podrun.device.owners import MachinePlace
from podrun.device.program.fabric import LocalFabric
from podrun.device.xla.pieces import PieceCache, writable_cache
from podrun.faults import ProcessPlan, process_plan, validate

DEFAULT_IPUS = 16


class InProcessMachines:
    """``ipus`` emulated IPUs in this process: one machine of fewer than four, or machines of four."""

    def __init__(
        self, ipus: int, pieces: PieceCache, faults: ProcessPlan | None = None, *, grace: float = 5.0
    ) -> None:
        if ipus < 1:
            raise UsageError(f"a device needs at least one IPU, not {ipus}")
        each = min(ipus, IPUS_PER_MACHINE)
        count = -(-ipus // each)
        fabric = LocalFabric()
        faults = faults or ProcessPlan(())
        validate(faults.planned, ipus=count * each)
        endpoints = tuple("in process" for _ in range(count))
        self.machines = [
            Machine(
                MachinePlace("", index, index * each, each, endpoints),
                fabric,
                pieces,
                grace=grace,
                claim=faults.claim,
            )
            for index in range(count)
        ]
        for index, machine in enumerate(self.machines):
            fabric.add(index, machine.offers)
            machine.plan_faults(faults.planned)
        self.sites = [Site(m.place.machine, m.place.endpoint, m.place.range) for m in self.machines]
        self.ipus = IpuRange(0, count * each)

    def connect(self, *, threaded: bool | None = None) -> PortConnection:
        """A connection of one host process. Several connections in one process have to be used in threads of their
        own."""

        def open_port(site: Site, machines: int) -> LocalPort:
            own_thread = machines > 1 if threaded is None else threaded
            return LocalPort(site, self.machines[site.machine], threaded=own_thread)

        return PortConnection(self.sites, open_port)


def connect_in_process(environ: Mapping[str, str], ipus: int | None) -> PortConnection:
    """A connection to fresh machines in this process.

    ``PODRUN_FAULTS``: faults to plan, separated by white space or semicolons. ``PODRUN_CACHE_DIR``: see
    `podrun.core.environment.cache_directory`. Raises UsageError for a fault that cannot happen on these machines.
    """
    report_fatal_signals()
    faults = process_plan(environ)
    return InProcessMachines(ipus or DEFAULT_IPUS, PieceCache(writable_cache(environ)), faults).connect()
