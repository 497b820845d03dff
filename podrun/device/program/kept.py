"""What replicas keep for themselves (running statistics), as the host sees it.

Any machine may be asked for any replica's value, by a host process that may not even own that replica. So at the end
of a run the machines give each other what the host can see of it (`podrun.executable.Variable.rows`), all variables
in one collective, and the host reads that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from podrun.collectives import Group
from podrun.device.program.buffers import Buffers
from podrun.device.program.operands import Array
from podrun.executable import Executable, Variable

_ARENA = "podrun:kept"


class KeptByReplicas:
    """See the module docstring. ``peers``: the machines that hold the same variables, in order of replicas."""

    def __init__(self, executable: Executable, buffers: Buffers, peers: Group) -> None:
        self._buffers = buffers
        self._peers = peers
        self._variables = {n: v for n, v in executable.variables.items() if v.per_replica}
        self._seen: dict[str, Array] = {}

    def take(self, values: Mapping[str, Array]) -> None:
        """Host writes."""
        self._seen |= {name: values[name] for name in self._variables.keys() & values.keys()}

    def read(self, name: str) -> Array | None:
        """A variable as the host wrote it, or as the last run left it; None if it is none of these."""
        variable = self._variables.get(name)
        if variable is None or name in self._seen:
            return self._seen.get(name)
        # Neither: as it was filled when the program was loaded, equal on all replicas.
        return np.broadcast_to(self._buffers.read(name)[0], variable.host_spec.shape)

    def publish(self) -> None:
        """Meet the other machines and see what a run left on all of them."""
        if not self._variables:
            return
        gathered = self._gathered([self._mine(variable) for variable in self._variables.values()])
        for (name, variable), whole in zip(self._variables.items(), gathered, strict=True):
            rows = variable.rows
            first = [rows.index(row) for row in range(max(rows) + 1)] if rows else 0
            self._seen[name] = np.array(whole[first], copy=True)

    def _mine(self, variable: Variable) -> Array:
        """This machine's replicas, those that the host may want: ``[replicas, *shape]``."""
        value = self._buffers.read(variable.spec.name)
        return value if variable.rows else value[:1]

    def _gathered(self, mine: list[Array]) -> Iterator[Array]:
        """Each array with those of the other machines behind it, in order."""
        size = sum(array.nbytes for array in mine)
        if self._peers.size == 1 or size == 0:
            yield from mine
            return
        arena = self._peers.allocate(_ARENA, "uint8", size * self._peers.size)
        at = self._peers.rank * size
        for array in mine:
            arena[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at += array.nbytes
        whole = np.asarray(self._peers.all_gather(_ARENA)).reshape(self._peers.size, size)
        at = 0
        for array in mine:
            rows = np.ascontiguousarray(whole[:, at : at + array.nbytes]).view(array.dtype)
            yield rows.reshape(self._peers.size * len(array), *array.shape[1:])
            at += array.nbytes
