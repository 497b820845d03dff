"""PrintTensor prints and Abort ends a run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import podrun.onnx_backend as backend
import podrun.popart as popart
from podrun.core.errors import UnsupportedError
from tests.popart.popart_sessions import options, replicated


def printing(**kwargs):
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2]), "x")
    w = builder.addInitializedInputTensor(np.array([1, 2], np.float32), "w")
    y = builder.aiGraphcore.printtensor([builder.aiOnnx.mul([x, w])], **kwargs)
    loss = builder.aiGraphcore.l1loss([y], 1.0, reduction=popart.ReductionType.Sum)
    return builder.getModelProto(), x, w, loss


def trained(model, loss, device, flow=None, opts=None):
    session = popart.TrainingSession(
        model,
        flow or popart.DataFlow(1, []),
        loss,
        popart.ConstSGD(0.5),
        device,
        userOptions=opts or options(),
    )
    session.prepareDevice()
    session.weightsFromHost()
    return session


def test_values_and_gradients_are_printed_in_order(device, capfd):
    model, x, _, loss = printing(title="y")
    session = trained(model, loss, device, popart.DataFlow(2, []))
    capfd.readouterr()
    session.run(popart.PyStepIO({x: np.array([[1, -1], [2, 2]], np.float32)}, {}))
    lines = capfd.readouterr().err.splitlines()
    # w is [1, 2], then [1, 2] - 0.5 * [1, 1] = [0.5, 1.5] (the gradient of |x w| is x sign(x w)).
    assert lines == [
        "y: [ 1.0000000 -2.0000000]",
        "y_gradient: [ 1.0000000 -1.0000000]",
        "y: [1.0000000 3.0000000]",
        "y_gradient: [1.0000000 1.0000000]",
    ]


def test_without_a_title_tensors_have_their_own_names(device, capfd):
    model, x, _, loss = printing()
    session = trained(model, loss, device)
    capfd.readouterr()
    session.run(popart.PyStepIO({x: np.array([12.5, -1], np.float32)}, {}))
    assert capfd.readouterr().err.splitlines() == [
        "Mul:0: [12.500000 -2.000000]",
        "Gradient___Mul:0: [ 1.0000000 -1.0000000]",
    ]


def test_printed_tensors_have_the_brackets_digits_and_format_asked_for(device, capfd):
    model, x, _, loss = printing(
        print_gradient=0, digits=3, separator=", ", openBracket="{", closeBracket="}", floatFormat=2
    )
    session = trained(model, loss, device)
    capfd.readouterr()
    session.run(popart.PyStepIO({x: np.array([1.5, 1000], np.float32)}, {}))
    assert capfd.readouterr().err == "Mul:0: {1.500e+00, 2.000e+03}\n"


def test_large_tensors_are_cut_in_the_middle(device, capfd):
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("INT32", [5000]), "x")
    y = builder.aiOnnx.identity([builder.aiGraphcore.printtensor([x], edgeItems=2)])
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device)
    session.prepareDevice()
    capfd.readouterr()
    session.run(popart.PyStepIO({x: np.arange(5000, dtype=np.int32)}, session.initAnchorArrays()))
    assert capfd.readouterr().err.split() == ["x:", "[", "0", "1", "...", "4998", "4999]"]


def test_replicas_and_micro_batches_say_who_they_are(device_of, capfd):
    model, x, _, loss = printing(title="y", print_gradient=0)
    session = trained(model, loss, device_of(2), opts=replicated(2, 2))
    capfd.readouterr()
    data = np.arange(8, dtype=np.float32).reshape(2, 2, 2) * 10
    session.run(popart.PyStepIO({x: data}, {}))
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["y (replica 0)", "y (replica 1)"] * 2
    assert [float(line.split("[")[1].split()[0]) for line in lines] == [0.0, 20.0, 40.0, 60.0]


def test_a_printed_tensor_can_be_anchored_too(device, capfd):
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [1]), "x")
    y = builder.aiGraphcore.printtensor([x])
    flow = popart.DataFlow(4, {y: popart.AnchorReturnType("Sum")})
    session = popart.InferenceSession(builder.getModelProto(), flow, device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: np.arange(4, dtype=np.float32)}, anchors))
    assert anchors[y] == 6.0
    assert capfd.readouterr().err.count("x: [") == 4


def aborting(conditional):
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [3]), "x")
    limit = builder.aiOnnx.constant(np.array([10.0], np.float32))
    y = builder.aiOnnx.mul([x, x])
    if conditional:
        builder.aiGraphcore.abort([builder.aiOnnx.greater([y, limit])])
    else:
        builder.aiGraphcore.abort([])
    return builder.getModelProto(), x, y


def test_a_condition_ends_the_run(device):
    model, x, y = aborting(conditional=True)
    session = popart.InferenceSession(model, popart.DataFlow(2, {y: popart.AnchorReturnType("All")}), device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: np.ones((2, 3), np.float32)}, anchors))
    assert anchors[y].sum() == 6
    data = np.array([[1, 2, 3], [1, 4, 2]], np.float32)
    with pytest.raises(popart.poplar_application_runtime_error, match="batch 1, micro-batch 0, replica 0"):
        session.run(popart.PyStepIO({x: data}, anchors))
    assert anchors[y].sum() == 6
    session.run(popart.PyStepIO({x: np.full((2, 3), 2, np.float32)}, anchors))
    assert anchors[y].sum() == 24


def test_without_a_condition_every_run_ends(device):
    model, x, y = aborting(conditional=False)
    session = popart.InferenceSession(model, popart.DataFlow(1, [y]), device)
    session.prepareDevice()
    with pytest.raises(popart.poplar_application_runtime_error, match="Abort Program"):
        session.run(popart.PyStepIO({x: np.ones(3, np.float32)}, session.initAnchorArrays()))


def test_the_backend_interface_cannot_be_stopped():
    model, _, _ = aborting(conditional=True)
    with pytest.raises(UnsupportedError, match="only a session"):
        backend.PodrunBackendRep(onnx.load_from_string(model))
