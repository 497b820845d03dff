"""A real launch's incidents beside their virtual twin: the same faults, answered by the same decisions.

What `podrun incidents RECORD --json` prints, or lines of such incidents, is read; each fault becomes the damage that it
does, the coordinator answers it, and the answer and the batches that a checkpoint policy would have lost stand beside
what the launch recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podrun.core.documents import read_text
from podrun.core.errors import ConfigError, PodrunError
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import text_table
from podrun.faults import parse_fault
from podrun.launcher.recovery import Attempt, Coordinator, Damage, Recovery
from podrun.simulate.campaign_setup import CampaignSetup
from podrun.simulate.damage import damage_by
from podrun.simulate.engine import SECOND
from podrun.simulate.launch_times import steps_named
from podrun.simulate.recovery_run import answer_of

_HINT = "podrun incidents RECORD --json > FILE; or incidents.jsonl of podrun chaos."


@dataclass(frozen=True, slots=True)
class _Recorded:
    """An incident as it was recorded."""

    line: int
    plain: Mapping[str, Any]


def read_incidents(path: Path) -> list[_Recorded]:
    """Incidents of a file: one JSON document, or one incident a line. Raises ConfigError with file and line."""
    text = read_text(path, hint=_HINT)
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if isinstance(document, dict) and isinstance(document.get("incidents"), list):
        return [_checked(path, number, entry) for number, entry in enumerate(document["incidents"], 1)]
    incidents = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            incidents.append(_checked(path, number, json.loads(line)))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path}:{number}: this is no incident, for it is no JSON: {error.msg}", hint=_HINT
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: this is no incident: {error}", hint=_HINT) from None
    if not incidents:
        raise ConfigError(f"{path} has no incidents", hint=_HINT)
    return incidents


def _checked(path: Path, line: int, entry: object) -> _Recorded:
    if not isinstance(entry, dict) or not {"id", "faults", "batch", "action", "cost"} <= set(entry):
        raise ConfigError(f"{path}:{line}: this is no incident of a launch", hint=_HINT)
    return _Recorded(line, entry)


def replayed(path: Path, setup: CampaignSetup) -> dict[str, Any]:
    """Each incident of a file beside its twin, and how many differ. Raises ConfigError."""
    coordinator = Coordinator(setup.restart)
    rows = [_row(path, incident, coordinator, setup) for incident in read_incidents(path)]
    return {
        "schema_version": 1,
        "incidents": rows,
        "equal_recovery": sum(row["equal_recovery"] for row in rows),
        "different": sum(not row["equal_recovery"] for row in rows),
    }


def _row(path: Path, incident: _Recorded, coordinator: Coordinator, setup: CampaignSetup) -> dict[str, Any]:
    plain = incident.plain
    try:
        faults = [parse_fault(str(text)) for text in plain["faults"]]
        batch, lost = int(plain["batch"]), plain["cost"]["lost_batches"]
    except PodrunError as error:
        raise ConfigError(f"{path}:{incident.line}: {error.message}", hint=error.hint) from None
    except (TypeError, ValueError, KeyError):
        raise ConfigError(f"{path}:{incident.line}: batch and cost are no numbers", hint=_HINT) from None
    damage = Damage()
    for fault in faults:
        first = fault.indices[0] if fault.indices else 0
        damage = damage_by(damage, fault.target.value, fault.kind, (f"machine {first}",), first)
    answer = coordinator.failed(Attempt("instance 0 failed", 1, damage, reached=batch))
    steps = answer.ways[0] if isinstance(answer, Recovery) and answer.ways else ()
    twin = answer_of(steps) if isinstance(answer, Recovery) else "not started again"
    between = max(1, round(setup.rhythm().work / SECOND / setup.step_s))
    recorded, virtual = steps_named(str(plain["action"])), steps_named(twin)
    return {
        "id": plain["id"],
        "faults": list(plain["faults"]),
        "batch": batch,
        "recorded": {"action": plain["action"], "recovery": list(recorded), "lost_batches": lost},
        "twin": {"action": twin, "recovery": list(virtual), "lost_batches": batch % between},
        "equal_recovery": recorded == virtual,
    }


def shown_twin(twin: Mapping[str, Any]) -> str:
    """The incidents beside their twins as text."""
    rows = [
        (
            row["id"],
            ", ".join(row["faults"]),
            row["recorded"]["action"],
            row["twin"]["action"],
            f"{row['recorded']['lost_batches']} / {row['twin']['lost_batches']}",
            "" if row["equal_recovery"] else "differs",
        )
        for row in twin["incidents"]
    ]
    head = ("incident", "faults", "launch", "twin", "lost batches", "")
    return text_table(head, rows) + f"\n{twin['equal_recovery']} equal, {twin['different']} different\n"
