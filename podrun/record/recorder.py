"""The events of one process: an `EventRecorder`, and a connection to IPUs that reports its calls to it.

A process writes lines to a file of its own, each with one system call, so that the lines of a killed process are there.
podrun brings the files together when the launch ends (`podrun.record.events`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from podrun.core.environment import OMPI_COMM_WORLD_RANK, PODRUN_RESTART_COUNT, environment
from podrun.core.error_codec import cause_to_dict
from podrun.core.errors import ErrorCause, PodrunError, PoplarError, RecoverableRuntimeError
from podrun.core.executable import AllGather, AllReduce, Executable, ReduceScatter, Sync
from podrun.device.connection import AttachRequest, Connection, Refusal, RunResult
from podrun.record.events import normalised

T = TypeVar("T")
FOLDER = "PODRUN_RECORD"
"""Variable that ``podrun --record`` sets: the folder for the files of the launch's processes."""
_COLLECTIVES = (AllReduce, ReduceScatter, AllGather, Sync)


class EventRecorder:
    """Appends events to a file. ``clock``: wall time in seconds, which is written beside each event."""

    def __init__(self, path: Path, actor: str, life: int, clock: Callable[[], float] = time.time) -> None:
        self.actor, self.life = actor, life
        self._clock = clock
        self._done = 0
        self._refusal: dict[str, Any] | None = None
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, kind: str, **data: object) -> None:
        """Write an event of this kind, with these facts."""
        self._refusal = None
        self.note_at(self._done, kind, data)

    def note_at(self, clock: int, kind: str, data: Mapping[str, Any]) -> None:
        """Write an event with another clock."""
        fields = {"life": self.life, "clock": clock, "kind": kind, "time": self._clock(), "data": data}
        os.write(self._file, json.dumps(fields, separators=(",", ":")).encode() + b"\n")

    def note_error(self, error: PodrunError, during: str) -> None:
        """Write a failure."""
        self.note("error", during=during, **_error_fields(error), message=normalised(error.message))

    def note_refusal(self, why: str, broken: PodrunError) -> None:
        """Write that IPUs were refused because of what is ``broken``; once, however often a process asks in a row."""
        data = _error_fields(broken) | {"message": normalised(why)}
        if data != self._refusal:
            self.note("refused", **data)
            self._refusal = data

    def joint_operation_done(self) -> None:
        """Count an operation that all instances do together."""
        self._done += 1

    def close(self) -> None:
        """End the record's file."""
        os.close(self._file)


def _error_fields(error: PodrunError) -> dict[str, Any]:
    data: dict[str, Any] = {"error": type(error).__name__}
    cause = getattr(error, "cause", None)
    if isinstance(cause, ErrorCause):
        data["cause"] = cause_to_dict(cause)
    if isinstance(error, PoplarError):
        data |= {"error": error.type, "code": error.code.name, "where": error.where}
    if isinstance(error, RecoverableRuntimeError):
        data["action"] = error.recovery_action.name
    return data


_of_this_process: dict[str, EventRecorder] = {}


def process_recorder(environ: Mapping[str, str] | None = None) -> EventRecorder | None:
    """The recorder of this process; None if nothing is recorded."""
    variables = environment(environ)
    folder = variables.get(FOLDER, "")
    if not folder:
        return None
    instance, life = variables.get(OMPI_COMM_WORLD_RANK, "0"), variables.get(PODRUN_RESTART_COUNT, "0")
    path = Path(folder, f"instance-{instance}.{life}.{os.getpid()}.jsonl")
    if str(path) not in _of_this_process:
        life_number = int(life) if life.isdecimal() else 0
        _of_this_process[str(path)] = EventRecorder(path, f"instance {instance}", life_number)
    return _of_this_process[str(path)]


