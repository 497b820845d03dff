"""The parts of a session and how they depend on each other: each gets what it needs, and none sees the session.

`SessionSource` is what a session is made from, `place_and_build` makes the placed and lowered model of it, and
`assemble` the parts that compile, load and run that model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from podrun.onnx_models.light_model import LightModel
from podrun.session import option_checks, virtual_graphs
from podrun.session.dataflow import DataFlow
from podrun.session.device import DeviceInfo
from podrun.session.enums import VirtualGraphMode
from podrun.session.environment import check_replicas
from podrun.session.optimizers.base import Optimizer
from podrun.session.parts.device_program import DeviceProgram, Hyperparameters, ProgramCompiler, ProgramLoader
from podrun.session.parts.files import ExecutableFiles, SessionReports
from podrun.session.parts.replica_check import ReplicaCheck
from podrun.session.parts.rng import RandomState
from podrun.session.parts.run import BatchRunner, StepRunner
from podrun.session.parts.weights import HostWeights, WeightTransfer
from podrun.session.patterns import Patterns
from podrun.session.pipelining import check_pipeline
from podrun.session.program.build import BuiltModel, build
from podrun.session.program.lowering_models import Request
from podrun.session.session_options import SessionOptions
from podrun.session.tensor_info import InputShapeInfo

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True, slots=True)
class SessionSource:
    """What a session is made from. ``model``: as it was given, without places."""

    name: str
    model: LightModel
    flow: DataFlow
    options: SessionOptions
    patterns: Patterns
    shapes: InputShapeInfo
    training: bool

    def request(self, device: DeviceInfo, loss: str | None, optimizer: Optimizer | None) -> Request:
        """The session's request to the lowering of its model."""
        return Request(
            self.name,
            self.flow,
            self.options,
            self.shapes,
            device.numIpus // self.options.local_replicas,
            loss,
            optimizer,
            own_copies=check_replicas(device._environ) > 0,
        )


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model with places, and what was built from it."""

    placed: LightModel
    built: BuiltModel


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What a session is made of. ``weights`` is the host's copy; ``transfer`` moves it."""

    source: SessionSource
    model: PlacedModel
    program: DeviceProgram
    loader: ProgramLoader
    scalars: Hyperparameters
    weights: HostWeights
    transfer: WeightTransfer
    random: RandomState
    reports: SessionReports
    files: ExecutableFiles
    runner: StepRunner
    batches: BatchRunner


def place_and_build(source: SessionSource, request: Request, target: str) -> PlacedModel:
    """Place the operators of a session's model on IPUs, check the placement, and build the model."""
    model, options = source.model.copy(), source.options
    proto = model.proto
    option_checks.check_recomputation(options, virtual_graphs.recompute_annotated(proto))
    if options.virtualGraphMode is VirtualGraphMode.Auto:

        def without_places(plain: ModelProto) -> BuiltModel:
            return build(LightModel(plain, model.values), request)

        virtual_graphs.place_automatically(
            proto,
            without_places,
            request.ipus_per_replica,
            options.virtualGraphSplitRatios,
            target,
            pipelined=options.overlaps,
        )
    virtual_graphs.place(proto, options, request.ipus_per_replica)
    check_pipeline(proto, options, source.flow.batchesPerStep(), training=source.training)
    return PlacedModel(model, build(model, request))


def assemble(
    source: SessionSource, model: PlacedModel, program: DeviceProgram, optimizer: Optimizer | None
) -> SessionParts:
    """The parts of a session, for a built model and the device of ``program``."""
    built, options = model.built, source.options
    weights = HostWeights(source.model, built, constant=options.constantWeights and not source.training)
    random = RandomState(program, options)
    scalars = Hyperparameters(built, optimizer)
    compiler = ProgramCompiler(source.name, model.placed, built, options)
    reports = SessionReports(program, options, built.program.ipus_per_replica, source.name)
    loader = ProgramLoader(program, compiler, weights, random, scalars, reports)
    check = ReplicaCheck(check_replicas(program.device._environ))
    inputs = (value.name for value in source.model.proto.graph.input)
    runner = StepRunner(built, source.flow, options, inputs)
    return SessionParts(
        source=source,
        model=model,
        program=program,
        loader=loader,
        scalars=scalars,
        weights=weights,
        transfer=WeightTransfer(loader, weights, random, check, options),
        random=random,
        reports=reports,
        files=ExecutableFiles(program, built, weights),
        runner=runner,
        batches=BatchRunner(runner, loader, weights, scalars, check, reports),
    )
