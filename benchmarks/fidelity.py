"""Hold podrun's model against published measurements.

``python benchmarks/fidelity.py [--measurements FILE] [--json FILE] [--markdown FILE] [--holdout SEED]``

Predicts every record that describes something podrun models, from its kind, target and parameters alone,
and prints predicted, published and error; by kind and confidence the count, median and worst error; and for
each record without a prediction, why. ``--holdout`` reports a random third of the rows apart (constants
were fitted on the others).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from fidelity_kinds import applications, estimators, footprints, grids, kernels, machine, products, schema  # noqa: E402
from fidelity_kinds.benchmark_only import USED  # noqa: E402
from fidelity_kinds.record import DEFAULTS, NotPredicted, Record, make_record  # noqa: E402
from short_mode import add_short  # noqa: E402

from podrun.core.errors import PodrunError  # noqa: E402

Predictor = Callable[[Record], float]
OWN = HERE / "data" / "measurements.json"
"""The project's copy of the published measurements."""
PREDICTORS: dict[str, Predictor] = {
    "amp_tile": machine.amp_tile,
    "memory_bandwidth": machine.memory_bandwidth,
    "exchange": machine.exchange_kind,
    "sync": machine.sync,
    "host_stream": machine.host_stream,
    "session_call": machine.session_call,
    "all_reduce": machine.all_reduce,
    "ipu_link": machine.ipu_link,
    "hpc_app": products.graph_search,
    "sparse_matmul": products.sparse_product,
    "gemm": products.gemm,
    "vertex": kernels.vertex,
    "stencil": grids.grid_kernel,
    "network": applications.network,
    "memory": footprints.memory,
}
NOT_A_DEVICE = {
    "compile_time_s": "host time to build the program, not a device figure",
    "speedup_vs_cpu": "needs the CPU's time, which is not part of the device model",
    "speedup_vs_gpu": "needs the GPU's time, which is not part of the device model",
    "time_to_train_min": "needs the convergence of the run, which a performance model does not give",
}
"""Metrics that no device model predicts, and why."""


def predict(raw: Mapping[str, Any], by_id: Mapping[str, Mapping[str, Any]]) -> float:
    """Predict one record; ``by_id`` resolves the two records a scaling ratio names.

    Raises:
        NotPredicted: with the reason.
    """
    wrong = schema.mistakes(str(raw["kind"]), raw.get("params", {}))
    if wrong:
        raise NotPredicted(f"not in the records' schema: {'; '.join(wrong)}")
    record = make_record(raw)
    if record.metric in NOT_A_DEVICE:
        raise NotPredicted(NOT_A_DEVICE[record.metric])
    if record.kind == "estimator_check":
        return estimators.estimator_check(record, by_id.values())
    if record.kind == "scaling_ratio":
        parts = []
        for side in ("numerator", "denominator"):
            name = record.params.get(side)
            if name not in by_id:
                raise NotPredicted(f"the {side} {name!r} is neither in this file nor in the project's copy")
            parts.append(predict(by_id[name], by_id))
        return parts[0] / parts[1]
    if record.kind not in PREDICTORS:
        raise NotPredicted(f"no model for kind {record.kind!r}")
    try:
        value = PREDICTORS[record.kind](record)
    except PodrunError as error:
        raise NotPredicted(str(error)) from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # A record of another file may hold parameters that no model here was made for: one row less, and said
        # so.
        raise NotPredicted(
            f"the model does not take these parameters: {type(error).__name__}: {error}"
        ) from error
    if not math.isfinite(value) or value <= 0.0:
        raise NotPredicted("the model gives no positive figure for these parameters")
    return value


