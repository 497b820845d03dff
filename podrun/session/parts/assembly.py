"""The parts of a session and how they depend on each other: each gets what it needs, and none sees the session.

`SessionSource` is what a session is made from, `place_and_build` makes the placed and lowered model of it, and
`assemble` the parts that compile, load and run that model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from podrun.runtime.graph import Model, OperatorGraph
from podrun.session import option_checks, virtual_graphs
from podrun.session.dataflow import DataFlow
from podrun.session.device import DeviceInfo
from podrun.session.enums import VirtualGraphMode
from podrun.session.environment import check_replicas
from podrun.session.optimizers.base import Optimizer
from podrun.session.parts.device_program import DeviceProgram, Hyperparameters, ProgramCompiler, ProgramLoader
from podrun.session.parts.files import ExecutableFiles, SessionReports
from podrun.session.parts.model_files import ModelFiles
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


@dataclass(frozen=True, slots=True)
class SessionSource:
    """What a session is made from. ``model``: as it was given, without places. ``files``: what writes the model with
    its weights; None for a model that was not read from ONNX. ``input_shapes``: shapes that the model leaves open.
    """

    name: str
    model: Model
    flow: DataFlow
    options: SessionOptions
    patterns: Patterns
    shapes: InputShapeInfo
    training: bool
    files: ModelFiles | None = None
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def request(self, device: DeviceInfo, loss: str | None, optimizer: Optimizer | None) -> Request:
        """The session's request to the lowering of its model."""
        return Request(
            self.name,
            self.flow,
            self.options,
            device.numIpus // self.options.local_replicas,
            loss,
            optimizer,
            own_copies=check_replicas(device._environ) > 0,
            input_shapes=self.input_shapes,
        )


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model with places, and what was built from it."""

    placed: Model
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
    model, options = source.model, source.options
    graph = model.graph
    option_checks.check_recomputation(options, virtual_graphs.recompute_annotated(graph))
    if options.virtualGraphMode is VirtualGraphMode.Auto:

        def without_places(plain: OperatorGraph) -> BuiltModel:
            return build(model.with_graph(plain), request)

        graph = virtual_graphs.place_automatically(
            graph,
            without_places,
            request.ipus_per_replica,
            options.virtualGraphSplitRatios,
            target,
            pipelined=options.overlaps,
        )
    graph = virtual_graphs.place(graph, options, request.ipus_per_replica)
    check_pipeline(graph, options, source.flow.batchesPerStep(), training=source.training)
    placed = model.with_graph(graph)
    return PlacedModel(placed, build(placed, request))


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
    graph = source.model.graph
    inputs = (*graph.inputs, *graph.initializers)
    runner = StepRunner(built, source.flow, options, inputs)
    return SessionParts(
        source=source,
        model=model,
        program=program,
        loader=loader,
        scalars=scalars,
        weights=weights,
        transfer=WeightTransfer(loader, weights, random, check),
        random=random,
        reports=reports,
        files=ExecutableFiles(program, built, weights, source.files),
        runner=runner,
        batches=BatchRunner(runner, loader, weights, scalars, check, reports),
    )
