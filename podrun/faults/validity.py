"""Which faults can strike on a partition of a size and shape, and in a program's instruction lists."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from podrun.core.cluster import IPUS_PER_MACHINE, LinkTopology, ladder_links
from podrun.core.errors import UsageError
from podrun.core.fault_spec import OF_INSTANCES, FaultSpec, FaultTarget
from podrun.core.quick_dataclass import dataclass


def validate(
    specs: Iterable[FaultSpec],
    *,
    ipus: int,
    links: Iterable[tuple[int, int]] | None = None,
    ilds: int = 1,
    instances: int | None = None,
) -> None:
    """Raise UsageError for a fault that cannot happen on a partition of ``ipus`` IPUs on ``ilds`` IPU-Link domains.

    ``links``: pairs of IPUs joined by IPU-Links, in partition indices (None: those of a torus). ``instances``: number
    of instances of the program (None: unknown).
    """
    machines = -(-ipus // IPUS_PER_MACHINE)
    joined = set(ladder_links(ipus, LinkTopology.TORUS) if links is None else links)
    counts = {"ipu": ipus, "link": ipus, "machine": machines, "gw-link": machines, "network": machines}
    of_launch = ("instance", "disk", "instance-network")
    counts |= {} if instances is None else dict.fromkeys(of_launch, instances)
    nouns = {"link": "IPU", "ipu": "IPU"} | dict.fromkeys(of_launch, "instance")
    for spec in specs:
        count, noun = counts.get(spec.target.value), nouns.get(spec.target.value, "machine")
        for index in spec.indices:
            if count is not None and index >= count:
                whose = "launch" if noun == "instance" else "partition"
                raise UsageError(
                    f"fault {spec.text}: the {whose} has no {noun} {index}, only 0 to {count - 1}",
                    hint=f"Indices count from 0 within the {whose}.",
                )
        if spec.target is FaultTarget.LINK and spec.indices not in joined:
            lower = spec.indices[0]
            peers = sorted({a + b - lower for a, b in joined if lower in (a, b)})
            raise UsageError(
                f"fault {spec.text}: no IPU-Link joins IPUs {lower} and {spec.indices[1]}",
                hint=f"IPU {lower} has links to: {', '.join(map(str, peers)) or 'no IPU of this partition'}.",
            )
        if spec.target is FaultTarget.GW_LINK:
            a, b = (machine * ilds // machines for machine in spec.indices)
            if a == b:
                raise UsageError(
                    f"fault {spec.text}: machines {spec.indices[0]} and {spec.indices[1]} are in one IPU-Link domain",
                    hint="GW-Links join IPU-Link domains; within one, name an IPU-Link: link:2-3.",
                )


def partition_links(ipus: int, ilds: int, topology: LinkTopology) -> list[tuple[int, int]]:
    """Pairs of IPUs that IPU-Links join in a partition whose IPUs lie on ``ilds`` IPU-Link domains."""
    share = ipus // ilds
    return [link for domain in range(ilds) for link in ladder_links(share, topology, domain * share)]


WHOLE_MACHINES = (FaultTarget.MACHINE, FaultTarget.GW_LINK, FaultTarget.NETWORK, FaultTarget.HOST)
"""Targets larger than an IPU: their faults enter the machine's first list."""


@dataclass(frozen=True, slots=True)
class ListPlaces:
    """Where the batches of one pass begin in an instruction list.

    ``ipus``: the partition's IPUs that run the list on this machine. ``starts``: the index of the first
    instruction of each batch; a program that pipelines whole batches runs several in one pass. ``length``: the
    number of instructions. ``leads``: this list is the machine's first; faults of a whole machine enter there.
    ``instances``: those whose first IPU is on this machine. ``batch_seconds``: modelled time of a batch (NaN: none).
    """

    ipus: frozenset[int]
    starts: tuple[int, ...]
    length: int
    leads: bool
    instances: frozenset[int] = frozenset()
    batch_seconds: float = math.nan

    def runs(self, spec: FaultSpec) -> bool:
        """True iff the fault strikes in this list."""
        if spec.target in OF_INSTANCES:
            return self.leads and not self.instances.isdisjoint(spec.indices)
        if spec.target in WHOLE_MACHINES:
            return self.leads
        return not self.ipus.isdisjoint(spec.indices)

    def instructions_of(self, batch: int) -> int:
        """The number of instructions of one batch of a pass."""
        ends = (*self.starts[1:], self.length)
        return ends[batch] - self.starts[batch]


def check_variable(spec: FaultSpec, name: str, variables: Mapping[str, Collection[int]]) -> None:
    """Raise UsageError if the program has no such variable, or has it on another IPU than the fault hits."""
    if name not in variables:
        near = difflib.get_close_matches(name, variables, n=3)
        names = ", ".join(near or sorted(variables)[:8])
        raise UsageError(f"fault {spec.text}: the program has no variable {name!r}", hint=f"It has: {names}.")
    if spec.indices[0] not in variables[name]:
        raise UsageError(
            f"fault {spec.text}: {name!r} does not lie on IPU {spec.indices[0]}",
            hint=f"On that machine it lies on: {', '.join(f'IPU {ipu}' for ipu in sorted(variables[name]))}.",
        )


def check_places(spec: FaultSpec, lists: Sequence[ListPlaces], *, done: int = 0) -> None:
    """Raise UsageError if the fault's batch is over, or if no list that it enters has its instruction."""
    if spec.during:
        return
    timed = [places for places in lists if places.runs(spec)]
    if spec.seconds is not None and any(math.isnan(places.batch_seconds) for places in timed):
        raise UsageError(
            f"fault {spec.text}: the program has no modelled time", hint="Say a batch instead: batch=N."
        )
    if (
        spec.batch < done
        and not spec.relative
        and spec.rate is None
        and spec.seconds is None
        and not spec.every
    ):
        raise UsageError(
            f"fault {spec.text}: the program has done {done} batches, so that batch {spec.batch} is over",
            hint="Batches count from 0 when the program is loaded. Name a later one.",
        )
    wanted = [places for places in lists if places.runs(spec)]
    if spec.instruction is None or not wanted:
        return
    most = max(places.instructions_of(spec.batch % len(places.starts)) for places in wanted)
    if spec.instruction >= most:
        raise UsageError(
            f"fault {spec.text}: batch {spec.batch} has no instruction {spec.instruction}, only 0 to {most - 1}",
            hint="Name one of these, or leave out instruction= to strike before the first.",
        )
