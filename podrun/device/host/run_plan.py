"""What all runs of a loaded program with one number of batches share: shapes, dtypes, and each machine's part of the
arrays. A connection makes a plan once and uses it from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import Array, Executable, Retrieval, Stream, numpy_dtype
from podrun.core.layout import IpuRange
from podrun.core.quick_dataclass import dataclass
from podrun.device.host.ports import Site, replica_slices
from podrun.device.program.streams import (
    anchor_shape,
    anchors_of,
    check_stream_arrays,
    input_shape,
    inputs_of,
)

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MachineArrays:
    """One machine's part of the arrays of a run: the index of it in each input and in each anchor."""

    inputs: Mapping[str, Index]
    anchors: Mapping[str, Index]


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """The common part of all runs with one number of batches: shapes, dtypes, and each machine's part of the arrays."""

    executable: Executable
    batches: int
    replicas: int
    inputs: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    anchors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    machines: Sequence[MachineArrays]

    @staticmethod
    def of(
        executable: Executable,
        owned: IpuRange,
        batches: int,
        sites: Sequence[Site],
        parts: Sequence[Executable],
    ) -> ArrayPlan:
        """``parts``: what the machine at each site runs."""
        ipus_per_replica = executable.layout.ipus_per_replica
        replicas = owned.count // ipus_per_replica
        machines = []
        for there, mine in zip(parts, replica_slices(sites, owned, ipus_per_replica), strict=True):
            to_device = {n: _index(None if s.broadcast else 2, mine) for n, s in inputs_of(there).items()}
            to_host = {n: _index(_replica_axis(s), mine) for n, s in anchors_of(there).items()}
            machines.append(MachineArrays(to_device, to_host))
        inputs = {
            name: (input_shape(executable, s, batches, replicas), numpy_dtype(s.spec.dtype))
            for name, s in inputs_of(executable).items()
        }
        anchors = {
            name: (anchor_shape(executable, s, batches, replicas), numpy_dtype(s.spec.dtype))
            for name, s in anchors_of(executable).items()
        }
        return ArrayPlan(executable, batches, replicas, inputs, anchors, machines)

    def check_inputs(self, arrays: Mapping[str, Array]) -> None:
        """Raises ApplicationRuntimeError that names the input that is missing, unknown or of the wrong form."""
        fits = self.batches > 0 and arrays.keys() == self.inputs.keys()
        if not fits or any((array.shape, array.dtype) != self.inputs[name] for name, array in arrays.items()):
            check_stream_arrays(self.executable, self.batches, self.replicas, arrays)

    def given_array(self, name: str, array: Array) -> Array:
        """The caller's array for an anchor. Raises ApplicationRuntimeError if it has another form."""
        shape, dtype = self.anchors[name]
        if array.shape != shape or array.dtype != dtype:
            raise ApplicationRuntimeError(
                f"the array for anchor {name!r} is {array.dtype}{list(array.shape)}; {dtype}{list(shape)} was expected"
            )
        return array


def _index(axis: int | None, replicas: slice) -> Index:
    """The index of some replicas along ``axis``. None: all replicas get the same array."""
    return () if axis is None else (*(slice(None),) * axis, replicas)


def _replica_axis(stream: Stream) -> int:
    """Where the replicas are in an anchor's host array."""
    return {Retrieval.ALL: 2, Retrieval.EVERY_N: 1}.get(stream.retrieval, 0)
