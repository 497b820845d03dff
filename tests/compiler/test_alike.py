"""Updates that differ in names alone are exported once, and are what they would be exported each."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from podrun.compiler import compile as compiling

RATES = {"near": 0.5, "far": 0.25, "odd": 0.125}


def session(device, options, optimizer):
    """Three weights with settings of their own, the last one of another shape."""
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [4])
    total = x
    for name, size in {"near": 4, "far": 4, "odd": 2}.items():
        w = builder.addInitializedInputTensor(np.arange(1.0, size + 1, dtype=np.float32), name)
        grown = builder.aiOnnx.reducesum([builder.aiOnnx.mul([w, w])], axes=[0], keepdims=1)
        total = builder.aiOnnx.add([total, grown])
        optimizer.insertSpecific(w, {"learningRate": (RATES[name], False)})
    loss = builder.aiGraphcore.identityloss([total], popart.ReductionType.Sum)
    made = popart.TrainingSession(
        builder.getModelProto(), popart.DataFlow(1, []), loss, optimizer, device, userOptions=options
    )
    made.prepareDevice()
    made.weightsFromHost()
    made.run(popart.PyStepIO({x: np.ones(4, np.float32)}, {}))
    made.weightsToHost()
    found = {name: np.empty(2 if name == "odd" else 4, np.float32) for name in RATES}
    made.readWeights(popart.PyWeightsIO(found))
    return made, found


@pytest.mark.parametrize("mode", [popart.AdamMode.Lamb, popart.AdamMode.Adam])
@pytest.mark.sample(2)
def test_weights_of_one_shape_share_an_update_that_is_theirs(monkeypatch, mode):
    exported = []
    real = compiling.export_piece
    monkeypatch.setattr(compiling, "export_piece", lambda piece: exported.append(piece.name) or real(piece))
    results = []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(compiling.SimilarUpdates, "similar", lambda *_: None)
        exported.clear()
        device = popart.DeviceManager().acquireAvailableDevice(1)
        made, found = session(device, popart.SessionOptions(), popart.Adam({}, mode=mode))
        computations = made.parts.program.executable.computations
        updates = {name: computations[name] for name in computations if name.startswith("update.")}
        results.append((updates, found))
        assert len(updates) == 3
        assert len([name for name in exported if name.startswith("update.")]) == (2 if shared else 3)
        device.detach()
    (updates, found), (each, alone) = results
    assert updates == each
    for name in RATES:
        np.testing.assert_array_equal(found[name], alone[name])
    assert not np.array_equal(found["near"], found["far"])  # Each with its own learning rate.
