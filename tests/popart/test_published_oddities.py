"""Behaviour that published programs rely on: tracepoints, binary fromstring, libraries of operators, gradients
at zero.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import sysconfig
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import podrun.popart as popart
from podrun.compat import COMPAT_PATH
from podrun.popart.operators.custom import explain_libraries
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
    assert not log_of({"PVTI_OPTIONS": '{"enable": "false"}'}).on
    assert log_of({"PVTI_OPTIONS": "no json"}).path == Path(
        f"tracepoints-{os.getpid()}.json"
    )  # As in the SDK.
    assert TracepointLog(None).write() is None


def test_the_sdks_names_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPAT_PATH)
    import libpvti as pvti

    options = {"directory": str(tmp_path), "channels": ["mine", "Poplar"]}
    monkeypatch.setenv("PVTI_OPTIONS", json.dumps(options))
    recorder.cache_clear()
    try:
        mine, other = pvti.createTraceChannel("mine"), pvti.createTraceChannel("other")
        assert pvti.listTraceChannels()[-2:] == [["mine", True], ["other", False]]
        with pvti.Tracepoint(mine, "step"), pvti.Tracepoint(other, "unseen"):
            loss = pvti.Graph("Loss", "%").addSeries("training")
            loss.add(0.5)
        pvti.enableTraceChannel(other)
        pvti.Tracepoint.event(other, "seen")
        pvti.disableTraceChannels([mine, other])
        pvti.Tracepoint.event(mine, "unseen")
        assert not pvti.checkTraceChannel(mine)
        pvti.HeatmapDouble("w", [0, 1, 2]).add([0.5, 1.5, 1.7, 9.0])
        pvti.closeTrace()
        loss.add(1.0)
        written = list(tmp_path.iterdir())
    finally:
        recorder.cache_clear()
        del sys.modules["libpvti"]
    events = json.loads(written[0].read_text())["traceEvents"]
    assert [(e["ph"], e["name"]) for e in events] == [
        ("B", "step"),
        ("C", "Loss (%)"),
        ("E", "step"),
        ("i", "seen"),
        ("C", "w"),
    ]
    assert events[1]["args"] == {"training": 0.5}
    assert events[-1]["args"] == {"0 to 1": 1, "1 to 2": 2}


def test_tracepoints_end_with_the_duration() -> None:
    times = iter([0.0, 1.0, 3.0])
    log = TracepointLog(Path("unused"), lambda: next(times), duration=2.0)
    channel = TraceChannel("c")
    log.note(channel, "kept", "i")
    log.note(channel, "late", "i")
    assert [event["name"] for event in log._events] == ["kept"]


def test_binary_fromstring_is_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from podrun.compat._numpy_1 import give_back

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


def test_names_of_numpy_1_are_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from podrun.compat._numpy_1 import give_back

    monkeypatch.setattr(np, "fromstring", np.fromstring)
    monkeypatch.setitem(np.__dict__, "__getattr__", np.__dict__["__getattr__"])
    give_back()
    given = {
        "float": float,
        "float_": np.float64,
        "Inf": np.inf,
        "NINF": -np.inf,
        "product": np.prod,
        "bool8": np.bool_,
    }
    for name, value in given.items():
        with pytest.warns(DeprecationWarning, match=f"numpy.{name} is NumPy 1's"):
            assert getattr(np, name) == value
    with pytest.warns(DeprecationWarning, match="Use numpy.isin"):
        assert np.in1d([[1, 2]], [2]).tolist() == [False, True]  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="Use numpy.asarray"):
        assert np.asfarray([1]).dtype == np.float64  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"np\.sctypes"):
        np.sctypes  # type: ignore[attr-defined]  # noqa: B018


def test_what_numpy_2_took_from_arrays_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    from podrun.compat._error_reports import report

    for text, hint in (("x.tostring()", "array.tobytes()"), ("float(x)", "array.item()"), ("x.y", "")):
        try:
            eval(text, {"x": np.ones(1)})  # noqa: S307
        except (AttributeError, TypeError) as error:
            report(type(error), error, error.__traceback__)
        assert ("hint: NumPy 2" in (said := capsys.readouterr().err)) == bool(hint)
        assert hint in said


def test_files_stand_in_for_a_library_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, operators = tmp_path / "custom_ops.so", tmp_path / "ops.py"
    library.write_bytes(b"compiled for another machine")
    operators.write_text("")
    monkeypatch.setattr(ctypes.CDLL, "__init__", ctypes.CDLL.__init__)
    explain_libraries()
    for name in (str(library), "libcustom_ops_of_the_path.so"):
        with pytest.raises(OSError, match="custom_ops") as caught:
            ctypes.CDLL(name)
        assert "PODRUN_CUSTOM_OPS=ops.py" in caught.value.__notes__[0]
    monkeypatch.setenv("PODRUN_CUSTOM_OPS", str(operators))
    for name in (str(library), "libcustom_ops_of_the_path.so"):
        assert ctypes.CDLL(name) is not None
    installed = compile(
        "ctypes.CDLL('libcuda_of_nobody.so')", f"{sysconfig.get_path('purelib')}/torch/a.py", "exec"
    )
    with pytest.raises(OSError, match="libcuda_of_nobody"):  # A module that looks for what is there.
        exec(installed, {"ctypes": ctypes})  # noqa: S102


def test_jax_is_silent_in_a_program_that_logs_what_happens() -> None:
    from podrun.runtime.environment import import_jax

    import_jax()
    for name in ("jax._src.compiler", "jaxlib.xla_client"):
        assert not logging.getLogger(name).isEnabledFor(logging.INFO)


def trained_once(
    builder: popart.Builder, loss: str, data: dict[str, np.ndarray], *anchors: str
) -> dict[str, np.ndarray]:
    """The anchors of one step of training on an emulated IPU."""
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1})
    flow = popart.DataFlow(1, [loss, *anchors])
    session = popart.TrainingSession(
        builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), deviceInfo=device
    )
    session.prepareDevice()
    session.weightsFromHost()
    made: dict[str, np.ndarray] = session.initAnchorArrays()
    session.run(popart.PyStepIO(data, made))
    return made


def nested(parent: popart.Builder, depth: int, x: str, w: str) -> str:
    """x times w, in calls in loops of three iterations in calls."""
    inner = parent.createSubgraphBuilder()
    if depth % 3 == 0:
        for kind, shape in (("INT32", []), ("BOOL", []), ("FLOAT", [4]), ("FLOAT", [4])):
            inner.addInputTensor(popart.TensorInfo(kind, shape))
        carried, weight = inner.getInputTensorIds()[2:]
        more = inner.aiOnnx.constant(np.array(True))
        made = nested(inner, depth - 1, carried, weight)
        for name in (more, made, inner.aiOnnx.identity([weight])):
            inner.addOutputTensor(name)
        count = parent.aiOnnx.constant(np.array(3, np.int64))
        start = parent.aiOnnx.constant(np.array(True))
        return str(parent.aiOnnx.loop([count, start, x, w], 2, inner)[0])
    a, b = inner.addUntypedInputTensor(), inner.addUntypedInputTensor()
    inner.addOutputTensor(inner.aiOnnx.mul([a, b]) if depth == 1 else nested(inner, depth - 1, a, b))
    return str(parent.aiGraphcore.call([x, w], 1, inner)[0])


def test_gradients_through_loops_and_calls_several_deep() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [4])
    w = builder.addInitializedInputTensor(np.full(4, 0.5, np.float32), "w")
    loss = builder.aiGraphcore.identityloss([nested(builder, 6, x, w)], reduction=popart.ReductionType.Sum)
    made = trained_once(builder, loss, {x: np.ones(4, np.float32)}, "Gradient___w")
    np.testing.assert_allclose(made[loss], 4 * 0.5**9)
    np.testing.assert_allclose(made["Gradient___w"], 9 * 0.5**8)


def test_a_call_without_outputs_and_a_weight_without_elements() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2])
    callee = builder.createSubgraphBuilder()
    callee.aiOnnx.neg([callee.addUntypedInputTensor()])
    assert builder.aiGraphcore.call([x], 0, callee) == []
    w = builder.addInitializedInputTensor(np.array([2, 3], np.float32), "w")
    nothing = builder.addInitializedInputTensor(np.zeros((0,), np.float32), "nothing")
    y = builder.aiOnnx.concat([builder.aiOnnx.mul([x, w]), nothing], 0)
    loss = builder.aiGraphcore.identityloss([y], reduction=popart.ReductionType.Sum)
    made = trained_once(builder, loss, {x: np.ones(2, np.float32)}, "Gradient___w")
    assert made[loss] == 5
    assert made["Gradient___w"].tolist() == [1, 1]
