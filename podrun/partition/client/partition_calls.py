"""Calls about partitions: made, used, waited for, removed; their machines and faults."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterable

from podrun.core.errors import (
    DeadlineError,
    LostAnswerError,
    NotFoundError,
    ServiceError,
)
from podrun.core.telemetry import MachineReport
from podrun.faults import FaultSpec
from podrun.partition.client.connection import NoServerError, ServiceConnection
from podrun.partition.state.codec import from_message, to_message, unsigned
from podrun.partition.state.values import (
    IpuofConfig,
    PartitionInfo,
    PartitionState,
    PartitionStatus,
    PlannedInfo,
    QueueInfo,
    Requirements,
)

QUEUE_POLL_S = 0.5
"""Seconds between two questions about a queued request."""
SERVER_PATIENCE_S = 30.0
"""Seconds for which a client that waits for a partition lets a server start again that does not answer any more."""


class PartitionCalls(ServiceConnection):
    """What a client asks about partitions."""

    def create_partition(
        self, needs: Requirements, *, wait: bool = False, priority: int = 0
    ) -> PartitionInfo:
        """Request a partition; returns at once, usually in state PENDING (see `wait_for_state`). With ``wait`` it is
        QUEUED if there is no room now; then call `wait_in_queue`.

        Raises UsageError for an invalid request, NotFoundError for an unknown allocation, ExistsError if a partition
        has the name, ExhaustedError if other partitions hold the IPUs.
        """
        request = to_message(needs, self._pb.CreatePartitionRequest)
        request.MergeFrom(self._request("CreatePartitionRequest", {"wait": wait, "priority": priority}))
        with contextlib.suppress(LostAnswerError):  # Whether it was carried out is seen at once.
            self._call(self._user.CreatePartition, request)
        return self.get_partition(needs.name)

    def get_partition(self, name: str) -> PartitionInfo:
        """One partition. Raises NotFoundError, which lists the partitions."""
        reply = self._ask("GetPartition", partition_id=name, again=True)
        return from_message(PartitionInfo, reply.partition)

    def list_partitions(self) -> list[PartitionInfo]:
        """All partitions, by name."""
        reply = self._ask("ListPartitions")
        return [from_message(PartitionInfo, entry) for entry in reply.partitions]

    def partition_state(self, name: str) -> tuple[PartitionState, str]:
        """State of a partition, and its error in state ERROR: cheap, for polling."""
        reply = self._ask("GetPartitionStatus", partition_id=name)
        status = from_message(PartitionStatus, reply.status)
        return status.state, status.error

    def reset_partition(self, name: str, generation: int = 0) -> None:
        """Re-initialise IPUs and links; returns at once (then `wait_for_state`).

        ``generation``: the generation to end; a partition that has been reset since is left alone. 0: any.
        """
        self._ask("ResetPartition", partition_id=name, generation=generation, again=generation > 0)

    def remove_partition(self, name: str, *, force: bool = False) -> None:
        """Give the IPUs back; returns at once (``wait_for_state(name, {REMOVED}, ...)`` waits for that). A queued
        request is given up. Raises ConflictError if a process is attached, unless ``force``."""
        try:
            self._ask("RemovePartition", partition_id=name, force=force)
        except LostAnswerError:
            with contextlib.suppress(NotFoundError):  # It was carried out.
                self._ask("RemovePartition", partition_id=name, force=force)

    def hold_partition(self, name: str, holder: str, *, keep: bool = False) -> None:
        """Tell the server that a partition's holder (`partition.host.holders`) lives. ``keep``: end that bond."""
        self._ask("HoldPartition", partition_id=name, holder=holder, keep=keep, again=True)

    def wait_in_queue(
        self, name: str, deadline: float = math.inf, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Wait until a request has left the queue, at most ``deadline`` seconds. Each question is a sign of life: some
        seconds after the last one the server drops the request. The server may start again meanwhile. Raises
        NotFoundError if the request was dropped, DeadlineError.
        """
        end = time.monotonic() + deadline
        while self._state_when_back(name, end, time.monotonic, sleep)[0] is PartitionState.QUEUED:
            if time.monotonic() >= end:
                raise DeadlineError(
                    f"partition {name} is still in the queue after {deadline:g} s",
                    hint=f"What it waits for: vipu explain {name}",
                )
            sleep(QUEUE_POLL_S)

    def list_queue(self) -> list[QueueInfo]:
        """Requests that wait for IPUs, in the order in which they are served."""
        reply = self._ask("ListQueue")
        return [from_message(QueueInfo, entry) for entry in reply.requests]

    def plan_partition(self, needs: Requirements, *, priority: int = 0) -> PlannedInfo:
        """When and where a partition would start, were it asked for now; changes nothing. Raises UsageError for a
        request that can never be met."""
        request = to_message(needs, self._pb.CreatePartitionRequest)
        request.MergeFrom(self._request("CreatePartitionRequest", {"priority": priority}))
        reply = self._ask("PlanPartition", request=request)
        return from_message(PlannedInfo, reply.planned)

    def capture(self) -> str:
        """Agents, partitions, queue and reservations as JSON, for `podrun simulate --start`."""
        json_text: str = self._ask("CaptureState").json
        return json_text

    def wait_for_state(
        self,
        name: str,
        states: Collection[PartitionState],
        deadline: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> PartitionState:
        """Poll until the partition is in one of ``states``; returns the state. ``deadline``: seconds from now.

        A partition that does not exist counts as REMOVED if ``states`` has it. Raises ServiceError with the partition's
        own error as soon as it is in ERROR (unless ``states`` has ERROR or REMOVED), DeadlineError after ``deadline``
        seconds.
        """
        wanted = set(states)
        end = clock() + deadline
        pause = 0.01
        while True:
            try:
                state, error = self._state_when_back(name, end, clock, sleep)
            except NotFoundError:
                if PartitionState.REMOVED in wanted:
                    return PartitionState.REMOVED
                raise
            if state in wanted:
                return state
            if state is PartitionState.ERROR and PartitionState.REMOVED not in wanted:
                raise ServiceError(
                    f"partition {name} is in state ERROR: {error}",
                    hint=f"Look at it: vipu get partition {name}",
                )
            if clock() >= end:
                names = " or ".join(sorted(state.name for state in wanted))
                raise DeadlineError(
                    f"partition {name} is still {state.name} after {deadline:g} s; waited for {names}",
                    hint="Allow more time (--vipu-server-timeout SECONDS), or see `vipu-admin list agents`.",
                )
            sleep(min(pause, max(end - clock(), 0)))
            pause = min(pause * 1.5, 0.2)

    def _state_when_back(
        self, name: str, end: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> tuple[PartitionState, str]:
        """`partition_state`; while no server answers, again: until ``end``, and for `SERVER_PATIENCE_S` at most."""
        give_up = None
        while True:
            try:
                return self.partition_state(name)
            except NoServerError:
                give_up = give_up or min(end, clock() + SERVER_PATIENCE_S)
                if clock() >= give_up:
                    raise
            sleep(QUEUE_POLL_S)

    def ipuof_config(self, name: str, gcd: int = 0) -> IpuofConfig:
        """How to reach the IPUs of GCD ``gcd`` of the partition."""
        config = self._ask(
            "GetPartitionIpuofConfig", partition_id=name, gcd_id=self._pb.GcdId(id=unsigned(gcd, "gcd"))
        ).ipuof_config
        return from_message(IpuofConfig, config)

    def machine_reports(self, partition: str | None = None) -> list[MachineReport]:
        """Reports of machines: those of ``partition`` in partition order, or all agents of the POD."""
        reply = self._ask("ListMachineReports", partition_id=partition or "")
        return [MachineReport.from_json_dict(json.loads(text)) for text in reply.reports_json]

    def reset_ipus(self, partition: str, ipus: Iterable[int]) -> None:
        """Reset IPUs (recovery action IPU_RESET) by their index in the partition. Links are not touched."""
        self._ask("ResetIpus", partition_id=partition, partition_ipus=[unsigned(ipu, "ipu") for ipu in ipus])

    def inject_faults(self, partition: str, specs: Iterable[FaultSpec | str]) -> None:
        """Plan faults, or their texts, on the machines of a partition. Raises UsageError for one that cannot strike."""
        self._ask("InjectFaults", partition_id=partition, faults=[str(fault) for fault in specs])

    def cancel_faults(self, partition: str, texts: Iterable[str] = ()) -> tuple[str, ...]:
        """Take faults of a partition off the plan: those of these texts, or all. Returns the cancelled ones.

        Raises NotFoundError for a text that is not planned.
        """
        return tuple(
            self._ask("InjectFaults", partition_id=partition, faults=list(texts), cancel=True).cancelled
        )