def evaluate(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per record: id, kind, confidence, predicted, published, error (signed fraction), reason, and the formulas
    that it rests on and no program of a user reaches.

    A scaling ratio may name records of another file: what ``records`` do not hold is sought in the
    project's copy.
    """
    by_id = {**own_records(), **{raw["id"]: raw for raw in records}}
    rows = []
    for raw in records:
        row: dict[str, Any] = {
            "id": raw["id"],
            "kind": raw["kind"],
            "confidence": raw["confidence"],
            "predicted": None,
            "published": raw["value"],
            "error": None,
            "reason": None,
            "benchmark_only": [],
        }
        USED.clear()
        try:
            value = predict(raw, by_id)
        except NotPredicted as why:
            row["reason"] = str(why)
        else:
            row["predicted"] = float(f"{value:.6g}")
            row["error"] = round(value / raw["value"] - 1.0, 6) if raw["value"] else None
            row["benchmark_only"] = sorted(USED)
        rows.append(row)
    return rows


@functools.cache
def own_records() -> Mapping[str, Mapping[str, Any]]:
    """The project's copy of the measurements, by id."""
    return {raw["id"]: raw for raw in json.loads(OWN.read_text(encoding="utf-8"))}


def median(values: Sequence[float]) -> float:
    """The middle value."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By kind and confidence: records, predicted, and errors with one vote per row of the table.

    A row's vote is the median of its records' absolute errors; ``worst`` is the worst single record.
    """
    out: dict[str, Any] = {}
    for kind in sorted({row["kind"] for row in rows}):
        groups: dict[str, list[Mapping[str, Any]]] = {"high+medium": [], "low": []}
        for row in rows:
            if row["kind"] == kind:
                groups["low" if row["confidence"] == "low" else "high+medium"].append(row)
                if row["confidence"] != "low":
                    groups.setdefault(row["confidence"], []).append(row)
        out[kind] = {name: _statistics(group) for name, group in groups.items() if group}
    return out


def _statistics(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    votes: dict[str, list[float]] = defaultdict(list)
    for row in group:
        if row["error"] is not None:
            votes[str(row["id"]).split(".")[0]].append(abs(row["error"]))
    errors = [abs(row["error"]) for row in group if row["error"] is not None]
    reached = sum(row["error"] is not None and not row["benchmark_only"] for row in group)
    return {
        "records": len(group),
        "predicted": len(errors),
        "reached": reached,
        "coverage": round(len(errors) / len(group), 4),
        "rows": len({str(row["id"]).split(".")[0] for row in group}),
        "median_error": round(median([median(v) for v in votes.values()]), 4) if votes else None,
        "worst_error": round(max(errors), 4) if errors else None,
    }


def split_rows(rows: Sequence[Mapping[str, Any]], seed: int) -> tuple[list[Any], list[Any]]:
    """Rows of the table split at random: two thirds to fit on, one third held out."""
    names = sorted({str(row["id"]).split(".")[0] for row in rows})
    held = set(random.Random(seed).sample(names, len(names) // 3))
    out: tuple[list[Any], list[Any]] = ([], [])
    for row in rows:
        out[str(row["id"]).split(".")[0] in held].append(row)
    return out


def print_report(rows: Sequence[Mapping[str, Any]], by_kind: Mapping[str, Any], *, verbose: bool) -> None:
    """The page for a terminal."""
    if verbose:
        for row in rows:
            if row["error"] is None:
                print(f"{row['kind']:17s}{row['id']:32s}{row['confidence']:7s} -  {row['reason']}")
            else:
                print(
                    f"{row['kind']:17s}{row['id']:32s}{row['confidence']:7s}"
                    f"{row['predicted']:14.6g}{row['published']:14.6g}{row['error']:+9.1%}"
                )
    print(f"{'kind':17s}{'confidence':13s}{'records':>8s}{'covered':>9s}{'median':>9s}{'worst':>9s}")
    for kind, groups in by_kind.items():
        for name, figures in groups.items():
            middle, worst = figures["median_error"], figures["worst_error"]
            print(
                f"{kind:17s}{name:13s}{figures['records']:8d}{figures['coverage']:9.0%}"
                + (f"{middle:9.1%}{worst:9.1%}" if middle is not None else f"{'-':>9s}{'-':>9s}")
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 0 when done, 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measurements", type=Path, default=OWN)
    parser.add_argument("--json", type=Path, help="write rows and by_kind here")
    parser.add_argument("--markdown", type=Path, help="write the page docs/fidelity.md here")
    parser.add_argument("--held-out", type=Path, help="results of fidelity_holdout.py --json, for the page")
    parser.add_argument("--every", type=int, default=1, help="only each so-manieth record")
    parser.add_argument("--kind", help="only records of this kind")
    parser.add_argument("--holdout", type=int, metavar="SEED", help="report a random third of the rows apart")
    parser.add_argument("--quiet", action="store_true", help="only the table by kind")
    add_short(parser, every=16)
    options = parser.parse_args(argv)
    try:
        records = json.loads(options.measurements.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"cannot read {options.measurements}: {error}", file=sys.stderr)
        return 2
    rows = evaluate(records[:: options.every])
    if options.kind:
        rows = [row for row in rows if row["kind"] == options.kind]
    by_kind = summarise(rows)
    print_report(rows, by_kind, verbose=not options.quiet)
    if options.holdout is not None:
        fitted, apart = split_rows(rows, options.holdout)
        print("\nfitted rows")
        print_report(fitted, summarise(fitted), verbose=False)
        print("\nheld-out rows")
        print_report(apart, summarise(apart), verbose=False)
    if options.json:
        options.json.write_text(
            json.dumps({"rows": rows, "by_kind": by_kind}, indent=1) + "\n", encoding="utf-8"
        )
    if options.markdown:
        from fidelity_kinds.page import page

        held = json.loads(options.held_out.read_text(encoding="utf-8")) if options.held_out else None
        options.markdown.write_text(page(rows, by_kind, DEFAULTS, held), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
