"""Which requests can be right at all, whatever else is on the POD: names, sizes, GCDs, IPU-Link domains."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import replace

from podrun.core.cluster import Cluster, smallest_holding
from podrun.core.errors import NotFoundError, UsageError
from podrun.vipu.ipu_placement import is_power_of_two, least_ilds
from podrun.vipu.types import Requirements, SyncType

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str, what: str) -> None:
    """Raises UsageError if ``name`` is not valid for ``what``, such as "a partition"."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for {what}",
            hint="Use letters, digits, '.', '_' and '-', at most 64, starting with a letter or digit.",
        )


def unknown_name(kind: str, name: str, known: Iterable[str], make: str) -> NotFoundError:
    """The error for a name that nothing has: the nearest name, then all of them, else ``make``, the command that makes
    one."""
    numbered = {text: [part.zfill(9) for part in re.split(r"(\d+)", text)] for text in known}
    names = sorted(numbered, key=lambda text: numbered[text])  # ipum2 before ipum10
    close = difflib.get_close_matches(name, names, n=1)
    did_you_mean = f"Did you mean {close[0]}? " if close else ""
    shown = ", ".join(names[:8]) + (" ..." if len(names) > 8 else ".")
    there = f"There are: {shown}" if names else f"There are none: {make}"
    return NotFoundError(f"there is no {kind} {name!r}", hint=did_you_mean + there)


def complete_requirements(needs: Requirements, cluster: Cluster) -> Requirements:
    """The requirements with defaults for what they leave open. Raises UsageError if the POD can never meet them."""
    check_name(needs.name, "a partition")
    if not is_power_of_two(needs.size):
        raise UsageError(
            f"the size of a partition is a power of two, not {needs.size}", hint=_sizes_near(needs.size)
        )
    ilds = needs.num_ilds or least_ilds(cluster, needs.size)
    _check_domains(needs.size, ilds, cluster)
    gcds = needs.num_gcds or 1
    if needs.reconfigurable:
        _check_reconfigurable(needs, gcds, ilds)
    if not is_power_of_two(gcds) or gcds > needs.size:
        raise UsageError(f"{gcds} GCDs do not divide {needs.size} IPUs", hint="Use a power of two.")
    if gcds < ilds:
        raise UsageError(
            f"a GCD lies in one IPU-Link domain: {ilds} domains need at least {ilds} GCDs, not {gcds}",
            hint=f"Use --num-gcds {ilds} (podrun: --num-instances {ilds} or more).",
        )
    default = SyncType.C2_COMPATIBLE if needs.reconfigurable else SyncType.POD_NATIVE_DEFAULT
    return replace(needs, num_gcds=gcds, num_ilds=ilds, sync_type=needs.sync_type or default)


def _check_domains(size: int, ilds: int, cluster: Cluster) -> None:
    if size > cluster.ipu_count:
        larger = smallest_holding(size, cluster.target)
        raise UsageError(
            f"a partition of {size} IPUs is larger than {cluster.name} of {cluster.ipu_count}",
            hint="Ask for fewer"
            + (f", or start a larger POD: vipu-server --cluster {larger.name}" if larger else "."),
        )
    if not is_power_of_two(ilds) or ilds > size or ilds > len(cluster.ilds):
        most = min(size, len(cluster.ilds))
        raise UsageError(
            f"{size} IPUs cannot lie in {ilds} IPU-Link domains of {cluster.name}",
            hint=f"Leave out --num-ilds, or use a power of two up to {1 << (most.bit_length() - 1)}.",
        )
    if size // ilds > cluster.topology.ild_ipus:
        raise UsageError(
            f"{size} IPUs do not fit {ilds} IPU-Link domains of {cluster.topology.ild_ipus}",
            hint=f"Use --num-ilds {least_ilds(cluster, size)}.",
        )


def _check_reconfigurable(needs: Requirements, gcds: int, ilds: int) -> None:
    if needs.sync_type not in (None, SyncType.C2_COMPATIBLE):
        raise UsageError(
            f"a reconfigurable partition has sync type c2-compatible, not {needs.sync_type.value}",
            hint="Leave out --sync-type or --reconfigurable.",
        )
    if gcds != 1:
        raise UsageError(
            f"a reconfigurable partition has one GCD, not {gcds}",
            hint="Leave out --num-gcds or --reconfigurable.",
        )
    if ilds != 1:
        raise UsageError(
            f"a reconfigurable partition lies in one IPU-Link domain; {needs.size} IPUs need {ilds}",
            hint=f"Leave out --reconfigurable and use --num-gcds {ilds} or more.",
        )


def _sizes_near(size: int) -> str:
    if size < 1:
        return "Use 1, 2, 4, 8, ..."
    lower = 1 << (size.bit_length() - 1)
    return f"Use {lower} or {2 * lower}."
