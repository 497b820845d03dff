"""Replica state, such as running statistics: values that each replica keeps for itself, as the host sees them.

A host process may ask any machine for the value of any replica, including one it does not own. So at the end of a run
the machines exchange what the host can see (`Variable.rows` of the executable), all variables in one collective, and
the host reads the exchanged copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from podrun.collectives import Group
from podrun.core.executable import Executable, Variable
from podrun.device.program.buffers import Buffers
from podrun.device.program.xla_memory import Array

_ARENA = "podrun:replica-state"


class ReplicaState:
    """See the module docstring. ``peers``: the machines that hold the same variables, in order of replicas."""

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
