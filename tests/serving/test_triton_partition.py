"""Instances of models on the machines of a partition: the genuine Triton, the real partition service, a lost
machine.
"""

from __future__ import annotations

import json
import queue
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from podrun.serving.compiler import Compiler, CompilerOptions
from tests.serving.partitions import PARTITION, partition_of_eight
from tests.serving.servers import TritonOfTest, tensor, triton
from tests.serving.test_runner import OPTIONS, expected, model, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.system]
RECOVERY_SECONDS = 150.0
CONFIG = """backend: "poplar"
max_batch_size: 8
input [ { name: "x", data_type: TYPE_FP32, dims: [ 8 ] } ]
output [ { name: "y", data_type: TYPE_FP32, dims: [ 3 ] } ]
instance_group [ { kind: KIND_CPU count: %d } ]
"""
REPLICATED = CompilerOptions(
    num_ipus=4,
    partials_type="float",
    popart_options={"enableReplicatedGraphs": True, "replicatedGraphCount": 4},
)


def right(served: TritonOfTest, name: str, rows: int) -> None:
    x = rows_of(rows, rows)
    y = served.client.infer(name, tensor(x), client_timeout=60).as_numpy("y")
    np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)


def test_instances_take_ipus_of_machines_and_a_lost_one_takes_its_share(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for name, instances, options in (("four", 2, OPTIONS), ("whole", 1, REPLICATED), ("late", 1, REPLICATED)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(CONFIG % instances)
        Compiler.compile_and_export(model(), None, repository / name / "1", options)
    incidents = tmp_path / "incidents.jsonl"
    with partition_of_eight() as (commands, variables):
        environ = commands.environment({**variables, "PODRUN_INCIDENTS": str(incidents)})
        control = ["--model-control-mode=explicit", "--load-model=whole"]  # It takes the first machine.
        with triton(repository, ["whole"], *control, environ=environ) as served:
            served.client.load_model("four", client_timeout=200)
            for rows in (1, 7, 8):
                right(served, "four", rows)
                right(served, "whole", rows)
            held = commands.run("gc-monitor", env=variables, timeout=60).stdout
            assert held.count("triton") + held.count("python") >= 1
            with pytest.raises(Exception, match="no device with 4 IPUs is free"):
                served.client.load_model("late", client_timeout=200)
            right(served, "four", 3)
            _lose_the_first_machine(served, commands, variables)
            _comes_back(served, commands, variables)
    entries = [json.loads(line) for line in incidents.read_text().splitlines()]
    assert any(entry["model"].startswith("whole") for entry in entries)


def _lose_the_first_machine(served: TritonOfTest, commands: Any, variables: dict[str, str]) -> None:
    """The model on machine 0 fails, while the one on machine 1 answers all the time."""
    lost = commands.run("podrun", "inject", PARTITION, "machine:0@batch=+3:lost", env=variables, timeout=60)
    assert lost.returncode == 0, lost.stderr
    answers: queue.Queue[Any] = queue.Queue()
    x = rows_of(2)
    for _ in range(6):
        served.client.async_infer("whole", tensor(x), lambda result, error: answers.put(error))
        right(served, "four", 2)
    errors = [answers.get(timeout=120) for _ in range(6)]
    assert any(error is not None for error in errors)
    right(served, "four", 1)


def _comes_back(served: TritonOfTest, commands: Any, variables: dict[str, str]) -> None:
    """A partition with a lost machine gives no IPUs out. Mended, the model answers by itself."""
    for words in (("vipu-admin", "restart", "agent", "ipum1"), ("vipu", "reset", "partition", PARTITION)):
        done = commands.run(*words, env=variables, timeout=120)
        assert done.returncode == 0, done.stderr
    end = time.monotonic() + RECOVERY_SECONDS
    while True:
        try:
            right(served, "whole", 5)
            return
        except InferenceServerException:  # Its instance asks for IPUs again.
            assert time.monotonic() < end
            time.sleep(0.5)
