"""A process forked from one that holds IPUs, as by a data loader, holds none of them."""

from __future__ import annotations

import os
import select
import traceback
from collections.abc import Callable

import numpy as np
import pytest

from podrun.core.errors import ApplicationRuntimeError
from podrun.core.layout import IpuRange
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.xla.clients import one_thread_device
from podrun.device.xla.pieces import PieceCache

from .conftest import request
from .programs import data, first_weights, linear

DEADLINE = 60.0


def forked(work: Callable[[], None]) -> int:
    """Do something in a forked process; its exit code, 1 if it raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    handle = os.pidfd_open(pid)
    ended, _, _ = select.select([handle], [], [], DEADLINE)
    os.close(handle)
    if not ended:
        os.kill(pid, 9)
    status = os.waitpid(pid, 0)[1]
    if ended:
        return os.waitstatus_to_exitcode(status)
    pytest.fail(f"the forked process did not end within {DEADLINE:g} s")


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_what_is_forked_lets_nothing_go_and_runs_nothing(pieces: PieceCache) -> None:
    executable = linear()
    connection = InProcessMachines(executable.layout.ipus, pieces).connect()
    all_ipus = IpuRange(0, executable.layout.ipus)
    assert connection.try_attach(request(all_ipus, all_ipus)) is None
    connection.load(executable)
    connection.write_variables(first_weights())
    let_go: list[PortConnection] = []
    connection._on_close = lambda: let_go.append(connection)

    def in_the_child() -> None:
        with pytest.raises(ApplicationRuntimeError, match=f"those of process {os.getppid()}"):
            connection.run(1, data(executable, 1))
        connection.close()
        connection.close()
        assert not let_go
        with pytest.raises(ApplicationRuntimeError, match="forked"):
            connection.try_attach(request(all_ipus, all_ipus))
        with pytest.raises(ApplicationRuntimeError, match=f"forked from process {os.getppid()}"):
            one_thread_device()  # where compiling begins: JAX would wait for threads that are not here

    assert forked(in_the_child) == 0
    assert np.isfinite(connection.run(1, data(executable, 1)).anchors["loss"]).all()
    connection.close()
    assert let_go
