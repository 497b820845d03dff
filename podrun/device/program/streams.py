"""Host data on a machine: inputs from its owners, and anchors to them.

Owners (host processes) hold neighbouring replicas of a machine, in order. `Feed` joins their input arrays along the
replica axis. `Drain` applies each anchor's `Retrieval` after every micro-batch and gives each owner its replicas. The
arrays may be a script's own, in shared memory, or received over a network.

Replica state, such as running statistics, are values that each replica keeps for itself. A host process may ask any
machine for the value of any replica, including one it does not own. So at the end of a run the machines exchange what
the host can see (`Variable.rows` of the executable), all variables in one collective, and the host reads the exchanged
copy (`ReplicaState`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.collectives import Group
from podrun.core.aligned_memory import ScratchArrays, is_aligned
from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import (
    Array,
    Executable,
    Retrieval,
    Stream,
    StreamDirection,
    Variable,
    numpy_dtype,
)
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.device.program.buffers import Buffers


@dataclass(frozen=True, slots=True)
class OwnerArrays:
    """One owner's part of a run on one machine: it holds machine-local replicas ``[first, first + count)``.

    ``inputs``: ``[batches, accumulation_factor, count, *shape]`` (no replica axis if broadcast). ``outputs``:
    writable arrays of the shape that `anchor_shape` gives.
    """

    first: int
    count: int
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


def input_shape(executable: Executable, stream: Stream, batches: int, replicas: int) -> tuple[int, ...]:
    """Shape of the host array of an input stream for ``batches`` batches of ``replicas`` replicas."""
    lead = (batches, executable.accumulation_factor)
    return (*lead, *stream.spec.shape) if stream.broadcast else (*lead, replicas, *stream.spec.shape)


def anchor_shape(executable: Executable, stream: Stream, batches: int, replicas: int) -> tuple[int, ...]:
    """Shape of the host array of an anchor for ``batches`` batches of ``replicas`` replicas."""
    if stream.retrieval is Retrieval.ALL:
        return (batches, executable.accumulation_factor, replicas, *stream.spec.shape)
    if stream.retrieval is Retrieval.EVERY_N:
        return (batches * executable.accumulation_factor // stream.period, replicas, *stream.spec.shape)
    return (replicas, *stream.spec.shape)


def inputs_of(executable: Executable) -> dict[str, Stream]:
    """Streams from the host."""
    return {n: s for n, s in executable.streams.items() if s.direction is StreamDirection.TO_DEVICE}


def anchors_of(executable: Executable) -> dict[str, Stream]:
    """Streams to the host."""
    return {n: s for n, s in executable.streams.items() if s.direction is StreamDirection.TO_HOST}


def check_stream_arrays(
    executable: Executable, batches: int, replicas: int, inputs: Mapping[str, Array]
) -> None:
    """Raises ApplicationRuntimeError that names the stream whose array is missing, unknown or of the wrong form."""
    if batches < 1:
        raise ApplicationRuntimeError(f"a run needs at least one batch, not {batches}")
    streams = inputs_of(executable)
    for name in inputs:
        if name not in streams:
            listed = ", ".join(sorted(streams)) or "none"
            raise ApplicationRuntimeError(
                f"the program has no input {name!r}", hint=f"Its inputs are: {listed}"
            )
    for name, stream in streams.items():
        if name not in inputs:
            raise ApplicationRuntimeError(f"input {name!r} was not given")
        array, shape = inputs[name], input_shape(executable, stream, batches, replicas)
        if array.shape != shape or array.dtype != numpy_dtype(stream.spec.dtype):
            raise ApplicationRuntimeError(
                f"input {name!r} is {array.dtype}{list(array.shape)}; {stream.spec.dtype}{list(shape)} was expected "
                f"([batches, accumulation factor, {'' if stream.broadcast else 'replicas, '}*shape])"
            )


def check_outputs(executable: Executable, batches: int, replicas: int, outputs: Mapping[str, Any]) -> None:
    """Raises ApplicationRuntimeError if there is no array of the right shape for some anchor."""
    for name, stream in anchors_of(executable).items():
        shape = anchor_shape(executable, stream, batches, replicas)
        if name not in outputs or outputs[name].shape != shape:
            actual = "missing" if name not in outputs else str(list(outputs[name].shape))
            raise ApplicationRuntimeError(
                f"the buffer for anchor {name!r} is {actual}; {list(shape)} was expected"
            )


class Feed:
    """Micro-batches of one run, from all owners of a machine."""

    def __init__(self, executable: Executable, owners: Sequence[OwnerArrays]) -> None:
        self._streams = inputs_of(executable)
        self._owners = owners
        self._scratch = ScratchArrays()

    def load(self, stream: str, batch: int, first: int, count: int) -> Array:
        """Micro-batches ``[first, first + count)`` of a batch: ``[count, replicas, *shape]``, aligned.

        The array is the caller's until the next call for the same stream and place.
        """
        if self._streams[stream].broadcast:
            return self._aligned(stream, first, self._owners[0].inputs[stream][batch, first : first + count])
        parts = [owner.inputs[stream][batch, first : first + count] for owner in self._owners]
        if len(parts) == 1:
            return self._aligned(stream, first, parts[0])
        replicas = sum(owner.count for owner in self._owners)
        whole = self._scratch.array((stream, first), (count, replicas, *parts[0].shape[2:]), parts[0].dtype)
        np.concatenate(parts, axis=1, out=whole)
        return whole

    def _aligned(self, stream: str, first: int, part: Array) -> Array:
        if is_aligned(part):
            return part
        copy = self._scratch.array((stream, first), part.shape, part.dtype)
        np.copyto(copy, part)
        return copy


class Drain:
    """Anchors of one run, to all owners of a machine."""

    def __init__(self, executable: Executable, owners: Sequence[OwnerArrays]) -> None:
        self._anchors = anchors_of(executable)
        self._accumulation = executable.accumulation_factor
        self._owners = owners
        self._summed: set[str] = set()

    def store(self, stream: str, batch: int, first: int, values: Array) -> None:
        """Take micro-batches ``[first, first + len(values))`` of a batch: ``[count, replicas, *shape]``."""
        anchor = self._anchors[stream]
        if anchor.retrieval is Retrieval.SUM:
            self._sum(stream, values)
            return
        for owner in self._owners:
            mine = values[:, owner.first : owner.first + owner.count]
            out = owner.outputs[stream]
            if anchor.retrieval is Retrieval.ALL:
                out[batch, first : first + len(mine)] = mine
            elif anchor.retrieval is Retrieval.FINAL:
                out[...] = mine[-1]
            else:
                passed = batch * self._accumulation + first
                for index in range(len(mine)):
                    tick, rest = divmod(passed + index + 1, anchor.period)
                    if rest == 0:
                        out[tick - 1] = mine[index]

    def _sum(self, stream: str, values: Array) -> None:
        for owner in self._owners:
            mine, out = values[:, owner.first : owner.first + owner.count], owner.outputs[stream]
            start = 0
            if stream not in self._summed:
                out[...] = mine[0]
                start = 1
            for index in range(start, len(mine)):
                np.add(out, mine[index], out=out, casting="same_kind")
        self._summed.add(stream)


_ARENA = "podrun:replica-state"


class ReplicaState:
    """Variables of which each replica has a value of its own: as the host wrote them, or as the last run left them.
    ``peers``: the machines that hold the same variables, in order of replicas.
    """

    def __init__(self, executable: Executable, buffers: Buffers, peers: Group) -> None:
        self._buffers = buffers
        self._peers = peers
        self._variables = {n: v for n, v in executable.variables.items() if v.per_replica}
        self._host_values: dict[str, Array] = {}

    def note_writes(self, values: Mapping[str, Array]) -> None:
        """Remember what the host wrote."""
        self._host_values |= {name: values[name] for name in self._variables.keys() & values.keys()}

    def read(self, name: str) -> Array | None:
        """The value the host wrote, or the one the last run left; None if the variable is not replica state."""
        variable = self._variables.get(name)
        if variable is None or name in self._host_values:
            return self._host_values.get(name)
        # Neither written nor run: the initial value, which is equal on all replicas.
        return np.broadcast_to(self._buffers.read(name)[0], variable.host_spec.shape)

    def exchange(self) -> None:
        """Exchange what a run left with all machines. A collective: all machines call it."""
        if not self._variables:
            return
        gathered = self._gathered([self._local(variable) for variable in self._variables.values()])
        for (name, variable), values in zip(self._variables.items(), gathered, strict=True):
            rows = variable.rows
            first = [rows.index(row) for row in range(max(rows) + 1)] if rows else 0
            self._host_values[name] = np.array(values[first], copy=True)

    def _local(self, variable: Variable) -> Array:
        """The values of this machine's replicas that the host may read: ``[replicas, *shape]``."""
        value = self._buffers.read(variable.spec.name)
        return value if variable.rows else value[:1]

    def _gathered(self, local: list[Array]) -> Iterator[Array]:
        """Each array with those of the other machines appended, in order of machines."""
        size = sum(array.nbytes for array in local)
        if self._peers.size == 1 or size == 0:
            yield from local
            return
        arena = self._peers.allocate(_ARENA, "uint8", size * self._peers.size)
        at = self._peers.rank * size
        for array in local:
            arena[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at += array.nbytes
        all_bytes = np.asarray(self._peers.all_gather(_ARENA)).reshape(self._peers.size, size)
        at = 0
        for array in local:
            rows = np.ascontiguousarray(all_bytes[:, at : at + array.nbytes]).view(array.dtype)
            yield rows.reshape(self._peers.size * len(array), *array.shape[1:])
            at += array.nbytes
