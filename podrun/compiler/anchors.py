"""What an anchor's name means.

A forward value, a gradient, a weight, an accumulator or a norm, and how often it is there.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Collection

from podrun.compiler.program import AnchorSpec, Program, joint
from podrun.core.errors import UnimplementedError, UsageError
from podrun.core.executable import Retrieval
from podrun.core.names import GRADIENT_ANCHOR, NORM_ANCHOR, REDUCED_ANCHOR, UPDATED_ANCHOR
from podrun.core.quick_dataclass import dataclass

_LATER = ("Accum___",)
"""Prefixes that PopART has and for which the compiler does not give a value yet."""


class AnchorKind(enum.Enum):
    """Where the value of an anchor comes from."""

    VALUE = "value"
    """A forward value, or an input."""
    VARIABLE = "variable"
    """A parameter, optimizer state or scalar as it stands while the micro-batch runs, before the update."""
    PARAMETER_GRADIENT = "parameter_gradient"
    """Gradient with respect to a parameter, for each replica and micro-batch."""
    VALUE_GRADIENT = "value_gradient"
    """Gradient with respect to a forward value or an input."""
    UPDATED = "updated"
    """A parameter after the update of its batch."""
    REDUCED = "reduced"
    """The gradient that the update of a batch sees: reduced over replicas and micro-batches, still scaled."""
    NORM = "norm"
    """The norm that a joint update clips by; the subject is the number of its group."""

    @property
    def once_a_batch(self) -> bool:
        """True iff there is one value for each batch, known when its micro-batches are done."""
        return self in (AnchorKind.UPDATED, AnchorKind.REDUCED, AnchorKind.NORM)


@dataclass(frozen=True, slots=True)
class Anchor:
    """An anchor with its kind; ``subject`` is the tensor named without the prefix."""

    name: str
    kind: AnchorKind
    subject: str


def classify(program: Program, variables: Collection[str]) -> tuple[Anchor, ...]:
    """Every anchor of ``program`` in its order; ``variables`` are the names of optimizer states and scalars.

    Forward values are not known before the trace, so an unknown name passes here and `trace` refuses it.
    Raises UsageError for an anchor that can have no value, UnimplementedError for one that has none yet.
    """
    names = [spec.name for spec in program.anchors]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"anchored twice: {', '.join(doubled)}", hint="Name each tensor once.")
    return tuple(_classify(spec, program, variables) for spec in program.anchors)


def _classify(spec: AnchorSpec, program: Program, variables: Collection[str]) -> Anchor:
    name = spec.name
    if spec.retrieval is Retrieval.EVERY_N and spec.period < 1:
        raise UsageError(f"anchor {name!r} has the period {spec.period}; it must be at least 1")
    if name in variables or name in program.parameters:
        return Anchor(name, AnchorKind.VARIABLE, name)
    if name.startswith(GRADIENT_ANCHOR):
        subject = name[len(GRADIENT_ANCHOR) :]
        if program.loss is None:
            raise UsageError(
                f"anchor {name!r} asks for a gradient, but the program has no loss",
                hint="Give the program a loss, as in training, or leave the anchor out.",
            )
        kind = AnchorKind.PARAMETER_GRADIENT if subject in program.parameters else AnchorKind.VALUE_GRADIENT
        return Anchor(name, kind, subject)
    if name.startswith(UPDATED_ANCHOR):
        return _updated(spec, program, UPDATED_ANCHOR, AnchorKind.UPDATED)
    if name.startswith(REDUCED_ANCHOR):
        return _updated(spec, program, REDUCED_ANCHOR, AnchorKind.REDUCED)
    if name.startswith(NORM_ANCHOR):
        if joint(program.update) is None:
            raise UsageError(
                f"anchor {name!r}: nothing is clipped by a norm",
                hint="Give the optimizer ClipNormSettings, or leave the anchor out.",
            )
        _check_once(spec, program)
        return Anchor(name, AnchorKind.NORM, name[len(NORM_ANCHOR) :])
    if name.startswith(_LATER):
        raise UnimplementedError(
            f"anchor {name!r}: tensors with this prefix cannot be anchored yet", hint="Leave the anchor out."
        )
    return Anchor(name, AnchorKind.VALUE, name)


def _updated(spec: AnchorSpec, program: Program, prefix: str, kind: AnchorKind) -> Anchor:
    subject = spec.name[len(prefix) :]
    parameter = program.parameters.get(subject)
    if parameter is None or not parameter.trainable or program.loss is None:
        raise UsageError(
            f"anchor {spec.name!r}: {subject!r} is no weight that this program updates",
            hint="Anchor a weight that it trains.",
        )
    _check_once(spec, program)
    return Anchor(spec.name, kind, subject)


def _check_once(spec: AnchorSpec, program: Program) -> None:
    once = program.accumulation_factor > 1 and not program.updates_each_micro_batch
    if once and spec.retrieval is not Retrieval.FINAL:
        raise UnimplementedError(
            f"anchor {spec.name!r} changes once a batch, not with each of its {program.accumulation_factor} "
            f"micro-batches; only FINAL can be returned yet",
            hint='Use AnchorReturnType("Final") for it.',
        )


def unknown_tensor(name: str, known: Collection[str], *, gradient: bool = False) -> UsageError:
    """The error for a name that is no tensor of the program, with the nearest that is."""
    near = difflib.get_close_matches(name, list(known), n=3)
    hint = f"Did you mean {' or '.join(repr(item) for item in near)}?" if near else None
    if gradient:
        return UsageError(f"anchor {GRADIENT_ANCHOR}{name}: the loss does not depend on {name!r}", hint=hint)
    return UsageError(f"no tensor of the program is called {name!r}", hint=hint)