def array_digest(value: np.ndarray[Any, Any]) -> str:
    """A name for an array's bits, 64 of them. Reads memory at about its speed."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def digest_of_all(values: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """A name for arrays by name."""
    import xxhash

    whole = xxhash.xxh3_64()
    for name in sorted(values):
        whole.update(f"{name}\0{array_digest(values[name])}\0".encode())
    return whole.hexdigest()


class FinishedRun:
    """A run that is done: its result, or its error."""

    done = True

    def __init__(self, result: RunResult | PodrunError) -> None:
        self._result = result

    def wait(self) -> RunResult:
        """The result. Raises the error."""
        if isinstance(self._result, PodrunError):
            raise self._result
        return self._result


class RecordedConnection:
    """A Connection that records the calls of another one."""

    def __init__(self, inner: Connection, notes: EventRecorder) -> None:
        self._inner, self._notes = inner, notes
        self._attached = False
        self._done = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def host_sync_timeout(self) -> float:
        """See `podrun.device.host.client.PortConnection`."""
        seconds: float = self._inner.host_sync_timeout  # type: ignore[attr-defined]
        return seconds

    @host_sync_timeout.setter
    def host_sync_timeout(self, seconds: float) -> None:
        self._inner.host_sync_timeout = seconds  # type: ignore[attr-defined]

    @property
    def total_ipus(self) -> int:
        return self._inner.total_ipus

    @property
    def holds_ipus(self) -> bool:
        return self._inner.holds_ipus

    def try_attach(self, request: AttachRequest) -> Refusal | None:
        refusal = self._inner.try_attach(request)
        if refusal is None:
            self._attached = True
            ranges = {"job": request.job, "owned": request.owned}
            self._notes.note(
                "attach", **{name: f"{ipus.first}-{ipus.stop - 1}" for name, ipus in ranges.items()}
            )
        elif refusal.broken is not None:
            self._notes.note_refusal(refusal, refusal.broken)
        return refusal

    def load(self, executable: Executable) -> None:
        self._done = 0
        with self._joint_operation():
            self._heard("load", lambda: self._inner.load(executable))
            self._notes.note("load", **describe_program(executable))

    def write_variables(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self._heard("write", lambda: self._inner.write_variables(values))
        arrays = {name: np.asarray(value) for name, value in values.items()}
        self._notes.note("write", tensors=len(arrays), digest=digest_of_all(arrays))

    def read_variables(self, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
        values = self._heard("read", lambda: self._inner.read_variables(names))
        self._notes.note("read", tensors=len(values), digest=digest_of_all(values))
        return values

    def read_digests(self) -> list[tuple[int, int]]:
        return self._heard("check", self._inner.read_digests)

    def run(
        self,
        batches: int,
        inputs: Mapping[str, np.ndarray[Any, Any]],
        outputs: Mapping[str, np.ndarray[Any, Any]] | None = None,
    ) -> RunResult:
        input_digests = {name: array_digest(np.asarray(value)) for name, value in inputs.items()}
        first = self._done
        self._notes.note("run", batch=first, batches=batches, inputs=input_digests)
        with self._joint_operation():
            result = self._heard("run", lambda: self._inner.run(batches, inputs, outputs))
            self._done = result.batches_done
            output_digests = {name: array_digest(value) for name, value in result.anchors.items()}
            self._notes.note("ran", batch=first, batches=result.batches_done - first, outputs=output_digests)
        return result

    def start(
        self,
        batches: int,
        inputs: Mapping[str, np.ndarray[Any, Any]],
        outputs: Mapping[str, np.ndarray[Any, Any]] | None = None,
        *,
        depth: int = 2,
    ) -> FinishedRun:
        """A run that is done when this returns: recorded runs do not overlap, so that the record has them in order."""
        try:
            return FinishedRun(self.run(batches, inputs, outputs))
        except PodrunError as error:
            return FinishedRun(error)

    def detach(self) -> None:
        self._inner.detach()
        self._note_detached()

    def close(self) -> None:
        self._inner.close()
        self._note_detached()

    def _note_detached(self) -> None:
        if self._attached:
            self._attached = False
            self._notes.note("detach")

    @contextlib.contextmanager
    def _joint_operation(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._notes.joint_operation_done()

    def _heard(self, what: str, act: Callable[[], T]) -> T:
        try:
            return act()
        except PodrunError as error:
            self._notes.note_error(error, what)
            raise


def describe_program(executable: Executable) -> dict[str, Any]:
    """A record's description of a program: a name for it, and the collectives of one pass of its instruction lists."""
    from podrun.core import executable_file

    counts: dict[str, int] = {}
    for work in executable.instructions:
        for instruction in work:
            if isinstance(instruction, _COLLECTIVES):
                name = type(instruction).__name__
                counts[name] = counts.get(name, 0) + 1
    data = np.frombuffer(executable_file.dumps(executable), np.uint8)
    return {"program": array_digest(data), "collectives": dict(sorted(counts.items()))}
