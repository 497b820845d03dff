"""Loops whose number of iterations is given at the call, over feeds that need not end."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import podrun.runtime.feeds as feeds
from podrun.core.errors import CallError, DeadlineError, UnsupportedError, UsageError
from podrun.core.executable import Retrieval, TensorSpec
from podrun.runtime.feeds import DataFeed, FedData, FeedEndedError
from podrun.runtime.settings import Returned, RunSettings, StepTensor
from tests.runtime.tiny import Descent, Network, TinySession, data
from tests.runtime.tiny_steps import with_own_step

RATE, ROWS = 0.05, 4
REPLICATED = RunSettings(replicas=2, local_replicas=2)


def samples(seed: int = 0) -> Iterator[Mapping[str, np.ndarray]]:
    """Micro-batches of a replica without end."""
    for number in itertools.count():
        yield data(ROWS, seed + number)


def joined(count: int) -> dict[str, np.ndarray]:
    """The first so many elements as the inputs of one run."""
    elements = list(itertools.islice(samples(), count))
    return {name: np.concatenate([element[name] for element in elements]) for name in ("x", "target")}


def session(settings: RunSettings = RunSettings(), batches: int = 3, own: bool = False) -> TinySession:  # noqa: B008
    """A network that trains, by a rule of the runtime or by its own step."""
    network = Network(rows=ROWS)
    if own:
        return TinySession(with_own_step(network, RATE), ["loss"], settings, batches=batches)
    model, optimizer = network.model(), Descent(RATE)
    return TinySession(model, ["loss"], settings, batches=batches, loss="loss", optimizer=optimizer)


def drawing() -> list[str]:
    """The threads of feeds."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("podrun-feed")]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert drawing() == []


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        (REPLICATED, True),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in [(RunSettings(), False), (RunSettings(), True), (REPLICATED, False)]
        ),
    ],
)
def test_a_loop_is_the_run_of_its_elements(settings: RunSettings, own: bool) -> None:
    iterations = 7
    with session(settings, batches=iterations, own=own) as whole:
        expected = whole.run(**joined(iterations * settings.replicas))["loss"]
        weights = {name: whole.read(name) for name in Network().start()}
    losses: list[np.ndarray] = []
    with session(settings, batches=3, own=own) as parts, DataFeed(samples()) as feed:
        for count in (4, 0, 3):
            parts.parts.batches.loop(count, feed, lambda _, value: losses.append(value))
        assert feed.taken == iterations * settings.replicas
        np.testing.assert_array_equal(np.concatenate(losses), expected)
        for name, value in weights.items():
            np.testing.assert_array_equal(parts.read(name), value, err_msg=name)


def test_micro_batches_are_elements_of_their_own() -> None:
    settings = RunSettings(accumulates=True, accumulation=2, replicas=2, local_replicas=2)
    with session(settings, batches=2) as whole:
        expected = whole.run(**joined(8))["loss"]
    losses: list[np.ndarray] = []
    with session(settings, batches=1) as parts, DataFeed(samples()) as feed:
        parts.parts.batches.loop(2, feed, lambda _, value: losses.append(value))
    np.testing.assert_array_equal(np.concatenate(losses), expected)


def test_the_last_value_comes_once() -> None:
    network, seen = Network(rows=ROWS), dict[str, np.ndarray]()
    with (
        TinySession(network.model(), ["tanh:1"], batches=2, returned=Returned(Retrieval.FINAL)) as final,
        DataFeed({"x": element["x"]} for element in samples()) as feed,
    ):
        final.parts.batches.loop(5, feed, lambda name, value: seen.setdefault(name, value))
        assert seen["tanh:1"].shape == (1, ROWS, 4)
    with TinySession(network.model(), ["tanh:1"], batches=5) as every:
        np.testing.assert_array_equal(every.run(x=joined(5)["x"])["tanh:1"][-1, 0], seen["tanh:1"])


def test_an_inference_pipeline_loops_over_what_it_was_compiled_for() -> None:
    network = Network(rows=ROWS, stages=2)
    settings = network.settings(RunSettings(pipelined=True))
    results: list[np.ndarray] = []
    with (
        TinySession(network.model(), ["tanh:1"], settings, batches=4, ipus=2) as pipeline,
        DataFeed({"x": element["x"]} for element in samples()) as feed,
    ):
        pipeline.parts.batches.loop(8, feed, lambda _, value: results.append(value))
        with pytest.raises(UsageError, match=r"compiled for 4 at a time"):
            pipeline.parts.batches.loop(6, feed)
    plain = replace(network, stages=1)
    with TinySession(plain.model(), ["tanh:1"], batches=8) as one:
        np.testing.assert_allclose(
            np.concatenate(results).ravel(), one.run(x=joined(8)["x"])["tanh:1"].ravel(), rtol=1e-6
        )


