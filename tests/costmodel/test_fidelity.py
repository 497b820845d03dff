"""The comparison with published measurements: its aims, and that it predicts rather than remembers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

FAST = {
    "amp_tile",
    "memory_bandwidth",
    "exchange",
    "sync",
    "host_stream",
    "session_call",
    "all_reduce",
    "ipu_link",
}
FAST |= {"gemm", "vertex", "stencil", "sparse_matmul", "hpc_app"}


@pytest.fixture(scope="module")
def fast_records(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] in FAST]


@pytest.mark.parametrize(
    ("kind", "coverage", "median"),
    [
        ("amp_tile", 1.0, 0.02),
        ("memory_bandwidth", 1.0, 0.10),
        ("exchange", 1.0, 0.10),
        ("sync", 1.0, 0.10),
        ("host_stream", 1.0, 0.20),
        ("session_call", 1.0, 0.20),
        ("vertex", 0.6, 0.15),
        ("all_reduce", 1.0, 0.15),
        ("gemm", 1.0, 0.15),
        ("stencil", 0.6, 0.20),
    ],
)
def test_each_kind_of_record_is_predicted_within_its_aim(
    fidelity: Any, fast_records: list[Any], kind: str, coverage: float, median: float
) -> None:
    rows = fidelity.evaluate([record for record in fast_records if record["kind"] == kind])
    found = fidelity.summarise(rows)[kind]["high+medium"]
    assert found["coverage"] >= coverage
    assert found["median_error"] <= median


def test_predictions_do_not_depend_on_id_value_or_note(fidelity: Any, fast_records: list[Any]) -> None:
    before = {row["id"]: row["predicted"] for row in fidelity.evaluate(fast_records)}
    names = [f"X{index}" for index in range(len(fast_records))]
    random.Random(0).shuffle(names)
    renamed = [
        {**record, "id": name, "value": 1.0, "low": None, "high": None, "note": "", "source": ""}
        for record, name in zip(fast_records, names, strict=True)
    ]
    after = {row["id"]: row["predicted"] for row in fidelity.evaluate(renamed)}
    for record, name in zip(fast_records, names, strict=True):
        assert after[name] == before[record["id"]]


def test_every_row_has_a_prediction_or_a_reason(fidelity: Any, fast_records: list[Any]) -> None:
    for row in fidelity.evaluate(fast_records):
        known = {"id", "kind", "confidence", "predicted", "published", "error", "reason", "benchmark_only"}
        assert set(row) == known
        assert (row["predicted"] is None) == (row["reason"] is not None)


def test_strange_records_are_reported_and_not_fatal(fidelity: Any, fast_records: list[Any]) -> None:
    odd = dict(fast_records[0])
    odd.update(id="odd", kind="unheard_of")
    empty = {**fast_records[0], "id": "empty", "params": {}, "kind": "stencil"}
    rows = fidelity.evaluate([odd, empty])
    assert all(row["reason"] for row in rows)


def test_records_with_other_parameters_are_predicted_or_refused_with_a_reason(
    fidelity: Any, fast_records: list[Any]
) -> None:
    """Records kept apart mix the same parameters in other ways: none of them may end the comparison."""
    choose = random.Random(7)
    values: dict[str, list[Any]] = {}
    for record in fast_records:
        for name, value in record["params"].items():
            values.setdefault(name, [None]).append(value)
    targets = sorted({record["target"] for record in fast_records} | {"pod64", "bow", "c600", "64xipu"})
    mixed = []
    for index in range(400):
        record = choose.choice(fast_records)
        params = dict(record["params"])
        for name in choose.sample(sorted(params), min(2, len(params))):
            params[name] = choose.choice(values[name])
        target = choose.choice([record["target"], *targets])
        mixed.append({**record, "id": f"M{index}", "params": params, "target": target})
    rows = fidelity.evaluate(mixed)
    assert all((row["predicted"] is None) == (row["reason"] is not None) for row in rows)
    assert all(row["predicted"] is None or row["predicted"] > 0.0 for row in rows)
    assert sum(row["predicted"] is not None for row in rows) > 200


def test_no_stencil_is_off_by_more_than_half(fidelity: Any, fast_records: list[Any]) -> None:
    rows = fidelity.evaluate([record for record in fast_records if record["kind"] == "stencil"])
    assert fidelity.summarise(rows)["stencil"]["high+medium"]["worst_error"] <= 0.5


def test_json_file_has_rows_and_by_kind(fidelity: Any, records: list[Any], tmp_path: Path) -> None:
    some = [record for record in records if record["kind"] in ("amp_tile", "sync")]
    source, out = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps(some), encoding="utf-8")
    assert fidelity.main(["--measurements", str(source), "--json", str(out), "--quiet"]) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert len(written["rows"]) == len(some)
    assert written["by_kind"]["amp_tile"]["high"]["predicted"] == 77


def test_a_missing_file_is_said(fidelity: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fidelity.main(["--measurements", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.slow
def test_networks_memory_and_ratios(fidelity: Any, records: list[Any]) -> None:
    rows = fidelity.evaluate([r for r in records if r["kind"] in ("network", "memory", "scaling_ratio")])
    found = fidelity.summarise(rows)
    for kind, coverage, median, worst in (
        ("network", 0.8, 0.15, 0.40),
        ("memory", 0.8, 0.15, 0.50),
        ("scaling_ratio", 1.0, 0.07, 0.10),
    ):
        assert found[kind]["high+medium"]["coverage"] >= coverage
        assert found[kind]["high+medium"]["median_error"] <= median
        assert found[kind]["high+medium"]["worst_error"] <= worst


LOOSE_ENDS = {
    **dict.fromkeys(("B17.split_188_200", "B17.split_29_50", "B17.reduction"), 0.10),  # A given split of CTC.
    **dict.fromkeys(("D02", "D05"), 0.10),  # Triads of GC2.
    **dict.fromkeys(("B12.switch", "B12.if", "B12.zeroing"), 0.20),  # Serial splits of a product.
    **dict.fromkeys(("B01.planner", "B02.total", "B02.instructions", "B02.stalls"), 0.10),  # N x 1 vertices.
}
"""Records that the model once missed by up to 2.4 times, and how far it may be from them."""


TRACED = {"L11.rate": 0.25, "L11.latency": 0.25, "H26.total": 0.20}
"""The same for records whose networks have to be traced: a text tower that is served, a transformer of one layer."""


@pytest.mark.parametrize(
    "near",
    [pytest.param(LOOSE_ENDS, id="kernels"), pytest.param(TRACED, id="traced", marks=pytest.mark.slow)],
)
def test_what_was_missed_by_much_stays_near(
    fidelity: Any, records: list[dict[str, Any]], near: dict[str, float]
) -> None:
    rows = fidelity.evaluate([record for record in records if record["id"] in near])
    assert len(rows) == len(near)
    errors = {row["id"]: row["predicted"] / row["published"] - 1 for row in rows}
    assert {name: error for name, error in errors.items() if abs(error) > near[name]} == {}


def test_a_given_partition_of_labels_counts(fidelity: Any, records: list[dict[str, Any]]) -> None:
    """Shorter parts of labels take fewer cycles each, and their gradients have to be summed."""
    (whole,) = (record for record in records if record["id"] == "B17.split_188_200")

    def of(label: int | None) -> float:
        (row,) = fidelity.evaluate([{**whole, "params": {**whole["params"], "split_label": label}}])
        return float(row["predicted"])

    (apart,) = fidelity.evaluate([record for record in records if record["id"] == "B17.reduction"])
    sums = apart["predicted"]
    assert of(200) < of(50) < of(100)
    assert of(50) - sums < of(100) - sums < of(200)
