"""Host data on a machine: inputs from its owners, and anchors to them.

Owners (host processes) hold neighbouring replicas of a machine, in order. `Feed` joins their input arrays along the
replica axis. `Drain` applies each anchor's `Retrieval` after every micro-batch and gives each owner its replicas. The
arrays may be a script's own, in shared memory, or received over a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import Executable, Retrieval, Stream, StreamDirection, numpy_dtype
from podrun.device.program.xla_memory import Array, aligned_empty


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


def check_inputs(executable: Executable, batches: int, replicas: int, inputs: Mapping[str, Array]) -> None:
    """Raises ApplicationRuntimeError that names the stream whose array is missing, unknown or of the wrong
    form.
    """
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
                f"input {name!r} is {array.dtype}{list(array.shape)}; {stream.spec.dtype}{list(shape)} "
                "was expected "
                f"([batches, accumulation factor, {'' if stream.broadcast else 'replicas, '}*shape])"
            )


def check_outputs(executable: Executable, batches: int, replicas: int, outputs: Mapping[str, Any]) -> None:
    """Raises ApplicationRuntimeError if there is no array of the right shape for some anchor."""
    for name, stream in anchors_of(executable).items():
        shape = anchor_shape(executable, stream, batches, replicas)
        if name not in outputs or outputs[name].shape != shape:
            found = "missing" if name not in outputs else str(list(outputs[name].shape))
            raise ApplicationRuntimeError(
                f"the buffer for anchor {name!r} is {found}; {list(shape)} was expected"
            )


class Feed:
    """Micro-batches of one run, from all owners of a machine."""

    def __init__(self, executable: Executable, owners: Sequence[OwnerArrays]) -> None:
        self._streams = inputs_of(executable)
        self._owners = owners
        self._scratch: dict[tuple[str, int], Array] = {}

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
        whole = self._buffer(stream, first, (count, replicas, *parts[0].shape[2:]), parts[0].dtype)
        np.concatenate(parts, axis=1, out=whole)
        return whole

    def _aligned(self, stream: str, first: int, part: Array) -> Array:
        if part.flags.c_contiguous and part.ctypes.data % 64 == 0:
            return part
        copy = self._buffer(stream, first, part.shape, part.dtype)
        np.copyto(copy, part)
        return copy

    def _buffer(self, stream: str, first: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        known = self._scratch.get((stream, first))
        if known is None or known.shape != shape:
            known = self._scratch[stream, first] = aligned_empty(shape, dtype)
        return known


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
