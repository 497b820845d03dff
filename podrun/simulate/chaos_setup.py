"""What `podrun chaos` simulates: the policy file, knobs that are swept, and whether the job can come forward at all.

A policy file is that of ``podrun --restart-policy`` with more keys: ``checkpoint`` (`podrun.checkpoint.policy`),
``spares``, ``times`` (`RecoveryTimes`) and ``job``. Without ``max-restarts`` the job is restarted as long as it helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from podrun.checkpoint.policy import CheckpointPolicy, Spacing, checkpoint_policy_of, periodic_efficiency
from podrun.core.documents import Document, read_document
from podrun.core.errors import UsageError
from podrun.launcher.recovery import policy_of
from podrun.simulate.campaign_setup import UNLIMITED, CampaignSetup, RecoveryTimes

_HINT = "As in version: 1, checkpoint: {every-seconds: 1800, cost-seconds: 20}, spares: 16 (podrun help simulate)."
OWN_KEYS = ("checkpoint", "spares", "times", "job")
_JOB_KEYS = {"ipus": "ipus", "replicas": "replicas", "step-seconds": "step_s"}
MOST_DAYS = 3650
HOPELESS = 0.001
"""Share of useful time below which a job does not come forward."""


def with_policy(setup: CampaignSetup, path: Path) -> CampaignSetup:
    """The setup with what a policy file says. Raises NotFoundError, and ConfigError, which names file, line and key."""
    document = read_document(path, hint=_HINT)
    values = document.value
    if not isinstance(values, dict):
        raise document.error((), "a policy is a table", hint=_HINT)
    restart_keys = {name: value for name, value in values.items() if name not in OWN_KEYS}
    restart = policy_of(Document(document.where, restart_keys, document.lines))
    if "max-restarts" not in restart_keys:
        restart = replace(
            restart, max_restarts=UNLIMITED.max_restarts, crash_loop_after=UNLIMITED.crash_loop_after
        )
    setup = replace(setup, restart=UNLIMITED if set(restart_keys) == {"version"} else restart)
    if "checkpoint" in values:
        setup = replace(setup, checkpoint=_checkpoint(document))
    if "spares" in values:
        setup = replace(setup, spares=int(_positive(document, ("spares",), values["spares"])))
    if "times" in values:
        setup = replace(setup, times=_times(document))
    return _with_job(setup, document)


def _checkpoint(document: Document) -> CheckpointPolicy:
    values = document.value["checkpoint"]
    if not isinstance(values, dict):
        raise document.error(("checkpoint",), "checkpoint is a table", hint=_HINT)
    try:
        return checkpoint_policy_of(values)
    except UsageError as error:
        raise document.error(("checkpoint",), error.message, hint=error.hint) from None


def _times(document: Document) -> RecoveryTimes:
    values = document.value["times"]
    known = {_time_key(entry.name): entry.name for entry in fields(RecoveryTimes)}
    if not isinstance(values, dict) or any(name not in known for name in values):
        raise document.error(("times",), "times is a table of seconds", hint=f"Keys: {', '.join(known)}.")
    return RecoveryTimes(
        **{known[name]: _positive(document, ("times", name), value) for name, value in values.items()}
    )


def _time_key(name: str) -> str:
    return name.removesuffix("_s").replace("_", "-") + ("-seconds" if name.endswith("_s") else "")


def _with_job(setup: CampaignSetup, document: Document) -> CampaignSetup:
    values = document.value.get("job", {})
    if not isinstance(values, dict) or any(name not in _JOB_KEYS for name in values):
        raise document.error(("job",), "job is a table", hint=f"Keys: {', '.join(_JOB_KEYS)}.")
    changes: dict[str, Any] = {}
    for name, value in values.items():
        number = _positive(document, ("job", name), value)
        changes[_JOB_KEYS[name]] = number if name == "step-seconds" else int(number)
    return replace(setup, **changes)


def _positive(document: Document, place: tuple[str, ...], value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise document.error(place, f"{place[-1]} is {value!r}, not a number from 0", hint=_HINT)
    return float(value)


# --- knobs ---------------------------------------------------------------------------------------------------------


def _rates_by(setup: CampaignSetup, value: float) -> CampaignSetup:
    return replace(setup, rates=setup.rates.scaled(value))


def _detect(setup: CampaignSetup, value: float) -> CampaignSetup:
    sources = tuple(replace(source, detect_s=value) for source in setup.rates.sources)
    return replace(setup, rates=replace(setup.rates, sources=sources))


def _spacing(setup: CampaignSetup, value: float) -> CampaignSetup:
    return replace(setup, checkpoint=replace(setup.checkpoint, spacing=Spacing.SECONDS, value=value))


def _time_knob(name: str) -> Callable[[CampaignSetup, float], CampaignSetup]:
    return lambda setup, value: replace(setup, times=replace(setup.times, **{name: value}))


KNOBS: Mapping[str, Callable[[CampaignSetup, float], CampaignSetup]] = {
    "spares": lambda setup, value: replace(setup, spares=int(value)),
    "rate-factor": _rates_by,
    "detect-seconds": _detect,
    "checkpoint-seconds": _spacing,
    "ipus": lambda setup, value: replace(setup, ipus=int(value)),
    **{
        _time_key(entry.name): _time_knob(entry.name)
        for entry in fields(RecoveryTimes)
        if entry.name.endswith("_s")
    },
}
"""What ``--sweep KNOB=VALUE,...`` may change."""


def knob_value(setup: CampaignSetup, knob: str) -> float:
    """The value of a knob as it is."""
    if knob == "rate-factor":
        return 1.0
    if knob == "detect-seconds":
        rates = [source.per_hour or 1.0 for source in setup.rates.sources]
        weighted = [rate * s.detect_s for rate, s in zip(rates, setup.rates.sources, strict=True)]
        return math.fsum(weighted) / math.fsum(rates)
    if knob == "checkpoint-seconds":
        return setup.rhythm().work / 1e9
    if knob in ("spares", "ipus"):
        return float(getattr(setup, knob))
    names = {_time_key(entry.name): entry.name for entry in fields(RecoveryTimes)}
    return float(getattr(setup.times, names[knob]))


def parse_sweep(text: str) -> tuple[str, list[float]]:
    """``spares=0,16,64`` as a knob and its values. Raises UsageError."""
    knob, equals, values = text.partition("=")
    if knob not in KNOBS or not equals:
        raise UsageError(f"{text!r} sweeps no knob", hint=f"Knobs: {', '.join(KNOBS)}; as in spares=0,16,64.")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        raise UsageError(f"{values!r} are no numbers", hint="As in --sweep spares=0,16,64") from None
    if any(not 0 <= number < math.inf for number in numbers):
        raise UsageError(f"{values!r} are not all numbers from 0", hint="As in --sweep spares=0,16,64")
    return knob, numbers


def check_setup(setup: CampaignSetup) -> None:
    """Raise UsageError for a job that does not fit the POD, and for one that cannot come forward."""
    size = setup.size
    if size > setup.pod.ipu_count or size < 1 or size & (size - 1):
        raise UsageError(
            f"a job of {size} IPUs is no partition of {setup.pod.name} with {setup.pod.ipu_count}",
            hint=f"A power of two up to {setup.pod.ipu_count}: --ipus {setup.pod.ipu_count}.",
        )
    if not 0 < setup.days <= MOST_DAYS:
        raise UsageError(
            f"a campaign takes more than 0 and at most {MOST_DAYS} days, not {setup.days:g}", hint="--days 30"
        )
    mttf = setup.mttf_s()
    if math.isinf(mttf):
        return
    work = min(setup.rhythm().work / 1e9 or setup.days * 86_400, setup.days * 86_400)
    cost = setup.checkpoint.blocking_s
    restore = setup.times.load_s + setup.checkpoint.reading_s
    down = knob_value(setup, "detect-seconds") + setup.times.diagnose_s
    exponent = (restore + work + cost) / mttf
    share = periodic_efficiency(work + cost, cost, mttf, restore, down) if exponent < 500 else 0.0
    if share < HOPELESS:
        raise UsageError(
            f"the job cannot come forward: with a failure every {_shown_s(mttf)} s, restarts of {restore:,.0f} s and "
            f"{work:,.0f} s between checkpoints, useful time is (T - C) / ((M + D) exp(R/M) (exp(T/M) - 1)) = "
            f"{share:.1e}",
            hint="Write checkpoints more often (checkpoint: {every-seconds: ...}), load faster, or use fewer IPUs.",
        )


def _shown_s(seconds: float) -> str:
    """Seconds in whole numbers, and short ones as they are."""
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
