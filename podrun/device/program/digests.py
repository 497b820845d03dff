"""Digests of what machines hold, by which copies of a program's state that should be equal are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import Array, Compute, Executable, VariableRole
from podrun.core.names import SLICE, WHOLE

CONTROL_ROW = 64
"""int64 numbers per machine in the control arena: batches, batches done, digest of host writes, number of variables
without a value, and the places of the first of these among all names. The rest is padding.
"""
FIRST_PLACE = 4


class Disagreement(ApplicationRuntimeError):
    """The machines got different requests. Nothing has changed, and the program stays loaded."""


def held_by_ipu(executable: Executable) -> list[list[str]]:
    """For each instruction list, the weights and optimizer state that all replicas hold alike and that its Computations
    use. What several lists use lies with the first that only reads it; what none reads, with the first that uses it.
    """
    roles = (VariableRole.WEIGHT, VariableRole.OPTIMIZER_STATE)
    names = {n for n, v in executable.variables.items() if v.role in roles and not v.per_replica}
    behind = {m.name: arena.name for arena in executable.arenas.values() for m in arena.members}
    own = {n: {n, WHOLE + behind[n], SLICE + behind[n]} if n in behind else {n} for n in names}
    ends = {name: (set(c.inputs), set(c.outputs)) for name, c in executable.computations.items()}
    places = dict.fromkeys(names, 0)
    for written in (True, False):
        for k, work in reversed(list(enumerate(executable.instructions))):
            for inputs, outputs in (ends[i.computation] for i in work if isinstance(i, Compute)):
                for name, buffers in own.items():
                    if not buffers.isdisjoint(inputs) and buffers.isdisjoint(outputs) is not written:
                        places[name] = k
    return [sorted(n for n in names if places[n] == k) for k in range(len(executable.instructions))]


UNCOMPARED = b"uncompared"
"""Replaces a digest where one owner holds the whole job: no other owner can write other values."""


def digest_of_array(value: Array) -> bytes:
    """A digest of an array's bits, 16 bytes."""
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return hashlib.blake2b(flat.data, digest_size=16).digest()


def program_state_digest(digests: Mapping[str, bytes]) -> int:
    """A digest of names and contents, 63 bits; 0 for no values."""
    if not digests:
        return 0
    whole = hashlib.blake2b(digest_size=8)
    for name in sorted(digests):
        whole.update(name.encode() + b"\0" + digests[name])
    return (int.from_bytes(whole.digest(), "little") >> 1) or 1


def refuse_differences(rows: Array, machines_per_replica: int, names: Sequence[str]) -> None:
    """Raise Disagreement. ``rows``: of all machines that compare states; machines of one position get equal writes."""
    for column, what in ((0, "batches in this run"), (1, "batches done since the program was loaded")):
        if len(set(rows[:, column])) > 1:
            listed = ", ".join(f"machine {m}: {n}" for m, n in enumerate(rows[:, column]))
            raise Disagreement(
                f"the machines of the program do not agree on the number of {what}: {listed}",
                hint="Call run with the same batches in every instance.",
            )
    for first in range(machines_per_replica):
        odd = [m for m in range(first, len(rows), machines_per_replica) if rows[m, 2] != rows[first, 2]]
        if odd:
            raise Disagreement(
                "host processes wrote different weights or other variables: "
                f"those on machine(s) {', '.join(map(str, odd))} differ from those on machine {first}",
                hint="Write the same values in every instance (same initial weights, same random seed).",
            )
    if any(rows[:, 3]):
        missing = {
            names[place]
            for row in rows
            for place in row[FIRST_PLACE : FIRST_PLACE + min(row[3], CONTROL_ROW - FIRST_PLACE)]
        }
        raise Disagreement(
            f"variables have no value yet: {', '.join(sorted(missing)[:10])}",
            hint="Write the weights to the device before the first run (weightsFromHost).",
        )
