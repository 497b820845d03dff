"""The partition service: carries out what the allocator decides, and answers over gRPC.

    service = Service(load_cluster("pod16"), Store(None, "pod16"), RayMachinePool(cluster))
    port = service.start("127.0.0.1", 0)
    ...
    service.stop()

Usable inside any process (the launcher runs it when no `vipu-server` is there). Requests that change
something take the lock, let the allocator decide, write the store, and hand the slow part to a worker thread;
the worker reports back with an event. Steps of one partition run one after the other; a step that is no
longer current when its turn comes is skipped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from podrun import __version__
from podrun.access import quiet_grpc
from podrun.cluster import Cluster, LinkTopology, ladder_links
from podrun.errors import ConflictError, PodrunError, ServiceError, UsageError
from podrun.partition import events as ev
from podrun.partition.allocator import Allocator
from podrun.partition.events import Partition
from podrun.partition.machine_pool import MachinePool, Seat
from podrun.partition.placement import routing_of
from podrun.partition.reports import Reporter
from podrun.partition.requirements import completed
from podrun.partition.store import Store
from podrun.partition.types import (
    AgentInfo,
    AllocationInfo,
    IpuofConfig,
    PartitionInfo,
    PartitionState,
    Requirements,
    ServerVersion,
)
from podrun.partition.views import agent_state, ipuof_config, partition_info
from podrun.telemetry import MachineReport

log = logging.getLogger("podrun.partition")

WORKERS = 8


class Service:
    """Partitions of one POD. ``clock`` gives seconds since 1970 (for the creation time of partitions)."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        machine_pool: MachinePool,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.cluster, self.store, self.pool = cluster, store, machine_pool
        self._clock = clock
        self._lock = threading.RLock()
        self._agents_lock = threading.RLock()
        self._allocator = Allocator(
            cluster,
            allocations=store.allocations(),
            partitions=store.partitions(),
            lost=store.lost(),
        )
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="podrun-partition")
        self._partition_locks: dict[str, threading.Lock] = {}
        self._reporter = Reporter(cluster, machine_pool)
        self._server: Any = None
        self._stopping = False
        self._address = ("", 0)

    # --- life -----------------------------------------------------------------------------------------------

    def start(self, host: str = "127.0.0.1", port: int = 8090, token: str = "") -> int:
        """Listen; returns the port (a free one if ``port`` is 0). ``token``: what callers have to show
        (`podrun.access`). Raises ConflictError if the port is taken."""
        quiet_grpc()
        from podrun.partition.grpc_service import serve

        self._server, bound = serve(self, host, port, token)
        self._address = (host, bound)
        self.pool.open(self._machine_lost)
        self.handle(ev.Recover())
        return bound

    def stop(self, grace: float = 1.0) -> None:
        """Stop listening, end all machines, close the store. Partitions stay in the store. Idempotent."""
        self._stopping = True
        if self._server is not None:
            self._server.stop(grace).wait(grace + 5)
            self._server = None
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.pool.close()
        self._workers.shutdown(wait=True)
        self.store.close()

    def version(self) -> ServerVersion:
        """Release, address and process."""
        host = self._address[0]
        shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        return ServerVersion(__version__, shown, self._address[1], os.getpid())

    # --- what users ask -------------------------------------------------------------------------------------

    def create(self, needs: Requirements) -> None:
        """Reserve IPUs and bring them up in the background."""
        if needs.faults:
            possible = completed(needs, self.cluster)
            self._check_faults(possible.faults, possible.size, possible.num_ilds)
        self.handle(ev.Create(needs, self._clock()))

    def partition(self, name: str) -> PartitionInfo:
        """One partition. Raises NotFoundError."""
        with self._lock:
            return partition_info(self.cluster, self._allocator.partition(name))

    def partitions(self) -> list[PartitionInfo]:
        """All partitions, by name."""
        with self._lock:
            return [
                partition_info(self.cluster, entry) for _, entry in sorted(self._allocator.partitions.items())
            ]

    def reset(self, name: str) -> None:
        """Re-initialise IPUs and links in the background."""
        self.handle(ev.RequestReset(name))

    def remove(self, name: str) -> None:
        """Take the IPUs back in the background."""
        self.handle(ev.RequestRemove(name))

    def ipuof_config(self, name: str, gcd: int) -> IpuofConfig:
        """Where the IPUs of one GCD are to be reached. Raises UsageError if there is no such GCD."""
        with self._lock:
            partition = self._allocator.partition(name)
        return ipuof_config(self.cluster, partition, gcd, self.pool.endpoints())

    def allocations(self) -> list[AllocationInfo]:
        """Allocations, by name."""
        with self._lock:
            entries = sorted(self._allocator.allocations.values(), key=lambda a: a.name)
        return [AllocationInfo(entry.name, self.cluster.name, entry.agents) for entry in entries]

    def machine_reports(self, name: str = "") -> list[MachineReport]:
        """What machines report now: those of one partition, or one report for each agent and partition of the
        POD.
        """
        with self._lock:
            lost = set(self._allocator.lost)
            if name:
                partitions = [self._allocator.partition(name)]
            else:
                partitions = sorted(self._allocator.partitions.values(), key=lambda p: p.name)
        reports = self._reporter.reports(partitions, lost)
        return reports if name else self._reporter.whole_pod(reports, lost)

    def reset_ipus(self, name: str, ipus: Sequence[int]) -> None:
        """Reset IPUs by their index in the partition. Raises ConflictError unless the partition is active."""
        with self._lock:
            partition = self._active(name)
        for ipu in ipus:
            if not 0 <= ipu < partition.size:
                raise UsageError(
                    f"partition {name} has no IPU {ipu}", hint=f"Its IPUs are 0 to {partition.size - 1}."
                )
        for first, part in partition.machines():
            local = [ipu - first for ipu in ipus if first <= ipu < first + part.count]
            if local:
                self.pool.control(Seat(part.agent_id, name)).reset_ipus(local)

    # --- what administrators ask ----------------------------------------------------------------------------

    def inject_faults(self, name: str, faults: Sequence[str]) -> None:
        """Plan faults on the machines of a partition; each machine picks those that concern it."""
        with self._lock:
            partition = self._active(name)
        self._check_faults(faults, partition.size, partition.num_ilds)
        self._on_machines(partition, lambda i, seat: self.pool.control(seat).inject(list(faults)))

    def agents(self) -> list[AgentInfo]:
        """Agents of the POD in its order."""
        with self._lock:
            lost = set(self._allocator.lost)
            holders = {agent.id: self._allocator.partitions_on(agent.id) for agent in self.cluster.agents}
        running, endpoints = self.pool.running_agents(), self.pool.endpoints()
        return [
            AgentInfo(
                agent_id=agent.id,
                host=agent.host,
                port=agent.port,
                serial=agent.serial,
                state=agent_state(agent.id, lost, running),
                ild=agent.ild,
                partitions=holders[agent.id],
                endpoints=tuple(where for seat, where in endpoints.items() if seat.agent_id == agent.id),
            )
            for agent in self.cluster.agents
        ]

    def handle(self, event: ev.Event) -> None:
        """Let the allocator take in an event, write what changed, and start what is to be done."""
        if isinstance(event, ev.MachineLost | ev.RequestRestart | ev.RequestPowerCycle):
            # Ending and starting the machines of agents happens in the order it was decided, but not under the lock
            # that everybody needs.
            with self._agents_lock:
                for step in self._decide(event):
                    self._carry_out_on_agent(step)
        else:
            self._decide(event)

    def _decide(self, event: ev.Event) -> list[ev.Instruction]:
        with self._lock:
            steps = self._allocator.handle(event)
            for step in steps:
                self._carry_out(step)
            return steps

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no partition is between two states; for tests and clean starts. False on time-out."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            with self._lock:
                if all(p.state.is_terminal() for p in self._allocator.partitions.values()):
                    return True
            time.sleep(0.005)
        return False

    # --- instructions ---------------------------------------------------------------------------------------

    def _carry_out(self, step: ev.Instruction) -> None:
        match step:
            case ev.SavePartition(name):
                partition = self._allocator.partitions[name]
                log.info("partition %s: %s", name, partition.story[-1] if partition.story else "")
                self.store.save_partition(partition)
            case ev.ForgetPartition(name):
                self.store.forget_partition(name)
            case ev.SaveAllocations():
                self.store.save_allocations(self._allocator.allocations.values())
            case ev.SaveLost():
                self.store.save_lost(self._allocator.lost)
            case ev.Provision() | ev.Reset() | ev.Release():
                self._submit(self._in_turn, step)
            case ev.StopMachines() | ev.RestartMachines() | ev.PowerCycle():
                pass  # See _carry_out_on_agent.

    def _carry_out_on_agent(self, step: ev.Instruction) -> None:
        """What a request waits for: when it returns, the fresh machine is there."""
        match step:
            case ev.StopMachines(agent):
                self.pool.stop_agent(agent)
            case ev.RestartMachines(agent, partitions):
                self.pool.stop_agent(agent)
                self.pool.acquire([Seat(agent, name) for name in partitions])
            case ev.PowerCycle(agent):
                for seat in self.pool.endpoints():
                    if seat.agent_id == agent:
                        self.pool.control(seat).power_cycle()

    def _submit(self, work: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # The service is stopping: nothing is to be done any more.
            self._workers.submit(self._logged, work, *args)

    def _logged(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception:
            log.exception("a step of the partition service failed: %s%s", work.__name__, args)

    def _in_turn(self, step: ev.Provision | ev.Reset | ev.Release) -> None:
        """Run a step of a partition when those before it are done; report how it ended."""
        with self._lock:
            turn = self._partition_locks.setdefault(step.partition, threading.Lock())
        with turn:
            with self._lock:
                partition = self._allocator.partitions.get(step.partition)
                if partition is None or partition.operation != step.operation:
                    return
                self.handle(ev.Started(step.partition, step.operation))
            try:
                self._bring_up(partition) if not isinstance(step, ev.Release) else self._take_back(step)
            except PodrunError as error:
                if self._stopping:
                    return  # Nothing is wrong with it: it is brought up when the service starts again.
                hint = f" {error.hint}" if error.hint else ""
                self.handle(ev.Failed(step.partition, step.operation, f"{error.message}.{hint}"))
            except Exception as error:
                log.exception("partition %s: a step failed", step.partition)
                self.handle(ev.Failed(step.partition, step.operation, f"{type(error).__name__}: {error}"))
            else:
                self.handle(ev.Succeeded(step.partition, step.operation))

    def _bring_up(self, partition: Partition) -> None:
        """Provision or reset: the machines of the partition, all as new, knowing each other."""
        seats = [Seat(part.agent_id, partition.name) for part in partition.slices]
        where = self.pool.acquire(seats)
        endpoints = [where[seat] for seat in seats]
        fresh = partition.generation == 0
        firsts = [first for first, _ in partition.machines()]

        def bring_up(index: int, seat: Seat) -> None:
            control = self.pool.control(seat)
            control.configure(
                partition=partition.name,
                first_ipu=firsts[index],
                machine_index=index,
                endpoints=endpoints,
                ipus=partition.slices[index].count,
            )
            control.reset_links()
            control.reset_ipus(range(partition.slices[index].count))
            if fresh and partition.faults:
                control.inject(partition.faults)

        self._on_machines(partition, bring_up)

    def _take_back(self, step: ev.Release) -> None:
        self.pool.release([Seat(part.agent_id, step.partition) for part in step.slices])

    def _on_machines(self, partition: Partition, work: Callable[[int, Seat], None]) -> None:
        """Do something with all machines of a partition at once. The first error names its machine."""
        seats = [Seat(part.agent_id, partition.name) for part in partition.slices]
        with ThreadPoolExecutor(min(len(seats), 16), thread_name_prefix="podrun-machines") as threads:
            results = [threads.submit(work, index, seat) for index, seat in enumerate(seats)]
        for seat, result in zip(seats, results, strict=True):
            try:
                result.result()
            except PodrunError as error:
                if isinstance(error, UsageError):
                    raise
                self.pool.check(seat)
                raise ServiceError(f"machine {seat.agent_id}: {error.message}", hint=error.hint) from error

    def _machine_lost(self, agent: str, reason: str) -> None:
        log.warning("machine %s is lost: %s", agent, reason)
        self.handle(ev.MachineLost(agent, reason))

    # --- inside ---------------------------------------------------------------------------------------------

    def _check_faults(self, faults: Sequence[str], size: int, ilds: int) -> None:
        """Raises UsageError naming what is wrong with a fault, or what a partition of that size does not
        have.
        """
        from podrun.faults import parse_fault, validate

        topology = LinkTopology(routing_of(self.cluster, size, ilds).link_topology)
        share = size // ilds
        links = [link for i in range(ilds) for link in ladder_links(share, topology, i * share)]
        validate([parse_fault(text) for text in faults], ipus=size, links=links)

    def _active(self, name: str) -> Partition:
        partition = self._allocator.partition(name)
        if partition.state is not PartitionState.ACTIVE:
            why = f": {partition.error}" if partition.error else ""
            raise ConflictError(
                f"partition {name} is {partition.state.name}, not ACTIVE{why}",
                hint=f"Look at it: vipu get partition {name}",
            )
        return partition