def test_the_cycles_of_a_loop_are_those_of_its_iterations() -> None:
    with session(batches=2) as parts, DataFeed(samples()) as feed:
        parts.parts.batches.loop(1, feed)
        one = parts.parts.reports.cycles
        parts.parts.batches.loop(5, feed)
        assert one
        assert parts.parts.reports.cycles == 5 * one


def test_a_feed_that_ends_says_how_far_the_loop_came() -> None:
    losses: list[np.ndarray] = []
    with session(batches=2) as parts, DataFeed(itertools.islice(samples(), 5)) as feed:
        with pytest.raises(FeedEndedError, match=r"ended after 5 elements: 5 of 8 iterations ran"):
            parts.parts.batches.loop(8, feed, lambda _, value: losses.append(value))
        with pytest.raises(FeedEndedError, match=r"0 of 1 iterations ran"):
            parts.parts.batches.loop(1, feed)
    with session(batches=5) as whole:
        np.testing.assert_array_equal(np.concatenate(losses), whole.run(**joined(5))["loss"])


class Torn(Exception):
    """The iterator's own."""


def test_an_error_of_the_iterator_is_raised_as_it_is() -> None:
    def torn() -> Iterator[Mapping[str, np.ndarray]]:
        yield from itertools.islice(samples(), 3)
        raise Torn("a file ended early")

    count = 0

    def seen(name: str, value: np.ndarray) -> None:
        nonlocal count
        count += len(value)

    with (
        session(batches=2) as parts,
        DataFeed(torn(), name="feed-of-files") as feed,
        pytest.raises(Torn, match="a file ended early") as caught,
    ):
        parts.parts.batches.loop(6, feed, seen)
    assert count == 3
    assert "feed 'feed-of-files' for its element 3" in caught.value.__notes__[0]


def test_elements_that_do_not_fit_are_refused_by_number() -> None:
    good = data(ROWS)
    cases: list[tuple[Mapping[str, np.ndarray], str]] = [
        ({"x": good["x"]}, r"Element 1 of the feed lacks the input 'target'; it has \['x'\]"),
        (
            {**good, "x": good["x"][:2]},
            r"Element 1 .* float32\[2, 4\] for the input 'x', which takes float32\[4, 4\]",
        ),
        ({**good, "x": good["x"].astype(np.float64)}, r"float64\[4, 4\] for the input 'x'"),
    ]
    with session(batches=1) as parts:
        for wrong, said in cases:
            with DataFeed([good, wrong]) as feed, pytest.raises(CallError, match=said):
                parts.parts.batches.loop(2, feed)


def test_an_input_that_all_replicas_share_has_no_elements() -> None:
    model = replace(Network(rows=ROWS).model(), broadcast=frozenset({"x"}))
    settings = RunSettings(replicas=2, local_replicas=2)
    with (
        TinySession(model, ["tanh:0"], settings) as parts,
        DataFeed([{"x": data(ROWS)["x"]}] * 2) as feed,
        pytest.raises(UnsupportedError, match=r"'x' is the same for all replicas"),
    ):
        parts.parts.batches.loop(1, feed)


def test_sums_over_a_run_are_not_sums_over_a_loop() -> None:
    network = Network(rows=ROWS)
    with (
        TinySession(network.model(), ["tanh:0"], returned=Returned(Retrieval.SUM)) as parts,
        DataFeed(samples()) as feed,
        pytest.raises(UnsupportedError, match=r"'tanh:0' comes back from a run as Sum"),
    ):
        parts.parts.batches.loop(1, feed)


def test_nothing_is_drawn_before_it_is_wanted_nor_far_ahead() -> None:
    drawn = threading.Semaphore(0)

    def counted() -> Iterator[Mapping[str, np.ndarray]]:
        for element in samples():
            drawn.release()
            yield element

    feed = DataFeed(counted(), ahead=2)
    assert drawing() == []
    assert not drawn.acquire(blocking=False)
    with feed:
        assert len(feed.take(1)) == 1
        for _ in range(1 + 2 + 1):  # The one taken, two that wait, one that waits for room.
            assert drawn.acquire(timeout=30)
        assert not drawn.acquire(timeout=0.05)


