"""What whole programs do that no other test of the front end does."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

import podrun.popart as popart


@pytest.fixture
def builder():
    return popart.Builder()


def test_a_scope_may_be_kept_and_entered_again(builder):
    scopes = [
        builder.nameScope("kept"),
        builder.virtualGraph(np.int64(1)),
        builder.outlineAttributes({"block": "first"}),
        builder.recomputeOutput(popart.RecomputeType.Checkpoint),
    ]
    x = builder.addInputTensor("FLOAT", [2])
    for _ in range(2):
        with ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope)
            with scopes[0]:
                y = builder.aiOnnx.relu([x])
        assert y.startswith("kept/kept/Relu:0")
        assert builder.getVirtualGraph({y}) == 1
    assert builder.getNameScope() == ""
    assert not builder.hasVirtualGraph()
