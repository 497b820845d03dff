"""Behaviour that published programs rely on: tracepoints, binary fromstring, libraries of operators, gradients
at zero.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import podrun.popart as popart
from podrun.compat import COMPAT_PATH
from podrun.onnx_models.custom import explain_libraries
from podrun.report.chrome_trace import (
    TraceChannel,
    Tracepoint,
    TracepointLog,
    instrument_fn,
    log_of,
    recorder,
)


@pytest.mark.parametrize("kind", ["abs", "l1", "reducel1"])
def test_the_gradient_of_an_absolute_value_at_zero_is_zero(kind: str) -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [3])
    w = builder.addInitializedInputTensor(np.array([-2, 0, 3], np.float32), "w")
    y = builder.aiOnnx.mul([x, w])
    if kind == "l1":
        loss = builder.aiGraphcore.l1loss([y], 1.0, reduction=popart.ReductionType.Sum)
    elif kind == "abs":
        loss = builder.aiGraphcore.identityloss([builder.aiOnnx.abs([y])], reduction=popart.ReductionType.Sum)
    else:
        loss = builder.aiOnnx.reducel1([y], [0], 0)
    device = popart.DeviceManager().createCpuDevice()
    flow = popart.DataFlow(1, ["Gradient___w"])
    session = popart.TrainingSession(
        builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), deviceInfo=device
    )
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: np.ones(3, np.float32)}, anchors))
    assert anchors["Gradient___w"].tolist() == [-1, 0, 1]


@pytest.mark.parametrize("outputs", [1, 5])
def test_statistics_of_each_element(outputs: int) -> None:
    """spatial=0: as normalising a sample that is all channels."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 2, 3)).astype(np.float32)
    held = [rng.uniform(0.5, 1.5, (2, 3)).astype(np.float32) for _ in range(4)]

    def run(shape: tuple[int, ...], spatial: int) -> np.ndarray:
        names = ["s", "b", "m", "v"]
        made = ["y", *[f"o{i}" for i in range(outputs - 1)]]
        node = helper.make_node("BatchNormalization", ["x", *names], made, spatial=spatial)
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            [node],
            "g",
            [value("x", TensorProto.FLOAT, (4, *shape))],
            [value("y", TensorProto.FLOAT, (4, *shape))],
            [
                numpy_helper.from_array(h.reshape(shape[: len(shape) if not spatial else 1]), n)
                for n, h in zip(names, held, strict=True)
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=3)
        from podrun.onnx_models.lowering import lower

        lowered = lower(model, training=outputs > 1)
        found = lowered.forward(lowered.initial, {"x": x.reshape(4, *shape)}, jax.random.key(0))
        return np.asarray(found["y"]).reshape(4, 6)

    assert run((2, 3), 0).tobytes() == run((6,), 1).tobytes()


def test_tracepoints_make_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PVTI_OPTIONS", json.dumps({"enable": "true", "directory": str(tmp_path)}))
    recorder.cache_clear()
    try:
        channel = TraceChannel("data")

        @instrument_fn(channel)
        def load() -> int:
            return 7

        with Tracepoint(channel, "epoch"):
            assert load() == 7
        written = recorder().write()
    finally:
        recorder.cache_clear()
    assert written is not None
    events = json.loads(written.read_text())["traceEvents"]
    assert [(e["ph"], e["name"].split(".")[-1]) for e in events] == [
        ("B", "epoch"),
        ("B", "load"),
        ("E", "load"),
        ("E", "epoch"),
    ]
    assert not log_of({}).on
    assert not log_of({"PVTI_OPTIONS": "no json"}).on
    assert TracepointLog(None).write() is None


def test_the_sdks_names_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPAT_PATH)
    import libpvti as pvti

    with pvti.Tracepoint(pvti.createTraceChannel("mine"), "step"):
        pass
    del sys.modules["libpvti"]


def test_binary_fromstring_is_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from podrun.compat._start import give_back

    monkeypatch.setattr(np, "fromstring", np.fromstring)
    give_back()
    give_back()
    data = np.arange(4, dtype=np.int32)
    with pytest.warns(DeprecationWarning, match="numpy.frombuffer"):
        found = np.fromstring(data.tobytes(), np.int32)
    assert found.tolist() == [0, 1, 2, 3]
    found[0] = 5  # A copy, as it was.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.fromstring("1 2", sep=" ").tolist() == [1, 2]


def test_files_stand_in_for_a_library_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, operators = tmp_path / "custom_ops.so", tmp_path / "ops.py"
    library.write_bytes(b"compiled for another machine")
    operators.write_text("")
    monkeypatch.setattr(ctypes.CDLL, "__init__", ctypes.CDLL.__init__)
    explain_libraries()
    with pytest.raises(OSError, match="custom_ops"):
        ctypes.CDLL(str(library))
    monkeypatch.setenv("PODRUN_CUSTOM_OPS", str(operators))
    assert ctypes.CDLL(str(library)) is not None


def test_jax_is_silent_in_a_program_that_logs_at_info() -> None:
    from podrun.session.environment import import_jax

    import_jax()
    assert not logging.getLogger("jax._src.compiler").isEnabledFor(logging.INFO)
