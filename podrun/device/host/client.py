"""The Connection: one host process's part of a job, spread over the machines that hold its IPUs.

`connect_in_process` connects to in-process machines, for a script that runs without ``podrun``. They have one thread
each and use the same machines, interpreter and collectives as machines behind gRPC, so all results have the same bits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from podrun.core.aligned_memory import aligned_empty
from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.environment import environment
from podrun.core.errors import (
    ApplicationRuntimeError,
    DeadlineError,
    IpusTakenError,
    PodrunError,
    PoplarError,
    Remains,
    UsageError,
)
from podrun.core.event_record import AttachedIpus, record_error
from podrun.core.executable import Executable
from podrun.core.layout import IpuRange
from podrun.core.names import DIGESTS
from podrun.core.terminal import note_moment
from podrun.device.connection import MOST_IN_FLIGHT, AttachRequest, Refusal, RunResult
from podrun.device.crash_records import report_fatal_signals
from podrun.device.host.ports import LocalPort, Port, ProgramFiles, RunArrays, Site, Wait, sites_holding
from podrun.device.host.run_plan import ArrayPlan
from podrun.device.host.started_runs import RunsInFlight, StartedRun
from podrun.device.owners import HOST_SYNC_TIMEOUT
from podrun.device.program.fabric import LocalFabric
from podrun.device.program.machine_groups import home_of, parts_by_position
from podrun.faults import ProcessPlan, ends_with_launch, hint_in_launch, process_plan, recovery_hint, validate

if TYPE_CHECKING:
    from podrun.device.xla.pieces import PieceCache

T = TypeVar("T")
_AFTER_ERROR = 5.0
"""Seconds that machines have to end a run after the first of them reported an error."""


class PortConnection:
    """A `podrun.device.connection.Connection` over ports. ``open_port`` makes the way to a machine.

    ``partition`` and ``agents``, by machine: for hints. ``host_sync_timeout``: the engine option
    target.hostSyncTimeout, seconds; may be set before `load`.

    It belongs to the process that made it. In a forked process, such as a data loader's worker, closing does nothing
    and everything else is refused.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        open_port: Callable[[Site, int], Port],
        *,
        on_close: Callable[[], None] = lambda: None,
        partition: str = "",
        agents: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._partition, self._agents = partition, agents
        self._sites = list(sites)
        self._open_port = open_port
        self._on_close = on_close
        self._ports: list[Port] = []
        self._owned: IpuRange | None = None
        self._executable: Executable | None = None
        self._files = ProgramFiles()
        self._parts: Mapping[int, Executable] = {}
        self._plans: dict[int, ArrayPlan] = {}
        self._process = os.getpid()
        self._flight = RunsInFlight()
        self.host_sync_timeout = HOST_SYNC_TIMEOUT

    @property
    def total_ipus(self) -> int:
        return max((site.ipus.stop for site in self._sites), default=0)

    def try_attach(self, request: AttachRequest) -> Refusal | None:
        self._check_process()
        if self._ports:
            raise ApplicationRuntimeError("this connection is attached already", hint="Detach first.")
        note_moment("attaching")
        sites = sites_holding(self._sites, request.owned)
        ports: list[Port] = []
        try:
            for site in sites:
                ports.append(self._open_port(site, len(sites)))
                refusal = ports[-1].attach(request)
                if refusal is not None:
                    _close(ports)
                    return refusal
        except BaseException as error:
            _close(ports)
            if isinstance(error, PoplarError):
                self._with_names(error)
            raise
        self._ports, self._owned = ports, request.owned
        return None

    @property
    def holds_ipus(self) -> bool:
        return self._owned is not None

    def load(self, executable: Executable) -> None:
        self._attached()
        self._flight.make_room(1)
        program = self._files.of(executable)
        self._executable = None
        self._all([port.load(program, self.host_sync_timeout) for port in self._ports])
        note_moment("machines have the program")
        self._executable, self._parts, self._plans = executable, parts_by_position(executable), {}

    def write_variables(self, values: Mapping[str, np.ndarray]) -> None:
        executable, _ = self._loaded()
        self._flight.make_room(1)
        arrays = {name: np.asarray(value) for name, value in values.items()}
        waits = []
        for place, port in enumerate(self._ports):
            # A name that is no variable goes to all: they have to say so.
            held = self._part_on(place).variables
            mine = {n: a for n, a in arrays.items() if n in held or n not in executable.variables}
            if mine:
                waits.append(port.write(mine))
        self._all(waits)

    def read_variables(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        executable, _ = self._loaded()
        self._flight.make_room(1)
        wanted = list(names)
        places: dict[int, list[str]] = {}
        for name in wanted:
            places.setdefault(home_of(executable, name), []).append(name)
        waits = [self._ports[place].read(there) for place, there in places.items()]
        arrays = {name: value for values in self._all(waits) for name, value in values.items()}
        return {name: arrays[name] for name in wanted}

    def read_digests(self) -> list[tuple[int, int]]:
        self._loaded()
        self._flight.make_room(1)
        per_port = self._all([port.read([DIGESTS]) for port in self._ports])
        return [(int(ipu), int(digest)) for values in per_port for ipu, digest in values[DIGESTS]]

    def run(
        self,
        batches: int,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray] | None = None,
    ) -> RunResult:
        return self.start(batches, inputs, outputs, depth=1).wait()

    def start(
        self,
        batches: int,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray] | None = None,
        *,
        depth: int = 2,
    ) -> StartedRun:
        if depth < 1 or depth > MOST_IN_FLIGHT or depth & (depth - 1):
            raise ApplicationRuntimeError(
                f"{depth} runs in flight: a power of two to {MOST_IN_FLIGHT} is taken"
            )
        # Machines of one job have no barrier at the end of a run: their owner starts the next when all are done.
        self._flight.make_room(depth if len(self._ports) == 1 else 1)
        begin = time.perf_counter()
        plan = self._plan(batches)
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        plan.check_inputs(arrays)
        buffers = outputs or {}
        anchors = {
            name: plan.given_array(name, buffers[name]) if name in buffers else aligned_empty(shape, dtype)
            for name, (shape, dtype) in plan.anchors.items()
        }
        waits = [
            port.run(
                RunArrays(
                    batches,
                    {name: arrays[name][index] for name, index in machine.inputs.items()},
                    {name: anchors[name][index] for name, index in machine.anchors.items()},
                    machine,
                    depth,
                )
            )
            for port, machine in zip(self._ports, plan.machines, strict=True)
        ]

        def finish() -> RunResult:
            outcomes = self._all(waits)
            return RunResult(
                anchors=anchors,
                batches_done=outcomes[0].batches_done,
                modelled_seconds=max(
                    outcome.modelled_seconds for outcome in outcomes
                ),  # They run in lockstep.
                emulation_seconds=time.perf_counter() - begin,
                details={"machine_seconds": max(outcome.seconds for outcome in outcomes)},
            )

        return self._flight.add(finish)

    def _plan(self, batches: int) -> ArrayPlan:
        """The plan of runs with this number of batches, made once for a loaded program."""
        executable, owned = self._loaded()
        plan = self._plans.get(batches)
        if plan is None:
            parts = [self._part_on(place) for place in range(len(self._ports))]
            plan = ArrayPlan.of(executable, owned, batches, [port.site for port in self._ports], parts)
            self._plans = {batches: plan}
        return plan

    def detach(self) -> None:
        ports, self._ports = self._ports, []
        self._flight.abandon()
        self._owned = self._executable = None
        self._parts, self._plans = {}, {}
        if self._is_here():
            _close(ports)

    def close(self) -> None:
        self.detach()
        on_close, self._on_close = self._on_close, lambda: None
        if self._is_here():
            on_close()

    def _is_here(self) -> bool:
        return self._process == os.getpid()

    def _check_process(self) -> None:
        if not self._is_here():
            raise ApplicationRuntimeError(
                f"the IPUs are those of process {self._process}, from which this one was forked",
                hint="Run the session there; leave only the preparation of data to forked processes.",
            )

    def _with_names(self, error: Exception) -> Exception:
        """An error of a lost machine whose hint names the machine's agent and the partition."""
        if not isinstance(error, PoplarError):
            return error
        cause = error.cause
        if cause is not None and cause.remains is Remains.LOST_MACHINE:
            agent = "" if cause.machine is None else self._agents.get(cause.machine, "")
            error.hint = recovery_hint(None, type(error), error.where, self._partition, agent)
            if ends_with_launch(None, type(error), self._partition):
                error.cause = replace(cause, remains=Remains.NOTHING)
        error.hint = hint_in_launch(error, environment())
        return error

    def _record(self, error: Exception) -> None:
        """Leave the error for monitors (`podrun.core.event_record`)."""
        if isinstance(error, PodrunError) and self._owned is not None:
            hosts = {ipu: site.endpoint.rpartition(":")[0] for site in self._sites for ipu in site.ipus}
            ipus_per_machine = max(site.ipus.count for site in self._sites)
            record_error(
                error,
                AttachedIpus(self._partition, tuple(self._owned), hosts),
                ipus_per_machine=ipus_per_machine,
            )

    def _part_on(self, place: int) -> Executable:
        """The part of the program on a port's machine: an owner's machines begin with the first of a replica."""
        return self._parts[place % len(self._parts)]

    def _attached(self) -> IpuRange:
        self._check_process()
        if self._owned is None:
            raise ApplicationRuntimeError(
                "this process holds no IPUs on this connection", hint="Attach to a device first."
            )
        return self._owned

    def _loaded(self) -> tuple[Executable, IpuRange]:
        owned = self._attached()
        if self._executable is None:
            raise ApplicationRuntimeError("no program is loaded", hint="Load one first (prepareDevice).")
        return self._executable, owned

    def _all(self, waits: Sequence[Wait[T]]) -> list[T]:
        """The results of all machines, or the first machine's error, once no machine is running any more.

        It waits for the last machine first: that machine often ends a run for all (`podrun.device.program.fused_tail`),
        and waking this process for every other machine would take a core from machines that still run.
        """
        results: dict[int, T] = {}
        errors: dict[int, Exception] = {}
        for place in (len(waits) - 1, *range(len(waits) - 1)) if waits else ():
            try:
                results[place] = waits[place](_AFTER_ERROR if errors else None)
            except (PoplarError, DeadlineError) as error:
                errors[place] = error
        if errors:
            # A machine that does not answer in time waits for one that has reported the cause.
            first = min(errors, key=lambda place: (isinstance(errors[place], DeadlineError), place))
            told = self._with_names(errors[first])
            self._record(told)
            if any(isinstance(failure, IpusTakenError) for failure in errors.values()):
                self._flight.abandon(told)
                self.detach()
            raise told
        return [results[place] for place in range(len(waits))]


