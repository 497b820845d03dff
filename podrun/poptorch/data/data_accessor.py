"""``poptorch.AsynchronousDataAccessor``: loads the next elements of a data set before the program asks for them.

A process of its own loads into the slots of a ring in shared memory. A slot is a credit: the process has as many
elements ahead as there are free slots, and gets a slot back when the program asks for the next element.
`PartitionSampler` says which elements of a data set one of several processes loads, `JoinedBatches` how batches of a
sampler become batches of a call.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util  # Registers its own exit function: ours, registered later, runs before it.
import os
import pickle
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from contextlib import nullcontext
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from podrun.poptorch.api.enums import SharingStrategy
from podrun.poptorch.api.signatures import checks_methods
from podrun.poptorch.capture import graph
from podrun.poptorch.data.data_feeder import FeederPlan, ProgramDataset, SharedRing, assembled, feed
from podrun.poptorch.data.forking import forking, prepare_copy
from podrun.poptorch.errors import ArgumentError, Error


class PartitionSampler(torch.utils.data.Sampler[int]):
    """The elements of one process among several, a block of neighbours in the order of the epoch.

    With ``drop_last`` every process has the largest number of whole batches that all have; the blocks of every other
    epoch begin as many elements later as are left over, so that two epochs see them all. Otherwise the blocks differ
    by one element at most. ``seed``: draw a new order for each epoch, the same in all processes; None: keep the order.
    """

    def __init__(
        self, elements: Sized, process: int, processes: int, batch: int, drop_last: bool, seed: int | None
    ) -> None:
        self._total = len(elements)
        self._process, self._processes = process, processes
        self._generator: torch.Generator | None = None
        if seed is not None:
            self._generator = torch.Generator().manual_seed(seed)
        self._epoch = 0
        whole, rest = divmod(self._total, processes)
        if drop_last:
            self._length = batch * (self._total // (batch * processes))
            self._start, self._left_over = process * self._length, self._total - processes * self._length
        else:
            self._length = whole + (process < rest)
            self._start, self._left_over = process * whole + min(process, rest), 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        order: Sequence[int] = range(self._total)
        if self._generator is not None:
            order = torch.randperm(self._total, generator=self._generator).tolist()
        start = self._start + (self._left_over if self._epoch % 2 else 0)
        self._epoch += 1
        yield from order[start : start + self._length]


class JoinedBatches(torch.utils.data.Sampler[list[int]]):
    """``count`` batches of another sampler as one. ``drop_last``: leave out the last one if it has fewer."""

    def __init__(self, batches: Collection[list[int]], count: int, drop_last: bool) -> None:
        self._batches, self._count, self._drop_last = batches, count, drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(self._batches), self._count)
        return whole + bool(rest and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        joined: list[int] = []
        taken = 0
        for batch in self._batches:
            joined += batch
            taken += 1
            if taken == self._count:
                yield joined
                joined, taken = [], 0
        if taken and not self._drop_last:
            yield joined


def element_count(data: object) -> int | None:
    """The number of elements of a data set; None if the data set does not know it."""
    try:
        return len(data)  # type: ignore[arg-type]  # A TypeError is the answer.
    except (TypeError, NotImplementedError):
        return None


_log = logging.getLogger("poptorch::python")

_START_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "fork",
}
"""How the process starts. The SDK's server for ForkServer imports the program once more for each process, workers of
the loader included: seconds each. A copy of the program takes milliseconds (`forking`)."""
STOP_SECONDS = 10.0
"""Seconds in which the process may end by itself before it is ended."""
KILLED_SECONDS = 60.0
"""Seconds in which a killed process is gone, on a busy host too, unless the kernel waits for a device in its name."""


@checks_methods()
class AsynchronousDataAccessor:
    """Iterates over ``dataset`` (a data set or a `DataLoader`) in a process of its own.

    The tensors of an element are views of shared memory, valid until the next element is asked for: clone what is to
    be kept. ``buffer_size``: elements that are loaded ahead. ``load_indefinitely``: begin the next epoch as soon as one
    has ended. ``early_preload``: begin when the accessor is made instead of when it is first iterated over.
    ``rebatched_size``: elements along dimension 0 that are joined to one. ``miss_sleep_time_in_ms`` is accepted; the
    accessor waits for a message and needs no polling.

    Raises Error if the loader loads asynchronously itself, the data set is empty or the process cannot start, and
    AssertionError for elements that are nested or differ in shape, and for what the data set raises.
    """

    def __init__(
        self,
        dataset: ProgramDataset,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        if buffer_size < 1:
            raise ArgumentError("buffer_size must be at least 1")
        if rebatched_size is not None and rebatched_size <= 1:
            raise ArgumentError("rebatched_size must be above 1")
        if getattr(dataset, "_accessor", None) is not None:
            raise Error("The DataLoader has an AsynchronousDataAccessor already: use it as it is")
        _check_whole_batches(dataset, rebatched_size)
        self._dataset = dataset
        self._indefinitely, self._rebatched = load_indefinitely, rebatched_size
        self._epoch, self._in_epoch, self._ended = 0, False, False
        self._preloaded = early_preload
        self._held: int | None = None
        plan = FeederPlan(
            dataset,
            load_indefinitely,
            early_preload,
            rebatched_size,
            bool(getattr(dataset, "rebatched_drop_last", True)),
            torch.random.get_rng_state(),
            graph.registered_parsers(),
        )
        process, ours = _started(_START_METHODS[sharing_strategy], plan)
        _log.debug("AsynchronousDataAccessor worker process: %s", process.pid)
        self._pipe, self._process = ours, process
        self._ending = _Ending(ours, process)
        weakref.finalize(self, self._ending)
        atexit.register(self._ending)
        message = self._receive(Error)
        self._layout, forms = message[1], message[2]
        self._ring, descriptor = SharedRing.create(forms, buffer_size)
        self._pipe.send(("ring", buffer_size))
        reduction.send_handle(self._pipe, descriptor, process.pid)
        os.close(descriptor)

    def __len__(self) -> int:
        if not isinstance(self._dataset, Sized):
            raise TypeError(f"object of type {type(self._dataset).__name__!r} has no len()")
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch again, unless the previous one has ended and the next is being loaded already."""
        if self._in_epoch or (self._ended and not self._indefinitely):
            self._epoch += 1
            self._pipe.send(("reset", self._epoch))
        elif not self._preloaded:
            self._pipe.send(("start",))
        self._preloaded, self._in_epoch, self._ended = True, True, False
        return self

    def __next__(self) -> Any:
        """The next element; StopIteration at the end of the epoch."""
        if not self._in_epoch:
            raise StopIteration
        self._give_back()
        while True:
            kind, *rest = self._receive(AssertionError)
            if kind == "item":
                epoch, slot, size = rest
                self._held = slot
                if epoch != self._epoch:
                    self._give_back()
                    continue
                tensors = self._ring.tensors(slot)
                if size >= 0:
                    tensors = [tensor[:size] if tensor.dim() else tensor for tensor in tensors]
                return assembled(self._layout, tensors)
            if kind == "end" and rest[0] == self._epoch:
                self._in_epoch, self._ended = False, True
                self._epoch += 1
                raise StopIteration

    def terminate(self) -> None:
        """End the process. May be called again."""
        self._ending()

    def _give_back(self) -> None:
        if self._held is not None:
            self._pipe.send(("credit", self._held))
            self._held = None

    def _receive(self, kind: type[Exception]) -> tuple[Any, ...]:
        """The process's next message. Raises ``kind`` for an error in it, and if it has ended."""
        if self._ending.done:
            raise ArgumentError("the AsynchronousDataAccessor was terminated")
        try:
            connection.wait([self._pipe, self._process.sentinel])
            if not self._pipe.poll():
                raise EOFError
            message: tuple[Any, ...] = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(STOP_SECONDS)
            code = self._process.exitcode
            self.terminate()
            raise kind(f"The process that loads data has ended (exit code {code})") from None
        if message[0] == "error":
            self.terminate()
            raise kind(f"The process that loads data has failed:\n{message[1]}")
        return message


