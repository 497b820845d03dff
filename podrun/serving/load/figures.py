"""What a server answered under load, for people and as JSON (``podrun/serving/load/load.schema.json``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from podrun.core.terminal import text_table
from podrun.serving.load.generator import Measured, Measuring

SCHEMA_VERSION = 1
PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def load_json(
    url: str, model: str, batch: int, measuring: Measuring, levels: Sequence[Measured]
) -> dict[str, Any]:
    """The figures of a measurement as values of JSON: units in key names, null for unknown."""
    return {
        "schema_version": SCHEMA_VERSION,
        "url": url,
        "model": model,
        "batch_size": batch,
        "interval_s": measuring.interval_s,
        "stability_share": measuring.share,
        "levels": [_level_json(level, batch) for level in levels],
    }


def _level_json(level: Measured, batch: int) -> dict[str, Any]:
    whole, modelled = level.whole, level.whole.modelled_s()
    answered = whole.answered
    return {
        "concurrency": level.level.concurrency or None,
        "rate_per_s": level.level.rate or None,
        "windows": level.windows,
        "stable": level.stable,
        "answered": answered,
        "answered_per_s": whole.rate,
        "inferences_per_s": whole.rate * batch,
        "latency_mean_s": whole.mean_s if answered else None,
        "latency_s": {f"p{one:g}": whole.latency_s(one) for one in (*PERCENTILES, 99.9)}
        if answered
        else None,
        "modelled_s": dict(zip(("compute", "transfer", "queue"), modelled, strict=True))
        if modelled
        else None,
        "errors": dict(sorted(whole.errors.items())),
    }


def load_text(levels: Sequence[Measured], batch: int) -> str:
    """A table, and under it the errors and what was not stable."""
    head = ("load", "infer/s", "mean", *(f"p{one:g}" for one in PERCENTILES), "modelled", "queue", "errors")
    text = text_table(head, [_row(level, batch) for level in levels])
    for level in levels:
        for kind, count in sorted(level.whole.errors.items()):
            text += f"\n{level.level.label}: {count} errors: {kind}"
        if not level.stable:
            text += (
                f"\n{level.level.label}: not stable in {level.windows} windows; give more with --max-trials."
            )
    return text + "\n"


def _row(level: Measured, batch: int) -> tuple[str, ...]:
    whole, modelled = level.whole, level.whole.modelled_s()
    errors = str(sum(whole.errors.values()))
    if not whole.answered:
        return (level.level.label, "0", *["-"] * (len(PERCENTILES) + 3), errors)
    return (
        level.level.label,
        f"{whole.rate * batch:,.1f}",
        _ms(whole.mean_s),
        *(_ms(whole.latency_s(one)) for one in PERCENTILES),
        _ms(modelled[0] + modelled[1]) if modelled else "-",
        _ms(modelled[2]) if modelled else "-",
        errors,
    )


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.3g} ms" if milliseconds < 999.5 else f"{milliseconds:,.0f} ms"
