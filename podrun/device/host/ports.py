"""A connection's way to one machine, and the way to a machine in this process.

A `Port` starts things and gives back how to wait for them, so that a connection can have all its machines at
work at once. `LocalPort` does it with a thread for its machine; `podrun.device.host.remote.RemotePort` over gRPC.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from podrun.device.connection import AttachRequest
from podrun.device.host.split import Site
from podrun.device.machine import Machine
from podrun.device.program.engine import Outcome
from podrun.device.program.operands import Array
from podrun.errors import DeadlineError, InternalError
from podrun.executable import Executable

T = TypeVar("T")
Wait = Callable[[float | None], T]
"""``wait(seconds)``: the result or the error of what was started; DeadlineError if it is not there in time.
"""


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A program on its way to machines. ``data``: the bytes of its file; ``digest``: their name."""

    executable: Executable
    digest: str
    data: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class RunArrays:
    """One machine's part of a run: views to read inputs from and to write anchors to. ``key`` changes with
    shapes.
    """

    batches: int
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    key: Any = field(default=None, compare=False)


class Port(Protocol):
    """See the module docstring."""

    @property
    def site(self) -> Site:
        """The machine."""

    def attach(self, request: AttachRequest) -> str | None:
        """None when attached; otherwise why not."""

    def load(self, program: ProgramFile, timeout: float) -> Wait[None]:
        """Load a program; ``timeout``: target.hostSyncTimeout, seconds."""

    def write(self, values: Mapping[str, Array]) -> Wait[None]:
        """Write variables."""

    def read(self, names: Iterable[str]) -> Wait[dict[str, Array]]:
        """Copies of variables."""

    def run(self, arrays: RunArrays) -> Wait[Outcome]:
        """Run; outputs are filled when the wait returns."""

    def close(self) -> None:
        """Detach. Idempotent; never raises for a machine that is gone."""


class LocalPort:
    """A machine in this process. Runs on a single machine stay in the calling thread; ``threaded``
    otherwise.
    """

    def __init__(self, site: Site, machine: Machine, *, threaded: bool) -> None:
        self._site = site
        self._machine = machine
        self._threads = ThreadPoolExecutor(1, f"podrun-machine-{site.machine}") if threaded else None
        self._owner: int | None = None

    @property
    def site(self) -> Site:
        return self._site

    def attach(self, request: AttachRequest) -> str | None:
        answer = self._machine.attach(request)
        if isinstance(answer, str):
            return answer
        self._owner = answer
        return None

    def load(self, program: ProgramFile, timeout: float) -> Wait[None]:
        return self._start(
            lambda: self._machine.load(self._id, program.digest, lambda: program.executable, timeout=timeout)
        )

    def write(self, values: Mapping[str, Array]) -> Wait[None]:
        return self._start(lambda: self._machine.write(self._id, values))

    def read(self, names: Iterable[str]) -> Wait[dict[str, Array]]:
        wanted = list(names)
        return self._start(lambda: {n: v.copy() for n, v in self._machine.read(self._id, wanted).items()})

    def run(self, arrays: RunArrays) -> Wait[Outcome]:
        return self._start(lambda: self._machine.run(self._id, arrays.batches, arrays.inputs, arrays.outputs))

    def close(self) -> None:
        if self._owner is not None:
            self._machine.detach(self._owner)
            self._owner = None
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    @property
    def _id(self) -> int:
        if self._owner is None:
            raise InternalError(f"machine {self._site.machine} was used without being attached")
        return self._owner

    def _start(self, work: Callable[[], T]) -> Wait[T]:
        if self._threads is None:
            future: Future[T] = Future()
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
        else:
            future = self._threads.submit(work)
        return lambda seconds: _wait(future, seconds, self._site)


def _wait(future: Future[T], seconds: float | None, site: Site) -> T:
    with contextlib.suppress(FutureTimeout):
        return future.result(seconds)
    raise DeadlineError(f"machine {site.machine} did not answer within {seconds} s")
