"""Where replicas lie: Program -> Layout.

A machine has four IPUs; replicas fill machines in order, and a larger replica fills several whole ones. All
machines of a program hold equally many replicas, because they run one Executable in lock-step.
"""

from __future__ import annotations

from podrun.compiler.program import Program
from podrun.device.target import IPUS_PER_MACHINE
from podrun.errors import UsageError
from podrun.executable import Layout


def layout_of(program: Program) -> Layout:
    """The Layout for ``program.replicas`` replicas of ``program.ipus_per_replica`` IPUs.

    Raises UsageError if they cannot fill machines evenly.
    """
    replicas, ipus = program.replicas, program.ipus_per_replica
    if replicas < 1 or ipus < 1:
        raise UsageError(f"a program needs at least one replica of one IPU, not {replicas} of {ipus}")
    if ipus & (ipus - 1):
        raise UsageError(
            f"a replica cannot have {ipus} IPUs: IPUs are given in powers of two",
            hint=f"Give each replica {1 << ipus.bit_length()} IPUs.",
        )
    if ipus > IPUS_PER_MACHINE:
        spanned = ipus // IPUS_PER_MACHINE
        return Layout(
            replicas, ipus, replicas * spanned, replicas_per_machine=1, machines_per_replica=spanned
        )
    total = replicas * ipus
    if total <= IPUS_PER_MACHINE:
        return Layout(replicas, ipus, machines=1, replicas_per_machine=replicas)
    if total % IPUS_PER_MACHINE:
        per_machine = IPUS_PER_MACHINE // ipus
        below = replicas // per_machine * per_machine
        raise UsageError(
            f"{replicas} replicas of {ipus} IPU(s) do not fill machines of {IPUS_PER_MACHINE} IPUs evenly",
            hint=f"Use {below} or {below + per_machine} replicas.",
        )
    machines = total // IPUS_PER_MACHINE
    return Layout(replicas, ipus, machines, replicas // machines)


def position_of(layout: Layout, ipu: int) -> int | None:
    """The machine of a replica that holds its IPU ``ipu``; None if a replica lies on one machine."""
    return ipu // IPUS_PER_MACHINE if layout.machines_per_replica > 1 else None


def holders(layout: Layout) -> int:
    """How many machines hold an arena, and so have a slice of it."""
    return layout.machines // layout.machines_per_replica
