"""Walls: values of long chains that XLA shall work out once.

XLA fuses operations element by element into the loops of whatever reads them, and works out anew, in each reader, what
has several. A residual network in halves is one such chain from its first layer to its last: every product reads a
widened copy, which fuses, so nothing is ever held in memory, and each layer's loops work out all layers before it.
Time to compile and time to run grow with the square of the depth: 12 layers of a transformer took 91 s of processor
time to compile and 0.52 for a step; behind walls 9 and 0.16.

A wall is a call of the identity that XLA is told not to inline: what is read behind it lies in memory. (XLA takes
``optimization_barrier`` away before it fuses. Pieces with large convolutions have their calls inlined, walls too, when
calls into the library are put in.) It stands behind a value that several equations read, once a reader
would have more than `LONGEST` equations to work out again. No program of few layers has one.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from podrun.compiler import jax_internals

LONGEST = 64
"""Equations that a reader of a value may have to work out again."""
SMALLEST = 1 << 10
"""Elements of a value that is worth a place in memory."""
_HELD = frozenset(
    {
        "dot_general",
        "conv_general_dilated",
        "scan",
        "while",
        "cond",
        "sort",
        "top_k",
        "scatter",
        "scatter-add",
        "custom_call",
        "ffi_call",
        "random_bits",
        "threefry2x32",
    }
)
"""Primitives whose results lie in memory whatever reads them."""
_SUMS = ("reduce_", "arg", "cum")
"""How the names of others begin."""


def walled(jaxpr: Jaxpr) -> frozenset[Var]:
    """The variables to put walls behind."""
    readers = Counter(v for e in jaxpr.eqns for v in {a for a in e.invars if not isinstance(a, Literal)})
    chains: dict[Any, int] = {}  # The equations of each chain, a bit for each.
    found = []
    for index, equation in enumerate(jaxpr.eqns):
        chain = 0
        if not _ends_chains(equation):
            chain = 1 << index
            for atom in equation.invars:
                if not isinstance(atom, Literal):
                    chain |= chains.get(atom, 0)
        for variable in equation.outvars:
            if readers[variable] > 1 and chain.bit_count() > LONGEST and _elements(variable) >= SMALLEST:
                found.append(variable)
            else:
                chains[variable] = chain
    return frozenset(found)


def wall(value: Any) -> Any:
    """The value, in memory."""
    with set_xla_metadata(inlineable="false"):  # type: ignore[no-untyped-call]
        return _same(value)


@jax.jit
def _same(value: Any) -> Any:
    return value


def _elements(variable: Var) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))


def _ends_chains(equation: JaxprEqn) -> bool:
    """Whether the equation's results are in memory whatever reads them."""
    name = equation.primitive.name
    if name in _HELD or name.startswith(_SUMS):
        return True
    inner = list(jax_internals.inner_jaxprs(equation))
    return any(_ends_chains(e) for jaxpr in inner for e in jaxpr.eqns)
