"""``session.run("implicitPipeliningFwdOnly", stepio)``: the forward stages of a pipelined training session, alone.

PopART compiles a second control program into the same executable. Here it is an inference program of its own, made on
first use: it takes the device with the weights as they stand, runs as many batches as a training step has
micro-batches, and gives the device back with all that training left there. Its data and anchors have the sizes of a
training step; anchors that only training has (gradients, updated weights, optimizer state) keep what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from podrun.compiler.program import RNG
from podrun.compiler.seeds import SEED_VARIABLE
from podrun.popart.dataflow import DataFlow
from podrun.popart.enums import RecomputationType
from podrun.popart.errors import popart_unimplemented, surfaced
from podrun.popart.session_model import tensors_of
from podrun.popart.settings import AutomaticLossScalingSettings
from podrun.popart.stepio import IStepIO, StepTensor

if TYPE_CHECKING:
    from podrun.popart.session import InferenceSession, Session

HANDLE = "implicitPipeliningFwdOnly"


class ForwardOnly:
    """The forward program of a training session."""

    def __init__(self, training: Session) -> None:
        self._training = training
        self._session = _inference(training)

    def run(self, io: IStepIO) -> None:
        """One step forward: as many micro-batches as a training step has."""
        training, forward = self._training, self._session
        training.weightsToHost()
        kept = _random_state(training)
        for name in forward._built.weights:
            value = training._weights.get(name)
            assert value is not None
            forward._weights.put(name, np.ascontiguousarray(value))
        if forward._executable is None:
            forward.prepareDevice()
        forward.weightsFromHost()
        try:
            forward.run(_Shared(io))
        finally:
            training.loadEngineAndConnectStreams()
            training._write(kept)
            training.weightsFromHost()


class _Shared(IStepIO):
    """A training step's data, whose names and sizes have been checked already."""

    def __init__(self, io: IStepIO) -> None:
        self._io = io

    def check(self, inputs: Mapping[str, StepTensor], outputs: Mapping[str, StepTensor]) -> None:
        """They were, against the training session."""

    def fetch(self, tensor: StepTensor) -> np.ndarray:
        return self._io.fetch(tensor)

    def store(self, tensor: StepTensor, value: np.ndarray) -> None:
        self._io.store(tensor, value)


def _inference(training: Session) -> InferenceSession:
    from podrun.popart.session import InferenceSession

    lowered = training._built.lowered
    if lowered.uses_random or lowered.state_updates:
        raise popart_unimplemented(
            f"run({HANDLE!r}, ...) of a model whose forward pass draws random numbers or keeps running statistics in "
            "training is not there yet.",
            hint="Make an InferenceSession from the same model, which neither drops out nor changes statistics.",
        )
    options = training._options.copy()
    options.enableGradientAccumulation, options.accumulationFactor = False, 1
    options.createImplicitPipeliningFwdOnlyProgram = options.constantWeights = False
    options.autoRecomputation = RecomputationType.NoRecompute
    options.automaticLossScalingSettings = AutomaticLossScalingSettings()
    flow, known = training._flow, tensors_of(training._model)
    batches = flow.batchesPerStep() * training.accumulationFactor
    anchors = {name: flow.art(name) for name in flow.anchors() if name in known}
    model = training._weights.model(with_state=False).SerializeToString()
    return InferenceSession(
        model,
        DataFlow(batches, anchors),
        training._device,
        training._shapes,
        training._patterns,
        options,
        f"{training._name}_forward",
    )


def _random_state(training: Session) -> dict[str, np.ndarray]:
    """The states of what rounds stochastically, where there are any."""
    executable = training._prepared("run")
    names = [name for name in (RNG, SEED_VARIABLE) if name in executable.variables]
    if not names or training._device._loaded is not training:
        return {}
    with surfaced():
        return dict(training._device.connection.read_variables(names))
