"""A connection's port to one machine, and the parts of a job that lie on each machine.

A `Port` starts a request and returns a function that waits for its result, so that a connection can use all its
machines at once. `LocalPort` calls a machine in this process; `podrun.device.host.remote.RemotePort` calls one over
gRPC.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol, TypeVar

from podrun.core import executable_file
from podrun.core.errors import ApplicationRuntimeError, DeadlineError, InternalError
from podrun.core.executable import Array, Executable
from podrun.core.layout import IpuRange, replicas_on
from podrun.core.quick_dataclass import dataclass
from podrun.device.connection import AttachRequest, Refusal, RunOutcome
from podrun.device.program.fabric import program_digest

if TYPE_CHECKING:
    from podrun.device.machine import Machine

T = TypeVar("T")
Wait = Callable[[float | None], T]
"""``wait(seconds)``: returns the result of a request or raises its error; DeadlineError after ``seconds``."""


@dataclass(frozen=True, slots=True)
class Site:
    """A machine as a client knows it: its index in the partition, endpoint, and IPUs."""

    machine: int
    endpoint: str
    ipus: IpuRange


def sites_holding(sites: Sequence[Site], owned: IpuRange) -> list[Site]:
    """The machines that hold any of ``owned``, in order.

    Raises ApplicationRuntimeError if some IPU of ``owned`` is on none of them.
    """
    holding = [s for s in sites if s.ipus.overlap(owned).count]
    held = sum(s.ipus.overlap(owned).count for s in holding)
    if owned.count < 1 or held != owned.count:
        last = max((s.ipus.stop for s in sites), default=0)
        raise ApplicationRuntimeError(
            f"IPUs {owned.first}-{owned.stop - 1} are not all in the partition, which has IPUs 0-{last - 1}"
        )
    return holding


def replica_slices(sites: Sequence[Site], owned: IpuRange, ipus_per_replica: int) -> list[slice]:
    """For each of these machines, the owner's replicas (counted from its first) that lie there, whole or in part.

    Raises ApplicationRuntimeError if the owner or a machine holds a part of a replica that could lie on one machine.
    """
    slices = []
    for site in sites:
        here = replicas_on(site.ipus, owned, ipus_per_replica)
        if here is None:
            raise ApplicationRuntimeError(
                f"IPUs {owned.first}-{owned.stop - 1} are not whole replicas of {ipus_per_replica} IPUs on each machine"
            )
        slices.append(here)
    return slices


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A program to be loaded. ``data``: gives the bytes of its file. ``digest``: see `program_digest`. ``own``: podrun
    has exported all of its pieces for this user (`podrun.core.executable_file`)."""

    executable: Executable
    digest: str
    data: Callable[[], bytes]
    own: bool = False


class ProgramFiles:
    """The files of the last programs that a connection loaded: a session that alternates between programs loads each
    again and again, and writes none of them twice.
    """

    KEPT = 4

    def __init__(self) -> None:
        self._latest: list[ProgramFile] = []

    def of(self, executable: Executable) -> ProgramFile:
        """The program's file, written now or before."""
        kept = [file for file in self._latest if _has_parts_of(file.executable, executable)]
        file = kept[0] if kept else _written(executable)
        self._latest = [file, *(other for other in self._latest if other is not file)][: self.KEPT]
        return file


def _has_parts_of(one: Executable, other: Executable) -> bool:
    """Whether two Executables have the very same parts, and equal metadata."""
    return one.metadata == other.metadata and all(
        getattr(one, field.name) is getattr(other, field.name)
        for field in fields(Executable)
        if field.name != "metadata"
    )


def _written(executable: Executable) -> ProgramFile:
    data = executable_file.dumps(executable)
    own = executable_file.are_own(item.stablehlo for item in executable.computations.values())
    return ProgramFile(executable, program_digest(data), lambda: data, own)


@dataclass(frozen=True, slots=True)
class RunArrays:
    """One machine's part of a run: arrays to read inputs from and to write anchors to.

    ``plan``: two runs with the same plan have arrays of the same names, shapes and dtypes. ``depth``: runs that may be
    in flight, this one included; with 1 the port may run in the calling thread.
    """

    batches: int
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    plan: object = None
    depth: int = 1


class Port(Protocol):
    """One machine, as the host talks to it (see the module docstring)."""

    @property
    def site(self) -> Site:
        """The machine that the port leads to."""

    def attach(self, request: AttachRequest) -> Refusal | None:
        """None if attached; otherwise the reason for the refusal."""

    def load(self, program: ProgramFile, timeout: float) -> Wait[None]:
        """Load a program; ``timeout``: target.hostSyncTimeout, seconds."""

    def write(self, values: Mapping[str, Array]) -> Wait[None]:
        """Write variables of the loaded program, by name."""

    def read(self, names: Iterable[str]) -> Wait[dict[str, Array]]:
        """Copies of variables of the loaded program, by name."""

    def run(self, arrays: RunArrays) -> Wait[RunOutcome]:
        """Run. Outputs are filled when the wait returns."""

    def close(self) -> None:
        """Detach. Idempotent; never raises for a machine that is gone."""


class LocalPort:
    """A machine in this process. ``threaded``: requests run in a thread of the port's own, else in the calling one."""

    def __init__(self, site: Site, machine: Machine, *, threaded: bool) -> None:
        self._site = site
        self._machine = machine
        self._threads = self._thread() if threaded else None
        self._owner: int | None = None

    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, f"podrun-machine-{self._site.machine}")

    @property
    def site(self) -> Site:
        return self._site

    def attach(self, request: AttachRequest) -> Refusal | None:
        answer = self._machine.attach(request)
        if isinstance(answer, Refusal):
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

    def run(self, arrays: RunArrays) -> Wait[RunOutcome]:
        checked = arrays.plan is not None  # the connection has checked them
        if self._threads is None and arrays.depth > 1:
            self._threads = self._thread()
        return self._start(
            lambda: self._machine.run(
                self._id, arrays.batches, arrays.inputs, arrays.outputs, checked=checked
            )
        )

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
