"""Machines and host processes as real processes: what happens when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from podrun.core.errors import ApplicationRuntimeError, PoplarError, UnrecoverableRuntimeError
from podrun.core.layout import IpuRange
from podrun.device.host.client import InProcessMachines
from podrun.device.xla.pieces import PieceCache
from tests.copies import CopiedProcess

from .conftest import request
from .pods import Pod, processes
from .programs import data, first_weights, linear

pytestmark = pytest.mark.system
PAIR = IpuRange(0, 8)
SOON = 60.0
"""Seconds in which a failure is known on the most loaded host; without being told, one waits for 300."""

HOST = """
import json, sys, time
from tests.device.conftest import request
from tests.device.pods import Pod
from tests.device.programs import data, first_weights, linear
from podrun.core.error_codec import error_to_dict
from podrun.core.layout import IpuRange
from podrun.core.errors import PoplarError
first, runs = int(sys.argv[2]), int(sys.argv[3])
connection = Pod(json.loads(sys.argv[1]), [], []).connect()
assert connection.try_attach(request(IpuRange(0, 8), IpuRange(first, 4))) is None
executable = linear(8)
connection.load(executable)
connection.write_variables(first_weights())
inputs = {n: a[:, :, first : first + 4] for n, a in data(executable, 1).items()}
print("ready", flush=True)
begin = time.time()
try:
    for run in range(runs):
        begin = time.time()
        connection.run(1, inputs)
        print("run", flush=True)
except PoplarError as error:
    print(json.dumps({**error_to_dict(error), "at": time.time(), "took": time.time() - begin}), flush=True)
    sys.exit(3)
connection.close()
"""


def host(pod: Pod, first: int, runs: int = 1_000_000) -> CopiedProcess:
    """A host process that holds four IPUs and runs the linear model."""
    return CopiedProcess(HOST, [json.dumps(pod.endpoints), str(first), str(runs)])


def until(process: CopiedProcess, line: str) -> str:
    for found in process.stdout:
        if found.startswith(line):
            return found
    raise AssertionError(f"the host process ended with {process.wait()} without saying {line!r}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("pieces"))


@pytest.fixture
def pod(cache: Path) -> Iterator[Pod]:
    """Machines of a test's own, which may kill them."""
    with processes(2, cache) as pod:
        yield pod


@pytest.fixture
def fresh(cache: Path) -> Iterator[Pod]:
    """Machines of which the memory of the first one is all its own."""
    with processes(2, cache, fresh=1) as pod:
        yield pod


@pytest.fixture(scope="module")
def started(cache: Path) -> Iterator[Pod]:
    """Machines that outlive a test."""
    with processes(2, cache) as pod:
        yield pod


@pytest.fixture
def lasting(started: Pod) -> Pod:
    """Those machines, once everything that the previous test left attached has gone."""
    deadline = time.monotonic() + SOON
    while True:
        connection = started.connect()
        refusal = connection.try_attach(request(PAIR))
        connection.close()
        if refusal is None:
            return started
        assert time.monotonic() < deadline, refusal


def test_the_same_bits_as_in_process_and_little_memory_when_idle(fresh: Pod, pieces: PieceCache) -> None:
    private = psutil.Process(fresh.processes[0].pid).memory_full_info().uss
    assert private < 350e6, "an idle machine takes at most 350 MB of its own"
    executable, outcomes = linear(8), []
    for connection in (InProcessMachines(8, pieces).connect(), fresh.connect()):
        assert connection.try_attach(request(PAIR)) is None
        connection.load(executable)
        connection.write_variables(first_weights())
        results = [connection.run(2, data(executable, 2)).anchors["loss"] for _ in range(2)]
        outcomes.append((results, connection.read_variables(["w"])["w"]))
        connection.close()
    np.testing.assert_array_equal(outcomes[0][0], outcomes[1][0])
    np.testing.assert_array_equal(outcomes[0][1], outcomes[1][1])


