"""Fault plans as files: the same faults as short forms, and what is refused with file and line."""

from __future__ import annotations

import itertools
import json
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.errors import ConfigError, UsageError
from podrun.core.fault_spec import drawn_batch
from podrun.faults import parse_fault, parse_plan, plan_schema, read_plan

PLAN = """version: 1
faults:
  - ipu:5@batch=17:tile-parity
  - target: {link: [3, 2]}
    when: {batch: 17}
    for: 10
    effect: degraded
    settings: {lanes: 4}
    optional: true
  - target: {machine: 1}
    when: {during: partition-reset}
    effect: lost
  - target: {ipu: 3}
    when: {rate: 0.01, seed: 7}
    repeat: {times: 3}
    effect: soft-error
    settings: {tile: 12}
  - target: {service: vipu}
    when: {during: ResetPartition}
    effect: slow
    settings: {seconds: 0.5}
"""
SHORT = [
    "ipu:5@batch=17:tile-parity",
    "link:2-3@batch=17,for=10:degraded,lanes=4:optional",
    "machine:1@during=partition-reset:lost",
    "ipu:3@rate=0.01,seed=7,repeat=3:soft-error,tile=12",
    "service:vipu@during=ResetPartition:slow,seconds=0.5",
]


def test_a_plan_says_the_same_as_short_forms(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    found = read_plan(path)
    assert [spec.text for spec in found] == SHORT
    assert list(found) == [parse_fault(text) for text in SHORT]
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1, "faults": SHORT}))
    assert read_plan(tmp_path / "plan.json") == found


def test_the_schema_in_the_package_is_that_of_the_code() -> None:
    stored = files("podrun.faults").joinpath("fault-plan.schema.json").read_text()
    assert json.loads(stored) == plan_schema(), "podrun faults schema > podrun/faults/fault-plan.schema.json"


@pytest.mark.parametrize(
    ("entry", "line", "message"),
    [
        ("- ipu:5@batch=17:tile-party", 3, "did you mean 'tile-parity'"),
        ("- target: {ipu: 5}\n  when: {batch: 1}\n  effect: explode", 5, "'explode' is not one of"),
        ("- target: {ipu: 5}\n  when: {batch: 1}\n  effect: down", 3, "ipu has no fault 'down'"),
        ("- target: {ipu: 5, machine: 1}\n  when: {batch: 1}\n  effect: trap", 3, "too many properties"),
        ("- target: {link: [2]}\n  when: {batch: 1}\n  effect: down", 3, "is too short"),
        ("- target: {ipu: 5}\n  when: {batch: 1, rate: 0.5}\n  effect: trap", 3, "not batch and rate"),
        ("- target: {ipu: 5}\n  when: {}\n  effect: trap", 3, "says when it strikes, not none"),
        ("- target: {ipu: 5}\n  when: {batch: 1}\n  effect: trap\n  for: 3", 3, "trap does not last"),
        ("- target: {ipu: 5}\n  when: {batch: 1}\n  effect: corrupt", 3, "corrupt needs tensor="),
        (
            "- target: {ipu: 5}\n  when: {batch: 1}\n  effect: slow\n  settings: {speed: 1}",
            *(3, "slow has no setting 'speed'"),
        ),
        (
            "- target: {ipu: 5}\n  when: {batch: 1}\n  effect: slow\n  settings: {factor: 0.5}",
            *(3, "factor=0.5 is no number from 1"),
        ),
        ("- ipu:5@batch=1:trap\n- ipu:5@batch=1:trap", 4, "is planned twice, also at plan:3"),
        ("- target: {service: vipu}\n  when: {batch: 1}\n  effect: slow", 3, "strike at a request"),
        ("- target: {ipu: 1}\n  when: {during: lunch}\n  effect: trap", 4, "'lunch' is not one of"),
        (
            "- target: {ipu: 1}\n  when: {during: load, instruction: 2}\n  effect: trap",
            3,
            "has no instruction",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_file_and_line(entry: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_plan(f"version: 1\nfaults:\n{entry}\n", "plan")
    assert caught.value.message.startswith(f"plan:{line}: "), caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ipu:1@time=0.1,every=2,repeat=2:trap", "every= counts batches"),
        ("ipu:1@batch=1,every=2:trap", "every= needs repeat="),
        ("ipu:1@batch=1,seed=2:trap", "seed= is not understood with batch="),
        ("ipu:1@rate=2:trap", "rate=2 is no number from 1e-09 to 1"),
        ("ipu:1@time=soon:trap", "time=soon is no number"),
        ("ipu:1@batch=1,repeat=0:trap", "repeat= is at least 1"),
        ("ipu:1@batch=1,batch=2:trap", "batch is given twice"),
        ("ipu:1@batch=1:corrupt,tensor=", "is not of the form"),
        ("instance:1@during=load:killed", "there is no event .load., only checkpoint-write"),
        ("machine:1@during=ResetPartition:lost", "there is no event 'ResetPartition', only load"),
    ],
)
def test_contradictions_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_fault(text)


@given(st.floats(0.001, 1), st.integers(0, 99))
def test_drawn_batches_are_the_same_each_time_and_go_up(rate: float, seed: int) -> None:
    drawn = [drawn_batch(rate, str(seed), strikes) for strikes in range(5)]
    assert drawn == [drawn_batch(rate, str(seed), strikes) for strikes in range(5)]
    assert drawn[0] >= 0
    assert all(a < b for a, b in itertools.pairwise(drawn))


def test_drawn_batches_have_the_rate() -> None:
    count = 2000
    assert 0.045 < count / drawn_batch(0.05, "x", count) < 0.055
