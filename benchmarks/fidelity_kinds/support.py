"""What each fitted constant rests on, and what the rows say of each other: each row left out in turn.

Every constant is moved a little and every record predicted again, which gives the share of each prediction
that follows the constant (its elasticity). Around today's values the predictions are then linear in the
logarithms, so that fitting all constants again without a row is one small system of equations, and so is
the error of that row under it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Constant = tuple[ModuleType, str]
STEP = 1.15
"""Factor by which a constant is moved."""
FELT = 0.1
"""Elasticity from which on a row speaks for a constant."""
NOISE, PRIOR = 0.12, 0.35
"""Spread of a record's logarithm about its prediction, and of a constant about today's value."""


def elasticities(
    predict: Callable[[Any], float | None], records: Sequence[Any], constants: Sequence[Constant]
) -> tuple[list[Any], NDArray[np.float64]]:
    """The records that are predicted, and [records, constants] of their elasticities."""
    now = [predict(record) for record in records]
    kept = [record for record, value in zip(records, now, strict=True) if value]
    base = np.asarray([value for value in now if value])
    columns = []
    for module, name in constants:
        was = getattr(module, name)
        setattr(module, name, was * STEP)
        columns.append(np.log(np.asarray([predict(r) or 1.0 for r in kept]) / base) / math.log(STEP))
        setattr(module, name, was)
    return kept, np.stack(columns, axis=1)


def row_of(record: Mapping[str, Any]) -> str:
    """The row of the source that a record belongs to."""
    return str(record["id"]).split(".")[0]


def support(
    records: Sequence[Any], slopes: NDArray[np.float64], names: Sequence[str]
) -> list[dict[str, Any]]:
    """For each constant the number of rows that speak for it, and those that do so most."""
    found = []
    for column, name in enumerate(names):
        most: dict[str, float] = {}
        for record, slope in zip(records, np.abs(slopes[:, column]), strict=True):
            most[row_of(record)] = max(most.get(row_of(record), 0.0), float(slope))
        felt = sorted((row for row in most if most[row] >= FELT), key=lambda row: -most[row])
        found.append({"constant": name, "rows": len(felt), "strongest": felt[:6]})
    return sorted(found, key=lambda entry: (entry["rows"], entry["constant"]))


def left_out(
    records: Sequence[Any], errors: NDArray[np.float64], slopes: NDArray[np.float64]
) -> dict[str, dict[str, float]]:
    """By kind: median error as it is, and of rows left out of the fit, one vote per row.

    ``errors``: logarithm of predicted over published.
    """
    rows = [row_of(record) for record in records]
    counts = Counter(rows)
    weight = np.asarray([1.0 / counts[row] for row in rows])
    votes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in counts:
        mine = np.asarray([other == row for other in rows])
        design = slopes[~mine] * np.sqrt(weight[~mine])[:, None]
        wanted = -errors[~mine] * np.sqrt(weight[~mine])
        normal = design.T @ design / NOISE**2 + np.eye(slopes.shape[1]) / PRIOR**2
        moved = errors[mine] + slopes[mine] @ np.linalg.solve(normal, design.T @ wanted / NOISE**2)
        kinds = [str(r["kind"]) for r, own in zip(records, mine, strict=True) if own]
        for kind in dict.fromkeys(kinds):
            own = np.asarray([other == kind for other in kinds])
            before, after = (float(np.median(np.abs(np.expm1(e[own])))) for e in (errors[mine], moved))
            votes[kind].append((before, after))
    return {
        kind: {
            "rows": len(pairs),
            "as_is": float(np.median([pair[0] for pair in pairs])),
            "left_out": float(np.median([pair[1] for pair in pairs])),
        }
        for kind, pairs in sorted(votes.items())
    }
