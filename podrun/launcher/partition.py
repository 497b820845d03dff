"""The partition of a launch: find or start a V-IPU server, then create, use, update, reset and remove the partition as
PopRun does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from podrun.core.access import is_loopback, make_token
from podrun.core.environment import runtime_directory
from podrun.core.errors import (
    ConflictError,
    ExhaustedError,
    NotFoundError,
    PodrunError,
    ServiceError,
    UsageError,
)
from podrun.core.telemetry import NO_ANSWER
from podrun.launcher.holds import HoldOnPartition, PlaceInPartition
from podrun.launcher.output import Log
from podrun.launcher.server import (
    LOCAL,
    ServerAddress,
    check_may_use,
    choose_cluster,
    facts_of,
    find_server,
    usable_names,
)
from podrun.launcher.spec import LaunchSpec, PartitionAddress, PartitionSpec, PodFacts, target_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from podrun.core.telemetry import MachineReport
    from podrun.faults import FaultSpec
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import PartitionInfo, PartitionState

Number = TypeVar("Number", int, float)

REMOVE_SECONDS = 20.0
"""Longest wait for a partition to be removed."""
BETWEEN_ATTEMPTS_SECONDS = 2.0
"""Pause between two attempts to get IPUs that others use, or to reach a server that is away."""
BETWEEN_REPORTS_SECONDS = 0.2
"""Pause between two questions to machines that do not answer in time."""
_STARTS_BADLY = (
    "Try again, with -vv to see more. A host that is very busy or short of memory starts machines too slowly; "
    "a vipu-server that stays up (vipu-server --prestart) starts them once."
)
CLOSE_SECONDS = 1.0
"""Seconds in which a thread that waits for the partition must notice that the launch is over."""


class Closed(PodrunError):
    """The launch has ended while a thread waited for the partition."""


@dataclass(slots=True)
class PartitionSession:
    """The server of a launch (perhaps its own) and the partition on it.

    `connect`, then `prepare`, then `wait_active` (perhaps in another thread while instances start), then
    `close`.
    """

    spec: LaunchSpec
    environ: Mapping[str, str]
    log: Log
    address: ServerAddress | None = None
    pod: PodFacts | None = None
    name: str = ""
    created: bool = False
    launch_id: str = ""
    """Marks the faults of this launch; they hit no other launch."""
    others: Sequence[str] = ()
    """Other hosts that run instances and must reach the server."""
    token: str = field(default="", repr=False)
    first_ipu: int = 0
    """First IPU of this launch in a reconfigurable partition that it shares with other launches."""
    _place: PlaceInPartition | None = None
    _hold: HoldOnPartition | None = None
    _client: Any = None
    _service: Any = None
    _info: Any = None
    before: Sequence[MachineReport] = ()
    """The work that the machines had done before the launch took the partition."""
    _closing: threading.Event = field(default_factory=threading.Event)
    _waiting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def wanted(self) -> PartitionSpec:
        """The requirements that the command line states for the partition."""
        assert self.spec.partition is not None, "a launch without a partition has no session"
        return self.spec.partition

    @property
    def client(self) -> VipuClient:
        """The connection to the server."""
        client: VipuClient = self._client
        return client

    @property
    def server_missing(self) -> bool:
        """True iff no server was found: podrun has started its own, or the POD is too small for the launch."""
        return self.address is None or self.own_service

    @property
    def own_service(self) -> bool:
        """True iff the server runs inside this process and ends with it."""
        return self._service is not None

    # --- the server -------------------------------------------------------------------------------------------

    def connect(self) -> PodFacts:
        """Find the server or start one, and return its POD. Raises ServiceError if a named server does not answer, and
        ConflictError if it has another POD than --cluster says or the port is taken.
        """
        self.address = find_server(self.spec.server, self.environ)
        if self.address is None:
            return self._start_service()
        self.log.info(f"V-IPU server {self.address}")
        if self.others and is_loopback(self.address.host):
            raise UsageError(
                f"instances on {', '.join(self.others)} cannot reach the V-IPU server {self.address}",
                hint="Start it with vipu-server --ray-address HOST:PORT --host ADDRESS, name that with "
                "--vipu-server-host, or stop it: podrun then runs its own.",
            )
        self.token = make_token(self.environ, runtime_directory())
        self._connect(self.address)
        pod = self.client.cluster()
        asked = self.spec.server.cluster
        if asked and asked != pod.name:
            raise ConflictError(
                f"the V-IPU server at {self.address} has {pod.name}, not {asked}",
                hint="Leave out --cluster, or stop that server (vipu-server) and let podrun start its own.",
            )
        self.pod = PodFacts(pod.name, pod.num_ipus, pod.ipu_link_domain_size, pod.ipu_link_topology)
        return self.pod

    def _connect(self, address: ServerAddress, timeout: float | None = None) -> None:
        from podrun.partition.client.vipu_client import VipuClient

        self._client = VipuClient(
            address.host, address.port, timeout or self.spec.server.timeout, own=address.own
        )

    def _start_service(self) -> PodFacts:
        from podrun.partition.machines.ray_pool import RayMachinePool
        from podrun.partition.machines.ray_session import check_installed
        from podrun.partition.server.service import Service
        from podrun.partition.state.store import Store

        check_installed()
        cluster = choose_cluster(self.spec)
        self.pod = facts_of(cluster)
        if self.spec.layout.ipus > self.pod.ipus:
            return self.pod  # The POD is too small: the caller refuses it, and nothing is started.
        ray = self.spec.server.ray
        if ray is not None:
            from podrun.partition.machines.ray_starts import resolve

            ray = resolve(ray, self.environ)
        self.token = make_token(self.environ, runtime_directory())
        pool = RayMachinePool(cluster, address=ray, token=self.token)
        self._service = Service(cluster, Store(None, cluster.name), pool)
        host = pool.own_address() if ray is not None else LOCAL
        port = self._service.start(host, self.spec.server.port or 0, self.token)
        self.address = ServerAddress(host, port, "podrun's own")
        self._connect(self.address)
        self.log.info(f"V-IPU server {self.address} for {cluster.name}")
        return self.pod

    # --- the partition ----------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Choose a partition or create one, as often as --vipu-partition-attempts says while others use the IPUs.

        True if the partition is being made and `wait_active` may run while instances start; False if the partition
        existed, so that `wait_active` must come first.
        """
        for attempt in range(1, self.wanted.attempts):
            try:
                return self._prepare()
            except ExhaustedError as error:
                self.log.warning(f"attempt {attempt} of {self.wanted.attempts}: {error.message}")
                self.pause(BETWEEN_ATTEMPTS_SECONDS)
        return self._prepare()

    def _prepare(self) -> bool:
        existing = {info.name: info for info in self.client.list_partitions()}
        self.name = self._choose_name(existing)
        if self.name not in existing:
            self._create()
            return True
        info = existing[self.name]
        check_may_use(self.client, self.name)
        self.log.info(f"partition {self.name} already exists and is in state {info.state.name}")
        if self._shares(info):
            self._take_place(info)
        else:
            self._check_free(info)
        if not self._fits(info):
            if not self.wanted.update:
                raise ConflictError(
                    f"partition {self.name} {self._misfit(info)}",
                    hint="Add --update-partition=yes to create it anew, or name another (--vipu-partition).",
                )
            self._remove()
            self._create()
            return True
        self._info = info
        self._reset_if_need_be(info)
        return False

    def wait_active(self) -> None:
        """Wait until the partition is ACTIVE, trying again as often as --vipu-partition-attempts says; then
        plan faults if the partition was there before. Raises ServiceError, DeadlineError."""
        with self._waiting:
            self._wait_active()

    def _wait_active(self) -> None:
        from podrun.partition.state.values import PartitionState

        started = time.monotonic()
        for attempt in range(1, self.wanted.attempts + 1):
            try:
                self.client.wait_for_state(
                    self.name, {PartitionState.ACTIVE}, self.spec.server.timeout, sleep=self.pause
                )
                break
            except ServiceError as error:
                if attempt == self.wanted.attempts:
                    if (
                        self.own_service
                    ):  # The server ends with podrun, so a hint to look at it would be of no use.
                        raise type(error)(error.message, hint=_STARTS_BADLY) from error
                    raise
                self.log.warning(f"attempt {attempt} of {self.wanted.attempts}: {error.message}")
                self._try_again()
        if not self.created:
            self.before = self._answers()
            if self.faults:
                self.client.inject_faults(self.name, self.faults)
        self._said_active(started)

    def wait_again(self) -> None:
        """Wait until the partition is ACTIVE after a recovery. Raises ServiceError, DeadlineError."""
        from podrun.partition.state.values import PartitionState

        started = time.monotonic()
        with self._waiting:
            self.client.wait_for_state(
                self.name, {PartitionState.ACTIVE}, self.spec.server.timeout, sleep=self.pause
            )
            self._said_active(started)

    def _said_active(self, started: float) -> None:
        self.log.info(f"final state of {self.name}: ACTIVE after {time.monotonic() - started:.1f} s")

    def pause(self, seconds: float) -> None:
        """Wait between two queries. Raises Closed when the session is closed."""
        if self._closing.wait(seconds):
            raise Closed(f"podrun ends while partition {self.name} is on its way")

    # --- recovery ---------------------------------------------------------------------------------------------

    def settled_state(self, clock: Callable[[], float] = time.monotonic) -> PartitionState:
        """ACTIVE, ERROR or REMOVED, once the partition is no longer on its way. A server that is away may come back.
        Raises ServiceError or DeadlineError after the time that a request may take."""
        from podrun.partition.state.values import PartitionState

        states = {PartitionState.ACTIVE, PartitionState.ERROR, PartitionState.REMOVED}
        end, away = clock() + self.spec.server.timeout, False
        while True:
            try:
                return self.client.wait_for_state(self.name, states, end - clock(), sleep=self.pause)
            except ServiceError as error:
                if clock() >= end:
                    raise
                if not away:
                    self.log.progress(f"waiting for the partition service: {error.message}")
                    away = True
            self.pause(BETWEEN_ATTEMPTS_SECONDS)

    def keep_faults(self, faults: Sequence[FaultSpec]) -> None:
        """The faults that have still to strike."""
        from dataclasses import replace

        self.spec = replace(self.spec, partition=replace(self.wanted, faults=tuple(faults)))

    def make_anew(self, spec: LaunchSpec | None = None, faults: Sequence[FaultSpec] | None = None) -> None:
        """Remove the partition and create one of the same name, for ``spec`` if given, without lost machines. Raises
        ExhaustedError if there is no room; the previous partition is gone by then.
        """
        from podrun.launcher.placement import fit_to_pod

        faults = self.wanted.faults if faults is None else faults
        if spec is not None:
            assert self.pod is not None
            assert spec.partition is not None
            self.spec = fit_to_pod(spec, self.pod)
        self.keep_faults(faults)
        with contextlib.suppress(NotFoundError):
            self._remove()
        self._create()

    def where(self) -> PartitionAddress:
        """The address through which instances reach the partition."""
        assert self.address is not None
        assert self.pod is not None
        info: PartitionInfo = self._info
        options = target_options(
            info.size,
            self.pod.ild_ipus,
            self.spec.layout.ipus_per_instance,
            info.ild_routing,
            self.environ,
        )
        return PartitionAddress(
            self.address.host,
            self.address.port,
            self.name,
            self.spec.server.timeout,
            options,
            self.token,
            str(runtime_directory()),
            self.address.own,
            self.first_ipu,
        )

    @property
    def faults(self) -> tuple[FaultSpec, ...]:
        """The faults that strike on machines and at the service, marked as this launch's."""
        from dataclasses import replace

        there = [spec for spec in self.wanted.faults if not spec.in_program]
        return tuple(replace(spec, launch=self.launch_id) for spec in there)

    def unstruck_faults(self) -> list[FaultSpec]:
        """The planned faults that have not struck. Raises ServiceError if the machines do not say."""
        if not self.faults:
            return []
        from podrun.faults import parse_fault

        planned = {
            parse_fault(text).experiment for report in self._answers() for text in report.planned_faults
        }
        return [spec for spec in self.faults if spec.experiment in planned]

    def reports(self) -> list[MachineReport]:
        """The work of the partition's machines in this launch; empty if the server does not answer."""
        try:
            return [work_since(self.before, report) for report in self._answers()]
        except PodrunError as error:
            self.log.debug(f"no machine reports: {error.message}")
            return []

    def history(self) -> list[MachineReport]:
        """Reports that list what changed the partition and which faults struck; empty if the server does not answer."""
        try:
            return self.client.machine_reports(self.name)
        except PodrunError as error:
            self.log.debug(f"no history of the partition: {error.message}")
            return []

    def _answers(self) -> list[MachineReport]:
        return answers(lambda: self.client.machine_reports(self.name), self.pause)

    def cancel(self) -> None:
        """Cancel what another thread waits for, such as an answer of a hanging server. Call only `close` after it."""
        self._closing.set()
        if self._client is not None:
            self._client.close()

    def close(self) -> None:
        """Remove the partition if podrun created it and has to remove it; end podrun's own service. Does not raise."""
        self._closing.set()
        if not self._waiting.acquire(timeout=CLOSE_SECONDS):
            self.cancel()
            self._waiting.acquire()
        try:
            self._close()
        finally:
            self._waiting.release()

    def _close(self) -> None:
        if self._place is not None:
            self._place.release()
        try:
            if self.faults and not self.own_service and self.name:
                self._disarm()
            if self.created and self.wanted.remove and not self.own_service:
                self._remove_at_end()
        except PodrunError as error:
            later = "; its server does that when it runs again" if self._hold is not None else ""
            self.log.warning(f"partition {self.name} could not be removed: {error.message}{later}")
        finally:
            if self._client is not None:
                self._client.close()
            if self._hold is not None:
                self._hold.release()
            if self._service is not None:
                self._service.stop()

    def _disarm(self) -> None:
        """Take the launch's remaining faults off the plan, because they must hit nobody else."""
        try:
            reports = self.client.machine_reports(self.name)
            planned = {text for report in reports for text in report.planned_faults}
            ours = sorted(text for text in planned if text.endswith(f":launch={self.launch_id}"))
            if ours:
                self.client.cancel_faults(self.name, ours)
        except PodrunError as error:  # The partition is gone and its faults with it, or nobody answers.
            self.log.debug(f"faults were not cancelled: {error.message}")

    # --- inside -----------------------------------------------------------------------------------------------

    def _choose_name(self, existing: Mapping[str, PartitionInfo]) -> str:
        if self.wanted.name:
            return self.wanted.name
        usable = usable_names(existing, self.environ)
        if len(usable) > 1:
            raise UsageError(
                f"there are several partitions: {', '.join(usable)}",
                hint=f"Name one: --vipu-partition {usable[0]}",
            )
        if usable:
            self.log.info(f"using partition {usable[0]} because it is the only one available")
            return usable[0]
        return f"podrun-{os.getpid()}"

    def _create(self) -> None:
        from podrun.partition.host.holders import this_holder
        from podrun.partition.state.values import PartitionState, Requirements, parse_sync_type

        wanted = self.wanted
        needs = Requirements(
            self.name,
            wanted.size,
            allocation=wanted.allocation or "",
            num_gcds=wanted.num_gcds,
            num_ilds=wanted.num_ilds or 0,
            sync_type=parse_sync_type(wanted.sync_type) if wanted.sync_type else None,
            faults=self.faults,
            holder=str(this_holder()) if wanted.remove or wanted.wait else "",
        )
        self.created = True  # The server may still carry out a request that it did not answer.
        try:
            self._info = self.client.create_partition(needs, wait=wanted.wait)
        except UsageError:
            self.created = False
            raise
        if self._info.state is PartitionState.QUEUED:
            self.log.warning(f"partition {self.name} waits in the queue; see vipu explain {self.name}")
            self.client.wait_in_queue(self.name, sleep=self.pause)
            self._info = self.client.get_partition(self.name)
        if not wanted.remove and needs.holder:
            self.client.hold_partition(self.name, needs.holder, keep=True)
        elif needs.holder and self._hold is None and not self.own_service:
            self._hold = HoldOnPartition(lambda: self.client.hold_partition(self.name, needs.holder))
        self.log.info(f"creating partition {self.name} of {wanted.size} IPUs")

    def _remove_at_end(self) -> None:
        """Remove the partition over a new connection, because the other one may have been cancelled."""
        assert self.address is not None
        self._client.close()
        self._connect(self.address, min(self.spec.server.timeout, REMOVE_SECONDS))
        with contextlib.suppress(NotFoundError):
            self._remove()

    def _remove(self) -> None:
        from podrun.partition.state.values import PartitionState

        self.client.remove_partition(self.name, force=True)
        self.client.wait_for_state(self.name, {PartitionState.REMOVED}, REMOVE_SECONDS)
        self.log.info(f"partition {self.name} is removed")

    def _try_again(self) -> None:
        if self.created:
            self._remove()
            self._create()
        else:
            self.client.reset_partition(self.name, self.client.get_partition(self.name).generation)

    def _reset_if_need_be(self, info: PartitionInfo) -> None:
        reset = self.wanted.reset if self.wanted.reset is not None else not info.reconfigurable
        kind = "reconfigurable " if info.reconfigurable else ""
        if reset:
            self.log.info(f"resetting {kind}partition {info.name}")
            self.client.reset_partition(info.name, info.generation)
        else:
            self.log.info(f"{kind}partition {info.name} is OK")

    def _fits(self, info: PartitionInfo) -> bool:
        if info.reconfigurable:
            return info.size >= self.wanted.size
        return info.size == self.wanted.size and info.num_gcds in (1, self.wanted.num_gcds)

    def _misfit(self, info: PartitionInfo) -> str:
        if info.size != self.wanted.size:
            return f"has {info.size} IPUs; the run needs {self.wanted.size}"
        return f"has {info.num_gcds} GCDs; the run needs 1 or {self.wanted.num_gcds}"

    def _shares(self, info: PartitionInfo) -> bool:
        """Whether the launch takes a part of the partition and leaves the rest to other launches."""
        return info.reconfigurable and info.size > self.wanted.size and not self.wanted.reset

    def _take_place(self, info: PartitionInfo) -> None:
        """Choose aligned IPUs that no process holds and no other launch has chosen. Raises ExhaustedError."""
        size = self.wanted.size
        held = {
            ipu.partition_ipu: f"process {ipu.process.pid} ({ipu.process.command})"
            for report in self.client.machine_reports(info.name)
            for ipu in report.ipus
            if ipu.process is not None
        }
        assert self.address is not None
        name = f"{self.address.host}-{self.address.port}-{info.name}"
        for first in range(0, info.size - size + 1, size):
            if held.keys().isdisjoint(range(first, first + size)):
                self._place = PlaceInPartition.take(runtime_directory(self.environ), name, first, size)
                if self._place is not None:
                    self.first_ipu = first
                    self.log.info(
                        f"IPUs {first} to {first + size - 1} of partition {info.name} are this run's"
                    )
                    return
        users = ", ".join(dict.fromkeys(held.values())) or "launches that are starting"
        raise ExhaustedError(
            f"partition {info.name} has no {size} aligned IPUs of its {info.size} free; it is in use by {users}",
            hint="Wait until they are done (gc-monitor), use another (--vipu-partition NAME), or a POD of the run's "
            "own: --private yes",
        )

    def _check_free(self, info: PartitionInfo) -> None:
        """Refuse a partition that another user's processes use: a reset would take their IPUs away."""
        try:
            reports = self.client.machine_reports(info.name)
        except (ServiceError, NotFoundError):
            return  # The next request, for the state of the partition, gives a better error.
        for report in reports:
            for ipu in report.ipus:
                if ipu.process is not None:
                    who = f"process {ipu.process.pid} ({ipu.process.command})"
                    raise ExhaustedError(
                        f"partition {info.name} is in use by {who}",
                        hint="Wait until it is done (gc-monitor), use another (--vipu-partition NAME), or a POD of the "
                        "run's own: --private yes",
                    )


