"""Operators that warn do so in every launch: what a trace with a warning tells is not kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from podrun.onnx_models.lowering import lower
from podrun.onnx_models.ops.sdk import Sdk
from tests.kept_programs import kept as kept
from tests.kept_programs import traces as traces

from .test_lowering import model, node


def test_lengths_that_the_sdks_gru_ignores(
    kept: Path, traces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is PopART's where the program imports popart: a filter hands it on, and the room's logger drops it."""
    lines: list[str] = []

    def handed_on(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False

    log = logging.getLogger("podrun.onnx_models")
    monkeypatch.setattr(log, "filters", [handed_on])
    monkeypatch.setattr(log, "isEnabledFor", lambda level: True)
    weights = {"w": np.zeros((1, 6, 3), np.float32), "r": np.zeros((1, 6, 2), np.float32)}
    gru = node("GRU", ["x", "w", "r", "", "n"], ["y"], hidden_size=2)
    inputs = {"x": (TensorProto.FLOAT, [4, 2, 3]), "n": (TensorProto.INT32, [2])}
    counts = []
    for _ in range(2):
        lower(model([gru], inputs, ["y"], weights, opset=11), dialect=Sdk())
        counts.append(len(lines))
    assert len(traces) == 2
    assert 0 < counts[0] < counts[1]
    assert "sequence_lens" in lines[-1]
