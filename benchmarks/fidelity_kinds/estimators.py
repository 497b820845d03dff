"""Records about cycle estimators: how far ours is off where hardware points are known.

Not a prediction of a device but the same check done on our own formula: it is priced at every AMP point of
the measurements that has the record's types, with the record's width of weight loads, and held against the
hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fidelity_kinds.record import TYPES, NotPredicted, Record, make_record
from podrun.costmodel import product_vertices

LOAD_BITS = 64
"""Width of a weight load where the record does not say: what matches hardware points."""


def estimator_check(record: Record, others: Iterable[Mapping[str, Any]]) -> float:
    """Mean of measured less estimated cycles, or of their distance over the measured, of the AMP 1x1
    formula.
    """
    (estimator,) = record.need("estimator")
    if estimator != "amp_1x1_supervisor_formula":
        raise NotPredicted(f"the hardware figures that {estimator!r} was held against are not in the records")
    types = [record.params.get(key) or "fp16" for key in ("input_type", "partials_type")]
    load_bytes = int(record.params.get("weight_load_bits") or LOAD_BITS) // 8
    pairs = [
        (float(raw["value"]), _estimated(make_record(raw), load_bytes))
        for raw in others
        if raw["kind"] == "amp_tile" and raw["metric"] == "cycles" and _types(make_record(raw)) == types
    ]
    if not pairs:
        raise NotPredicted(f"no hardware points of {types[0]} with {types[1]} partials in the records")
    if record.metric == "residual_cycles":
        return sum(measured - estimated for measured, estimated in pairs) / len(pairs)
    if record.metric == "relative_error":
        return sum(abs(estimated / measured - 1.0) for measured, estimated in pairs) / len(pairs)
    raise NotPredicted(f"metric {record.metric!r} of an estimator is not modelled")


def _types(record: Record) -> list[str]:
    return [record.params[key] for key in ("input_type", "partials_type")]


def _estimated(record: Record, load_bytes: int) -> float:
    rows, inputs, outputs = record.need("rows", "in_channels", "out_channels")
    input_type, partials = (TYPES[kind] for kind in _types(record))
    return float(
        product_vertices.matmul_cycles(
            rows,
            inputs,
            outputs,
            input_type=input_type,
            partials_type=partials,
            units=record.chip.conv_units(input_type, partials),
            load_bytes=load_bytes,
        )
    )
