"""A second launch of an unchanged program imports no JAX in its process, and everything that uses JAX later works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Commands, script, tagged
from tests.kept_programs import kept as kept
from tests.system.conftest import PARTITION

pytestmark = pytest.mark.system

PROGRAM = """
import sys

import numpy as np
import popart
import popdist
import popdist.popart

def told(where):
    print(where, *(name for name in ("jax", "jaxlib", "podrun.runtime.discovery") if name in sys.modules), flush=True)

builder = popart.Builder()
x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 8]), "x")
w = builder.addInitializedInputTensor(np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4), "w")
y = builder.aiOnnx.dropout([builder.aiOnnx.matmul([x, w])], 1, 0.25)[0]
loss = builder.aiGraphcore.l1loss([y], 0.1)
options = popart.SessionOptions()
popdist.popart.configureSessionOptions(options)
options.instrumentWithHardwareCycleCounter = True
with popdist.popart.getDevice() as device:
    session = popart.TrainingSession(
        fnModel=builder.getModelProto(),
        dataFlow=popart.DataFlow(1, {loss: popart.AnchorReturnType("All")}),
        loss=loss,
        optimizer=popart.SGD({"defaultLearningRate": (0.125, False), "defaultMomentum": (0.5, True)}),
        deviceInfo=device,
        userOptions=options,
    )
    session.prepareDevice()
    session.weightsFromHost()
    session.setRandomSeed(7)
    anchors = session.initAnchorArrays()
    replicas = popdist.getNumLocalReplicas()
    data = {x: np.arange(16 * replicas, dtype=np.float32).reshape(replicas, 2, 8)}
    for step in range(2):
        session.run(popart.PyStepIO(data, anchors))
    session.updateOptimizerFromHost(popart.SGD({"defaultLearningRate": (0.5, False), "defaultMomentum": (0.5, True)}))
    session.run(popart.PyStepIO(data, anchors))
    told("trained:")
    session.modelToHost(sys.argv[1] + "/model.onnx")
    session.saveExecutable(sys.argv[1] + "/program")
    with open(sys.argv[1] + "/report", "w") as file:
        print(anchors[loss].tobytes().hex(), session.getCycleCount(), session.getRandomSeed(), file=file)
        print(session.getSummaryReport(), session.getReport(), file=file)
        print(session._serializeIr(popart.IrSerializationFormat.JSON), file=file)
    told("reported:")
    inference = popart.InferenceSession(
        builder.getModelProto(), popart.DataFlow(1, {y: popart.AnchorReturnType("All")}), device, userOptions=options
    )
    inference.prepareDevice()
    anchors = inference.initAnchorArrays()
    inference.weightsFromHost()
    inference.run(popart.PyStepIO(data, anchors))
    with open(sys.argv[1] + "/report", "a") as file:
        print(anchors[y].tobytes().hex(), file=file)
    told("inferred:")
"""


def launched(pod: Commands, kept: Path, folder: Path, program: Path) -> tuple[list[str], dict[str, bytes]]:
    """What the program said of its modules, and the files that it wrote."""
    folder.mkdir()
    env = {"PODRUN_CACHE_DIR": str(kept), "PODRUN_PLAN_CACHE": str(kept / "plans")}
    done = pod.run("podrun", "--num-replicas=16", "--vipu-partition", PARTITION, program, folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return tagged(done.stdout, 0), files


def test_a_second_launch_imports_no_jax(pod: Commands, kept: Path, tmp_path: Path) -> None:
    program = script(tmp_path, PROGRAM)
    said, files = launched(pod, kept, tmp_path / "one", program)
    assert said == [
        f"{when}: jax jaxlib podrun.runtime.discovery" for when in ("trained", "reported", "inferred")
    ]
    said, again = launched(pod, kept, tmp_path / "two", program)
    assert said == ["trained:", "reported:", "inferred:"]
    assert files == again
    assert {"model.onnx", "report"} < files.keys()
