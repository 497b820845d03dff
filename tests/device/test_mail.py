"""Messages between machines of a replica: nobody waits for a receiver's work, nobody runs away, every wait ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from podrun.collectives import RankLostError, RankMissingError
from podrun.collectives.rendezvous import in_process
from podrun.device.program.mail import WINDOW, Line, MachineLost, MachineMissing, Mail, of_the_program
from podrun.errors import ApplicationRuntimeError, InternalError

from .conftest import together

pytestmark = pytest.mark.usefixtures("no_threads_left")
RANKS = (4, 7)


@pytest.fixture
def lines() -> Iterator[tuple[Line, Line]]:
    """Two machines at positions 0 and 1, of four IPUs each: two messages there and one back in a batch."""
    groups = in_process(2, timeout=20.0)
    made = Line(groups[0], 1, RANKS, 2, 1), Line(groups[1], 0, RANKS, 1, 2)
    yield made
    for line in made:
        line.group.abort({"type": "UsageError", "message": "the test is over"})
    for line in made:
        line.close()


@pytest.fixture
def mails(lines: tuple[Line, Line]) -> tuple[Mail, Mail]:
    return Mail([lines[0]], 4), Mail([lines[1]], 4)


def test_messages_come_as_they_are_whatever_their_order(mails: tuple[Mail, Mail]) -> None:
    first, second = mails
    values = [
        np.arange(6, dtype=np.float32).reshape(1, 2, 3).swapaxes(1, 2),
        np.array(1.5, ml_dtypes.bfloat16),
        np.empty((1, 0, 2), np.uint32),
    ]
    for mail in mails:
        mail.begin(1)
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
    for mail in mails:
        mail.end_batch()
    for mail in mails:
        mail.end()


def test_nobody_needs_a_receiver_that_is_at_work_to_send(mails: tuple[Mail, Mail]) -> None:
    """More than what a channel holds, both ways at once, before either receives: that must not lock up."""
    big = np.arange(3 * 2**20, dtype=np.float64)  # 24 MiB
    for mail in mails:
        mail.begin(1)
    sent = together(
        [
            lambda: [mails[0].send((0, 4, tag), big + tag) for tag in range(2)],
            lambda: mails[1].send((4, 0, 0), -big),
        ],
        timeout=15.0,
    )
    assert not any(isinstance(result, BaseException) for result in sent), sent
    mails[1].await_any([(0, 4, 1)])
    np.testing.assert_array_equal(mails[1].fetch((0, 4, 1)), big + 1)
    mails[0].await_any([(4, 0, 0)])
    np.testing.assert_array_equal(mails[0].fetch((4, 0, 0)), -big)


def test_a_sender_is_at_most_a_few_batches_ahead(mails: tuple[Mail, Mail]) -> None:
    sender, receiver = mails
    for mail in mails:
        mail.begin(WINDOW + 1)
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
    ahead.join(10)
    assert said == [True]


def test_messages_of_two_batches_stay_apart(mails: tuple[Mail, Mail]) -> None:
    for mail in mails:
        mail.begin(2)
    for batch in range(2):
        for tag in range(2):
            mails[0].send((0, 4, tag), np.array([batch, tag]))
    for batch in range(2):
        for tag in (1, 0):
            mails[1].await_any([(0, 4, tag)])
            np.testing.assert_array_equal(mails[1].fetch((0, 4, tag)), [batch, tag])


def test_an_end_elsewhere_ends_every_wait(lines: tuple[Line, Line], mails: tuple[Mail, Mail]) -> None:
    for mail in mails:
        mail.begin(1)
    error = ApplicationRuntimeError("somewhere else something broke")
    waits = [lambda: mails[0].await_any([(4, 0, 0)]), mails[1].end]
    lines[0].group.abort(error.to_dict())
    for result in together(waits, timeout=10.0):
        assert isinstance(result, ApplicationRuntimeError)
        assert "somewhere else" in result.message
    with pytest.raises(ApplicationRuntimeError, match="somewhere else"):
        mails[0].has((4, 0, 0))


def test_a_machine_that_leaves_is_named_among_all_of_the_program(
    lines: tuple[Line, Line], mails: tuple[Mail, Mail]
) -> None:
    mails[0].begin(1)
    lines[1].group.close()
    with pytest.raises(MachineLost) as caught:
        mails[0].await_any([(4, 0, 0)])
    assert caught.value.rank == RANKS[1]


def test_a_machine_that_does_not_send_is_named() -> None:
    groups = in_process(2, timeout=0.3)
    line = Line(groups[1], 0, RANKS, 0, 1)
    mail = Mail([line], 4)
    mail.begin(1)
    with pytest.raises(MachineMissing) as caught:
        mail.await_any([(0, 4, 0)])
    assert caught.value.ranks == (RANKS[0],)
    line.close()
    groups[0].close()


def test_waiting_for_what_nobody_sends_ends(mails: tuple[Mail, Mail]) -> None:
    for mail in mails:
        mail.begin(1)
    for tag in range(2):
        mails[0].send((0, 4, tag), np.zeros(1))
    mails[1].end_batch()
    mails[0].end_batch()
    with pytest.raises(InternalError, match="nobody sends"):
        mails[1].await_any([(0, 4, 7)])


def test_errors_of_a_part_name_machines_of_the_whole() -> None:
    lost = of_the_program(RankLostError("gone", rank=1), RANKS)
    assert isinstance(lost, MachineLost)
    assert lost.rank == 7
    assert of_the_program(lost, (0, 1)) is lost, "once is enough"
    late = of_the_program(RankMissingError("late", ranks=(0, 1)), RANKS)
    assert isinstance(late, MachineMissing)
    assert late.ranks == RANKS
    assert of_the_program(RankLostError("who", rank=-1), RANKS).rank == -1  # type: ignore[attr-defined]
    other = ValueError()
    assert of_the_program(other, RANKS) is other
