"""The short form of the long run (`tests.serving.soak`) against the real Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from podrun.core.errors import PodrunError
from podrun.serving import triton_server
from tests.serving.soak import EXPECTED, kind_of


def test_an_answer_with_the_rows_of_others_or_of_padding_is_told() -> None:
    wanted = EXPECTED[0]
    zeros = np.zeros((3, *wanted.shape[1:]), wanted.dtype)
    assert kind_of(wanted.copy(), wanted) == "right"
    assert kind_of(np.concatenate([wanted, zeros]), wanted) == "padded"
    for other in (wanted + 1, wanted[:0], wanted[0], EXPECTED[4], None):
        assert kind_of(other, wanted) == "wrong"
    # Values alone would not tell padding of rows that are equal: they are spread over each other.
    row = np.ones((1, 3), np.float32)
    assert kind_of(np.ones((4, 3), np.float32), row) == "padded"


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
    assert set(told["protocols"]) == {"grpc", "stream", "http"}
    assert told["protocols"]["http"] == 4000 // 6
    assert (told["unanswered"], told["answered_twice"], told["out_of_order"]) == (0, 0, 0)
    assert told["crashes"] == 0
    assert set(told["kinds"]) <= {"right", "cancelled", "error"}
    assert told["kinds"]["right"] > 2500  # A sixth goes to the model whose process is killed.
    assert told["disturbances"]["reloads"] >= 1
