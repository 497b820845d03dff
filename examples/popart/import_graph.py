"""Run an ONNX file whose batch size is open: InputShapeInfo fixes it."""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import popart
from onnx import TensorProto, helper, numpy_helper


def write_model(path: Path) -> np.ndarray:
    """Some framework's export: y = softmax(x w) for any number of rows. Gives w."""
    w = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Softmax", ["h"], ["y"], axis=1)],
        "exported",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(w, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6), path)
    return w


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.onnx"
    w = write_model(path)
    shapes = popart.InputShapeInfo()
    shapes.add("x", popart.TensorInfo("FLOAT", [5, 4]))
    with popart.DeviceManager().acquireAvailableDevice(1) as device:
        session = popart.InferenceSession(str(path), popart.DataFlow(1, ["y"]), device, inputShapeInfo=shapes)
        session.prepareDevice()
        anchors = session.initAnchorArrays()
        x = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
        session.run(popart.PyStepIO({"x": x}, anchors))

expected = np.exp(x @ w)
expected /= expected.sum(axis=1, keepdims=True)
print(f"largest difference from NumPy: {np.abs(anchors['y'] - expected).max():.1e}")
