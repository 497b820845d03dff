"""Instances on another node of a Ray cluster. The other node is on this machine, under another name."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator

import pytest

from tests.conftest import Commands, script, tagged, wait_until

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture
def elsewhere(commands: Commands) -> Iterator[dict[str, str]]:
    """A Ray cluster with one node called elsewhere; the environment in which podrun finds it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    short = tempfile.mkdtemp(prefix="ray-")  # Linux limits the length of sockets' paths, which are below it.
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    head = commands.start(
        *("ray", "start", "--head", "--block", "--node-name=elsewhere", f"--port={port}", "--num-cpus=1"),
        *("--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--temp-dir={short}"),
        env=ray,
    )
    assert head.stdout is not None
    while "Ray runtime started" not in (line := head.stdout.readline()):
        assert line, head.communicate()
    yield {**ray, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    head.send_signal(signal.SIGTERM)
    head.communicate(timeout=120)
    shutil.rmtree(short, ignore_errors=True)


OFFLINE = ("podrun", "--offline-mode=1")


def test_instances_run_there_and_here(commands: Commands, elsewhere: dict[str, str]) -> None:
    script(
        commands.home,
        "import os, sys\n"
        "rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
        "print(rank, os.environ['POPDIST_LOCAL_INSTANCE_INDEX'], os.environ.get('MINE'), os.environ.get('OTHER'))\n"
        "if len(sys.argv) > 1 and rank == sys.argv[1]: raise ValueError('there')\n"
        "if len(sys.argv) > 1:\n"
        "    import time; time.sleep(60)\n",
    )
    env = {**elsewhere, "MINE": "m", "OTHER": "o"}
    words = (*OFFLINE, "--host=elsewhere,localhost", "--num-replicas=4", "--num-instances=4")
    done = commands.run(*words, "--mpi-local-args=-x MINE", "train.py", env=env)
    assert done.returncode == 0, done.stderr
    seen = [tagged(done.stdout, i) for i in range(4)]
    assert seen == [["0 0 m None"], ["1 1 m None"], ["2 0 m o"], ["3 1 m o"]]
    failed = commands.run(*words, "train.py", "1", env=env)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == "[1,1]<stderr>:ValueError: there"


def test_ctrl_c_reaches_the_other_host(commands: Commands, elsewhere: dict[str, str]) -> None:
    script(commands.home, "import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    process = commands.start(*OFFLINE, "--host=elsewhere", "train.py", env=elsewhere)
    assert process.stdout is not None
    assert process.stdout.readline() == "[1,0]<stdout>:here\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    wait_until(
        lambda: not any("train.py" in w for w in commands.processes().values()), 10, "the instance ends"
    )


def test_hosts_that_are_not_there(commands: Commands, elsewhere: dict[str, str]) -> None:
    unknown = commands.run(*OFFLINE, "--host=nowhere", "true", env=elsewhere)
    assert unknown.returncode == 2
    assert "nowhere: no node of the Ray cluster has that name" in unknown.stderr


def test_without_a_ray_cluster_or_with_ipus(commands: Commands) -> None:
    none = commands.run(*OFFLINE, "--host=nowhere", "true", env={"RAY_ADDRESS": "127.0.0.1:1"})
    assert none.returncode == 2
    assert "need a Ray cluster, and there is none" in none.stderr
    assert "ray start --head" in none.stderr
    ipus = commands.run("podrun", "--host=nowhere", "true", env={"RAY_ADDRESS": "127.0.0.1:1"})
    assert ipus.returncode == 1
    assert "nobody answers at 127.0.0.1:1" in ipus.stderr
    assert "ray start --head" in ipus.stderr
