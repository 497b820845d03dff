"""Node health for Slurm: which nodes of a cluster must be drained, because IPUs that their jobs use are broken.

Slurm's ``HealthCheckProgram`` runs on every node. It calls ``podrun health --slurm-node``, which says whether the node
must be drained, with the reason that administrators see in ``sinfo -R``; `slurm_commands` has the ``scontrol`` command.

Drained is what needs a hand: a machine that is lost, silent or failed, an IPU that needs more than a reset, a partition
in ``ERROR``, a service that does not answer. Not drained is what clears by itself or by the next job's start: a tile
error or an IPU that needs IPU_RESET, and everything that needs only attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from podrun.core.quick_dataclass import dataclass
from podrun.monitor.pod_health import HealthProblem, Severity

REASON_PREFIX = "podrun:"
"""Begins the reason of every drain of podrun's, so that it undoes its own and no others."""
LONGEST_REASON = 200
CLEARS_ITSELF = ("IPU_RESET",)
"""Recovery actions that the start of the next job carries out."""


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """Whether a node must be drained; ``reason`` says why, in one line that begins with `REASON_PREFIX`."""

    drain: bool
    reason: str


def must_drain(problem: HealthProblem) -> bool:
    """Whether a problem keeps the next job from working."""
    if problem.severity is not Severity.BROKEN:
        return False
    return not problem.remedy.startswith(CLEARS_ITSELF)


def verdict_of(problems: Iterable[HealthProblem], partitions: Sequence[str] | None = None) -> NodeVerdict:
    """The verdict for a node whose jobs use ``partitions`` (None: any of the POD)."""
    relevant = [
        problem
        for problem in problems
        if must_drain(problem)
        and (partitions is None or not problem.partition or problem.partition in partitions)
    ]
    if not relevant:
        return NodeVerdict(False, "")
    first = relevant[0]
    where = " ".join(filter(None, [first.partition, first.agent]))
    more = f" and {len(relevant) - 1} more" if len(relevant) > 1 else ""
    return NodeVerdict(True, _one_line(f"{REASON_PREFIX} {where}: {first.what}{more}"))


def unreachable_verdict(why: str) -> NodeVerdict:
    """The verdict when no service answers."""
    return NodeVerdict(True, _one_line(f"{REASON_PREFIX} no partition service: {why}"))


def _one_line(text: str) -> str:
    """Printable, short, and without what a shell or Slurm's configuration reads otherwise."""
    return re.sub(r"[^ -~]|[\"'`$\\;|&<>]", " ", text)[:LONGEST_REASON].strip()


def slurm_commands(verdict: NodeVerdict, node: str, state: str, reason: str) -> list[list[str]]:
    """The ``scontrol`` commands that bring a node into line; ``state`` and ``reason``: as Slurm shows them now.

    A node that podrun drained is resumed when it is well; one that somebody else drained is left alone.
    """
    drained = "DRAIN" in state.upper()
    ours = reason.strip().startswith(REASON_PREFIX)
    if verdict.drain and not drained:
        return [["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={verdict.reason}"]]
    if not verdict.drain and drained and ours:
        return [["scontrol", "update", f"NodeName={node}", "State=RESUME"]]
    return []
