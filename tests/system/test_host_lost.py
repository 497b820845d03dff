"""A host of a Ray cluster ends in the middle of a run: a named error, and nothing of the run stays on the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.conftest import wait_until
from tests.system.conftest import PROGRAMS
from tests.system.ray_hosts import Cluster, ray_cluster, read_until

pytestmark = [pytest.mark.system, pytest.mark.slow]
SMALL = PROGRAMS / "small.py"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster of a test's own: it does not survive it."""
    with ray_cluster() as made:
        yield made


def start_run(cluster: Cluster, *options: str) -> subprocess.Popen[str]:
    """A run on machines of both hosts, once it has begun its steps."""
    words = ("podrun", f"--ray-address={cluster.address}", "--num-replicas=16", *options, SMALL, "1000000")
    process = cluster.start(cluster.hosts[0], *words)
    read_until(process, "stepping")
    return process


def end_second_host(cluster: Cluster) -> None:
    """As a power cut does: with the first process of the host all others end at once."""
    os.kill(cluster.hosts[1].inside, signal.SIGKILL)


def left_on_first_host(cluster: Cluster) -> str:
    """Instances and machines that still run there."""
    return cluster.run("pgrep", "--list-full", "--full", "small.py|ray::MachineActor").stdout


@pytest.mark.parametrize("instances", [1, 2])
def test_a_host_that_ends_in_a_run(cluster: Cluster, instances: int) -> None:
    hosts = ",".join(host.address for host in cluster.hosts)
    options = (f"--host={hosts}", "--num-instances=2") if instances == 2 else ()
    process = start_run(cluster, *options)
    end_second_host(cluster)
    began = time.monotonic()
    out, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    assert "poplar_unrecoverable_runtime_error" in out
    second = cluster.hosts[1].address
    assert re.search(rf"IPU-M {second}:\d+ \(machine [23] of the partition\)", out)
    assert len(re.findall(rf"machine ipum[34] is lost: its process at {second}", out)) == 2
    wait_until(lambda: not left_on_first_host(cluster), 60, "the run's processes end on the other host")


def test_a_host_is_lost_by_plan(cluster: Cluster) -> None:
    words = ("podrun", f"--ray-address={cluster.address}", "--num-replicas=16")
    refused = cluster.run(*words, "--fault=host:0@batch=20:lost", SMALL, "30")
    assert refused.returncode != 0
    assert "that host runs the partition service" in refused.stdout + refused.stderr
    done = cluster.run(*words, "--fault=host:1@batch=20:lost", SMALL, "1000000")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "poplar_unrecoverable_runtime_error" in done.stdout + done.stderr
    assert "did not strike" not in done.stderr
    second = cluster.hosts[1].address
    wait_until(lambda: not left_on_first_host(cluster), 60, "the run's processes end on the other host")
    assert f"IPU-M {second}" in done.stdout + done.stderr
