"""Every public name of PopART's Python API is there: ``public_names.txt`` lists them as ``Class.name``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import podrun.popart as popart
from podrun.popart import popart_exception
from tests.popart.popart_sessions import linear

NAMES = Path(__file__).with_name("public_names.txt").read_text().split()
HOLDERS = {"Session": popart.TrainingSession}
"""PopART's documentation speaks of both kinds of session as one."""
MADE = {
    "ClipNormSettings": lambda: popart.ClipNormSettings.clipAllWeights(1.0),
    "TensorInfo": lambda: popart.TensorInfo("FLOAT", [1]),
}
"""Classes whose names are attributes of instances, and that need arguments."""
ABSENT = {"ExperimentalSettings._customTransformApplierSettings": "private"}
"""Names that are not there, with the reason."""


def _operators(name: str) -> set[str]:
    builders = [popart.Builder(opsets={"ai.onnx": opset, "ai.graphcore": 1}) for opset in (6, 8, 9, 10, 11)]
    return {item for builder in builders for item in dir(getattr(builder, name))}


def _is_there(name: str, operators: dict[str, set[str]]) -> bool:
    head, _, tail = name.partition(".")
    if head == "popart":
        return hasattr(popart, tail)
    if head in operators:
        return tail in operators[head]
    kind = HOLDERS.get(head) or getattr(popart, head)
    return hasattr(kind, tail) or hasattr(MADE.get(head, kind)(), tail)


def test_every_public_name_is_there() -> None:
    operators = {family: _operators(family) for family in ("aiOnnx", "aiGraphcore", "aiOnnxMl")}
    missing = [name for name in NAMES if not _is_there(name, operators)]
    assert missing == list(ABSENT)
    assert len(NAMES) > 750


def test_a_numerics_report_compares_two_trainings(tmp_path) -> None:
    def saved(name, **weights):
        graph = helper.make_graph(
            [], "g", [], [], [numpy_helper.from_array(v, n) for n, v in weights.items()]
        )
        onnx.save(helper.make_model(graph), tmp_path / name)
        return str(tmp_path / name)

    start = {"a": np.zeros(4, np.float32), "b": np.ones((2, 2), np.float32)}
    first = {"a": np.ones(4, np.float32), "b": np.full((2, 2), 3, np.float32)}
    second = {"a": np.ones(4, np.float32), "b": np.full((2, 2), 2, np.float32)}
    files = [saved("A0", **start), saved("A1", **first), saved("B0", **start), saved("B1", **second)]
    report = popart.NumericsReport(*files)
    errors = report.getRelativeErrors()
    assert errors["a"] == 0
    np.testing.assert_allclose(errors["b"], 4 / (4 * 2), rtol=1e-6)  # dA = 2, dB = 1 in four places
    assert report.fullReport().splitlines() == [report.report("a"), report.report("b")]
    with pytest.raises(popart_exception, match="no weight 'c'"):
        report.report("c")
    with pytest.raises(popart_exception, match="only one of A0 and B1"):
        popart.NumericsReport(*files[:3], saved("B2", a=first["a"]))


def test_context_managers_by_their_names() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [1]))
    with popart.NameContextManager(builder, "scope"), popart.AttributeContextManager(builder, "mark", 3):
        y = builder.aiOnnx.relu([x])
    with popart.KeyValueContextManager(builder, "key", "value"):
        z = builder.aiOnnx.relu([y])
    assert y.startswith("scope/")
    assert builder.getInt64NodeAttribute("mark", {y}) == 3
    assert not builder.nodeHasAttribute("mark", {z})
    assert builder.getStringVectorNodeAttribute("__outline", {z}) == ["key", "value"]


def test_a_session_takes_another_device_of_its_size(device_of) -> None:
    case = linear()
    session = popart.InferenceSession(case.model, popart.DataFlow(1, [case.y]), device_of(1))
    with pytest.raises(popart_exception, match="made for 1 IPUs"):
        session._setDeviceInfo(device_of(2))
    session._setDeviceInfo(device_of(1))
    session.prepareDevice()
    with pytest.raises(popart_exception, match="before prepareDevice"):
        session._setDeviceInfo(device_of(1))
