"""Errors from inside a library reach nobody bare: they name the operator and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import podrun.popart as popart
from podrun.compiler import jaxprs as jaxprs_module
from podrun.core.errors import InternalError, UsageError
from podrun.core.names import library_errors_named
from podrun.runtime import tracing


def session() -> popart.TrainingSession:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 8]))
    w = builder.addInitializedInputTensor(np.ones((8, 2), np.float32))
    with builder.nameScope("head"):
        y = builder.aiOnnx.matmul([x, w])
    loss = builder.aiGraphcore.l1loss([y], 0.1)
    return popart.TrainingSession(
        builder.getModelProto(),
        deviceInfo=popart.DeviceManager().createIpuModelDevice({"numIPUs": 1}),
        dataFlow=popart.DataFlow(1, {loss: popart.AnchorReturnType("All")}),
        loss=loss,
        optimizer=popart.SGD({"defaultLearningRate": (0.1, False)}),
    )


BARE = [ValueError("Too many leaves for PyTreeDef"), KeyError("axis"), RuntimeError("INTERNAL: broken")]


@pytest.mark.parametrize("bare", BARE, ids=lambda error: type(error).__name__)
def test_an_error_while_differentiating_names_the_operator(
    bare: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised where an equation of the trace is evaluated, in the compiler's own rewriting."""
    made = session()
    whole = jaxprs_module.evaluate

    def broken(jaxpr: Any, consts: Any, arguments: Any, taps: Any, apply: Any) -> Any:
        def step(equation: Any, operands: Any) -> Any:
            if equation.primitive.name == "dot_general":
                raise bare
            return apply(equation, operands)

        return whole(jaxpr, consts, arguments, taps, step)

    # As if it stood in the library: what is asked is whose frame raises.
    monkeypatch.setitem(globals(), "__name__", "jax.broken")
    monkeypatch.setattr(jaxprs_module, "evaluate", broken)
    with pytest.raises(popart.popart_internal_exception) as caught:
        made.prepareDevice()
    assert "'head/MatMul:0'" in str(caught.value)
    assert type(bare).__name__ in str(caught.value)
    assert "PODRUN_TRACEBACK=full" in str(caught.value.hint)
    assert "operator" in str(caught.value.hint)


def test_an_error_while_tracing_names_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("inside")

    monkeypatch.setattr(tracing, "_call", broken)
    monkeypatch.setitem(globals(), "__name__", "jax.broken")
    with pytest.raises(popart.popart_internal_exception, match=r"'?head/MatMul:0'?.*RuntimeError: inside"):
        session()


@pytest.mark.parametrize(
    "bare",
    ["INTERNAL: Failed to emit the kernel\nat 0x7f", "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."],
    ids=["broken", "out of memory"],
)
def test_what_xla_cannot_compile_is_named_with_what_to_try(
    bare: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(
        "PODRUN_CACHE_DIR", str(tmp_path)
    )  # In the user's the program may be compiled already.

    def broken(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError(bare)

    made = session()
    monkeypatch.setattr(jax.stages.Lowered, "compile", broken)
    with pytest.raises(popart.poplar_application_runtime_error) as caught:
        made.prepareDevice()
    said = str(caught.value)
    assert said.startswith("XLA cannot compile piece ")
    assert said.endswith(bare.partition("\n")[0])
    assert "smaller micro-batch" in str(caught.value.hint)


def test_errors_of_the_programs_own_and_of_podrun_pass() -> None:
    with pytest.raises(ZeroDivisionError), library_errors_named("Compiling"):
        _ = 1 / 0
    with pytest.raises(UsageError, match="mine"), library_errors_named("Compiling"):
        raise UsageError("mine")


def test_without_an_operator_it_says_what_was_done() -> None:
    with (
        pytest.raises(InternalError, match=r"^Compiling 'training' failed, inside a library: \w*Error: "),
        library_errors_named("Compiling 'training'"),
    ):
        jax.numpy.zeros((2, 3)).reshape(7)
