"""Small models and sessions that many tests of the PopART front end use."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podrun.popart as popart
from podrun.compat import COMPAT_PATH
from podrun.compiler.compile import model_program

MICRO_BATCH, INPUTS, OUTPUTS = 3, 4, 2


@dataclass
class Linear:
    """``loss = sum |x @ w|`` (l1loss with reduction Sum): its gradient is ``x^T sign(x @ w)``, exact in
    NumPy.
    """

    model: bytes
    x: str
    w: str
    y: str
    loss: str
    start: np.ndarray


def linear(dtype: str = "float32", seed: int = 0, reduction: Any = popart.ReductionType.Sum) -> Linear:
    """See `Linear`."""
    start = np.random.default_rng(seed).standard_normal((INPUTS, OUTPUTS)).astype(dtype)
    builder = popart.Builder()
    kind = "FLOAT16" if dtype == "float16" else "FLOAT"
    x = builder.addInputTensor(popart.TensorInfo(kind, [MICRO_BATCH, INPUTS]))
    w = builder.addInitializedInputTensor(start)
    y = builder.aiOnnx.matmul([x, w])
    loss = builder.aiGraphcore.l1loss([y], 0.5, reduction=reduction)
    return Linear(builder.getModelProto(), x, w, y, loss, start)


def options(**values: Any) -> popart.SessionOptions:
    """SessionOptions with attributes set."""
    made = popart.SessionOptions()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def replicated(replicas: int, accumulation: int = 1, **values: Any) -> popart.SessionOptions:
    """Options for a number of replicas and micro-batches."""
    made = options(**values)
    if replicas > 1:
        made.enableReplicatedGraphs, made.replicatedGraphCount = True, replicas
    if accumulation > 1:
        made.enableGradientAccumulation, made.accumulationFactor = True, accumulation
    return made


def training(
    case: Linear,
    anchors: Mapping[str, popart.AnchorReturnType] | Sequence[str],
    device: popart.DeviceInfo,
    *,
    batches: int = 1,
    optimizer: popart.Optimizer | None = None,
    opts: popart.SessionOptions | None = None,
    model: bytes | None = None,
) -> popart.TrainingSession:
    """A prepared training session with its weights sent."""
    session = popart.TrainingSession(
        fnModel=model or case.model,
        dataFlow=popart.DataFlow(batches, anchors),
        loss=case.loss,
        optimizer=optimizer or popart.ConstSGD(0.1),
        deviceInfo=device,
        userOptions=opts or popart.SessionOptions(),
    )
    session.prepareDevice()
    session.weightsFromHost()
    return session


def modelled(session: popart.Session) -> dict[str, Any]:
    """The tile report that a session on a Mk2 has once it is prepared, without compiling its program.
    ``test_popart_phases.py`` and ``test_popart_pipelining.py`` compare the two for a session each, and
    ``tests/compiler/test_cost.py`` for programs of more kinds.
    """
    return model_program(session.parts.model.built.program)


def weights(session: popart.Session, *names: str) -> list[np.ndarray]:
    """Values of weights or optimizer state after the last run."""
    session.weightsToHost()
    arrays = {}
    for name in names:
        info = session.getInfo(name)
        arrays[name] = np.empty(info.shape(), info.numpy_dtype())
    session.readWeights(popart.PyWeightsIO(arrays))
    return list(arrays.values())


def gradient(case: Linear, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """d loss / d w of `linear` for one micro-batch, float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    return 0.5 * x.T @ np.sign(x @ w)


def run_program(monkeypatch: pytest.MonkeyPatch, program: Path, *arguments: str) -> str:
    """The output of a program that runs in this process, with popart and popdist on the path as `python -m
    podrun.compat` puts them.
    """
    ours = ("popart", "popdist", "popdist.popart", "popart.session", "network")
    with monkeypatch.context() as patched:
        for name in ours:
            patched.delitem(sys.modules, name, raising=False)
        patched.setattr(sys, "path", [str(program.parent), COMPAT_PATH, *sys.path])
        patched.setattr(sys, "argv", [str(program), *arguments])
        patched.setattr(sys, "excepthook", sys.excepthook)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(program), run_name="__main__")
        for name in ours:
            sys.modules.pop(name, None)
    return printed.getvalue()
