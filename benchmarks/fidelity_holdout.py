"""Does the model predict, or remember? ``python benchmarks/fidelity_holdout.py [--seeds N] [--json FILE]``.

For each seed, a random third of the table's rows is held out. The fitted constants are fitted again on the
other two thirds (where any of their kind is there), from values that are off by half as much again, one
after the other: the value of a grid with the smallest mean squared log error. The median error by kind is
printed for both parts. Constants that are published or derived from a formula stay as they are. Nothing is
written back.

Then, to first order (`fidelity_kinds.support`): which rows each constant rests on, and the error of every
row when all constants are fitted without it. Last, rows that are not in the table at all (`data/beside.json`, each with
its source): no constant is ever fitted to them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import fidelity  # noqa: E402
import numpy as np  # noqa: E402
from fidelity_kinds import applications, footprints, own_formulas, products, stencil  # noqa: E402
from fidelity_kinds.support import elasticities, left_out, support  # noqa: E402
from short_mode import add_short  # noqa: E402

from podrun.collectives import timing as ipu_links  # noqa: E402
from podrun.costmodel import batch, exchange, lookups  # noqa: E402

FITTED: tuple[tuple[ModuleType, str, str], ...] = (
    (applications, "LIBRARY_2018", "network"),
    (applications, "INFERENCE_PACKING", "network"),
    (applications, "PIPELINE_IMBALANCE", "network"),
    (batch, "DOMAIN_SECONDS", "network"),
    (batch, "STREAMING_BYTES_PER_SECOND", "network"),
    (footprints, "VERTEX_DATA_2018", "memory"),
    (footprints, "IMBALANCE_2018", "memory"),
    (footprints, "TILE_IMBALANCE", "memory"),
    (own_formulas, "LOOP_SLOTS", "memory_bandwidth"),
    (own_formulas, "HALO_FRAGMENTS", "exchange"),
    (stencil, "SWEEP_CYCLES", "stencil"),
    (stencil, "ROW_CYCLES", "stencil"),
    (stencil, "GATHER_START", "stencil"),
    (stencil, "SCATTER_START", "stencil"),
    (stencil, "CELL_PACKETS", "stencil"),
    (exchange, "WAIT_SECONDS", "host_stream"),
    (exchange, "RELEASE_SECONDS", "host_stream"),
    (own_formulas, "CALL_SECONDS", "session_call"),
    (products, "CPP_MAC", "gemm"),
    (products, "LINEAR_FRAGMENTS", "gemm"),
)
"""Module, constant and the kind it is fitted to. Constants that shape a plan are not refitted: plans are
cached.
"""
ONE_STEP: tuple[tuple[ModuleType, str], ...] = (
    (applications, "LIBRARY_2018"),
    (footprints, "VARIABLES_2018"),
    (own_formulas, "COISSUE_EFFICIENCY"),
    (own_formulas, "ARRANGE_PER_BYTE"),
    (own_formulas, "COUNTER_READ"),
    (stencil, "GLOBAL_SKEW"),
    (exchange, "TRANSFER_CYCLES"),
    (exchange, "STREAM_BYTES_PER_SECOND"),
    (lookups, "CELL_CYCLES"),
    (lookups, "CANDIDATE_CYCLES"),
    (lookups, "BEAM_CYCLES"),
    (ipu_links, "EFFICIENCY"),
    (ipu_links, "STEP_CYCLES"),
)
"""Constants that the first-order study adds to the fitted ones."""
BESIDE = HERE / "data" / "beside.json"
"""Published figures that are not among the measurements."""
GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 2.0)
START = 1.5
ROUNDS = 2


def loss(records: Sequence[Any], by_id: Any) -> float:
    """Mean squared log error of those that are predicted, one vote per row of the table."""
    votes: dict[str, list[float]] = {}
    for record in records:
        try:
            value = fidelity.predict(record, by_id)
        except fidelity.NotPredicted:
            continue
        votes.setdefault(str(record["id"]).split(".")[0], []).append(math.log(value / record["value"]) ** 2)
    means = [sum(v) / len(v) for v in votes.values()]
    return sum(means) / len(means) if means else 0.0


def trusted(records: Sequence[Any], kind: str) -> list[Any]:
    """High and medium confidence records of a kind."""
    return [r for r in records if r["kind"] == kind and r["confidence"] != "low"]


def refit(records: Sequence[Any], by_id: Any) -> dict[str, float]:
    """Fit every constant on ``records`` from a wrong start; sets them and returns their values."""
    chosen_by_kind = {kind: trusted(records, kind) for _, _, kind in FITTED}
    fitted = [entry for entry in FITTED if chosen_by_kind[entry[2]]]
    for module, name, _ in fitted:
        setattr(module, name, getattr(module, name) * START)
    for _ in range(ROUNDS):
        for module, name, kind in fitted:
            chosen = chosen_by_kind[kind]
            now = getattr(module, name)
            best, least = now, math.inf
            for factor in sorted(GRID, key=lambda f: abs(math.log(f))):
                setattr(module, name, now * factor)
                found = loss(chosen, by_id)
                if found < least - 1e-9:
                    best, least = now * factor, found
            setattr(module, name, best)
    return {name: getattr(module, name) for module, name, _ in FITTED}


def medians(rows: Sequence[Any]) -> dict[str, float | None]:
    """Median error by kind, high and medium confidence."""
    found = fidelity.summarise(rows)
    return {
        kind: groups["high+medium"]["median_error"]
        for kind, groups in found.items()
        if "high+medium" in groups
    }


def first_order(records: Sequence[Any], by_id: Any) -> dict[str, Any]:
    """What constants rest on, and rows left out one by one (high and medium confidence)."""

    def predict(record: Any) -> float | None:
        try:
            return float(fidelity.predict(record, by_id))
        except fidelity.NotPredicted:
            return None

    constants = list(dict.fromkeys([*((module, name) for module, name, _ in FITTED), *ONE_STEP]))
    chosen = [r for r in records if r["confidence"] != "low" and r["kind"] != "scaling_ratio"]
    kept, slopes = elasticities(predict, chosen, constants)
    errors = np.asarray([math.log((predict(r) or 1.0) / r["value"]) for r in kept])
    names = [f"{module.__name__.rpartition('.')[2]}.{name}" for module, name in constants]
    return {"support": support(kept, slopes, names), "left_out": left_out(kept, errors, slopes)}


def described(record: Any) -> str:
    """A row beside the table in a few words: network, task, front end, system."""
    params = record["params"]
    task = [str(params.get("task", "")).replace("_", " "), "packed" if params.get("packed") else ""]
    words = [params["name"], *task, params["framework"], record["target"]]
    return " ".join(word for word in words if word)


def main(argv: Sequence[str] | None = None) -> int:
    """Refit and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measurements", type=Path, default=HERE / "data" / "measurements.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="only each so-manieth record")
    parser.add_argument("--json", type=Path)
    add_short(parser, seeds=1, every=24)
    options = parser.parse_args(argv)
    records = json.loads(options.measurements.read_text(encoding="utf-8"))
    by_id = {record["id"]: record for record in records}
    records = records[:: options.every]
    kept = {(module, name): getattr(module, name) for module, name, _ in FITTED}
    results = []
    for seed in range(options.seeds):
        fitted, held = fidelity.split_rows(records, seed)
        constants = refit(fitted, by_id)
        by_group = {
            name: medians(
                [row for row in fidelity.evaluate(records) if row["id"] in {r["id"] for r in group}]
            )
            for name, group in (("fitted", fitted), ("held_out", held))
        }
        results.append({"seed": seed, "constants": constants, **by_group})
        print(f"seed {seed}: {'kind':<18}{'fitted':>9}{'held out':>10}")
        for kind in sorted({*by_group["fitted"], *by_group["held_out"]}):
            cells = (by_group[name].get(kind) for name in ("fitted", "held_out"))
            print(f"        {kind:<18}" + "".join(f"{'-' if c is None else f'{c:.1%}':>9} " for c in cells))
        for (module, name), value in kept.items():
            setattr(module, name, value)
    study = first_order(records, by_id)
    print("constants that rest on fewer than three rows:")
    for entry in study["support"]:
        if entry["rows"] < 3:
            print(f"        {entry['constant']:<38}" + " ".join(entry["strongest"]))
    for kind, found in study["left_out"].items():
        print(f"        {kind:<18}{found['as_is']:>8.1%}{found['left_out']:>9.1%} left out row by row")
    records = json.loads(BESIDE.read_text(encoding="utf-8"))
    beside = [
        {**row, "what": described(record), "source": record["source"]}
        for record, row in zip(records, fidelity.evaluate(records), strict=True)
    ]
    print("rows beside the table:")
    for row in beside:
        print(f"        {row['what']:<58}{row['predicted'] or 0.0:>10.6g}{row['published']:>10.6g}", end="")
        print(f"{row['error']:>+8.1%}" if row["error"] is not None else f"  {row['reason']}")
    if options.json:
        study["beside"] = beside
        options.json.write_text(json.dumps({"seeds": results, **study}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
