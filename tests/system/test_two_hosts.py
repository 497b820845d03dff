"""A partition and its instances on two hosts: the same bits as on one, and nothing for strangers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, script, tagged
from tests.system.ray_hosts import Cluster, ray_cluster

pytestmark = [pytest.mark.system, pytest.mark.slow]
EXAMPLE = ROOT / "examples/digits/train.py"
LARGE = ROOT / "examples/popart/large_replicas.py"
FEW = ("--epochs=1", "--model=mlp", "--seed=5")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as made:
        yield made


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_two_hosts_compute_the_same_bits_as_one(cluster: Cluster) -> None:
    words = ("podrun", "--num-replicas=16", "--num-instances=2")
    hosts = ",".join(host.address for host in cluster.hosts)
    both = cluster.run(
        *words, f"--host={hosts}", EXAMPLE, *FEW, "--save=/tmp/2.onnx", env={"RAY_ADDRESS": cluster.address}
    )
    assert both.returncode == 0, both.stdout + both.stderr
    assert "16 replicas, 2 instances, 4 machines" in both.stderr
    one = cluster.run(*words, EXAMPLE, *FEW, "--save=/tmp/1.onnx")
    assert one.returncode == 0, one.stdout + one.stderr
    here = cluster.hosts[0].tmp
    assert digest(here / "2.onnx") == digest(here / "1.onnx")


@pytest.mark.parametrize(("replicas", "ipus"), [(2, 8), (1, 16)])
def test_replicas_over_several_machines_lie_on_both_hosts(cluster: Cluster, replicas: int, ipus: int) -> None:
    """Gradients between hosts (a replica on each), then activations too (one replica on both)."""
    words = ("podrun", f"--num-replicas={replicas}", f"--ipus-per-replica={ipus}", LARGE)
    both = cluster.run(*words, env={"RAY_ADDRESS": cluster.address})
    assert both.returncode == 0, both.stdout + both.stderr
    one = cluster.run(*words)
    assert one.returncode == 0, one.stdout + one.stderr
    said = tagged(both.stdout, 0)
    assert said[0].startswith(f"{ipus} stages, {replicas} replica(s): loss")
    assert said == tagged(one.stdout, 0), "the same losses and weights"
    assert "4 machines" in both.stderr


LOOK = """
import os, time
from podrun.partition.client.vipu_client import VipuClient
from podrun.core.errors import PodrunError
host, port = os.environ["IPUOF_VIPU_API_HOST"], int(os.environ["IPUOF_VIPU_API_PORT"])
name = os.environ["IPUOF_VIPU_API_PARTITION_ID"]
with VipuClient(host, port) as client:

    while not (config := client.ipuof_config(name)).devices or config.state.name != "ACTIVE":
        time.sleep(0.05)
print("machines on", *sorted({(d.ip) for d in config.devices}))
device = config.devices[-1]
os.environ.pop("PODRUN_TOKEN", None)
os.environ["PODRUN_RUNTIME_DIR"] = "/tmp/stranger"
from podrun.device.service.control import MachineControl
for ask in (lambda: VipuClient(host, port).list_partitions(),
            lambda: MachineControl(f"{device.ip}:{device.server_port}").telemetry()):
    try:
        ask()
        print("let in")
    except PodrunError as error:
        print("refused" if "secret" in str(error) or "UNAUTHENTICATED" in str(error) else error)
"""


def test_a_server_of_ones_own_for_instances_on_both_hosts(cluster: Cluster) -> None:
    first, second = (host.address for host in cluster.hosts)
    server = cluster.start(
        cluster.hosts[0],
        *("vipu-server", f"--ray-address={cluster.address}", f"--host={first}", "--no-state"),
    )
    assert server.stdout is not None
    assert f"listens on {first}:8090" in server.stdout.readline()
    script(cluster.home, LOOK)
    done = cluster.run(
        *("podrun", f"--vipu-server-host={first}", f"--host={first},{second}", "--num-instances=2"),
        *("--num-replicas=16", "train.py"),
        env={"RAY_ADDRESS": cluster.address},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for instance in range(2):
        assert tagged(done.stdout, instance) == [f"machines on {first} {second}", "refused", "refused"]
    stop = cluster.run("pkill", "--full", "--signal", "TERM", "bin/vipu-server")
    assert stop.returncode == 0, stop.stderr
    server.communicate(timeout=120)
    assert server.returncode == 0


def test_machines_lie_on_both_hosts_and_want_the_token(cluster: Cluster) -> None:
    script(cluster.home, LOOK)
    done = cluster.run("podrun", f"--ray-address={cluster.address}", "--num-replicas=16", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (host.address for host in cluster.hosts)
    assert tagged(done.stdout, 0) == [f"machines on {first} {second}", "refused", "refused"]
