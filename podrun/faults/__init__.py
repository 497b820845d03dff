"""Faults: what may go wrong on a machine, as data, and the one point where it enters.

`parse_fault` reads ``ipu:5@step=17:tile-parity`` into a `FaultSpec`; `validate` holds specs against a
partition; `error_for` says which error a fault raises and which recovery action clears it; a `FaultPoint` is
asked by a machine's interpreter between two instructions. Only pure data and rules live here: what a machine
does about a fault (mark an IPU, end a process) is the machine's own business.
"""

from podrun.faults.effects import EFFECTS, Effect, describe_kinds, error_for
from podrun.faults.point import FaultPoint
from podrun.faults.spec import FaultSpec, FaultTarget, parse_fault, parse_faults, validate

__all__ = [
    "EFFECTS",
    "Effect",
    "FaultPoint",
    "FaultSpec",
    "FaultTarget",
    "describe_kinds",
    "error_for",
    "parse_fault",
    "parse_faults",
    "validate",
]