def _close(ports: Iterable[Port]) -> None:
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.callback(port.close)


DEFAULT_IPUS = 16


class InProcessMachines:
    """``ipus`` emulated IPUs in this process: one machine of fewer than four, or machines of four."""

    def __init__(
        self, ipus: int, pieces: PieceCache, faults: ProcessPlan | None = None, *, grace: float = 5.0
    ) -> None:
        from podrun.device.machine import Machine
        from podrun.device.machine_context import MachinePlace

        if ipus < 1:
            raise UsageError(f"a device needs at least one IPU, not {ipus}")
        per_machine = min(ipus, IPUS_PER_MACHINE)
        count = -(-ipus // per_machine)
        fabric = LocalFabric()
        faults = faults or ProcessPlan(())
        validate(faults.planned, ipus=count * per_machine)
        endpoints = tuple("in process" for _ in range(count))
        self.machines = [
            Machine(
                MachinePlace("", index, index * per_machine, per_machine, endpoints),
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
        self.ipus = IpuRange(0, count * per_machine)

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
    `podrun.core.environment.podrun_cache_directory`. Raises UsageError for a fault that cannot happen on these
    machines.
    """
    from podrun.device.xla.kept_pieces import writable_cache
    from podrun.device.xla.pieces import PieceCache

    report_fatal_signals()
    faults = process_plan(environ)
    return InProcessMachines(ipus or DEFAULT_IPUS, PieceCache(writable_cache(environ)), faults).connect()
