"""Several machines in a process: said on the screen, the same bits, and a lost machine takes nobody with it. And
partitions over several IPU-Link domains."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.conftest import ROOT, Commands, script, tagged
from tests.system.conftest import PROGRAMS

pytestmark = [pytest.mark.system, pytest.mark.slow]
EXAMPLE = ROOT / "examples/digits/train.py"
FEW = ("--epochs=1", "--model=mlp", "--seed=7")
SHARED = {"PODRUN_MACHINES_PER_PROCESS": "2"}


def test_shared_processes_compute_the_same_bits(commands: Commands, tmp_path: Path) -> None:
    digests = set()
    for name, env in (("shared", SHARED), ("own", {"PODRUN_MACHINES_PER_PROCESS": "1"})):
        path = tmp_path / f"{name}.onnx"
        done = commands.run(
            "podrun", "--num-replicas=16", EXAMPLE, *FEW, "--save", path, env=env, timeout=120
        )
        assert done.returncode == 0, done.stderr
        said = "2 machines share a process on this host: 4 machines in 2 processes" in done.stderr
        assert said == (name == "shared")
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_lost_machine_is_lost_alone(commands: Commands) -> None:
    done = commands.run(
        *("podrun", "--num-replicas=16", "--fault=machine:1@batch=5:lost", PROGRAMS / "small.py"),
        env=SHARED,
        timeout=120,
    )
    assert done.returncode != 0
    assert "poplar_unrecoverable_runtime_error" in done.stdout + done.stderr
    assert "machine 1" in done.stdout + done.stderr


def test_the_server_loses_one_machine_of_a_shared_process_and_replaces_it(commands: Commands) -> None:
    server = commands.start("vipu-server", "--cluster=pod16", "--port=0", "--no-state", env=SHARED)
    assert server.stdout is not None
    assert "listens on" in server.stdout.readline()
    create = commands.run("vipu", "create", "partition", "p", "--size=16", timeout=90)
    assert create.returncode == 0, create.stderr
    run = ("podrun", "--num-replicas=16", "--vipu-partition=p")
    fault = "--fault=machine:1@batch=5:lost"
    assert commands.run(*run, fault, PROGRAMS / "small.py", timeout=120).returncode != 0
    agents = commands.run("vipu-admin", "list", "agents").stdout.splitlines()
    states = {words[0]: line for line in agents if (words := line.replace("|", " ").split())}
    assert "LOST" in states["ipum2"].upper()
    assert all("LOST" not in states[name].upper() for name in ("ipum1", "ipum3", "ipum4"))
    for repair in (("vipu-admin", "restart", "agent", "ipum2"), ("vipu", "reset", "partition", "p")):
        done = commands.run(*repair, timeout=90)
        assert done.returncode == 0, done.stderr
    again = commands.run(*run, PROGRAMS / "small.py", "5", timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    server.terminate()
    server.communicate(timeout=120)


LOOK = """
import os
from podrun.device.host.connecting import connect
connection = connect(os.environ)
print(os.environ["IPUOF_VIPU_API_GCD_ID"], connection.total_ipus)
connection.close()
"""


def test_instances_of_a_pod128_have_a_gcd_each_and_see_all_machines(commands: Commands) -> None:
    script(commands.home, LOOK)
    done = commands.run(
        *("podrun", "--num-replicas=128", "--num-instances=4", "--cluster=pod128", "train.py"),
        env={"PODRUN_MACHINES_PER_PROCESS": "16"},
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert [tagged(done.stdout, i) for i in range(4)] == [[f"{i} 128"] for i in range(4)]


def test_two_launches_share_a_reconfigurable_partition(commands: Commands, tmp_path: Path) -> None:
    """They start at the same moment, train on disjoint IPUs, and reach what one alone reaches; a third has no room.
    Then the partition is removed under one of them, which reads that."""
    server = commands.start("vipu-server", "--cluster=pod16", "--port=0", "--no-state")
    assert server.stdout is not None
    assert "listens on" in server.stdout.readline()
    create = commands.run("vipu", "create", "partition", "p", "--size=8", "--reconfigurable", timeout=90)
    assert create.returncode == 0, create.stderr
    run = ("podrun", "--vipu-partition=p", "--num-replicas=4")
    programs = [commands.start(*run, PROGRAMS / "small.py", "4000") for _ in range(2)]
    out = [program.stdout for program in programs]
    for stream in out:
        assert stream is not None
        while "stepping" not in (line := stream.readline()):
            assert line, "a launch ended before it had trained"
    listed = commands.run("gc-monitor", "-j", env={"IPUOF_VIPU_API_PARTITION_ID": "p"}).stdout
    assert listed.count('"user process id"') == 8 or "small.py" in listed
    third = commands.run(*run, PROGRAMS / "small.py")
    assert third.returncode != 0
    assert "has no 4 aligned IPUs of its 8 free" in third.stderr
    refused = commands.run("vipu", "remove", "partition", "p")
    assert refused.returncode != 0
    assert "is in use by process" in refused.stderr
    forced = commands.run("vipu", "remove", "partition", "p", "--force")
    assert forced.returncode == 0, forced.stderr
    for program in programs:
        _, err = program.communicate(timeout=120)
        assert program.returncode != 0
        assert "partition p was removed" in err, err
    server.terminate()
    server.communicate(timeout=120)
