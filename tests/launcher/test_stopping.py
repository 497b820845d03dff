"""Signals are noted and acted upon at safe places; work in progress reaches its end."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from podrun.launcher.supervise import CLEARING_SECONDS, Interrupted, Stopping


@pytest.fixture
def told() -> list[int]:
    return []


def test_a_signal_does_not_raise_where_it_comes(told: list[int]) -> None:
    with Stopping(told.append).heard() as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stopping.number, told) == (signal.SIGTERM, [signal.SIGTERM])
        with pytest.raises(Interrupted) as caught:
            stopping.check()
        assert caught.value.number == signal.SIGTERM


def test_the_first_signal_counts_and_all_are_told(told: list[int]) -> None:
    with Stopping(told.append).heard() as stopping:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stopping.number == signal.SIGHUP
    assert told == [signal.SIGHUP, signal.SIGTERM, signal.SIGINT]


def test_what_is_ignored_stays_ignored_and_handlers_come_back(told: list[int]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handler = signal.getsignal(signal.SIGTERM)
        with Stopping(told.append).heard():
            os.kill(os.getpid(), signal.SIGHUP)
        assert told == []
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_waiting_gives_what_the_work_gives_or_raises(told: list[int]) -> None:
    def fail() -> None:
        raise KeyError("x")

    stopping = Stopping(told.append)
    assert stopping.wait_for(lambda: 42, lambda: None) == 42
    with pytest.raises(KeyError, match="x"):
        stopping.wait_for(fail, lambda: None)


def test_a_signal_ends_the_waiting_after_the_work_was_cancelled(
    told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podrun.launcher.supervise.PATIENCE_SECONDS", 0.01)
    cancelled, ended = threading.Event(), threading.Event()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert cancelled.wait(30)
        ended.set()

    with Stopping(told.append).heard() as stopping, pytest.raises(Interrupted):
        stopping.wait_for(work, cancelled.set)
    assert ended.is_set()


def test_work_that_ends_by_itself_is_not_cancelled(told: list[int]) -> None:
    def cancel() -> None:
        raise AssertionError("nobody waits")

    with Stopping(told.append).heard() as stopping, pytest.raises(Interrupted):
        stopping.wait_for(lambda: os.kill(os.getpid(), signal.SIGINT), cancel)


def test_signals_do_not_hinder_clearing_up_unless_it_takes_long(
    told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    now = [100.0]
    monkeypatch.setattr("podrun.launcher.supervise.time.monotonic", lambda: now[0])
    with Stopping(told.append, exit_at_once=codes.append).heard() as stopping:
        stopping.clearing()
        os.kill(os.getpid(), signal.SIGINT)
        assert codes == []
        now[0] += CLEARING_SECONDS + 1
        os.kill(os.getpid(), signal.SIGINT)
    assert codes == [130]
