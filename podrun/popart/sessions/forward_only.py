"""``session.run("implicitPipeliningFwdOnly", stepio)``: the forward stages of a pipelined training session, alone.

PopART compiles a second control program into the same executable. Here it is an inference program of its own, made on
first use: it takes the device with the weights as they stand, runs as many batches as a training step has
micro-batches, and gives the device back with everything that training left there. Its data and anchors have the sizes
of a training step; anchors that only training has (gradients, updated weights, optimizer state) keep what they hold.

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
from podrun.core.errors import InternalError
from podrun.popart.options.option_groups import AutomaticLossScalingSettings
from podrun.popart.sessions.session_base import Session
from podrun.popart.step_data.dataflow import DataFlow
from podrun.popart.step_data.stepio import IStepIO
from podrun.popart.values.enums import RecomputationType
from podrun.runtime.assembly import PlacedModel
from podrun.runtime.building import build_model
from podrun.runtime.pipelining import check_pipeline
from podrun.runtime.settings import StepTensor
from podrun.runtime.words import SessionCall

if TYPE_CHECKING:
    from podrun.runtime.assembly import SessionParts, SessionSource
    from podrun.runtime.model_lowering import Request

HANDLE = "implicitPipeliningFwdOnly"


class ForwardOnly:
    """The forward program of a training session."""

    def __init__(self, training: Session) -> None:
        self._training = training
        self._session = _inference(training)

    def run(self, io: IStepIO) -> None:
        """One step forward: as many micro-batches as a training step has."""
        training, forward = self._training.parts, self._session.parts
        training.transfer.to_host()
        state = _changing_values(training)
        for name in forward.model.built.weights:
            value = training.weights.get(name)
            if value is None:
                raise InternalError(
                    f"the training session has no weight {name!r}, which its forward program reads"
                )
            forward.weights.put(name, np.ascontiguousarray(value))
        if forward.program.executable is None:
            self._session.prepareDevice()
        forward.transfer.from_host()
        forward.program.write({name: state[name] for name in _changing(forward) & state.keys()})
        try:
            self._session.run(_Shared(io))
            state |= _changing_values(forward)
        finally:
            training.loader.load()
            training.transfer.from_host()
            training.program.write(state)
            # The host has the statistics of one replica for all, or one of each group; the device has all of them.
            training.weights.device_is_ahead = True


class _Shared(IStepIO):
    """A training step's data, whose names and sizes have been checked already."""

    def __init__(self, io: IStepIO) -> None:
        self._io = io

    def check(self, inputs: Mapping[str, StepTensor], outputs: Mapping[str, StepTensor]) -> None:
        """No-op: the training session has checked names and sizes."""

    def fetch(self, tensor: StepTensor) -> np.ndarray:
        return self._io.fetch(tensor)

    def store(self, tensor: StepTensor, value: np.ndarray) -> None:
        self._io.store(tensor, value)


def _inference(training: Session) -> Session:
    parts = training.parts

    class Forward(Session):
        """The training session's placed model, its operators as in training."""

        def _build(self, source: SessionSource, request: Request, target: str) -> PlacedModel:
            placed = parts.model.placed
            check_pipeline(placed.graph, source.settings, source.plan.batches, training=False)
            return PlacedModel(placed, build_model(placed, replace(request, as_in_training=True)))

    options = training._options.copy()
    options.enableGradientAccumulation, options.accumulationFactor = False, 1
    options.createImplicitPipeliningFwdOnlyProgram = options.constantWeights = False
    options.autoRecomputation = RecomputationType.NoRecompute
    options.automaticLossScalingSettings = AutomaticLossScalingSettings()
    flow, known = training._flow, parts.source.model.graph.tensors()
    batches = flow.batchesPerStep() * training._options.micro_batches
    anchors = {name: flow.art(name) for name in flow.anchors() if name in known}
    return Forward(
        parts.weights.model(),
        DataFlow(batches, anchors),
        training.device,
        training._shapes,
        training._patterns,
        options,
        f"{parts.source.name}_forward",
    )


def _changing(parts: SessionParts) -> set[str]:
    """What forward work changes on the device: running statistics, and the states of the random generators."""
    changed = {RNG, SEED_VARIABLE, *parts.model.built.lowered.state_updates}
    return changed & parts.program.prepared(SessionCall.RUN).variables.keys()


def _changing_values(parts: SessionParts) -> dict[str, np.ndarray]:
    """Their values on the device; empty if another session has the device."""
    if not parts.program.on_device:
        return {}
    return parts.program.read(sorted(_changing(parts)))