def answers(
    ask: Callable[[], list[MachineReport]], pause: Callable[[float], None], attempts: int = 25
) -> list[MachineReport]:
    """Reports of a partition's machines, which are asked again while some do not answer in time, as on a busy host.

    Returns the last reports; a machine that does not answer ``attempts`` questions has a report without an answer.
    """
    reports = ask()
    for _ in range(attempts - 1):
        if all(report.state != NO_ANSWER for report in reports):
            break
        pause(BETWEEN_REPORTS_SECONDS)
        reports = ask()
    return reports


def work_since(before: Sequence[MachineReport], report: MachineReport) -> MachineReport:
    """A machine's report without the work that it had done ``before``; work that ``before`` does not mention counts as
    0.
    """
    from dataclasses import replace

    for earlier in before:
        if earlier.agent_id == report.agent_id and earlier.batches_done <= report.batches_done:
            did = {ipu.ipu: ipu.batches_done for ipu in earlier.ipus}
            return replace(
                report,
                batches_done=report.batches_done - earlier.batches_done,
                samples_done=_less(report.samples_done, earlier.samples_done),
                modelled_s=_less(report.modelled_s, earlier.modelled_s),
                emulation_s=_less(report.emulation_s, earlier.emulation_s),
                ipus=tuple(
                    replace(i, batches_done=max(0, i.batches_done - did.get(i.ipu, 0))) for i in report.ipus
                ),
            )
    return report


def _less(now: Number | None, before: Number | None) -> Number | None:
    return None if now is None else now - (before or 0)
