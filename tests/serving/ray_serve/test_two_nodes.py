"""A model served by Ray Serve on two nodes, with IPUs of a partition of a real partition service."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from podrun.core.errors import UsageError
from podrun.serving.compiler import Compiler, ServedModel
from tests.serving.partitions import ROOT, partition_of_eight
from tests.serving.test_runner import OPTIONS, model
from tests.serving.test_triton import free_ports


@pytest.mark.slow
@pytest.mark.system
def test_replicas_over_two_nodes_lose_a_machine_and_go_on(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray.serve")
    Compiler.compile_and_export(model(), None, tmp_path, OPTIONS)
    incidents = tmp_path / "incidents.jsonl"
    words = [sys.executable, "-m", "tests.serving.ray_serve.driver", str(tmp_path / "executable.popef")]
    words.append(str(free_ports(1)[0]))
    with partition_of_eight() as (commands, variables):
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
