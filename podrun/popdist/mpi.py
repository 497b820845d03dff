"""``mpi4py.MPI`` as PopDist programs use it on the host: rank, size, and collectives among the instances.

Under PopRun instances are processes of mpirun, so programs import mpi4py beside popdist. Under ``podrun`` they are not,
and an MPI library would tell each of them that it is alone. This is the same interface over `podrun.popdist`:
``COMM_WORLD`` with its rank and size, and every collective on buffers (``Bcast``, ``Allreduce``, ``Gather`` ...) and on
objects (``bcast``, ``gather`` ...). The rest of MPI is refused by name.

Objects travel as JSON and raw arrays, never pickled: None, booleans, numbers, strings, bytes, lists, tuples,
dictionaries and NumPy arrays of numbers. Source of names and meaning: the mpi4py documentation.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from podrun.core.errors import UnsupportedError
from podrun.popdist import collectives, core
from podrun.popdist.collectives import decode_object, encode_object
from podrun.popdist.core import popdist_error

if TYPE_CHECKING:
    import numpy as np

IN_PLACE = -1
"""Takes the place of a send buffer: the receive buffer holds the values."""


class Op:
    """How a reduction combines the instances' values. Objects are combined with ``+``, ``*``, ``max`` or ``min``."""

    def __init__(self, name: str, objects: Callable[[Any, Any], Any]) -> None:
        self.name = name
        self.objects = objects

    def __repr__(self) -> str:
        return f"MPI.{self.name.upper()}"


SUM = Op("sum", lambda a, b: a + b)
PROD = Op("product", lambda a, b: a * b)
MAX = Op("max", max)
MIN = Op("min", min)


def _array(buffer: object) -> np.ndarray:
    """The array of a buffer argument: an array, or ``[array, type]``."""
    import numpy as np

    array = buffer[0] if isinstance(buffer, (list, tuple)) and buffer else buffer
    if not isinstance(array, np.ndarray):
        raise UnsupportedError(f"mpi4py here takes NumPy arrays as buffers, not {type(array).__name__}")
    return array


