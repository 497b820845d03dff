"""Sessions whose traces and programs an earlier one left: the same bits, reports, tensors and errors as that one's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podrun.popart as popart
from podrun.onnx_models.ops import registry
from tests.kept_programs import kept as kept
from tests.kept_programs import operators_as_before as operators_as_before
from tests.kept_programs import traces as traces
from tests.popart import generated_training
from tests.popart.popart_sessions import linear, options, training

SEEDS = (7,)
MORE = (4, 16, 19, 35, 40, 43, 50)


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE)])
def test_a_generated_program_has_the_same_bits(kept: Path, traces: list[Any], seed: int) -> None:
    def bits() -> list[np.ndarray]:
        runs = generated_training.Program(seed).ours()
        return [
            value for loss, weights in runs for value in (loss, *map(weights.__getitem__, sorted(weights)))
        ]

    first, count = bits(), len(traces)
    again = bits()
    assert len(traces) == count > 0
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_reports_tensors_and_files_are_the_same(
    kept: Path, traces: list[Any], device_of: Callable[[int], popart.DeviceInfo], tmp_path: Path
) -> None:
    def told(name: str) -> list[object]:
        device = device_of(1)
        case, rate = linear(), popart.SGD({"defaultLearningRate": (0.1, False)})
        opts = options(instrumentWithHardwareCycleCounter=True)
        anchors = {case.loss: popart.AnchorReturnType("All")}
        session = training(case, anchors, device, optimizer=rate, opts=opts)
        session.run(popart.PyStepIO({case.x: np.ones((3, 4), np.float32)}, session.initAnchorArrays()))
        session.modelToHost(str(tmp_path / f"{name}.onnx"))
        session.saveExecutable(str(tmp_path / name))
        device.detach()
        files = [tmp_path / f"{name}.onnx", tmp_path / name]
        report = (session.getSummaryReport(), session.getReport(), session.getCycleCount())
        infos = [(tensor, str(session.getInfo(tensor))) for tensor in session.parts.model.built.infos]
        drawn = session._serializeIr(popart.IrSerializationFormat.JSON)
        return [*report, infos, drawn, *(file.read_bytes() for file in files)]

    first, count = told("one"), len(traces)
    again = told("two")
    assert len(traces) == count > 0
    assert first == again


def test_errors_are_the_same(kept: Path, device: popart.DeviceInfo) -> None:
    """A program that does not fit is refused again, and so is one that cannot be traced."""

    def said(build: Callable[[popart.Builder], str]) -> str:
        builder = popart.Builder()
        out = build(builder)
        flow = popart.DataFlow(1, {out: popart.AnchorReturnType("All")})
        with pytest.raises(popart.popart_exception) as error:
            popart.InferenceSession(builder.getModelProto(), flow, device).prepareDevice()
        return str(error.value)

    def large(builder: popart.Builder) -> str:
        x = builder.addInputTensor(popart.TensorInfo("FLOAT", [1 << 15, 1 << 15]))
        return builder.aiOnnx.exp([x])

    def misfit(builder: popart.Builder) -> str:
        x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 3]))
        return builder.aiOnnx.matmul([x, x])

    for build in (large, misfit):
        assert said(build) == said(build)


@pytest.mark.usefixtures("operators_as_before")
def test_operators_of_the_program_are_never_kept(kept: Path, device: popart.DeviceInfo) -> None:
    """The same name with another function computes what that does."""
    from podrun.popart import register_op

    def result(function: Callable[[Any], Any]) -> np.ndarray:
        register_op("kept.test", "Power", 1, function)
        builder = popart.Builder()
        x = builder.addInputTensor(popart.TensorInfo("FLOAT", [3]))
        (y,) = builder.customOp("Power", 1, "kept.test", [x], {})
        flow = popart.DataFlow(1, {y: popart.AnchorReturnType("All")})
        session = popart.InferenceSession(builder.getModelProto(), flow, device)
        session.prepareDevice()
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({x: np.array([1, 2, 3], np.float32)}, anchors))
        return anchors[y]

    np.testing.assert_array_equal(result(lambda x: x**2), [1, 4, 9])
    np.testing.assert_array_equal(result(lambda x: x**3), [1, 8, 27])


def test_noted_operators_are_those_of_the_table(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not imported operators answers as one that has, from the first one's note."""
    versions = [(o.domain, o.name, v) for o in registry.operators()[::7] for v in (o.since - 1, o.since, 99)]
    asked = [question for question in versions if question[2] > 0]
    asked += [
        ("", "Relu", 11),
        ("ai.onnx", "NoSuch", 11),
        ("kept.test", "Relu", 1),
        ("ai.graphcore", "Relu", 1),
    ]
    known = [registry.find_onnx_operator(*question) is not None for question in asked]
    assert {True, False} == set(known)

    def answers(real: bool) -> list[bool]:
        registry._noted_operators.cache_clear()
        load = registry.load_onnx_operators
        with monkeypatch.context() as patch:
            patch.setattr(registry, "load_onnx_operators", functools.cache(load if real else _never))
            return [registry.has_onnx_operator(*question) for question in asked]

    try:
        assert answers(real=True) == answers(real=False) == known
    finally:
        registry._noted_operators.cache_clear()


def _never() -> None:
    raise AssertionError("operators are imported")
