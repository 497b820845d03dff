"""Messages between machines of a replica: no sender waits for a receiver's work or runs too far ahead; every
wait ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from podrun.collectives import RankLostError, RankMissingError, host_memory
from podrun.collectives.linux import Futex
from podrun.collectives.rendezvous import in_process
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core.error_codec import error_to_dict
from podrun.core.errors import ApplicationRuntimeError, InternalError
from podrun.device.program import replica_messages
from podrun.device.program.replica_messages import (
    WINDOW,
    Key,
    MachineLost,
    MachineMissing,
    ReplicaChannel,
    ReplicaMessages,
    with_program_ranks,
)

from .conftest import together

pytestmark = pytest.mark.usefixtures("no_threads_left")
RANKS = (4, 7)


@pytest.fixture
def channels() -> Iterator[tuple[ReplicaChannel, ReplicaChannel]]:
    """Two machines at positions 0 and 1, of four IPUs each: two messages there and one back in a batch."""
    groups = in_process(2, timeout=20.0)
    made = ReplicaChannel(groups[0], 1, RANKS, 2, 1), ReplicaChannel(groups[1], 0, RANKS, 1, 2)
    yield made
    for channel in made:
        channel.group.abort({"type": "UsageError", "message": "the test is over"})
    for channel in made:
        channel.close()


@pytest.fixture
def ends(channels: tuple[ReplicaChannel, ReplicaChannel]) -> tuple[ReplicaMessages, ReplicaMessages]:
    return ReplicaMessages([channels[0]], 4), ReplicaMessages([channels[1]], 4)


def test_messages_come_as_they_are_whatever_their_order(
    ends: tuple[ReplicaMessages, ReplicaMessages],
) -> None:
    first, second = ends
    values = [
        np.arange(6, dtype=np.float32).reshape(1, 2, 3).swapaxes(1, 2),
        np.array(1.5, ml_dtypes.bfloat16),
        np.empty((1, 0, 2), np.uint32),
    ]
    for messages in ends:
        messages.begin(1)
    first.send((3, 4, 9), values[0])
    first.send((0, 5, 2), values[1])
    second.send((6, 1, 2), values[2])
    second.await_any([(0, 5, 2)])
    assert not second.has((0, 5, 3))
    found = [second.fetch((0, 5, 2)), second.fetch((3, 4, 9))]
    first.await_any([(6, 1, 2)])
    for value, expected in zip([found[1], found[0], first.fetch((6, 1, 2))], values, strict=True):
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(value, expected)
    for messages in ends:
        messages.end_batch()
    for messages in ends:
        messages.end()


def test_nobody_needs_a_receiver_that_is_at_work_to_send(
    ends: tuple[ReplicaMessages, ReplicaMessages],
) -> None:
    """More than what a channel holds, both ways at once, before either receives: that must not lock up."""
    big = np.arange(3 * 2**20, dtype=np.float64)  # 24 MiB
    for messages in ends:
        messages.begin(1)
    sent = together(
        [
            lambda: [ends[0].send((0, 4, tag), big + tag) for tag in range(2)],
            lambda: ends[1].send((4, 0, 0), -big),
        ],
        timeout=15.0,
    )
    assert not any(isinstance(result, BaseException) for result in sent), sent
    ends[1].await_any([(0, 4, 1)])
    np.testing.assert_array_equal(ends[1].fetch((0, 4, 1)), big + 1)
    ends[0].await_any([(4, 0, 0)])
    np.testing.assert_array_equal(ends[0].fetch((4, 0, 0)), -big)


def test_a_sender_is_at_most_a_few_batches_ahead(ends: tuple[ReplicaMessages, ReplicaMessages]) -> None:
    sender, receiver = ends
    for messages in ends:
        messages.begin(WINDOW + 1)
    for batch in range(WINDOW):
        sender.await_room(batch)
    said: list[bool] = []
    done = threading.Event()

    def go_on() -> None:
        sender.await_room(WINDOW)
        said.append(done.is_set())

    ahead = threading.Thread(target=go_on)
    ahead.start()
    ahead.join(0.1)
    assert ahead.is_alive(), "it went on before the receiver was done with the first batch"
    done.set()
    receiver.end_batch()
    ahead.join(60)
    assert said == [True]


def test_messages_of_two_batches_stay_apart(ends: tuple[ReplicaMessages, ReplicaMessages]) -> None:
    for messages in ends:
        messages.begin(2)
    for batch in range(2):
        for tag in range(2):
            ends[0].send((0, 4, tag), np.array([batch, tag]))
    for batch in range(2):
        for tag in (1, 0):
            ends[1].await_any([(0, 4, tag)])
            np.testing.assert_array_equal(ends[1].fetch((0, 4, tag)), [batch, tag])


def test_an_end_elsewhere_ends_every_wait(
    channels: tuple[ReplicaChannel, ReplicaChannel], ends: tuple[ReplicaMessages, ReplicaMessages]
) -> None:
    for messages in ends:
        messages.begin(1)
    error = ApplicationRuntimeError("somewhere else something broke")
    waits = [lambda: ends[0].await_any([(4, 0, 0)]), ends[1].end]
    channels[0].group.abort(error_to_dict(error))
    for result in together(waits, timeout=60):
        assert isinstance(result, ApplicationRuntimeError)
        assert "somewhere else" in result.message
    with pytest.raises(ApplicationRuntimeError, match="somewhere else"):
        ends[0].has((4, 0, 0))


def test_a_machine_that_leaves_is_named_among_all_of_the_program(
    channels: tuple[ReplicaChannel, ReplicaChannel], ends: tuple[ReplicaMessages, ReplicaMessages]
) -> None:
    ends[0].begin(1)
    channels[1].group.close()
    with pytest.raises(MachineLost) as caught:
        ends[0].await_any([(4, 0, 0)])
    assert caught.value.rank == RANKS[1]


def test_a_machine_that_does_not_send_is_named() -> None:
    groups = in_process(2, timeout=0.3)
    channel = ReplicaChannel(groups[1], 0, RANKS, 0, 1)
    messages = ReplicaMessages([channel], 4)
    messages.begin(1)
    with pytest.raises(MachineMissing) as caught:
        messages.await_any([(0, 4, 0)])
    assert caught.value.ranks == (RANKS[0],)
    channel.close()
    groups[0].close()


def test_a_patient_machine_waits_no_longer_than_the_groups_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look by itself after an hour."""
    monkeypatch.setattr(host_memory, "_PATIENT_SLICE", 3600.0)
    slept, wait = list[float](), Futex.wait

    def noted(self: Futex, seen: int, seconds: float) -> None:
        slept.append(seconds)
        wait(self, seen, min(seconds, 0.05))

    monkeypatch.setattr(Futex, "wait", noted)
    groups = in_process(2, timeout=0.05)
    channel = ReplicaChannel(groups[1], 0, RANKS, 0, 1)
    with pytest.raises(MachineMissing):
        channel.receive()
    assert slept
    assert max(slept) == 0.05
    channel.close()
    groups[0].close()


