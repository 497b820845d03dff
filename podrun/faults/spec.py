"""A fault as data: what is hit, when, and how. Written ``TARGET@step=N[,instruction=I]:KIND``."""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from podrun.cluster import IPUS_PER_MACHINE, LinkTopology, ladder_links
from podrun.errors import UsageError
from podrun.faults.effects import EFFECTS, describe_kinds


class FaultTarget(enum.Enum):
    """What a fault hits."""

    IPU = "ipu"
    """One IPU, by its index in the partition."""
    LINK = "link"
    """The IPU-Link between two IPUs, by their indices in the partition."""
    MACHINE = "machine"
    """One IPU-M2000, by its index in the partition."""


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One fault that happens once.

    ``indices``: one IPU, one machine, or the two IPUs of a link, lower first. ``step``: how many batches the
    program has done since it was loaded when the fault strikes (0: in its first batch). ``instruction``: the
    place in that batch's instruction list before which it strikes (None: before the first). ``kind``: a key
    of `EFFECTS`.
    """

    target: FaultTarget
    indices: tuple[int, ...]
    step: int
    kind: str
    instruction: int | None = None

    def __str__(self) -> str:
        where = "-".join(map(str, self.indices))
        place = "" if self.instruction is None else f",instruction={self.instruction}"
        return f"{self.target.value}:{where}@step={self.step}{place}:{self.kind}"


_FORM = re.compile(
    r"(?P<target>[a-z]+):(?P<first>\d{1,9})(?:-(?P<second>\d{1,9}))?"
    r"@step=(?P<step>\d{1,18})(?:,instruction=(?P<instruction>\d{1,9}))?:(?P<kind>[a-z0-9-]+)"
)


def parse_fault(text: str) -> FaultSpec:
    """The fault that ``text`` describes. Raises UsageError that names the form or the kinds there are."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"fault {text!r} is not of the form TARGET@step=N:KIND, such as ipu:5@step=17:tile-parity",
            hint=f"Faults there are: {describe_kinds()}.",
        )
    try:
        target = FaultTarget(match["target"])
    except ValueError:
        raise UsageError(
            f"fault {text!r}: there is no target {match['target']!r}; targets are ipu, link and machine",
            hint=f"Faults there are: {describe_kinds()}.",
        ) from None
    kind = match["kind"]
    if (target.value, kind) not in EFFECTS:
        raise UsageError(
            f"fault {text!r}: {_no_kind(target, kind)}", hint=f"Faults there are: {describe_kinds()}."
        )
    instruction = None if match["instruction"] is None else int(match["instruction"])
    return FaultSpec(target, _indices(text, target, match), int(match["step"]), kind, instruction)


def parse_faults(text: str) -> tuple[FaultSpec, ...]:
    """Faults separated by semicolons or white space; empty text gives none."""
    return tuple(parse_fault(part) for part in re.split(r"[;\s]+", text) if part)


def validate(
    specs: Iterable[FaultSpec], *, ipus: int, links: Iterable[tuple[int, int]] | None = None
) -> None:
    """Raises UsageError for a fault that cannot happen on a partition of ``ipus`` IPUs.

    ``links``: pairs of IPUs joined by IPU-Links, in partition indices; by default those of the ladder, ends
    joined.
    """
    machines = -(-ipus // IPUS_PER_MACHINE)
    joined = set(ladder_links(ipus, LinkTopology.TORUS) if links is None else links)
    for spec in specs:
        count = machines if spec.target is FaultTarget.MACHINE else ipus
        noun = "machine" if spec.target is FaultTarget.MACHINE else "IPU"
        for index in spec.indices:
            if index >= count:
                raise UsageError(
                    f"fault {spec}: the partition has no {noun} {index}, only 0 to {count - 1}",
                    hint="Indices count from 0 within the partition.",
                )
        if spec.target is FaultTarget.LINK and spec.indices not in joined:
            lower = spec.indices[0]
            peers = sorted({a + b - lower for a, b in joined if lower in (a, b)})
            raise UsageError(
                f"fault {spec}: no IPU-Link joins IPUs {lower} and {spec.indices[1]}",
                hint=f"IPU {lower} has links to: {', '.join(map(str, peers)) or 'none in this partition'}.",
            )


def _indices(text: str, target: FaultTarget, match: re.Match[str]) -> tuple[int, ...]:
    first, second = int(match["first"]), match["second"]
    if target is not FaultTarget.LINK:
        if second is not None:
            raise UsageError(
                f"fault {text!r}: {target.value} takes one index; only link takes two, as link:2-3"
            )
        return (first,)
    if second is None or int(second) == first:
        raise UsageError(f"fault {text!r}: link takes the two IPUs it joins, as link:2-3")
    return (min(first, int(second)), max(first, int(second)))


def _no_kind(target: FaultTarget, kind: str) -> str:
    kinds = [name for where, name in EFFECTS if where == target.value]
    near = difflib.get_close_matches(kind, kinds, n=1)
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{target.value} has no fault {kind!r}{guess}"
