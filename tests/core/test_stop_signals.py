"""A stop request reaches its waiters, whenever a signal's handler makes it."""

from __future__ import annotations

import subprocess
import sys
import threading

from podrun.core.stop_signals import StopRequest

SECONDS = 60
SIGNAL_AT_EVERY_STEP = """
import signal, sys
from podrun.core.stop_signals import StopRequest

def stops_when_told_at(step):
    stop, steps = StopRequest(), iter(range(step + 1))
    signal.signal(signal.SIGUSR1, lambda number, frame: stop.set())

    def trace(frame, event, argument):
        frame.f_trace_opcodes = True
        if next(steps, None) == step:
            signal.raise_signal(signal.SIGUSR1)
        return trace

    sys.settrace(trace)
    stop.wait(0.001)
    sys.settrace(None)
    return stop.wait(0.0), next(steps, None) is None

told, step = 0, 0
while True:
    heard, reached = stops_when_told_at(step)
    if not reached:
        break
    told += heard
    step += 1
print(told, step)
"""

SIGNAL_TO_ANOTHER_THREAD = """
import signal, sys, threading, time
from podrun.core.stop_signals import stop_on_signals

stop, sent = stop_on_signals(), []

def asleep():
    with open(f"/proc/self/task/{threading.main_thread().native_id}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"

def send():
    looks = 0
    while looks < 1000:  # Between two looks the main thread may go on, if it waits for nothing but Python's lock.
        looks = looks + 1 if asleep() else 0
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=send).start()
begin = time.monotonic()
heard = stop.wait(40)
print("heard before the end" if heard and time.monotonic() - begin < 30 else "heard at the end")
"""


def test_a_signal_at_any_step_of_wait_is_heard() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNAL_AT_EVERY_STEP], capture_output=True, text=True, timeout=SECONDS
    )
    told, steps = map(int, done.stdout.split())
    assert told == steps > 10, done.stderr


def test_every_waiter_goes_on_and_a_wait_without_request_ends() -> None:
    stop = StopRequest()
    assert not stop.wait(0.0)
    heard: list[bool] = []
    waiters = [threading.Thread(target=lambda: heard.append(stop.wait(SECONDS))) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    stop.set()
    stop.set()
    for waiter in waiters:
        waiter.join(SECONDS)
    assert heard == [True] * 4
    assert stop.wait()


def test_a_signal_that_another_thread_gets_ends_the_wait_of_the_main_one() -> None:
    told = subprocess.run(
        [sys.executable, "-c", SIGNAL_TO_ANOTHER_THREAD], capture_output=True, text=True, timeout=SECONDS
    )
    assert told.stdout == "heard before the end\n", told.stderr
