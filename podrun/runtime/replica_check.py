"""Silent corruption: replicas compare digests of their weights and optimizer state every so many batches.

Replicas that train together hold the same bits. A flipped bit in the memory of one replica raises no error, but from
then on its weights differ from those of the others. For the check to see this, each machine keeps and updates all
weights by itself (`UpdateContext.own_copies`), as IPUs do. Without the check machines update a slice each and take the
rest from each other, which hides or spreads a difference. The replicas of one machine share its copy until the memory
of one of them changes (`podrun.device.program.replica_copies.ReplicaCopies`).

Weights are compared before a checkpoint is saved, so whatever a program resumes from was alike on all IPUs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from podrun.core.errors import ErrorCause, ErrorCode, RecoverableRuntimeError, RecoveryAction
from podrun.core.executable import Executable
from podrun.core.quick_dataclass import dataclass
from podrun.record.recorder import array_digest, process_recorder

if TYPE_CHECKING:
    from podrun.runtime.device import RunDevice


@dataclass(frozen=True, slots=True, order=True)
class IpuDigest:
    """What the weights and optimizer state on one IPU are: its index in the partition, and 64 bits."""

    ipu: int
    digest: int


class ReplicaCheck:
    """The checks of one session. ``every``: batches between two checks; 0: no checks."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._agreed = 0
        """Batches since the program was loaded, at the last check that found all machines alike."""
        self._done = 0

    def after_run(self, executable: Executable, device: RunDevice, done: int, replicas: int) -> None:
        """Compare if a check is due after ``done`` batches since the program was loaded."""
        before, self._done = (self._done if self._done <= done else 0), done
        if self.every and done // self.every > before // self.every:
            self._compare(executable, device, replicas)

    def before_save(self, executable: Executable, device: RunDevice, replicas: int) -> None:
        """Compare, unless that happened after this batch."""
        if self.every and self._agreed != self._done:
            self._compare(executable, device, replicas)

    def _compare(self, executable: Executable, device: RunDevice, replicas: int) -> None:
        """Raise RecoverableRuntimeError, in all instances, that names the IPUs whose weights differ."""
        if replicas == 1 or not executable.training:
            return
        if self._agreed > self._done:  # The program was loaded again.
            self._agreed = 0
        mine = [IpuDigest(*row) for row in device.connection.read_digests()]
        digests = _of_all_instances(mine) if device.job != device.ipus else sorted(mine)
        span = executable.layout.ipus_per_replica
        suspects = odd_ones(digests, span)
        notes = process_recorder(device.environ)
        if notes is not None:
            first = np.array([digest.digest for digest in digests[:span]], np.uint64)
            notes.note("checked", batch=self._done, digest=None if suspects else array_digest(first))
        if suspects:
            error = differing(suspects, self._done, self._agreed)
            if notes is not None:
                notes.note_error(error, "check")
            raise error
        self._agreed = self._done


def _of_all_instances(mine: Sequence[IpuDigest]) -> list[IpuDigest]:
    """The IPUs of all instances, each once, in order."""
    from podrun import popdist

    popdist.init()
    rows = np.array([[ipu_digest.ipu, ipu_digest.digest] for ipu_digest in mine], np.uint64)
    rows = popdist.allGather(rows).reshape(-1, 2)
    return sorted({IpuDigest(*(int(number) for number in row)) for row in rows})


def odd_ones(digests: Sequence[IpuDigest], span: int = 1) -> list[IpuDigest]:
    """The IPUs whose weights differ from those of the majority; all IPUs of a tie. ``span``: IPUs of one replica, which
    hold different weights, so that IPUs at the same position of all replicas are compared.
    """
    suspects = []
    for position in range(span):
        alike = digests[position::span]
        counts = Counter(item.digest for item in alike)
        most = max(counts.values())
        winners = [digest for digest, count in counts.items() if count == most]
        right = winners[0] if len(winners) == 1 else None
        suspects += [item for item in alike if item.digest != right]
    return sorted(suspects)


def differing(suspects: Sequence[IpuDigest], batch: int, agreed: int) -> RecoverableRuntimeError:
    """The error for IPUs whose weights differ after a batch."""
    names = ", ".join(_ranges([suspect.ipu for suspect in suspects]))
    since = f"they were alike after batch {agreed}" if agreed else "they were not compared before"
    of_most = "those of most replicas" if len({suspect.digest for suspect in suspects}) == 1 else "alike"
    return RecoverableRuntimeError(
        f"Weights differ between replicas after batch {batch}: those of {names} are not {of_most}; {since}",
        recovery_action=RecoveryAction.IPU_RESET,
        code=ErrorCode.MEMORY_ERROR,
        where=names.replace("IPU", "ipu"),
        cause=ErrorCause(batch=batch, ipus=tuple(suspect.ipu for suspect in suspects)),
        hint="Load the program again and go on from a checkpoint: none is saved of replicas that differ.",
    )


def _ranges(ipus: Sequence[int]) -> list[str]:
    """``IPU 3``, ``IPUs 5-8``: neighbours together."""
    ranges = []
    for _, group in itertools.groupby(enumerate(ipus), lambda pair: pair[1] - pair[0]):
        first, *rest = (ipu for _, ipu in group)
        ranges.append(f"IPUs {first}-{rest[-1]}" if rest else f"IPU {first}")
    return ranges
