"""Colours of reports: told apart by everybody, seen on light and on dark paper."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from podrun.report.charts import (
    COLOURS,
    DARK_PAPER,
    MICRO_BATCH_COLOURS,
    OTHER,
    PALETTE,
    STRIPE,
    stacked_bar,
    striped,
)
from podrun.report.model import PHASES
from podrun.report.text import BATCH, CONTENTS, CYCLES

BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""What is seen of linear red, green and blue (Machado, Oliveira and Fernandes, 2009, severity 1)."""
OKLAB = (
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ],
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ],
)
"""To cones and from their cube roots to lightness and hue (Ottosson, 2020): distances there are as they look."""
LEAST_DISTANCE, LEAST_CONTRAST = 0.1, 2.0
TILE = (
    "always_live",
    "not_always_live",
    "temporary",
    "vertex_state",
    "vertex_code",
    "exchange_code",
    "control_code",
)


def _linear(colour: str) -> NDArray[np.float64]:
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def _seen(colour: str, blindness: str) -> NDArray[np.float64]:
    cones = np.array(OKLAB[0]) @ np.clip(np.array(BLINDNESS[blindness]) @ _linear(colour), 0, 1)
    return np.asarray(np.array(OKLAB[1]) @ np.cbrt(cones))


def _distance(one: str, other: str) -> float:
    return min(float(np.linalg.norm(_seen(one, kind) - _seen(other, kind))) for kind in BLINDNESS)


def _contrast(one: str, other: str) -> float:
    low, high = sorted(float(_linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    "names", [PHASES, tuple(BATCH), tuple(CYCLES), TILE], ids=("phases", "batch", "cycles", "tile")
)
def test_parts_of_a_chart_are_told_apart(names: tuple[str, ...]) -> None:
    close = [
        pair
        for pair in combinations(names, 2)
        if _distance(*(COLOURS[name] for name in pair)) < LEAST_DISTANCE
    ]
    assert close == []


def test_micro_batches_and_neighbours_in_memory_are_told_apart() -> None:
    pairs = [
        *combinations(MICRO_BATCH_COLOURS, 2),
        *((COLOURS[a], COLOURS[b]) for a, b in pairwise(CONTENTS)),
    ]
    assert [pair for pair in pairs if _distance(*pair) < LEAST_DISTANCE] == []


def test_contents_of_a_memory_with_one_colour_differ_by_stripes() -> None:
    names = ["weights", "optimizer_state", *CONTENTS]
    stripes = striped(names)
    looks = [(COLOURS.get(name, OTHER), name in stripes) for name in names]
    assert len(set(looks)) == len(names)
    drawn = stacked_bar(dict.fromkeys(names, 8.0), "B", CONTENTS)
    assert drawn.count(STRIPE) == 3 * len(stripes) > 0
    assert drawn.count("class=striped") == len(stripes)


@pytest.mark.parametrize("paper", ["#ffffff", DARK_PAPER])
def test_colours_are_seen_on_light_and_dark_paper(paper: str) -> None:
    assert {name: c for name, c in PALETTE.items() if _contrast(c, paper) < LEAST_CONTRAST} == {}
