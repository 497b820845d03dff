"""connectStreamToCallback: functions in place of step data."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import replicated


def values(capsule, count):
    """The floats that a capsule points to."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(pointer(capsule, None)))


@pytest.fixture
def session(device_of):
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [3], "x")
    y = builder.aiOnnx.mul([x, x])
    made = popart.InferenceSession(
        builder.getModelProto(),
        popart.DataFlow(2, {y: popart.AnchorReturnType("All")}),
        device_of(2),
        userOptions=replicated(2),
    )
    made.prepareDevice()
    return made


def test_a_function_fills_the_stream_of_its_replica(session):
    calls = []

    def fill(capsule):
        calls.append(None)
        values(capsule, 3)[:] = len(calls)

    session.connectStreamToCallback("h2d_x", fill, 1)
    anchors = session.initAnchorArrays()
    given = np.full((2, 2, 3), 10, np.float32)
    session.run(popart.PyStepIO({"x": given}, anchors))
    assert anchors["Mul:0"][:, :, 0].tolist() == [[100, 1], [100, 4]]
    assert np.all(given == 10)


def test_no_data_are_needed_where_functions_fill_every_replica(session):
    for index in range(2):
        session.connectStreamToCallback(
            "h2d_x", lambda capsule, index=index: values(capsule, 3).fill(index + 2), index
        )
    seen = []
    session.connectStreamToCallback(
        "anchor_d2h_Mul:0", lambda capsule: seen.append(values(capsule, 3).tolist())
    )
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({}, anchors))
    assert anchors["Mul:0"][:, :, 1].tolist() == [[4, 9], [4, 9]]
    assert seen == [[4, 4, 4]] * 2


def test_streams_that_are_not_there(session):
    for handle, index, word in [
        ("h2d_z", 0, "no stream 'h2d_z'"),
        ("x", 0, "anchor_d2h_Mul:0, h2d_x"),
        ("h2d_x", 2, "2 replicas"),
    ]:
        with pytest.raises(popart.popart_runtime_error, match=word):
            session.connectStreamToCallback(handle, print, index)
    with pytest.raises(TypeError, match="incompatible"):
        session.connectStreamToCallback("h2d_x", 3)
