"""The short form of the long run (`tests.serving.soak`) against the real Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from podrun.core.errors import PodrunError
from podrun.serving import triton_server


@pytest.mark.slow
@pytest.mark.system
def test_no_request_is_lost_answered_twice_or_wrong() -> None:
    try:
        triton_server.find_tritonserver("", os.environ)
    except PodrunError as error:
        pytest.skip(error.message)
    pytest.importorskip("tritonclient.grpc")
    words = [sys.executable, "-m", "tests.serving.soak", "--requests", "4000"]
    result = subprocess.run(
        words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=580, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout)
    assert told["requests"] == 4000
    assert (told["unanswered"], told["answered_twice"], told["out_of_order"]) == (0, 0, 0)
    assert told["crashes"] == 0
    assert set(told["kinds"]) <= {"right", "cancelled", "error"}
    assert told["kinds"]["right"] > 2500  # A fifth goes to the model whose process is killed.
    assert told["disturbances"]["reloads"] >= 1
