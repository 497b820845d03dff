"""Processes of instances that are killed: told from those that are replaced or unloaded, and mended on the real
server.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from podrun.serving.compiler import Compiler
from podrun.serving.instance_watch import InstanceProcess, instance_of, killed_models
from tests.serving.servers import tensor, triton
from tests.serving.test_runner import OPTIONS, expected, model, rows_of

OLD = [InstanceProcess("a", "a_0_0", 10), InstanceProcess("a", "a_0_1", 11), InstanceProcess("b", "b_0", 12)]


def test_a_killed_process_is_told_from_others() -> None:
    gone = OLD[1:]
    assert killed_models(gone, [OLD[0]], {"a", "b"}) == {"a", "b"}
    assert killed_models(gone, [OLD[0]], {"a"}) == {"a"}  # The server has unloaded the other one.
    replaced = InstanceProcess("a", "a_0_1", 20)
    assert killed_models(gone, [OLD[0], replaced], {"a", "b"}) == {"b"}
    words = [
        "/t/python/triton_python_backend_stub",
        "/m/net/1/model.py",
        "shm",
        "1",
        "2",
        "net_0_1",
        "/t/poplar",
    ]
    assert instance_of(7, words) == InstanceProcess("net", "net_0_1", 7)
    assert instance_of(7, ["python", "-c", "pass"]) is None
    words[-2] = "net"  # Asked for the configuration, each time that the model is loaded.
    assert instance_of(7, words) is None


@pytest.mark.slow
@pytest.mark.system
def test_the_model_of_a_killed_process_is_loaded_again(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for name in ("net", "other"):
        (repository / name / "1").mkdir(parents=True)
        Compiler.compile_and_export(model(), None, repository / name / "1", OPTIONS)
    x = rows_of(3)
    with triton(repository, ["net", "other"]) as served:
        (process,) = served.stubs("net_0")
        process.kill()
        end = time.monotonic() + 200
        while True:
            right = served.client.infer("other", tensor(x), client_timeout=60).as_numpy("y")
            np.testing.assert_allclose(right, expected(x), rtol=1e-5, atol=1e-6)
            try:
                y = served.client.infer("net", tensor(x), client_timeout=60).as_numpy("y")
                break
            except Exception:  # It is being loaded.
                assert time.monotonic() < end, served.log.read_text()[-3000:]
                time.sleep(0.1)
        np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)
        assert "a process of model net was killed" in served.log.read_text()
