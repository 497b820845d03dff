"""A machine that answers nothing any more, though its process is there: as behind a network that lost it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from podrun.core.errors import RecoverableRuntimeError, RecoveryAction, UnrecoverableRuntimeError
from podrun.core.layout import IpuRange
from podrun.device.host.client import PortConnection
from podrun.device.host.machine_stream import OTHERS_SECONDS, JobLosses
from podrun.device.service.wire import UNREACHABLE_SECONDS

from .conftest import request
from .pods import processes
from .programs import data, first_weights, linear


def run_until_it_fails(connection: PortConnection) -> None:
    """A machine that is being stopped may still end a run."""
    while True:
        connection.run(1, data(linear(8), 1))


def test_whoever_waits_for_one_machine_is_told_that_another_is_lost() -> None:
    now = [0.0]
    losses = JobLosses(lambda: now[0])
    losses.check()
    losses.note(UnrecoverableRuntimeError("machine 1 is gone"))
    losses.note(RecoverableRuntimeError("later", recovery_action=RecoveryAction.IPU_RESET))
    losses.check()  # The others have a moment to say more about it.
    now[0] = OTHERS_SECONDS + 0.1
    for _ in range(2):
        with pytest.raises(UnrecoverableRuntimeError, match="machine 1 is gone"):
            losses.check()


@pytest.mark.slow
@pytest.mark.system
def test_a_machine_that_is_silent_already_is_named_as_a_program_attaches(tmp_path: Path) -> None:
    """The kernel takes the connection for its process, which says nothing on it."""
    with processes(2, tmp_path) as pod:
        os.kill(pod.processes[1].pid, signal.SIGSTOP)
        connection = pod.connect()
        try:
            begin = time.monotonic()
            with pytest.raises(UnrecoverableRuntimeError, match="machine 1 of the partition") as caught:
                connection.try_attach(request(IpuRange(0, 8)))
            assert time.monotonic() - begin < 2 * UNREACHABLE_SECONDS
            assert "batch" not in caught.value.message  # It was not yet given a program.
        finally:
            os.kill(pod.processes[1].pid, signal.SIGCONT)
            connection.close()


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_machine_that_cannot_be_reached_is_named_within_seconds(tmp_path: Path, stopped: int) -> None:
    """The other machine waits for it in the exchange of the run, and would do so until the host sync timeout."""
    with processes(2, tmp_path) as pod:
        connection = pod.connect()
        assert connection.try_attach(request(IpuRange(0, 8))) is None
        connection.load(linear(8))
        connection.write_variables(first_weights())
        connection.run(1, data(linear(8), 1))
        os.kill(pod.processes[stopped].pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            with pytest.raises(UnrecoverableRuntimeError) as caught:
                run_until_it_fails(connection)
            assert time.monotonic() - begin < 3 * UNREACHABLE_SECONDS
            assert caught.value.cause is not None
            assert caught.value.cause.machine == stopped
            assert pod.endpoints[stopped] in caught.value.message
        finally:
            os.kill(pod.processes[stopped].pid, signal.SIGCONT)
            connection.close()