def test_a_killed_host_process_frees_its_ipus_and_ends_the_others_run(lasting: Pod) -> None:
    pod = lasting
    first, second = host(pod, 0), host(pod, 4)
    try:
        until(second, "run")
        second.send_signal(signal.SIGKILL)
        killed = time.time()
        report: dict[str, Any] = json.loads(until(first, "{"))
        assert report["at"] - killed < SOON
        assert report["type"] == "ApplicationRuntimeError"
        assert f"process {second.pid}" in report["message"]
        assert "IPUs 4-7" in report["message"]
        assert first.wait(60) == 3
        connection = pod.connect()
        deadline = time.monotonic() + SOON
        while (refusal := connection.try_attach(request(PAIR))) is not None:
            assert time.monotonic() < deadline, refusal
        connection.load(linear(8))
        connection.close()
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_a_host_process_that_just_ends_lets_go(lasting: Pod) -> None:
    pod = lasting
    both = [host(pod, 0, runs=3), host(pod, 4, runs=3)]
    try:
        assert [process.wait(60) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
            process.communicate(60)
    connection = pod.connect()
    assert connection.try_attach(request(PAIR)) is None
    connection.close()


def test_a_machine_that_dies_is_reported_everywhere_within_seconds(pod: Pod) -> None:
    for control in pod.controls:
        control.inject(["machine:1@batch=20:lost"])
    hosts = [host(pod, 0), host(pod, 4)]
    try:
        reports = [json.loads(until(process, "{")) for process in hosts]
        assert pod.processes[1].wait(60) == -signal.SIGKILL
        for report in reports:
            assert report["type"] == "UnrecoverableRuntimeError"
            assert pod.endpoints[1] in report["message"]
            assert report["took"] < SOON
    finally:
        for process in hosts:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_machine_killed_between_runs(pod: Pod) -> None:
    connection = pod.connect()
    assert connection.try_attach(request(PAIR)) is None
    connection.load(linear(8))
    connection.write_variables(first_weights())
    connection.run(1, data(linear(8), 1))
    os.kill(pod.processes[0].pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(UnrecoverableRuntimeError, match="machine 0 of the partition"):
        connection.run(1, data(linear(8), 1))
    assert time.monotonic() - begin < 60
    connection.close()
    with pytest.raises(PoplarError):
        connection.try_attach(request(PAIR))


def test_taking_ipus_of_a_running_program_is_refused(lasting: Pod) -> None:
    pod = lasting
    running = [host(pod, 0), host(pod, 4)]
    try:
        until(running[0], "run")
        refusal = pod.connect().try_attach(request(PAIR))
        assert refusal is not None
        assert f"attached by process {running[0].pid}" in refusal
        states = [c.telemetry().ipus[0] for c in pod.controls]
        assert [s.process.pid for s in states if s.process] == [p.pid for p in running]
        pod.controls[0].reset_links()
        report = json.loads(until(running[0], "{"))
        assert "the partition was reset" in report["message"] or "taken away by a reset" in report["message"]
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_the_ray_actor_is_a_machine_and_ends_with_its_owner(cache: Path) -> None:
    ray = pytest.importorskip("ray")
    from podrun.device.service.control import MachineControl
    from podrun.device.service.server import machine_actor

    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    try:
        actor = machine_actor().options(num_cpus=0).remote()
        started = actor.start.remote(agent_ids=["agent0"], environ={"PODRUN_CACHE_DIR": str(cache)})
        (endpoint,) = ray.get(started)
        pid = ray.get(actor.pid.remote())
        control = MachineControl(endpoint)
        control.configure(partition="p", first_ipu=0, machine_index=0, endpoints=[endpoint])
        assert control.telemetry().pid == pid
        connection = Pod([endpoint], [control], []).connect()
        assert connection.try_attach(request(IpuRange(0, 4))) is None
        connection.load(linear(4))
        with pytest.raises(ApplicationRuntimeError, match="no value yet"):
            connection.run(1, data(linear(4), 1))
        connection.close()
        control.close()
    finally:
        ray.shutdown()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid)
