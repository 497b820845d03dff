"""popdist's host collectives between instances on two hosts of a Ray cluster: the same results as on one host, and
errors that name the instance, the call and what differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import numpy as np
import pytest

from tests.conftest import script, tagged, wait_until
from tests.system.conftest import PROGRAMS
from tests.system.ray_hosts import Cluster, ray_cluster, read_until

pytestmark = [pytest.mark.system, pytest.mark.slow]
PROGRAM = PROGRAMS / "instances.py"

BITS = """
import hashlib, os
import numpy as np
import popdist

popdist.init()
rank, count = popdist.getInstanceIndex(), popdist.getNumInstances()
values = np.random.default_rng(rank)
found = hashlib.sha256()
for size in (1, 1000, 300_001, 10_000_000):
    for dtype in ("float32", "float16", "int32"):
        mine = (values.standard_normal(size) * 100).astype(dtype)
        found.update(popdist.allReduceSum(mine.copy()))
        found.update(popdist.broadcast(mine.copy(), count - 1))
        found.update(popdist.allGather(mine[:50_000]))
popdist.barrier()
print(os.uname().nodename, found.hexdigest())
"""

GOES = """
import os, sys
import numpy as np
import popdist

popdist.init()
last = popdist.getInstanceIndex() == popdist.getNumInstances() - 1
for turn in range(1_000_000):
    popdist.allReduceSum(np.ones(1_000_000, np.float32))
    if turn == 5:
        print("reducing", flush=True)
        if last and "leaves" in sys.argv:
            sys.exit(0)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as made:
        yield made


def words(cluster: Cluster, instances: int, *, both: bool) -> list[str]:
    """A launch of so many instances, on both hosts or on the first."""
    line = ["podrun", "--offline-mode=yes", f"--num-replicas={instances}", f"--num-instances={instances}"]
    if both:
        hosts = ",".join(host.address for host in cluster.hosts)
        line += [f"--ray-address={cluster.address}", f"--host={hosts}"]
    return line


@pytest.mark.parametrize("instances", [2, 4])
def test_the_same_bits_as_on_one_host(cluster: Cluster, instances: int) -> None:
    program = script(cluster.home, BITS)
    both = cluster.run(*words(cluster, instances, both=True), program)
    assert both.returncode == 0, both.stdout + both.stderr
    one = cluster.run(*words(cluster, instances, both=False), program)
    assert one.returncode == 0, one.stdout + one.stderr
    said = [tagged(both.stdout, instance)[0].split() for instance in range(instances)]
    assert [host for host, _ in said] == sorted(["host-a", "host-b"] * (instances // 2))
    digests = {digest for _, digest in said}
    assert len(digests) == 1
    assert {tagged(one.stdout, instance)[0].split()[1] for instance in range(instances)} == digests


def test_everything_popdist_and_mpi_have(cluster: Cluster) -> None:
    done = cluster.run(*words(cluster, 4, both=True), PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        found = json.loads(tagged(done.stdout, rank)[0])
        assert found["total"] == [10 * i for i in range(5)]
        assert found["half"] == [float(np.float16(10005))] * 3
        assert found["gathered"] == [[i, i * i] for i in range(4)]
        assert found["root"] == [30, 7]
        assert found["some"] == ([2.0] if rank in (0, 3) else None)
        assert found["again"] == ([0, 3] if rank in (0, 3) else None)
        assert found["weights"] == [3.0] * 4
        assert found["mpi"]["rank"] == [rank, 4, rank, 4, 1]
        assert found["mpi"]["best"] == [3, 0.5]
        assert found["mpi"]["mine"] == [rank]


def test_instances_that_differ_say_how(cluster: Cluster) -> None:
    done = cluster.run(*words(cluster, 2, both=True), PROGRAM, "differ")
    assert done.returncode != 0
    for text in ("popdist.allReduceSum", "float32[2]", "float32[3]"):
        assert text in done.stdout + done.stderr


def test_an_instance_that_does_not_come_is_named(cluster: Cluster) -> None:
    done = cluster.run(
        *words(cluster, 2, both=True), PROGRAM, "absent", env={"PODRUN_HOST_COLLECTIVES_TIMEOUT": "3"}
    )
    assert done.returncode != 0
    assert "popdist.barrier: instance 1 did not come within 3 s" in done.stdout + done.stderr


def test_an_instance_that_leaves_is_named(cluster: Cluster) -> None:
    done = cluster.run(*words(cluster, 2, both=True), script(cluster.home, GOES), "leaves")
    assert done.returncode != 0
    assert "popdist.allReduceSum: instance 1 ended" in done.stdout + done.stderr


def test_an_instance_that_is_killed_ends_the_launch_and_the_next_one_works(cluster: Cluster) -> None:
    program = script(cluster.home, GOES, "goes.py")
    process = cluster.start(cluster.hosts[0], *words(cluster, 2, both=True), program)
    read_until(process, "reducing")
    second = cluster.hosts[1]
    kill = second.words("pkill", "--full", "--signal", "KILL", "goes.py", env=cluster.env, cwd=cluster.home)
    assert os.spawnvp(os.P_WAIT, kill[0], kill) == 0
    out, _ = process.communicate(timeout=120)  # A collective would wait for 300 s.
    assert process.returncode != 0
    assert "instance 1" in out
    wait_until(lambda: not cluster.run("pgrep", "--full", "goes.py").stdout, 60, "the launch leaves nothing")
    done = cluster.run(*words(cluster, 2, both=True), script(cluster.home, BITS))
    assert done.returncode == 0, done.stdout + done.stderr
