"""Crash records: what the machines of a process compute, in memory that outlives the process.

A fatal signal in native code ends a process in the middle of a piece, and nothing in the process can report it. So each
program has a *slot* in a memory file that other processes of the host can open. A machine writes two numbers there: the
piece that is under way and the batch. After the slots there is room for the stacks that Python's faulthandler writes on
a fatal signal.

When a machine is gone, its host processes and the other machines of its program read its crash record and raise
`CrashReader.error`. A script with in-process machines writes the same text to standard error as it dies
(`report_fatal_signals`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrun.core.documents import write_whole
from podrun.core.environment import PODRUN_CONVOLUTIONS, XDG_STATE_HOME, environment
from podrun.core.errors import ApplicationRuntimeError, ErrorCause, ErrorCode, UnrecoverableRuntimeError
from podrun.core.executable import Array, Computation
from podrun.core.names import SLICE, parse_scope
from podrun.core.shared_region import RegionName, SharedRegion

SLOTS = 64
"""Programs of a process that have a slot. Further programs are not recorded."""
SLOT_BYTES = 1 << 14
STACK_BYTES = 1 << 18
_TEXTS = 16
_LAYERS = 4
"""Layers of a piece that a message names."""


class ProgressSlot:
    """The progress of one loaded program. ``texts``: descriptions of its pieces, by key."""

    def __init__(self, memory: memoryview, texts: Mapping[Any, str]) -> None:
        self._cells = memory[:_TEXTS].cast("q")
        self._cells[0] = self._cells[1] = 0
        self._places: dict[Any, int] = {}
        end = _TEXTS
        for key, text in texts.items():
            data = text.encode("utf-8", "replace")[:400] + b"\0"
            if end + len(data) <= len(memory):
                memory[end : end + len(data)] = data
                self._places[key] = end
                end += len(data)

    def place(self, key: object) -> int:
        """The argument of `begin` for a piece; 0 if its description did not fit."""
        return self._places.get(key, 0)

    def set_batch(self, number: int) -> None:
        """Note that a batch begins, for the record of a crash."""
        self._cells[1] = number

    def begin(self, place: int) -> None:
        """A piece begins. 0: it has ended."""
        self._cells[0] = place


class CrashRecord:
    """The slots of a process and the room for its stacks, in a shared region."""

    def __init__(self) -> None:
        self._region = SharedRegion.create("ipuof", SLOTS * SLOT_BYTES + STACK_BYTES)
        self.slots: memoryview = self._region.bytes.data[: SLOTS * SLOT_BYTES]
        self._free = list(range(SLOTS))
        self._lock = threading.Lock()
        self._takes_stacks = False

    @property
    def name(self) -> RegionName:
        """The region's name, by which other processes open it."""
        return self._region.name

    @contextlib.contextmanager
    def slot(self, texts: Mapping[Any, str]) -> Iterator[ProgressSlot]:
        """A free slot, released when the context ends."""
        with self._lock:
            number = self._free.pop(0) if self._free else None
        memory = memoryview(bytearray(_TEXTS))
        if number is not None:
            memory = self.slots[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
        slot = ProgressSlot(memory, texts)
        try:
            yield slot
        finally:
            slot.begin(0)
            if number is not None:
                with self._lock:
                    self._free.insert(0, number)

    def write_stacks_on_fatal_signal(self) -> None:
        """Let a fatal signal write the stacks of all threads here. For processes that hold only machines."""
        if self._takes_stacks:
            return
        self._takes_stacks = True
        fd = os.open(f"/proc/self/fd/{self.name.fd}", os.O_WRONLY | os.O_CLOEXEC)
        os.lseek(fd, SLOTS * SLOT_BYTES, os.SEEK_SET)
        faulthandler.enable(fd, all_threads=True)


_starting = threading.RLock()
"""Held while the process's record is made or its handler installed: several threads may load their first programs."""


def own_crash_record() -> CrashRecord:
    """The crash record of this process. A forked process without machines does not use it."""
    with _starting:
        return _own()


@functools.cache
def _own() -> CrashRecord:
    return CrashRecord()


class CrashReader:
    """Reads the crash record of another process of this host after that process has ended. ``memory``: the record's
    bytes; ``pid``: of the process. Raises ApplicationRuntimeError if that is no record."""

    def __init__(self, memory: Array, pid: int) -> None:
        if memory.size != SLOTS * SLOT_BYTES + STACK_BYTES:
            raise ApplicationRuntimeError("a machine's crash record does not have the expected size")
        self._memory, self._pid = memory, pid

    @classmethod
    def of_peer(cls, name: RegionName) -> CrashReader:
        """The record of another machine of a program, by the name that it gave to the group."""
        return cls(_opened(lambda: SharedRegion.open(name)), name.pid)

    @classmethod
    def handed_over(cls, fd: int, pid: int) -> CrashReader:
        """The record behind a file descriptor that a machine handed over."""
        return cls(_opened(lambda: SharedRegion.adopt(fd)), pid)

    def error(
        self, machine: int, endpoint: str, environ: Mapping[str, str]
    ) -> UnrecoverableRuntimeError | None:
        """The error for a process that died of a fatal signal, after its stacks are written to a file; None if the
        process ended in another way."""
        stacks = self._memory[SLOTS * SLOT_BYTES :].tobytes().rstrip(b"\0").decode("utf-8", "replace")
        if not stacks:
            return None
        signal = stacks.partition("\n")[0].removeprefix("Fatal Python error: ")
        doing = running_pieces(self._memory) or ["no piece (it loaded a program, or waited)"]
        advice = _advice(environ)
        again = ""
        if environ.get(PODRUN_CONVOLUTIONS) != "xla":
            again = " A vipu-server has to be restarted with it."
        return UnrecoverableRuntimeError(
            f"native code died ({signal}) in the process of machine {machine} of the partition, {endpoint}, "
            f"while it computed {'; '.join(doing)}. {_keep(stacks, self._pid, environ)}",
            code=ErrorCode.HOST_LINK_DOWN,
            where=f"machine {machine}",
            cause=ErrorCause(machine=machine),
            hint=f"{advice[0].upper()}{advice[1:]}.{again} With a vipu-server, vipu-admin restart agent, then vipu "
            "reset partition, bring the machine back.",
        )


def _opened(find: Callable[[], SharedRegion]) -> Array:
    try:
        region = find()
    except (OSError, ValueError) as error:
        raise ApplicationRuntimeError(f"a machine's crash record cannot be opened: {error}") from error
    region.close()  # the mapping stays as long as the array
    return region.bytes


def running_pieces(memory: Array) -> list[str]:
    """The pieces that are under way according to a crash record, each with its batch."""
    pieces = []
    for number in range(SLOTS):
        slot = memory[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
        place, batch = (int(n) for n in slot[:_TEXTS].view(np.int64))
        if _TEXTS <= place < SLOT_BYTES:
            text = slot[place:].tobytes().partition(b"\0")[0].decode("utf-8", "replace")
            pieces.append(f"{text}, batch {batch}")
    return pieces


def report_fatal_signals() -> None:
    """Have a fatal signal write to standard error what this process was computing, and then the stacks (by
    faulthandler, which is enabled if it was not). Without the C module only the stacks are written."""
    with _starting:
        _install_handlers()


def survive_stack_overflow() -> None:
    """Let this thread's fatal signals be reported where its stack has overflowed. Nothing without the C module."""
    module = _c_module()
    if module is not None:
        module.use_signal_stack()


@functools.cache
def _c_module() -> Any:
    """None if it was not built, or before this version of podrun."""
    try:
        module = importlib.import_module("podrun.device._crash_stack")
    except ImportError:
        return None
    return module if hasattr(module, "use_signal_stack") else None


@functools.cache
def _install_handlers() -> None:
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        if not faulthandler.is_enabled():
            faulthandler.enable(2, all_threads=True)
    module = _c_module()
    if module is not None:
        first = "\npodrun: native code died in this process by "
        module.install(own_crash_record().slots, SLOT_BYTES, 2, first, f"podrun: {_advice(environment())}:\n")


def _advice(environ: Mapping[str, str]) -> str:
    """What to do when native code has died in a piece."""
    blame = "the script did not cause this: please report it with the stacks"
    if environ.get(PODRUN_CONVOLUTIONS) == "xla":
        return f"{blame}; {PODRUN_CONVOLUTIONS}=xla, which helps where convolutions are the cause, is set already"
    return f"to go on, export {PODRUN_CONVOLUTIONS}=xla (XLA's own convolutions, slower) and start again; {blame}"


def describe_piece(computation: Computation, layers: Sequence[str], on: str) -> str:
    """Text for a piece: its name, the layers that its IPU computes (`busiest_layers`), and the IPUs ``on``."""
    if any(name.startswith(SLICE) for name in computation.outputs):
        names = sorted({name.removeprefix(SLICE) for name in computation.outputs if name.startswith(SLICE)})
        return f"piece {computation.name!r} (update of {', '.join(names[:_LAYERS])}) on {on}"
    more = f" and {len(layers) - _LAYERS} more" if len(layers) > _LAYERS else ""
    named = f" (layers {', '.join(layers[:_LAYERS])}{more})" if layers else ""
    return f"piece {computation.name!r}{named} on {on}"


def busiest_layers(report: Mapping[str, Any], ipu: int) -> list[str]:
    """The layers that an IPU of a replica computes, those with the most cycles first."""
    cycles: dict[str, float] = {}
    for segment in report.get("segments") or ():
        if segment.get("ipu") == ipu:
            for scope, count in ((segment.get("report") or {}).get("by_scope") or {}).items():
                names = parse_scope(scope).names
                if names and not scope.startswith("("):
                    layer = "/".join(names)
                    cycles[layer] = cycles.get(layer, 0.0) + count
    return sorted(cycles, key=lambda name: -cycles[name])


def _keep(stacks: str, pid: int, environ: Mapping[str, str]) -> str:
    base = environ.get(XDG_STATE_HOME) or os.path.join(environ.get("HOME", "/tmp"), ".local/state")
    path = Path(base) / "podrun" / "crashes" / f"stacks-{pid}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(stacks.encode(), path)
    except OSError as error:
        return f"The stacks of its threads could not be kept in {path.parent}: {error.strerror}"
    return f"The stacks of its threads are in {path}"
