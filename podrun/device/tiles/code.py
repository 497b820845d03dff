"""Bytes of code on the tiles: vertex code, vertex state, exchange code, control code.

Sizes follow from how many vertices, exchange fragments and compute sets the plans hold. The constants are
few; each is stated with where it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence

from podrun.device.target import Chip
from podrun.device.tiles.plan import Plan

RUNTIME_CODE = 2048
"""Bytes of runtime and supervisor code on each tile. Assumed: part of the 8 KiB seen on GC2 in 2018."""
FAMILY_CODE = 1024
"""Bytes of vertex code for each family of operations in use. Derived: 5 to 6 KB per tile for BERT's set."""
VERTEX_STATE = 28
"""Bytes of state, edge pointers and run instruction per vertex. Derived: facts page 3.1, BERT layers."""
FRAGMENT_CODE = 8
"""Bytes of exchange code per fragment. Derived: two timed control words."""
EXCHANGE_CODE = 32
"""Bytes of exchange code per phase on each tile. Assumed."""
CONTROL_CODE = 20
"""Bytes of control code per compute set or exchange on each tile. Derived: 0.9 KB per BERT layer."""


def code_bytes(chip: Chip, plans: Sequence[Plan]) -> dict[str, float]:
    """Bytes on the whole chip by category, of a program that holds ``plans`` once each."""
    families = {plan.family for plan in plans if plan.family not in ("view", "loop")}
    state = sum(plan.vertices * plan.tiles for plan in plans) * VERTEX_STATE
    fragments = sum(plan.fragments * plan.tiles for plan in plans) * FRAGMENT_CODE
    phases = sum(1 for plan in plans if plan.exchanges)
    sets = sum(1 for plan in plans if plan.compute_sets)
    return {
        "vertex_code": float(chip.tiles * (RUNTIME_CODE + FAMILY_CODE * len(families))),
        "vertex_state": state,
        "exchange_code": fragments + float(chip.tiles * EXCHANGE_CODE * phases),
        "control_code": float(chip.tiles * CONTROL_CODE * (sets + phases)),
    }
