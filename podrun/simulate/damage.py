"""From a failure of a unit to what the machines would report broken, in the words of the launcher's recovery.

The action that makes a target usable again is that of `podrun.core.fault_effects`, as for `--fault`.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any

from podrun.core.errors import RecoveryAction
from podrun.core.fault_effects import EFFECTS
from podrun.core.fault_kinds import DISTURBANCES
from podrun.core.quick_dataclass import dataclass
from podrun.launcher.recovery import Damage
from podrun.record.incidents import Incident
from podrun.simulate.engine import SECOND
from podrun.simulate.rates import FailureSource

SLOW_S = 3600.0
"""How long a disturbance lasts that is not ended by a recovery."""
_SLOW_KINDS = {"slow": 1.3, "throttled": 1.25, "degraded": 1.1}
"""Kinds that slow all down, and by what factor: a step is as slow as its slowest part."""
_NEEDED_SETTINGS = {"corrupt": ",tensor=weights", "throttled": ",mhz=1064"}
"""Settings that the form of a fault needs, of a campaign: which tensor is unknown; 1,064 MHz is 1,330 over 1.25."""


@dataclass(slots=True)
class IncidentNote:
    """A failure of the campaign. ``at``: nanoseconds; ``unit``: by its index in the partition, as in ``--fault``;
    ``lost``: nanoseconds of work; ``phase``: what the job did."""

    at: int
    source: FailureSource
    unit: int
    agents: tuple[str, ...]
    lost: int
    phase: str
    answer: str = ""
    evidence: tuple[str, ...] = field(default=())

    @property
    def place(self) -> str:
        """Where it struck, as in ``--fault``; a link by its first end."""
        linked = self.source.target in ("link", "gw-link")
        return f"{self.unit}-{self.unit + 1}" if linked else str(self.unit)

    def plain(self, number: int, step_s: float) -> dict[str, Any]:
        """The failure as values of JSON, in the form of a launch's incidents, with the time."""
        target, kind = self.source.target, self.source.kind
        effect = EFFECTS.get((target, kind))
        error = {
            "type": effect.error.__name__ if effect else "Disturbance",
            "code": effect.code.name if effect else "NONE",
            "where": ", ".join(self.agents),
            "recovery_action": effect.action.value if effect and effect.action else "",
            "message": effect.state or kind if effect else kind,
        }
        batch = int(self.at / SECOND / step_s)
        fault = f"{target}:{self.place}@batch={batch}:{kind}{_NEEDED_SETTINGS.get(kind, '')}"
        incident = Incident(
            id=f"incident-{number}",
            faults=(fault,),
            batch=batch,
            instances=(),
            error=tuple(error.items()),
            component=f"{target} {self.unit} ({', '.join(self.agents)})",
            action=self.answer or "none yet",
            evidence=(f"the job was {self.phase}",),
            lost_batches=int(self.lost / SECOND / step_s),
        )
        return {**incident.plain, "time_s": self.at / SECOND, "lost_seconds": self.lost / SECOND}


def slowdown_by(source: FailureSource) -> tuple[float, float] | None:
    """The factor by which a source of failures slows the job down, and for how long; None if it stops it."""
    if (source.target, source.kind) in DISTURBANCES and source.kind in _SLOW_KINDS:
        return _SLOW_KINDS[source.kind], SLOW_S if not source.detect_s else max(source.detect_s, 60.0)
    return None


def damage_by(damage: Damage, target: str, kind: str, agents: tuple[str, ...], ipu: int) -> Damage:
    """The damage with that of one more fault of a kind."""
    effect = EFFECTS.get((target, kind))
    words = (*damage.words, f"{kind} of {target}")[-4:]
    if effect is None:  # A disturbance that stops the program and breaks nothing.
        return replace(damage, words=words)
    if effect.action is None:
        return replace(damage, lost=tuple(dict.fromkeys((*damage.lost, *agents))), words=words)
    if effect.action is RecoveryAction.FULL_RESET:
        return replace(damage, power=tuple(dict.fromkeys((*damage.power, *agents))), words=words)
    if effect.action is RecoveryAction.PARTITION_RESET:
        return replace(damage, partition=True, words=words)
    if effect.code.is_tile_exception:
        return replace(damage, tile_exceptions=(*damage.tile_exceptions, ipu), words=words)
    return replace(damage, ipus=(*damage.ipus, ipu), words=words)
