"""``session.run("implicitPipeliningFwdOnly", stepio)``: the forward stages of a pipelined training session, alone.

PopART compiles a second control program into the same executable. Here it is an inference program of its own, made on
first use: it takes the device with the weights as they stand, runs as many batches as a training step has
micro-batches, and gives the device back with all that training left there. Its data and anchors have the sizes of a
training step; anchors that only training has (gradients, updated weights, optimizer state) keep what they hold.

Operators mean what they mean in training: they drop out, with the generator's next numbers, and running statistics move
on, those of each replica for itself; the training session continues from both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from podrun.compiler.extra_state import SEED_VARIABLE
from podrun.compiler.program import RNG
from podrun.session.dataflow import DataFlow
from podrun.session.enums import RecomputationType
from podrun.session.option_groups import AutomaticLossScalingSettings
from podrun.session.pipelining import check_pipeline
from podrun.session.program.build import build
from podrun.session.program.lowering_models import tensors_of
from podrun.session.stepio import IStepIO, StepTensor

if TYPE_CHECKING:
    from podrun.session.program.build import BuiltModel
    from podrun.session.session import InferenceSession, Session
    from podrun.session.tensor_info import InputShapeInfo

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
        kept = _kept(training)
        for name in forward._built.weights:
            value = training._weights.get(name)
            assert value is not None
            forward._weights.put(name, np.ascontiguousarray(value))
        if forward._executable is None:
            forward.prepareDevice()
        forward.weightsFromHost()
        forward._write({name: kept[name] for name in _changing(forward) & kept.keys()})
        try:
            forward.run(_Shared(io))
            kept |= _kept(forward)
        finally:
            training.loadEngineAndConnectStreams()
            training.weightsFromHost()
            training._write(kept)
            # The host has the statistics of one replica for all, or of each group: the device knows them all.
            training._weights.device_is_ahead = True


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
    from podrun.session.session import InferenceSession

    class Forward(InferenceSession):
        """The training session's placed model, its operators as in training."""

        def _build(self, shapes: InputShapeInfo, loss: str | None) -> BuiltModel:
            self._placed = training._placed
            check_pipeline(self._placed.proto, self._options, self._flow.batchesPerStep(), training=False)
            return build(self._placed, replace(self._request(shapes, loss), as_in_training=True))

    options = training._options.copy()
    options.enableGradientAccumulation, options.accumulationFactor = False, 1
    options.createImplicitPipeliningFwdOnlyProgram = options.constantWeights = False
    options.autoRecomputation = RecomputationType.NoRecompute
    options.automaticLossScalingSettings = AutomaticLossScalingSettings()
    flow, known = training._flow, tensors_of(training._model.proto)
    batches = flow.batchesPerStep() * training.accumulationFactor
    anchors = {name: flow.art(name) for name in flow.anchors() if name in known}
    model = training._weights.model(with_state=False).to_bytes()
    return Forward(
        model,
        DataFlow(batches, anchors),
        training._device,
        training._shapes,
        training._patterns,
        options,
        f"{training._name}_forward",
    )


def _changing(session: Session) -> set[str]:
    """What forward work changes on the device: running statistics, and the state of the generators of what it draws
    and of what it rounds stochastically."""
    return {RNG, SEED_VARIABLE, *session._built.lowered.state_updates} & session._prepared(
        "run"
    ).variables.keys()


def _kept(session: Session) -> dict[str, np.ndarray]:
    """Their values on the device; nothing where another session has it."""
    if not session._program.on_device:
        return {}
    return session._program.read(sorted(_changing(session)))
