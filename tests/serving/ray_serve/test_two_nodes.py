"""A model served by Ray Serve on two nodes, with IPUs of a partition of a real partition service."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podrun.core.errors import UsageError
from podrun.partition.host.discovery import Registry
from podrun.serving.compiler import Compiler, ServedModel
from tests.conftest import Commands, run_and_check_for_leaks, wait_until
from tests.serving.test_runner import OPTIONS, model
from tests.serving.test_triton import free_ports

START_SECONDS = 180.0
PARTITION = "served"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def service() -> Iterator[tuple[Commands, dict[str, str]]]:
    """Commands beside a `vipu-server`, and the variables of a partition of eight IPUs on its two machines."""
    pytest.importorskip("ray.serve")
    home = Path(tempfile.mkdtemp(prefix="pod-"))
    try:
        for commands in run_and_check_for_leaks(home):
            server = commands.start("vipu-server", "--cluster=pod16", "--port=0", "--no-state")
            wait_until(
                lambda: server.poll() is not None or _port(commands) is not None,  # noqa: B023
                START_SECONDS,
                "vipu-server starts",
            )
            words = ["vipu", "create", "partition", PARTITION, "--size=8", "--no-ipuof-files"]
            created = commands.run(*words, timeout=START_SECONDS)
            assert created.returncode == 0, created.stderr
            yield (
                commands,
                {
                    "IPUOF_VIPU_API_HOST": "localhost",
                    "IPUOF_VIPU_API_PORT": str(_port(commands)),
                    "IPUOF_VIPU_API_PARTITION_ID": PARTITION,
                    "PYTHONPATH": str(ROOT),
                },
            )
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _port(commands: Commands) -> int | None:
    entry = Registry(commands.runtime).find() if commands.runtime.exists() else None
    return None if entry is None else entry.port


@pytest.mark.slow
@pytest.mark.system
def test_replicas_over_two_nodes_lose_a_machine_and_go_on(
    service: tuple[Commands, dict[str, str]], tmp_path: Path
) -> None:
    commands, variables = service
    Compiler.compile_and_export(model(), None, tmp_path, OPTIONS)
    incidents = tmp_path / "incidents.jsonl"
    words = [sys.executable, "-m", "tests.serving.ray_serve.driver", str(tmp_path / "executable.popef")]
    words.append(str(free_ports(1)[0]))
    environ = {**variables, "PODRUN_INCIDENTS": str(incidents)}
    result = commands.run(*words, env=environ, cwd=ROOT, timeout=560)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["replicas"], told["nodes"]) == (3, 2)
    assert told["right"]
    assert told["http"] == [200, True]
    assert [code for code, _ in told["http wrong"]] == [400, 400]
    assert "DT_STRING" in told["http wrong"][1][1]["error"]
    assert told["deadline"]
    assert told["scaled"]
    assert set(told["under load"]) <= {"right", "late"}
    for name in ("under load", "lost", "healed"):
        assert told[name].get("wrong", 0) == 0
        assert told[name]["late"] == 0
        assert told[name]["right"] > 0
    failed = sum(count for kind, count in told["lost"].items() if kind not in ("right", "late"))
    assert 1 <= failed < told["lost"]["right"]  # The share of one machine.
    assert told["again"]
    assert set(told["healed"]) <= {"right", "late"}
    entries = [json.loads(line) for line in incidents.read_text().splitlines()]
    costs = [request for entry in entries for request in entry["cost"]["requests"]]
    assert costs
    assert all("-" in request for request in costs)  # The labels of the driver's requests.


def test_a_deployment_fits_its_partition(tmp_path: Path) -> None:
    from podrun.serving.ray import RayServiceOptions, deployment, room_for

    pytest.importorskip("ray.serve")
    Compiler.compile_and_export(model(), None, tmp_path, OPTIONS)
    file = tmp_path / "executable.popef"
    assert room_for(ServedModel(str(file)), {"PODRUN_STANDALONE_IPUS": "16"}) == 16
    with pytest.raises(UsageError, match="least_replicas is 1 to 2, not 3"):
        deployment(file, options=RayServiceOptions(3, environ={"PODRUN_STANDALONE_IPUS": "2"}))
