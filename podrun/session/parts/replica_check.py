"""Silent corruption: replicas compare digests of their weights and optimizer state every so many batches.

Replicas that train together hold the same bits. A flipped bit in the memory of one replica raises no error, but from
then on its weights differ from those of the others. For the check to see this, each machine keeps and updates all
weights by itself (`UpdateContext.own_copies`), as IPUs do. Without the check machines update a slice each and take the
rest from each other, which hides or spreads a difference. The replicas of one machine share its copy.

Weights are compared before a checkpoint is saved, so whatever a program resumes from was alike on all machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from podrun.core.errors import ErrorCode, RecoverableRuntimeError, RecoveryAction
from podrun.core.executable import Executable, VariableRole
from podrun.record.recorder import digest_of_all, recorder

if TYPE_CHECKING:
    from podrun.session.device import DeviceInfo


@dataclass(frozen=True, slots=True, order=True)
class MachineDigest:
    """A digest of the weights of one machine: the first and the number of its IPUs, and 64 bits."""

    first: int
    count: int
    digest: int

    @property
    def ipus(self) -> str:
        """The IPUs in words."""
        return f"IPU {self.first}" if self.count == 1 else f"IPUs {self.first}-{self.first + self.count - 1}"


class ReplicaCheck:
    """The checks of one session. ``every``: batches between two checks; 0: no checks."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._agreed = 0
        """Batches since the program was loaded, at the last check that found all machines alike."""
        self._done = 0

    def after_run(self, executable: Executable, device: DeviceInfo, done: int, replicas: int) -> None:
        """Compare if a check is due after ``done`` batches since the program was loaded."""
        before, self._done = (self._done if self._done <= done else 0), done
        if self.every and done // self.every > before // self.every:
            self._compare(executable, device, replicas)

    def before_save(self, executable: Executable, device: DeviceInfo, replicas: int) -> None:
        """Compare, unless that happened after this batch."""
        if self.every and self._agreed != self._done:
            self._compare(executable, device, replicas)

    def _compare(self, executable: Executable, device: DeviceInfo, replicas: int) -> None:
        """Raise RecoverableRuntimeError, in all instances, that names the IPUs whose weights differ."""
        if replicas == 1 or not executable.training:
            return
        if self._agreed > self._done:  # The program was loaded again.
            self._agreed = 0
        roles = (VariableRole.WEIGHT, VariableRole.OPTIMIZER_STATE)
        names = [name for name, v in executable.variables.items() if v.role in roles and not v.per_replica]
        copies = device.connection.read_copies(names)
        mine = [
            MachineDigest(ipus.first, ipus.count, int(digest_of_all(values), 16)) for ipus, values in copies
        ]
        found = _of_all_instances(mine) if device._job != device.ipus else sorted(mine)
        span = executable.layout.machines_per_replica
        suspects = odd_ones(found, span)
        notes = recorder(device._environ)
        if notes is not None:
            alike = not suspects
            notes.note("checked", batch=self._done, digest=f"{found[0].digest:016x}" if alike else None)
        if suspects:
            error = differing(suspects, self._done, self._agreed)
            if notes is not None:
                notes.note_error(error, "check")
            raise error
        self._agreed = self._done


def _of_all_instances(mine: Sequence[MachineDigest]) -> list[MachineDigest]:
    """The machines of all instances, each once, in order of their IPUs."""
    from podrun import popdist

    popdist.init()
    rows = np.array([[m.first, m.count, m.digest] for m in mine], np.uint64)
    rows = popdist.allGather(rows).reshape(-1, 3)
    return sorted({MachineDigest(*(int(number) for number in row)) for row in rows})


def odd_ones(found: Sequence[MachineDigest], span: int = 1) -> list[MachineDigest]:
    """The machines whose weights differ from those of the majority; all machines of a tie. ``span``: machines of one
    replica, which hold different weights, so that machines at the same position of all replicas are compared.
    """
    suspects = []
    for position in range(span):
        alike = found[position::span]
        counts = Counter(machine.digest for machine in alike)
        most = max(counts.values())
        winners = [digest for digest, count in counts.items() if count == most]
        right = winners[0] if len(winners) == 1 else None
        suspects += [machine for machine in alike if machine.digest != right]
    return sorted(suspects)


def differing(suspects: Sequence[MachineDigest], batch: int, agreed: int) -> RecoverableRuntimeError:
    """The error for machines whose weights differ after a batch."""
    names = ", ".join(machine.ipus for machine in suspects)
    since = f"they were alike after batch {agreed}" if agreed else "they were not compared before"
    of_most = "those of most replicas" if len({m.digest for m in suspects}) == 1 else "alike"
    return RecoverableRuntimeError(
        f"Weights differ between replicas after batch {batch}: those of {names} are not {of_most}; {since}",
        recovery_action=RecoveryAction.IPU_RESET,
        code=ErrorCode.MEMORY_ERROR,
        where=", ".join(machine.ipus.lower() for machine in suspects),
        hint="Load the program again and go on from a checkpoint: none is saved of replicas that differ.",
    )
