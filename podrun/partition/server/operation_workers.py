"""Threads that carry out operations on partitions, one after the other for each partition, and report how they end."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from podrun.core.errors import PodrunError
from podrun.partition.machines import operations
from podrun.partition.machines.pool import MachinePool
from podrun.partition.state import events as ev
from podrun.partition.state.records import MachineUse, Partition

log = logging.getLogger("podrun.partition")

WORKERS = 8
"""Operations on partitions that run at a time."""
Operation = ev.ProvisionMachines | ev.ResetMachines | ev.ReleaseMachines


class OperationWorkers:
    """The threads of a service. ``current``: the record of a partition as it is now; ``report`` takes how an operation
    ended; ``agents_lock`` is held while machines of agents end and start; ``stopping``: the service is being stopped.
    """

    def __init__(
        self,
        pool: MachinePool,
        service: str,
        current: Callable[[str], Partition | None],
        report: Callable[[ev.Event], None],
        agents_lock: threading.RLock,
        stopping: threading.Event,
    ) -> None:
        self._pool, self._service, self._current, self._report = pool, service, current, report
        self._agents_lock, self._stopping = agents_lock, stopping
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="podrun-partition")

    def submit(self, operation: Operation) -> None:
        """Carry out an operation in a thread. Returns at once."""
        with contextlib.suppress(RuntimeError):  # The service is stopping.
            self._threads.submit(self._logged, operation)

    def refuse_new(self) -> None:
        """Begin nothing more; what runs goes on."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def wait(self) -> None:
        """Wait until what runs has ended."""
        self._threads.shutdown(wait=True)

    def _logged(self, operation: Operation) -> None:
        try:
            self._run(operation)
        except Exception:
            log.exception("an operation failed: %s", operation)

    def _run(self, operation: Operation) -> None:
        """Run an operation on a partition after those before it; report how it ended."""
        name, number = operation.partition, operation.operation
        with self._lock:
            turn = self._turns.setdefault(name, threading.Lock())
        with turn:
            partition = self._current(name)
            if partition is None or partition.operation != number:
                return
            with self._agents_lock:
                pass  # Instructions for its agents from before this operation are carried out first.
            self._report(ev.OperationStarted(name, number))
            try:
                if isinstance(operation, ev.ReleaseMachines):
                    self._pool.release([MachineUse(part.agent_id, name) for part in operation.slices])
                else:
                    operations.bring_up(self._pool, partition, self._service)
            except PodrunError as error:
                if self._stopping.is_set():
                    return  # The partition is in order: it is brought up when the service starts again.
                hint = f" {error.hint}" if error.hint else ""
                self._report(ev.OperationFailed(name, number, f"{error.message}.{hint}"))
            except Exception as error:
                log.exception("partition %s: an operation failed", name)
                self._report(ev.OperationFailed(name, number, f"{type(error).__name__}: {error}"))
            else:
                self._report(ev.OperationSucceeded(name, number))