class Comm:
    """All instances, or this one alone."""

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone

    @property
    def rank(self) -> int:
        """The index of this instance among all."""
        return 0 if self._alone else core.getInstanceIndex()

    @property
    def size(self) -> int:
        """Number of instances."""
        return 1 if self._alone else core.getNumInstances()

    def Get_rank(self) -> int:
        """The index of this instance among all."""
        return self.rank

    def Get_size(self) -> int:
        """Number of instances."""
        return self.size

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End this instance at once; ``podrun`` ends the others."""
        os._exit(errorcode or 1)

    # -- buffers ----------------------------------------------------------------------------------

    def Barrier(self) -> None:
        """Wait until all instances have arrived."""
        if self.size > 1:
            collectives.barrier()

    def Bcast(self, buf: object, root: int = 0) -> None:
        """Copy the root's array into every instance's array."""
        array = _array(buf)
        if self.size > 1:
            collectives.broadcast(array, root)

    def Allreduce(self, sendbuf: object, recvbuf: object, op: Op = SUM) -> None:
        """Combine all instances' arrays, for all. Halves are added in float32, in the order of instances."""
        from podrun.core.executable import Reduction

        received = _array(recvbuf)
        sent = received if sendbuf is IN_PLACE else _array(sendbuf)
        if self.size == 1:
            received[...] = sent.reshape(received.shape)
            return
        with collectives._named("mpi4py.Allreduce") as group:
            received[...] = group.all_reduce(sent, Reduction(op.name)).reshape(received.shape)

    def Reduce(self, sendbuf: object, recvbuf: object, op: Op = SUM, root: int = 0) -> None:
        """Combine all instances' arrays, for the root alone."""
        import numpy as np

        sent = _array(recvbuf) if sendbuf is IN_PLACE else _array(sendbuf)
        received = np.empty_like(sent)
        self.Allreduce(sent, received, op)
        if self.rank == root:
            target = _array(recvbuf)
            target[...] = received.reshape(target.shape)

    def Allgather(self, sendbuf: object, recvbuf: object) -> None:
        """Gather all instances' arrays in their order, for all."""
        received = _array(recvbuf)
        received[...] = self._gathered(_array(sendbuf)).reshape(received.shape)

    def Gather(self, sendbuf: object, recvbuf: object, root: int = 0) -> None:
        """Gather all instances' arrays in their order, for the root alone (None elsewhere)."""
        gathered = self._gathered(_array(sendbuf))
        if self.rank == root:
            received = _array(recvbuf)
            received[...] = gathered.reshape(received.shape)

    def Scatter(self, sendbuf: object, recvbuf: object, root: int = 0) -> None:
        """Give each instance its entry of the root's array, which is None elsewhere."""
        received = _array(recvbuf)
        if self.size == 1:
            received[...] = _array(sendbuf).reshape(received.shape)
            return
        sent = _array(sendbuf) if self.rank == root else None
        with collectives._named("mpi4py.Scatter") as group:
            parts = None if sent is None else sent.reshape(self.size, *received.shape).astype(received.dtype)
            group.scatter(parts, received, root)

    def _gathered(self, array: np.ndarray) -> np.ndarray:
        return collectives.allGather(array) if self.size > 1 else array[None]

    # -- objects ----------------------------------------------------------------------------------

    barrier = Barrier

    def allgather(self, sendobj: object) -> list[Any]:
        """All instances' objects in their order."""
        import numpy as np

        note = np.frombuffer(encode_object(sendobj), np.uint8)
        if self.size == 1:
            return [decode_object(note.tobytes())]
        lengths = collectives.allGather(np.array(note.size, np.int64))
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: note.size] = note
        rows = collectives.allGather(padded)
        return [decode_object(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def gather(self, sendobj: object, root: int = 0) -> list[Any] | None:
        """All instances' objects in their order, for the root; None elsewhere."""
        objects = self.allgather(sendobj)
        return objects if self.rank == root else None

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The root's object, for all."""
        import numpy as np

        if self.size == 1:
            return obj
        note = (
            np.frombuffer(encode_object(obj), np.uint8).copy() if self.rank == root else np.empty(0, np.uint8)
        )
        length = np.array([note.size], np.int64)
        collectives.broadcast(length, root)
        if self.rank != root:
            note = np.empty(int(length[0]), np.uint8)
        received = decode_object(collectives.broadcast(note, root).tobytes())
        return obj if self.rank == root else received

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Entry *rank* of the root's sequence. popdist_error if the sequence has another number of entries."""
        entries = self.bcast(None if sendobj is None else list(sendobj), root)
        if entries is None or len(entries) != self.size:
            raise popdist_error(f"scatter() needs one entry for each of the {self.size} instances.")
        return entries[self.rank]

    def allreduce(self, sendobj: Any, op: Op = SUM) -> Any:
        """All instances' objects combined, in their order, for all."""
        first, *others = self.allgather(sendobj)
        for other in others:
            first = op.objects(first, other)
        return first

    def reduce(self, sendobj: Any, op: Op = SUM, root: int = 0) -> Any:
        """All instances' objects combined, for the root; None elsewhere."""
        total = self.allreduce(sendobj, op)
        return total if self.rank == root else None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refused(f"Comm.{name}")


def _refused(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"mpi4py.MPI.{name} is not there under podrun, whose instances are no processes of mpirun",
        hint="Collectives of MPI.COMM_WORLD are (podrun help popart).",
    )


FLOAT = REAL = "FLOAT"
DOUBLE = "DOUBLE"
INT = INT32_T = "INT"
LONG = INT64_T = "LONG"
BYTE = "BYTE"
"""Types of buffers. They have no effect, because arrays know their type."""

COMM_WORLD = Comm()
COMM_SELF = Comm(alone=True)
Intracomm = Comm


def Init() -> None:
    """No-op: instances connect at the first collective."""


def Finalize() -> None:
    """No-op: instances disconnect when they end."""


def Is_initialized() -> bool:
    """True: instances need no MPI to be started."""
    return True


def Is_finalized() -> bool:
    """False: nothing ends before the process does."""
    return False


def Get_processor_name() -> str:
    """This host's name."""
    return socket.gethostname()


def Wtime() -> float:
    """Seconds of a clock that only goes forward."""
    return time.perf_counter()


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise _refused(name)
