"""The loop of virtual time and its random numbers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from podrun.core.errors import InternalError
from podrun.simulate.engine import SECOND, Order, VirtualEngine, nanoseconds
from podrun.simulate.streams import RandomStreams, lognormal, weibull_left


def test_events_run_by_time_then_class_then_sequence() -> None:
    engine, seen = VirtualEngine(), []
    engine.on("note", seen.append)
    engine.at(20, Order.END, "note", "late")
    engine.at(10, Order.PLAN, "note", "plan")
    engine.at(10, Order.SUBMISSION, "note", "first")
    engine.at(10, Order.SUBMISSION, "note", "second")
    engine.at(10, Order.FAILURE, "note", "failure")
    engine.at(10, Order.END, "note", "end")
    engine.run()
    assert seen == ["end", "failure", "first", "second", "plan", "late"]
    assert engine.now == 20
    assert engine.handled == 6


def test_a_cancelled_event_does_not_happen() -> None:
    engine, seen = VirtualEngine(), []
    engine.on("note", seen.append)
    kept, gone = engine.at(5, Order.END, "note", 1), engine.at(3, Order.END, "note", 2)
    engine.cancel(gone)
    assert engine.next_time == 5
    engine.run()
    assert seen == [1]
    assert kept != gone


def test_nothing_is_planned_in_the_past() -> None:
    engine = VirtualEngine()
    engine.on("note", lambda _: None)
    engine.run(until=7)
    with pytest.raises(InternalError, match="2 ns ago"):
        engine.at(5, Order.END, "note")


def walk(engine: VirtualEngine, streams: RandomStreams, seen: list[int]) -> None:
    """A walk whose steps are drawn."""

    def step(name: str) -> None:
        seen.append(engine.now)
        engine.after(nanoseconds(float(streams.of(name, "steps").exponential())), Order.END, "step", name)

    engine.on("step", step)


def test_a_run_from_a_snapshot_gives_the_same() -> None:
    engine, streams, seen = VirtualEngine(), RandomStreams(3), []
    walk(engine, streams, seen)
    for name in ("a", "b"):
        engine.at(0, Order.END, "step", name)
    engine.run(until=20 * SECOND)
    text = json.dumps([engine.snapshot(), streams.snapshot()])
    before = len(seen)
    engine.run(until=60 * SECOND)
    again, other, later = VirtualEngine(), RandomStreams(3), []
    walk(again, other, later)
    snapshot, places = json.loads(text)
    again.restore(snapshot)
    other.restore(places)
    again.run(until=60 * SECOND)
    assert later == seen[before:]
    assert json.dumps(again.snapshot()) == json.dumps(engine.snapshot())


def test_a_stream_does_not_depend_on_the_others() -> None:
    alone = RandomStreams(1).of("ipum3", "failures").random(4)
    streams = RandomStreams(1)
    streams.of("ipum2", "failures").random(100)
    assert (streams.of("ipum3", "failures").random(4) == alone).all()
    assert (RandomStreams(2).of("ipum3", "failures").random(4) != alone).all()
    assert (RandomStreams(1).of("ipum3", "repairs").random(4) != alone).all()


def test_a_lognormal_time_has_its_median_and_mean() -> None:
    stream = RandomStreams(5).of("x", "repair")
    times = np.array([lognormal(stream, 2.0, 5.0) for _ in range(40_000)])
    assert np.median(times) == pytest.approx(2.0, rel=0.03)
    assert times.mean() == pytest.approx(5.0, rel=0.05)


def test_the_age_counts_in_a_weibull_time() -> None:
    stream = RandomStreams(5).of("x", "failures")
    young = np.mean([weibull_left(stream, 2.0, 10.0, 0.0) for _ in range(20_000)])
    old = np.mean([weibull_left(stream, 2.0, 10.0, 20.0) for _ in range(20_000)])
    assert young == pytest.approx(10 * math.gamma(1.5), rel=0.02)
    assert old < young / 3