def test_a_feed_that_is_closed_or_dropped_closes_its_generator() -> None:
    for drop in (False, True):
        closed = threading.Event()

        def closing(closed: threading.Event = closed) -> Iterator[Mapping[str, np.ndarray]]:
            try:
                yield from samples()
            finally:
                closed.set()

        feed = DataFeed(closing())
        feed.take(1)
        if drop:
            thread = next(t for t in threading.enumerate() if t.name == "podrun-feed")
            del feed
            gc.collect()
            thread.join(30)
        else:
            feed.close()
            feed.close()
            with pytest.raises(CallError, match="is closed"):
                feed.take(1)
        assert closed.wait(30)


def test_an_iterator_that_waits_too_long_is_named() -> None:
    go_on = threading.Event()

    def waiting() -> Iterator[Mapping[str, np.ndarray]]:
        yield data(ROWS)
        go_on.wait(30)
        yield data(ROWS)

    with DataFeed(waiting()) as feed:
        feed.take(1)
        feed._seconds = 0.05
        with pytest.raises(DeadlineError, match=r"waited 0\.05 s for element 1"):
            feed.take(1)
        go_on.set()


def test_a_feed_draws_at_least_one_element_ahead() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        DataFeed([], ahead=0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_elements_are_put_together_where_machines_read_them_without_a_copy(
    dtype: str, shape: tuple[int, ...]
) -> None:
    generator = np.random.default_rng(1)
    elements = [{"x": generator.integers(0, 2, shape).astype(dtype)} for _ in range(6)]
    tensor = StepTensor("x", TensorSpec("x", dtype, shape), (6, *shape), str)
    together = FedData(elements, lambda name, value: None).fetch(tensor)
    assert together.ctypes.data % 64 == 0
    np.testing.assert_array_equal(together, np.stack([element["x"] for element in elements]))


def numbered(shapes: Iterator[tuple[int, ...]]) -> Iterator[dict[str, np.ndarray]]:
    """Elements whose values are their numbers."""
    for number, shape in enumerate(shapes):
        yield {"x": np.full(shape, number, np.float32), "n": np.array(number, np.int32)}


def fetched(feed: DataFeed, count: int) -> tuple[FedData, dict[str, np.ndarray]]:
    """The inputs of a run of so many elements."""
    elements = FedData(feed.take(count), lambda name, value: None)
    inputs = {
        "x": StepTensor("x", TensorSpec("x", "float32", (2, 3)), (count, 1, 1, 2, 3), str),
        "n": StepTensor("n", TensorSpec("n", "int32", ()), (count, 1, 1), str),
    }
    elements.check(inputs, {})
    return elements, {name: elements.fetch(tensor) for name, tensor in inputs.items()}


def test_a_loop_like_the_one_before_copies_no_element() -> None:
    with DataFeed(numbered(itertools.repeat((2, 3))), ahead=2) as feed:
        for first in (0, 4, 8):
            data, inputs = fetched(feed, 4)
            np.testing.assert_array_equal(inputs["n"].reshape(-1), np.arange(first, first + 4))
            np.testing.assert_array_equal(inputs["x"][:, 0, 0, 1, 2], np.arange(first, first + 4))
            assert all(np.shares_memory(inputs["x"], element["x"]) for element in data.elements)


def test_loops_of_any_length_take_elements_in_order() -> None:
    first = 0
    with DataFeed(numbered(itertools.repeat((2, 3))), ahead=7) as feed:
        for count in (3, 5, 1, 1, 16, 2, 4, 4, 4):
            inputs = fetched(feed, count)[1]
            np.testing.assert_array_equal(inputs["n"].reshape(-1), np.arange(first, first + count))
            np.testing.assert_array_equal(inputs["x"][:, 0, 0, 0, 0], np.arange(first, first + count))
            first += count


def test_an_element_of_another_shape_among_others_is_named() -> None:
    shapes = iter([(2, 3)] * 5 + [(3, 2)] + [(2, 3)] * 2)
    with DataFeed(numbered(shapes), ahead=4) as feed:
        fetched(feed, 4)
        with pytest.raises(CallError, match=r"Element 1 of the feed has float32\[3, 2\]"):
            fetched(feed, 4)


def test_a_closed_feed_keeps_no_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: weakref.WeakSet[Any] = weakref.WeakSet()

    class Watched(feeds._Block):
        def __init__(self, first: feeds.Element, size: int) -> None:
            super().__init__(first, size)
            blocks.add(self)

    monkeypatch.setattr(feeds, "_Block", Watched)
    feed = DataFeed(({"x": np.full(3, i, np.float32)} for i in itertools.count()), ahead=2)
    feed.take(4)
    assert len(blocks) > 0
    feed.close()
    assert len(blocks) == 0
