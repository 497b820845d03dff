"""From a micro-batch to a batch: every second has a cause, and layouts behave as layouts do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fidelity_kinds.applications import tied_pipeline
from hypothesis import given
from hypothesis import strategies as st

from podrun.costmodel.batch import BatchWork, batch_seconds
from podrun.costmodel.target import BOW, GC200

PIPELINE = BatchWork(
    1e7, stages=4, accumulation=16, replicas=4, boundary_bytes=3e6, weights=8e7, optimizer="lamb"
)


def test_a_pipeline_of_p_ipus_ramps_over_2p_minus_2_steps() -> None:
    causes = batch_seconds(GC200, PIPELINE)
    step = (causes["compute"] + causes["copies"]) / 16
    assert causes["ramp"] == pytest.approx(6 * step)


def test_more_accumulation_amortises_what_comes_once() -> None:
    def rate(accumulation: int) -> float:
        return accumulation / sum(batch_seconds(GC200, replace(PIPELINE, accumulation=accumulation)).values())

    assert rate(16) < rate(64) < rate(256)


def test_bow_speeds_up_tiles_and_not_links() -> None:
    slow, fast = batch_seconds(GC200, PIPELINE), batch_seconds(BOW, PIPELINE)
    assert slow["compute"] / fast["compute"] == pytest.approx(1.85 / 1.33)
    assert slow["state"] == fast["state"]
    assert slow["all_reduce"] / fast["all_reduce"] < 1.2


def test_off_chip_state_costs_its_bytes_both_ways() -> None:
    causes = batch_seconds(GC200, replace(PIPELINE, state_bytes=8.0))
    assert causes["state"] == pytest.approx(2 * 8e7 * 8 * 4 / 20e9)


def test_one_replica_reduces_nothing() -> None:
    assert batch_seconds(GC200, BatchWork(1e6, weights=1e6))["all_reduce"] == 0


def test_a_slow_host_holds_up_the_step() -> None:
    causes = batch_seconds(GC200, BatchWork(1e4, accumulation=4, input_bytes=8e6, training=True))
    assert causes["host"] > 0
    assert causes["host"] + causes["compute"] == pytest.approx(4 * 8e6 / 8e9, rel=0.01)


def test_sharded_state_gathers_new_weights_and_updates_a_part() -> None:
    """What crosses the links is an all-reduce in two halves; the update and the state's way shrink with the
    replicas.
    """
    whole = batch_seconds(GC200, replace(PIPELINE, gradient_bytes=2.0, state_bytes=8.0))
    parts = batch_seconds(GC200, replace(PIPELINE, gradient_bytes=2.0, state_bytes=8.0, sharded=True))
    assert "all_reduce" not in parts
    assert parts["reduce_scatter"] + parts["all_gather"] == pytest.approx(whole["all_reduce"], rel=0.05)
    assert parts["update"] < whole["update"]
    assert parts["state"] == pytest.approx(whole["state"] / PIPELINE.replicas)
    wide = batch_seconds(GC200, replace(PIPELINE, weight_bytes=4.0, sharded=True))
    assert wide["all_gather"] > 1.8 * parts["all_gather"]


def test_bert_large_on_four_ipus_has_seven_layers_on_one() -> None:
    slowest = tied_pipeline(GC200, 24, 1.0, 0.4, 4, 12.6e6, 31.8e6)
    assert slowest == pytest.approx(7.0)
    assert tied_pipeline(GC200, 24, 1.0, 0.4, 8, 12.6e6, 31.8e6) == pytest.approx(3.4)


@given(st.integers(1, 64), st.integers(1, 8))
def test_all_causes_are_there_and_none_is_negative(accumulation: int, replicas: int) -> None:
    causes = batch_seconds(BOW, replace(PIPELINE, accumulation=accumulation, replicas=replicas))
    assert min(causes.values()) >= 0


def test_a_layout_says_how_many_layers_stand_on_the_first_ipu() -> None:
    """The published BERT-Base leaves its first IPU to the embedding and the head."""
    balanced = tied_pipeline(BOW, 12, 1.0, 0.4, 4, 7.1e6, 23.8e6)
    published = tied_pipeline(BOW, 12, 1.0, 0.4, 4, 7.1e6, 23.8e6, first=0)
    assert published == 4.0
    assert balanced == pytest.approx(3.4)


def test_layers_in_two_pieces_balance_better() -> None:
    whole = tied_pipeline(GC200, 24, 1.0, 0.4, 4, 12.6e6, 31.8e6, first=4)
    halves = tied_pipeline(GC200, 24, 1.0, 0.4, 4, 12.6e6, 31.8e6, first=4.5, pieces=2)
    assert whole == 7.0
    assert halves == 6.5