@pytest.mark.parametrize("header", [((0, 4, 0), "float32", (3,)), ((0, 0, -1), "", ())])
def test_a_message_of_another_size_than_its_header_says_is_refused(
    channels: tuple[ReplicaChannel, ReplicaChannel], header: tuple[Key, str, tuple[int, ...]]
) -> None:
    memory = channels[0].group
    assert isinstance(memory, SharedMemoryGroup)
    memory.send(np.zeros(2, np.float32), 1, preface=replica_messages._header_of(*header))
    with pytest.raises(InternalError, match="has 8 bytes, its header says"):
        channels[1].receive()


def test_waiting_for_what_nobody_sends_ends(ends: tuple[ReplicaMessages, ReplicaMessages]) -> None:
    for messages in ends:
        messages.begin(1)
    for tag in range(2):
        ends[0].send((0, 4, tag), np.zeros(1))
    ends[1].end_batch()
    ends[0].end_batch()
    with pytest.raises(InternalError, match="nobody sends"):
        ends[1].await_any([(0, 4, 7)])


def test_errors_of_a_part_name_machines_of_the_whole() -> None:
    lost = with_program_ranks(RankLostError("gone", rank=1), RANKS)
    assert isinstance(lost, MachineLost)
    assert lost.rank == 7
    assert with_program_ranks(lost, (0, 1)) is lost, "once is enough"
    late = with_program_ranks(RankMissingError("late", ranks=(0, 1)), RANKS)
    assert isinstance(late, MachineMissing)
    assert late.ranks == RANKS
    assert with_program_ranks(RankLostError("who", rank=-1), RANKS).rank == -1  # type: ignore[attr-defined]
    other = ValueError()
    assert with_program_ranks(other, RANKS) is other


def test_an_error_wakes_who_sleeps_for_a_message(
    channels: tuple[ReplicaChannel, ReplicaChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look in between: one would come after an hour."""
    monkeypatch.setattr(host_memory, "_PATIENT_SLICE", 3600.0)
    sleeps, wait, ended = threading.Event(), Futex.wait, []

    def noted(self: Futex, seen: int, seconds: float) -> None:
        sleeps.set()
        wait(self, seen, seconds)

    def receive() -> None:
        with pytest.raises(ApplicationRuntimeError, match="chiller") as found:
            channels[1].receive()
        ended.append(found.value)

    monkeypatch.setattr(Futex, "wait", noted)
    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    assert sleeps.wait(20)
    channels[0].group.abort(error_to_dict(ApplicationRuntimeError("the chiller stopped")))
    receiver.join(20)
    assert ended
