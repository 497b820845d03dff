"""Names that programs for PopART 1 use and PopART 3 has no more: what to write instead."""

from __future__ import annotations

_LOSS = "is PopART 1's: losses are operators. {instead}, and give its output to TrainingSession as the loss."
_NAMES = {
    "L1Loss": _LOSS.format(instead="Write builder.aiGraphcore.l1loss([x], scale)"),
    "NllLoss": _LOSS.format(instead="Write builder.aiGraphcore.nllloss([probabilities, labels])"),
    "IdentityLoss": _LOSS.format(instead="Write builder.aiGraphcore.identityloss([x])"),
}


def missing(name: str) -> AttributeError:
    """What ``popart.name`` raises where there is no such name."""
    hint = f" popart.{name} {_NAMES[name]}" if name in _NAMES else ""
    return AttributeError(f"module 'popart' has no attribute {name!r}.{hint}")
