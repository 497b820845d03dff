"""The parts of a session and how they depend on each other: each gets what it needs, and none sees the session.

`SessionSource` is what a session is made from, `place_and_build` makes the placed and lowered model of it, and
`assemble` the parts that compile, load and run that model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from podrun.core.quick_dataclass import dataclass
from podrun.runtime import placing
from podrun.runtime.batches import BatchRunner
from podrun.runtime.building import BuiltModel, build_model
from podrun.runtime.device import RunDevice
from podrun.runtime.device_program import DeviceProgram, ProgramCompiler, ProgramLoader, StreamedScalars
from podrun.runtime.environment import check_replicas
from podrun.runtime.executable_files import ExecutableFiles
from podrun.runtime.graph import Model, OperatorGraph
from podrun.runtime.model_lowering import Request, UpdateSource
from podrun.runtime.own_steps import check_own_step, check_stages
from podrun.runtime.pipelining import check_pipeline
from podrun.runtime.random_state import RandomState
from podrun.runtime.replica_check import ReplicaCheck
from podrun.runtime.runner import StepRunner, StreamTaps
from podrun.runtime.session_reports import SessionReports
from podrun.runtime.settings import PlacedBy, RunPlan, RunSettings
from podrun.runtime.weights import HostWeights, WeightTransfer


@dataclass(frozen=True, slots=True)
class SessionSource:
    """What a session is made from. ``model``: as it was given, without places. ``input_shapes``: shapes that the model
    leaves open.
    """

    name: str
    model: Model
    plan: RunPlan
    settings: RunSettings
    training: bool
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def request(self, device: RunDevice, loss: str | None, optimizer: UpdateSource | None) -> Request:
        """The session's request to the lowering of its model."""
        return Request(
            self.name,
            self.plan,
            self.settings,
            device.ipu_count // self.settings.local_replicas,
            loss,
            optimizer,
            as_in_training=bool(self.model.stepped),
            own_copies=check_replicas(device.environ) > 0,
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
    scalars: StreamedScalars
    weights: HostWeights
    transfer: WeightTransfer
    random: RandomState
    reports: SessionReports
    files: ExecutableFiles
    runner: StepRunner
    batches: BatchRunner


def place_and_build(source: SessionSource, request: Request, target: str) -> PlacedModel:
    """Place the operators of a session's model on IPUs, check the placement, and build the model."""
    model, settings = source.model, source.settings
    check_own_step(model, settings, request.loss)
    graph = model.graph
    if settings.placement is PlacedBy.AUTOMATIC:

        def without_places(plain: OperatorGraph) -> BuiltModel:
            return build_model(model.with_graph(plain), request)

        graph = placing.place_automatically(
            graph,
            without_places,
            request.ipus_per_replica,
            settings.split_ratios,
            target,
            pipelined=settings.overlaps,
        )
    graph = placing.place(graph, settings, request.ipus_per_replica)
    check_pipeline(graph, settings, source.plan.batches, training=source.training)
    placed = model.with_graph(graph)
    check_stages(placed, settings)
    return PlacedModel(placed, build_model(placed, request))


def assemble(
    source: SessionSource, model: PlacedModel, program: DeviceProgram, taps: StreamTaps | None = None
) -> SessionParts:
    """The parts of a session, for a built model and the device of ``program``. ``taps``: functions of the user's
    program in the way of streams.
    """
    built, settings = model.built, source.settings
    changing = source.training or bool(source.model.stepped)
    weights = HostWeights(source.model, built, constant=settings.constant_weights and not changing)
    random = RandomState(program, settings)
    scalars = StreamedScalars(built)
    compiler = ProgramCompiler(source.name, built, settings)
    reports = SessionReports(program, settings, built.program.ipus_per_replica, source.name)
    loader = ProgramLoader(program, compiler, weights, random, scalars, reports)
    check = ReplicaCheck(check_replicas(program.device.environ))
    graph = source.model.graph
    runner = StepRunner(built, source.plan, settings, (*graph.inputs, *graph.initializers), taps)
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
        files=ExecutableFiles(loader, weights, built, source.plan, settings),
        runner=runner,
        batches=BatchRunner(runner, loader, weights, scalars, check, reports),
    )
