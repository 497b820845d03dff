"""The partition of a launch: chosen or created, waited for, made anew and removed, as PopRun does."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from podrun.core.environment import runtime_directory
from podrun.core.errors import (
    ConflictError,
    ExhaustedError,
    NotFoundError,
    PodrunError,
    ServiceError,
    UsageError,
    present,
)
from podrun.core.layout import IpuRange
from podrun.launcher.holds import IpuReservation, PartitionKeepalive, check_unused, reserve_ipus
from podrun.launcher.launch_faults import LaunchFaults
from podrun.launcher.launch_server import LaunchPauses, LaunchServer
from podrun.launcher.machine_work import LaunchReports
from podrun.launcher.server import check_may_use, usable_names
from podrun.launcher.spec import LaunchSpec, PartitionAddress, PartitionSpec, target_options

if TYPE_CHECKING:
    from podrun.faults import FaultSpec
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import PartitionInfo, PartitionState, Requirements

REMOVE_SECONDS = 20.0
"""Longest wait for a partition to be removed."""
BETWEEN_ATTEMPTS_SECONDS = 2.0
"""Pause between two attempts to get IPUs that others use, or to reach a server that is away."""
CLOSE_SECONDS = 1.0
"""Seconds in which a thread that waits for the partition must notice that the launch is over."""
_STARTS_BADLY = (
    "Try again, with -vv to see more. A host that is very busy or short of memory starts machines too slowly; "
    "a vipu-server that stays up (vipu-server --prestart) starts them once."
)


class LaunchPartition:
    """The partition of a launch on the server that it has connected to.

    `prepare`, then `wait_active` (perhaps in another thread while instances start), then `close`. ``faults``: those of
    the launch on machines. ``reports``: what the machines report. ``created``: podrun has asked for the partition.
    ``was_active``: it was ACTIVE in this launch, so that programs could attach and faults strike.
    """

    def __init__(self, server: LaunchServer, launch_id: str = "", pauses: LaunchPauses | None = None) -> None:
        self.server, self.current, self._log = server, server.current, server.log
        self.pauses = pauses or LaunchPauses()
        self.faults = LaunchFaults(server.current, launch_id)
        self.reports = LaunchReports(
            lambda: self.client.machine_reports(self.name), lambda seconds: self.pause(seconds), server.log
        )
        self.name = ""
        self.created = self.was_active = False
        self._reservation: IpuReservation | None = None
        self._keepalive: PartitionKeepalive | None = None
        self._info: PartitionInfo | None = None
        self._waiting = threading.Lock()

    @property
    def wanted(self) -> PartitionSpec:
        """The requirements that the command line states."""
        return self.current.wanted

    @property
    def client(self) -> VipuClient:
        """The connection to the server."""
        return self.server.client

    @property
    def first_ipu(self) -> int:
        """The launch's first IPU; not 0 only in a reconfigurable partition that it shares with other launches."""
        return 0 if self._reservation is None else self._reservation.first_ipu

    def pause(self, seconds: float) -> None:
        """Wait between two queries. Raises Closed when the launch ends."""
        self.pauses.pause(seconds)

    # --- chosen or created -----------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Choose a partition or create one, as often as --vipu-partition-attempts says while others use the IPUs.

        True if the partition is being made and `wait_active` may run while instances start; False if the partition
        existed, so that `wait_active` must come first.
        """
        for attempt in range(1, self.wanted.attempts):
            try:
                return self._choose_or_create()
            except ExhaustedError as error:
                self._log.warning(f"attempt {attempt} of {self.wanted.attempts}: {error.message}")
                self.pause(BETWEEN_ATTEMPTS_SECONDS)
        return self._choose_or_create()

    def _choose_or_create(self) -> bool:
        partitions = self.server.awaited(lambda: self.client.list_partitions(), self.pause)
        existing = {info.name: info for info in partitions}
        self.name = self._choose_name(existing)
        if self.name not in existing:
            self._create()
            return True
        info = existing[self.name]
        check_may_use(self.client, self.name)
        self._log.info(f"partition {self.name} already exists and is in state {info.state.name}")
        if _shares(info, self.wanted):
            self._reserve_ipus(info)
        else:
            check_unused(self.client, info)
        if not _fits(info, self.wanted):
            if not self.wanted.update:
                raise ConflictError(
                    f"partition {self.name} {_misfit(info, self.wanted)}",
                    hint="Add --update-partition=yes to create it anew, or name another (--vipu-partition).",
                )
            self._remove()
            self._create()
            return True
        self._info = info
        self._reset_if_need_be(info)
        return False

    def _choose_name(self, existing: Mapping[str, PartitionInfo]) -> str:
        if self.wanted.name:
            return self.wanted.name
        usable = usable_names(existing, self.server.environ)
        if len(usable) > 1:
            raise UsageError(
                f"there are several partitions: {', '.join(usable)}",
                hint=f"Name one: --vipu-partition {usable[0]}",
            )
        if usable:
            self._log.info(f"using partition {usable[0]} because it is the only one available")
            return usable[0]
        return f"podrun-{os.getpid()}"

    def _reserve_ipus(self, info: PartitionInfo) -> None:
        address, size = self.server.connected_address, self.wanted.size
        directory = runtime_directory(self.server.environ)
        self._reservation = reserve_ipus(self.client, info, size, directory, f"{address.host}-{address.port}")
        last = self.first_ipu + size - 1
        self._log.info(f"IPUs {self.first_ipu} to {last} of partition {info.name} are this run's")

    def _reset_if_need_be(self, info: PartitionInfo) -> None:
        reset = self.wanted.reset if self.wanted.reset is not None else not info.reconfigurable
        kind = "reconfigurable " if info.reconfigurable else ""
        if reset:
            self._log.info(f"resetting {kind}partition {info.name}")
            self.client.reset_partition(info.name, info.generation)
        else:
            self._log.info(f"{kind}partition {info.name} is OK")

    def _requirements(self) -> Requirements:
        from podrun.partition.host.holders import this_holder
        from podrun.partition.state.values import Requirements, parse_sync_type

        wanted = self.wanted
        return Requirements(
            self.name,
            wanted.size,
            allocation=wanted.allocation or "",
            num_gcds=wanted.num_gcds,
            num_ilds=wanted.num_ilds or 0,
            sync_type=parse_sync_type(wanted.sync_type) if wanted.sync_type else None,
            faults=self.faults.planned,
            holder=str(this_holder()) if wanted.remove or wanted.wait else "",
        )

    def _create(self) -> None:
        from podrun.partition.state.values import PartitionState

        wanted, needs = self.wanted, self._requirements()
        self.created = True  # The server may still carry out a request that it did not answer.
        try:
            self._info = self.client.create_partition(needs, wait=wanted.wait)
        except UsageError:
            self.created = False
            raise
        if self._info.state is PartitionState.QUEUED:
            self._log.warning(f"partition {self.name} waits in the queue; see vipu explain {self.name}")
            self.client.wait_in_queue(self.name, sleep=self.pause)
            self._info = self.client.get_partition(self.name)
        if not wanted.remove and needs.holder:
            self.client.hold_partition(self.name, needs.holder, keep=True)
        elif needs.holder and self._keepalive is None and not self.server.own:
            self._keepalive = PartitionKeepalive(lambda: self.client.hold_partition(self.name, needs.holder))
        self._log.info(f"creating partition {self.name} of {wanted.size} IPUs")

    # --- waited for ------------------------------------------------------------------------------------------

    def wait_active(self) -> None:
        """Wait until the partition is ACTIVE, trying again as often as --vipu-partition-attempts says; then
        plan faults if the partition was there before. Raises ServiceError, DeadlineError."""
        started = time.monotonic()
        with self._waiting:
            self._wait_with_attempts()
            self.was_active = True
            if not self.created:
                ipus = IpuRange(self.first_ipu, self.current.spec.layout.ipus)
                self.reports.before = self.server.awaited(
                    lambda: self.reports.answering(self.name, ipus), self.pause
                )
                if self.faults.planned:
                    self.client.inject_faults(self.name, self.faults.planned)
            self._log_active(started)

    def wait_again(self) -> None:
        """Wait until the partition is ACTIVE after a recovery. Raises ServiceError, DeadlineError."""
        started = time.monotonic()
        with self._waiting:
            self._wait_for_active()
            self._log_active(started)

    def state_at_rest(self, clock: Callable[[], float] = time.monotonic) -> PartitionState:
        """ACTIVE, ERROR or REMOVED, once the partition is no longer on its way. A server that is away may come back.
        Raises ServiceError or DeadlineError after the time that a request may take."""
        from podrun.partition.state.values import PartitionState

        states = {PartitionState.ACTIVE, PartitionState.ERROR, PartitionState.REMOVED}
        end, away = clock() + self.current.spec.server.timeout, False
        while True:
            try:
                return self.client.wait_for_state(self.name, states, end - clock(), sleep=self.pause)
            except ServiceError as error:
                if clock() >= end:
                    raise
                if not away:
                    self._log.progress(f"waiting for the partition service: {error.message}")
                    away = True
            self.pause(BETWEEN_ATTEMPTS_SECONDS)

    def _wait_for_active(self) -> None:
        from podrun.partition.state.values import PartitionState

        timeout = self.current.spec.server.timeout
        try:
            self.client.wait_for_state(self.name, {PartitionState.ACTIVE}, timeout, sleep=self.pause)
        except ServiceError as error:
            if self.server.own:
                # The server ends with podrun, so a hint to look at it would be of no use.
                error.hint = _STARTS_BADLY
            raise

    def _wait_with_attempts(self) -> None:
        for attempt in range(1, self.wanted.attempts + 1):
            try:
                self._wait_for_active()
                return
            except ServiceError as error:
                if attempt == self.wanted.attempts:
                    raise
                self._log.warning(f"attempt {attempt} of {self.wanted.attempts}: {error.message}")
                self._try_again()

    def _try_again(self) -> None:
        if self.created:
            self._remove()
            self._create()
        else:
            self.client.reset_partition(self.name, self.client.get_partition(self.name).generation)

    def _log_active(self, started: float) -> None:
        self._log.info(f"final state of {self.name}: ACTIVE after {time.monotonic() - started:.1f} s")

    # --- used ------------------------------------------------------------------------------------------------

    def make_anew(self, spec: LaunchSpec | None = None, faults: Sequence[FaultSpec] = ()) -> None:
        """Remove the partition and create one of the same name, for ``spec`` with ``faults`` if it is given, without
        lost machines. Raises ExhaustedError if there is no room; the previous partition is gone by then.
        """
        from podrun.launcher.placement import fit_to_pod

        if spec is not None:
            self.current.spec = fit_to_pod(spec, self.server.connected_pod)
            self.current.keep_faults(faults)
        ours = self.created
        with contextlib.suppress(NotFoundError):
            self._remove()
        try:
            self._create()
        except ExhaustedError:
            self.created = ours  # Another way of the recovery may make it again.
            raise

    def address(self) -> PartitionAddress:
        """The address through which instances reach the partition."""
        server, info = self.server, present(self._info, "prepare comes first")
        options = target_options(
            info.size,
            server.connected_pod.ild_ipus,
            self.current.spec.layout.ipus_per_instance,
            info.ild_routing,
            server.environ,
        )
        address = server.connected_address
        return PartitionAddress(
            address.host,
            address.port,
            self.name,
            self.current.spec.server.timeout,
            options,
            server.token,
            str(runtime_directory()),
            address.own,
            self.first_ipu,
        )

    # --- removed ---------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancel what another thread waits for, such as an answer of a hanging server. Call only `close` after it."""
        self.pauses.close()
        self.server.close_client()

    def close(self) -> None:
        """Remove the partition if podrun created it and has to remove it; end podrun's own service. Does not raise."""
        self.pauses.close()
        if not self._waiting.acquire(timeout=CLOSE_SECONDS):
            self.cancel()
            self._waiting.acquire()
        try:
            self._close()
        finally:
            self._waiting.release()

    def _close(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
        try:
            if self.faults.planned and not self.server.own and self.name:
                self.faults.disarm(self.client, self.name, self._log)
            if self.created and self.wanted.remove and not self.server.own:
                self._remove_at_end()
        except PodrunError as error:
            later = "; its server does that when it runs again" if self._keepalive is not None else ""
            self._log.warning(f"partition {self.name} could not be removed: {error.message}{later}")
        finally:
            self.server.close_client()
            if self._keepalive is not None:
                self._keepalive.release()
            self.server.close()

    def _remove_at_end(self) -> None:
        """Remove the partition over a new connection, because the other one may have been cancelled."""
        self.server.reconnect(REMOVE_SECONDS)
        with contextlib.suppress(NotFoundError):
            self._remove()

    def _remove(self) -> None:
        from podrun.partition.state.values import PartitionState

        self.client.remove_partition(self.name, force=True)
        self.client.wait_for_state(self.name, {PartitionState.REMOVED}, REMOVE_SECONDS)
        self._log.info(f"partition {self.name} is removed")


def _fits(info: PartitionInfo, wanted: PartitionSpec) -> bool:
    if info.reconfigurable:
        return info.size >= wanted.size
    return info.size == wanted.size and info.num_gcds in (1, wanted.num_gcds)


def _misfit(info: PartitionInfo, wanted: PartitionSpec) -> str:
    if info.size != wanted.size:
        return f"has {info.size} IPUs; the run needs {wanted.size}"
    return f"has {info.num_gcds} GCDs; the run needs 1 or {wanted.num_gcds}"


def _shares(info: PartitionInfo, wanted: PartitionSpec) -> bool:
    """Whether the launch takes a part of the partition and leaves the rest to other launches."""
    return info.reconfigurable and info.size > wanted.size and not wanted.reset
