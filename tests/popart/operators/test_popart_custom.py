"""Custom operators in Python, and the error of loading a compiled one."""

from __future__ import annotations

import ctypes
import os

import jax.numpy as jnp
import numpy as np
import pytest

import podrun.popart as popart
from podrun.onnx_models.ops import registry
from podrun.popart.operators.custom import explain_libraries
from tests.copies import COMPAT, run_copied

DOMAIN = "test.ops"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Leave the operator tables as they were."""
    from podrun.popart.operators import custom

    registry.load_onnx_operators()  # Families register when they are loaded, once: into the table that stays.
    monkeypatch.setattr(custom, "_registered", {})
    monkeypatch.setattr(registry, "_table", dict(registry._table))


def cube(x, *, scale=1.0):
    return scale * x**3


def train(device, outputs=1):
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [4])
    y, *_ = builder.customOp("Cube", 1, DOMAIN, [x], {"scale": 2.0}, outputs)
    loss = builder.aiGraphcore.identityloss([y], popart.ReductionType.Sum)
    gradient = popart.reservedGradientPrefix() + x
    session = popart.TrainingSession(
        builder.getModelProto(), popart.DataFlow(1, [y, gradient]), loss, popart.ConstSGD(0.1), device
    )
    session.prepareDevice()
    session.weightsFromHost()
    data = np.array([-1, 0, 2, 3], np.float32)
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: data}, anchors))
    return builder, y, data, anchors[y], anchors[gradient]


def test_an_operator_and_its_gradient_by_jax(device):
    popart.register_op(DOMAIN, "Cube", 1, cube)
    builder, y, data, got, gradient = train(device)
    assert builder.getTensorShape(y) == [4]
    np.testing.assert_allclose(got, 2 * data**3)
    np.testing.assert_allclose(gradient, 6 * data**2)


def test_a_gradient_that_is_given(device):
    def backward(inputs, outputs, incoming, attributes):
        assert attributes == {"scale": 2.0}
        return [incoming[0] * inputs[0] * 0 + 7.0]

    popart.register_op(DOMAIN, "Cube", 1, cube, gradient=backward)
    *_, gradient = train(device)
    np.testing.assert_array_equal(gradient, 7)


def test_several_outputs_and_versions(device):
    popart.register_op(DOMAIN, "Cube", 2, lambda x, scale: pytest.fail("a later version"))
    popart.register_op(DOMAIN, "Cube", 1, lambda x, scale: (cube(x, scale=scale), jnp.sum(x)))
    _, _, data, got, _ = train(device, outputs=2)
    np.testing.assert_allclose(got, 2 * data**3)


def test_what_is_not_registered_is_refused_with_the_way_out(device):
    with pytest.raises(popart.popart_exception, match="Cube") as caught:
        train(device)
    assert "register_op" in str(caught.value.hint)
    with pytest.raises(popart.popart_exception, match="PopART's own"):
        popart.register_op("ai.onnx", "Relu", 1, cube)
    with pytest.raises(popart.popart_exception, match="positive"):
        popart.register_op(DOMAIN, "Cube", 0, cube)
    popart.register_op(DOMAIN, "Cube", 1, lambda x, scale: jnp.dot(x, jnp.ones((7, 2))))
    with pytest.raises(popart.popart_exception, match="cannot take its inputs"):
        train(device)


def test_compiled_libraries_say_what_to_do(tmp_path, monkeypatch):
    """A library that needs libpopart.so, which is not there: the loader's own message, explained."""
    monkeypatch.setattr(ctypes.CDLL, "__init__", ctypes.CDLL.__init__)
    explain_libraries()
    explain_libraries()
    with pytest.raises(popart.popart_exception, match="cannot be loaded here") as caught:
        ctypes.cdll.LoadLibrary(str(tmp_path / "libpopart_custom.so"))
    assert "register_op" in str(caught.value.hint)
    with pytest.raises(OSError, match="nothing"):
        ctypes.CDLL("libnothing.so")
    code = "import podrun.compat.popart, ctypes; ctypes.CDLL('libpoplar.so')"
    done = run_copied(code)
    assert done.returncode == 2
    assert "register_op" in done.stderr


def test_what_nothing_is_known_of_may_be_an_output(device):
    """An operator that is known to the session but not to the builder gives tensors without a type."""
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [4])
    y, *_ = builder.customOp("Late", 1, DOMAIN, [x], {})
    builder.addOutputTensor(y)
    popart.register_op(DOMAIN, "Late", 1, cube)
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: np.full(4, 2, np.float32)}, anchors))
    np.testing.assert_array_equal(anchors[y], np.full(4, 8))


def test_programs_may_add_operators_to_ai_graphcore_but_not_replace_them(device):
    with pytest.raises(popart.popart_exception, match=r"ai\.graphcore\.Gelu is PopART's own"):
        popart.register_op("ai.graphcore", "Gelu", 1, cube)
    popart.register_op("ai.graphcore", "TestKeep", 1, lambda x: x)
    popart.register_op("ai.graphcore", "TestKeep", 1, lambda x: x + 1)  # Again: a file may be run twice.
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT16", [4, 2])
    (y,) = builder.customOp("TestKeep", 1, "ai.graphcore", [x], {})
    assert builder.getTensorShape(y) == [4, 2]


def test_an_operator_that_nobody_has_says_how_to_give_it(device):
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [4])
    y, *_ = builder.customOp("Fused", 3, "test.ops.none", [x], {})
    with pytest.raises(popart.popart_exception) as caught:
        popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device)
    assert "test.ops.none.Fused is none of PopART's" in str(caught.value)
    assert 'register_op("test.ops.none", "Fused", 3, function)' in caught.value.hint


PROGRAM = """
import ctypes, os
import numpy as np
import popart
ctypes.cdll.LoadLibrary(os.path.join(os.path.dirname(os.path.abspath(__file__)), "build", "fused.so"))
popart.Patterns().enablePattern("OurRewrite", False)
builder = popart.Builder()
x = builder.addInputTensor("FLOAT", [4])
(y,) = builder.customOp("Fused", 1, "our.ops", [x], {"factor": 3.0})
device = popart.DeviceManager().createCpuDevice()
session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device)
session.prepareDevice()
anchors = session.initAnchorArrays()
session.run(popart.PyStepIO({x: np.ones(4, np.float32)}, anchors))
print(anchors[y])
"""
OPERATORS = """
from podrun.popart import register_op
from podrun.popart import register_pattern
register_op("our.ops", "Fused", 1, lambda x, *, factor: x * factor)
register_pattern("OurRewrite")
"""


@pytest.mark.system
def test_a_program_with_a_compiled_library_runs_unchanged_with_a_file_in_its_place(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "ops.py").write_text(OPERATORS)
    words = [str(tmp_path / "program.py")]
    alone = run_copied(COMPAT, words)
    assert alone.returncode == 1
    assert "cannot open shared object file" in alone.stderr
    assert "PODRUN_CUSTOM_OPS=ops.py podrun" in alone.stderr
    environ = {**os.environ, "PODRUN_CUSTOM_OPS": str(tmp_path / "ops.py")}
    given = run_copied(COMPAT, words, env=environ)
    assert given.stdout.splitlines()[-1:] == ["[3. 3. 3. 3.]"], given.stderr
    assert "fused.so is not loaded: its operators are those of" in given.stderr