def _check_whole_batches(dataset: object, rebatched_size: int | None) -> None:
    if not isinstance(dataset, torch.utils.data.DataLoader) or rebatched_size is not None:
        return
    count, size = element_count(dataset.dataset), getattr(dataset, "combinedBatchSize", dataset.batch_size)
    whole = dataset.drop_last or not size or (count is not None and count % size == 0)
    if not whole and dataset.batch_sampler is not None:
        raise ArgumentError(
            "AsynchronousDataAccessor needs drop_last=True, or rebatched_size: the last batch of the loader is smaller "
            "than the others"
        )


def _started(method: str, plan: FeederPlan) -> tuple[BaseProcess, Connection]:
    """The process, and our end of its pipe. Error if it cannot start."""
    context: Any = multiprocessing.get_context(method)  # Any: each method has a class of its own.
    ours, theirs = context.Pipe(duplex=True)
    copied = method == "fork"
    target, arguments = (
        (_feed_in_copy, (theirs, plan, ours))
        if copied
        else (_feed_in_new_python, (theirs, plan, multiprocessing.get_start_method(allow_none=True)))
    )
    process = context.Process(target=target, args=arguments, name="podrun-data")
    try:
        with forking() if copied else nullcontext():
            process.start()
    except (RuntimeError, OSError, TypeError, AttributeError, pickle.PicklingError) as error:
        ours.close()
        raise Error(
            f"The process that loads data cannot be started: {error}",
            hint="The data set must be picklable, and the program's main part must stand under "
            'if __name__ == "__main__".',
        ) from error
    finally:
        theirs.close()
    return process, ours


def _feed_in_copy(pipe: Connection, plan: FeederPlan, other_end: Connection) -> None:
    """`feed` in a copy of the program, which has the program's end of the pipe as well."""
    prepare_copy()
    other_end.close()
    feed(pipe, plan)


def _feed_in_new_python(pipe: Connection, plan: FeederPlan, start_method: str | None) -> None:
    """`feed` in a Python that has imported the program. The loader's workers start as the program's own would, by
    default as copies: as new Pythons, which `multiprocessing` chooses here, each would import everything again.
    """
    multiprocessing.set_start_method(start_method, force=True)
    feed(pipe, plan)


class _Ending:
    """Ends the process: by a message first, then with SIGTERM, then with SIGKILL. May be called again."""

    def __init__(self, pipe: Connection, process: BaseProcess) -> None:
        self._pipe, self._process, self.done = pipe, process, False
        self._owner = os.getpid()

    def __call__(self) -> None:
        """End the process and free its resources."""
        if self.done or os.getpid() != self._owner:
            return
        self.done = True
        atexit.unregister(self)
        try:
            self._pipe.send(("stop",))
        except (OSError, ValueError):
            _log.debug("The process that loads data has ended by itself")
        self._pipe.close()
        ends: tuple[tuple[Callable[[], object], float], ...] = (
            (lambda: None, STOP_SECONDS),
            (self._process.terminate, STOP_SECONDS),
            (self._process.kill, KILLED_SECONDS),
        )
        for end, seconds in ends:
            end()
            self._process.join(seconds)
            if self._process.exitcode is not None:
                self._process.close()
                return
        _log.debug("The process that loads data is killed and not yet gone")
