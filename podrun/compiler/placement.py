"""Placement: which IPU of a replica each equation of the trace belongs to.

A front end places operators with name scopes ``ipu:i`` (`podrun.compiler.program.Forward`). Differentiation
keeps them, wrapped: ``transpose(jvp(ipu:1))``. The innermost scope counts.
"""

from __future__ import annotations

import re

from jax.extend.core import JaxprEqn

from podrun.compiler import jax_internals
from podrun.compiler.trace import Trace
from podrun.errors import UsageError

_IPU = re.compile(r"\bipu:(\d+)\b")


def ipu_of(equation: JaxprEqn) -> int | None:
    """The IPU an equation was placed on; None if its operator has no place of its own."""
    for scope in reversed(jax_internals.name_scopes(equation)):
        found = _IPU.search(scope)
        if found:
            return int(found[1])
    return None


def check_placement(traced: Trace, ipus_per_replica: int) -> None:
    """Raises UsageError that names an operator placed on an IPU that a replica does not have."""
    for equation in traced.jaxpr.jaxpr.eqns:
        ipu = ipu_of(equation)
        if ipu is not None and ipu >= ipus_per_replica:
            scopes = "/".join(jax_internals.name_scopes(equation))
            raise UsageError(
                f"{equation.primitive.name} in {scopes!r} is placed on IPU {ipu}, but a replica has "
                f"{ipus_per_replica} IPU(s).",
                hint=f"Place it on an IPU below {ipus_per_replica}, or give each replica more IPUs.",
            )
