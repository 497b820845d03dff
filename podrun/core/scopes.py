"""Scopes: names on traced operations that say IPU, pipeline stage, operator and recomputation.

A front end traces each operator under ``jax.named_scope``: ``ipu:1/stage:0/layer3/MatMul:0``. JAX's transformations
keep these names and wrap them: ``transpose(jvp(ipu:1))/stage:0/layer3/MatMul:0``. `parse` reads such a text:

    >>> parse("transpose(jvp(ipu:1))/stage:0/layer3/MatMul:0").ipu
    1

The innermost IPU, stage and cut count. A builder's label ends with the operator's type and a number (``MatMul:0``,
``MatMul:0/1``); below any other label a scope says the type: ``encoder/op:MatMul:0``.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

BACKWARD = "transpose("
"""Begins the scope of every backward equation."""
RECOMPUTED = "checkpoint("
"""In the scope of every copy of a forward equation that recomputation makes."""
RESTORE = "transpose(restore)"
"""Scope of a forward value that is computed together with the backward work of its stage."""
LOCAL = "anew"
"""Innermost scope of equations that every segment reading their results computes for itself."""

_TRANSFORMATIONS = frozenset(
    {
        *("transpose", "jvp", "vmap", "checkpoint", "remat", "rematted_computation"),
        *("custom_jvp", "custom_vjp"),
    }
)
_PARENTHESES = re.compile(r"(\w*)\(|\)")
_LOCAL = re.compile(rf"(?:(?:jvp|vmap)\()*{LOCAL}\)*")
_PLACE = re.compile(r"(ipu|stage|cut):(\d+)")
_KIND = re.compile(r"op:(\w+):0")
_TYPED = re.compile(r"(?:op:)?([A-Z][A-Za-z0-9]*):\d+")
_CUT = re.compile(r"/cut:\d+\b")


@dataclass(frozen=True, slots=True)
class ScopeOperator:
    """The operator in whose scope an equation stands: its ``label`` with the names around it, and its ONNX type."""

    label: str
    kind: str


@dataclass(frozen=True, slots=True)
class Scope:
    """What the scope of an equation says. None for a place that it does not name."""

    names: tuple[str, ...]
    """The scope's parts without transformations, places and types: the layer's name."""
    ipu: int | None = None
    stage: int | None = None
    cut: int | None = None
    """The pipeline stage that the operator would have, in a program without stages."""
    operator: ScopeOperator | None = None
    backward: bool = False
    recomputed: bool = False
    restored: bool = False
    """True iff it is computed with the backward work of its stage (`RESTORE`)."""

    @property
    def layer(self) -> str:
        """The layer's name, or ``(no name)``."""
        return "/".join(self.names) or "(no name)"

    def within(self, labels: frozenset[str]) -> str | None:
        """The longest of ``labels`` that the layer's name begins with; None if there is none.

        A number behind a label belongs to another operator: ``MatMul:0/1`` is not in ``MatMul:0``.
        """
        known = _by_names(labels)
        for end in range(len(self.names), 0, -1):
            if self.names[:end] in known:
                return known[self.names[:end]]
            if self.names[end - 1].isdecimal():
                return None
        return None


@functools.lru_cache(maxsize=64)
def _by_names(labels: frozenset[str]) -> dict[tuple[str, ...], str]:
    """Labels by their parts, as `Scope.names` has them."""
    return {tuple(part for part in label.split("/") if part): label for label in sorted(labels)}


@functools.lru_cache(maxsize=1 << 16)
def parse(text: str) -> Scope:
    """Read the text of a scope, parts separated by ``/``. Any text is a scope; the empty one says nothing."""
    parts = [part for part in unwrapped(text).split("/") if part]
    places: dict[str, int] = {}
    names: list[str] = []
    for part in parts:
        place = _PLACE.fullmatch(part)
        if place is not None:
            places[place[1]] = int(place[2])
        elif not _KIND.fullmatch(part):
            names.append(part)
    return Scope(
        tuple(names),
        places.get("ipu"),
        places.get("stage"),
        places.get("cut"),
        _operator(parts),
        backward=BACKWARD in text,
        recomputed=RECOMPUTED in text,
        restored=RESTORE in text,
    )


def unwrapped(text: str) -> str:
    """``text`` without JAX's transformations; parentheses of other names stay."""
    kept: list[str] = []
    wrappers: list[bool] = []
    end = 0
    for found in _PARENTHESES.finditer(text):
        opens = found[0] != ")"
        if opens:
            wrappers.append(found[1] in _TRANSFORMATIONS)
        is_wrapper = wrappers[-1] if opens else bool(wrappers) and wrappers.pop()
        if is_wrapper:
            kept.append(text[end : found.start()])
            end = found.end()
    return "".join([*kept, text[end:]])


def _operator(parts: list[str]) -> ScopeOperator | None:
    """The innermost operator whose type is known. A builder's second operator of a name is ``MatMul:0/1``."""
    for end in range(len(parts), 0, -1):
        typed = _TYPED.fullmatch(parts[end - 1])
        if typed is not None:
            last = end + 1 if end < len(parts) and parts[end].isdecimal() else end
            return ScopeOperator("/".join(parts[:last]), typed[1])
    return None


def operator_scopes(label: str, kind: str) -> tuple[str, ...]:
    """The scopes of an operator: its label, and its type unless the label ends with a type and a number."""
    parts = label.split("/")
    if len(parts) > 1 and parts[-1].isdecimal():
        parts.pop()
    typed = _TYPED.fullmatch(parts[-1])
    return (label,) if typed is not None and not parts[-1].startswith("op:") else (label, f"op:{kind}:0")


def place_scopes(ipu: int | None = None, stage: int | None = None, cut: int | None = None) -> tuple[str, ...]:
    """The scopes of an operator's place, from the outside in."""
    places = {"ipu": ipu, "stage": stage, "cut": cut}
    return tuple(f"{kind}:{number}" for kind, number in places.items() if number is not None)


def recomputing(text: str) -> str:
    """The scope of a copy, in the backward pass, of an equation whose scope is ``text``."""
    return f"{BACKWARD}{RECOMPUTED}{text}))"


def without_cuts(text: str) -> str:
    """``text`` without cuts, which stand below an IPU and are not part of any report."""
    return _CUT.sub("", text)


def is_local(part: str) -> bool:
    """True iff the innermost part of a scope is `LOCAL`, in the forward pass."""
    return _LOCAL.fullmatch(part) is not None
