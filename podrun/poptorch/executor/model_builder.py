"""From a captured module to a `CompiledModel`: what comes back, the session, the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from podrun.poptorch.api.enums import ConnectionType, OutputMode, OverlapMode
from podrun.poptorch.api.logs import log_options, logger
from podrun.poptorch.api.optim import ProgramOptimizer
from podrun.poptorch.api.options import Options
from podrun.poptorch.api.strategies import PHASED
from podrun.poptorch.capture.capture import Capture
from podrun.poptorch.capture.graph import GraphValue
from podrun.poptorch.capture.torch_names import to_numpy
from podrun.poptorch.compile.computed_values import ValuesToCompute, values_to_compute
from podrun.poptorch.compile.module_capture import CompileRequest, Division, check_micro_batches, division_of
from podrun.poptorch.compile.popart_options import compiles_engine, requested_drawing
from podrun.poptorch.compile.session_model import PlacedGraph, SessionModel, model_of_graph, overlaps
from podrun.poptorch.compile.session_optimizers import check_scaling, clips_gradients, session_optimizer
from podrun.poptorch.compile.torch_settings import (
    check_annotated,
    check_patterns,
    returned_as,
    run_plan,
    torch_settings,
)
from podrun.poptorch.errors import Error, translated
from podrun.poptorch.executor.compiled_model import CompiledModel
from podrun.poptorch.executor.devices import acquire
from podrun.poptorch.executor.host_calls import ChainedModel, GraphPart, calls_host, parts_of
from podrun.poptorch.executor.torch_session import TorchSession
from podrun.runtime.assembly import SessionSource
from podrun.runtime.graph_text import write_dots
from podrun.runtime.placing import recompute_annotated
from podrun.runtime.settings import Returned

DEFAULT_SEED = 42
"""Seed of the IPU's random numbers if none is set."""


def compile_model(captured: Capture, request: CompileRequest) -> CompiledModel | ChainedModel:
    """Build and compile a session for a captured module, and attach its device as the options say.

    A module that calls functions of the host has a session for each part between the calls.
    """
    if not request.training and calls_host(captured.graph):
        return _chained(captured, request)
    return _compile_session(captured, request)


def _chained(captured: Capture, request: CompileRequest) -> ChainedModel:
    options, batches = request.options, request.batches
    if batches.groups != batches.replicas:
        raise Error("poptorch.CPU and inputReplicaGrouping do not go together")
    if request.executable is not None:
        raise Error("a model that calls poptorch.CPU cannot be loaded from a file")
    parts: list[tuple[GraphPart, CompiledModel | None]] = []
    for place, part in enumerate(parts_of(captured)):
        own = options.clone()
        if part.call is not None:
            own.outputMode(OutputMode.All)
        own.modelName(f"{options.extra('model_name', 'inference')}-part{place}")
        computes = any(isinstance(leaf, GraphValue) for leaf in part.captured.graph.outputs)
        needed = bool(computes or part.captured.graph.updates or part.captured.graph.input_updates)
        model = _compile_session(part.captured, replace(request, options=own)) if needed else None
        parts.append((part, model))
    return ChainedModel(captured, parts, captured.graph.functions, batches)


def _compile_session(captured: Capture, request: CompileRequest) -> CompiledModel:
    options = request.options
    division = division_of(captured.graph.nodes)
    check_micro_batches(division, options, request.training)
    values = values_to_compute(captured, options, training=request.training)
    model = model_of_graph(_placed(captured, request, division), values.all, type(request.module).__name__)
    anchors = {
        short: (name, options.output_mode if kind is None else kind, every)
        for short, (name, kind, every) in options.anchored_tensors.items()
    }
    returned = _returned(values, model, overlaps(captured.graph), options)
    session = _session(model, values.loss, request, division, returned)
    return CompiledModel(
        session,
        captured,
        model,
        request.batches,
        request.training,
        options.output_mode,
        options.output_return_period,
        anchors,
        {place: model.names[v.number] for place, v in values.updates.items()},
        bool(options.extra("enable_synthetic_data")),
        {},
    )


def _returned(
    values: ValuesToCompute, model: SessionModel, beside: Mapping[int, OverlapMode], options: Options
) -> dict[str, Returned]:
    """What comes back of each tensor, by the session's name."""
    mode, period = options.output_mode, options.output_return_period
    names = model.names
    returned = {
        names[v.number]: returned_as(mode, period, beside.get(v.number, OverlapMode.NoOverlap))
        for v in values.outputs
    }
    returned |= {name: returned_as(mode, period) for name, _, _ in options.anchored_tensors.values()}
    returned |= {names[v.number]: returned_as(OutputMode.All, 1) for v in values.updates.values()}
    if not returned and values.unseen is not None:
        returned = {names[values.unseen.number]: returned_as(OutputMode.Final, 1)}
    return returned | {names[v.number]: returned_as(OutputMode.Final, 1) for v in values.checks}


def _session(
    model: SessionModel,
    loss: GraphValue | None,
    request: CompileRequest,
    division: Division,
    returned: Mapping[str, Returned],
) -> TorchSession:
    """A session with its program, compiled and on its device as the options say."""
    options, training = request.options, request.training
    clips = request.optimizer is not None and clips_gradients(request.optimizer)
    log_options(options)
    settings = torch_settings(
        options, training=training, ipus=division.ipus, phases=division.phases, clips=clips
    )
    plan = run_plan(options, returned, pipelined=settings.pipelined)
    check_patterns(options)
    check_annotated(settings, options, recompute_annotated(model.model.graph))
    device = acquire(options, division.ipus * options.replication_factor)
    with translated("compiling the model"):
        optimizer = None
        if loss is not None and request.optimizer is not None:
            names = {id(parameter): name for name, parameter in request.module.named_parameters()}
            optimizer = session_optimizer(request.optimizer, names)
            check_scaling(settings, optimizer)
        name = str(options.extra("model_name", "training" if training else "inference"))
        source = SessionSource(name, model.model, plan, settings, training)
        session = TorchSession(source, device, None if loss is None else model.names[loss.number], optimizer)
        write_dots(session.parts.model.built.lowered.graph, requested_drawing(options._Popart.options))
        if compiles_engine(options._Popart.options):
            _prepare(session, request)
        else:
            logger.warning("Not compiling engine by request: compileEngine is False, so the model cannot run")
    return session


def _prepare(session: TorchSession, request: CompileRequest) -> None:
    """Compile, or use the program of a file. Load it and send weights, unless there is no device."""
    if request.executable is not None:
        session.take_executable(request.executable)
    attached, parts = request.options.connection_type != ConnectionType.Never, session.parts
    session.prepare(load=attached)
    if parts.model.built.program.uses_random or request.options.Precision.stochastic_rounding:
        parts.random.set_seed(request.options.extra("random_seed", DEFAULT_SEED))
    if attached:
        parts.transfer.from_host()


def _placed(captured: Capture, request: CompileRequest, division: Division) -> PlacedGraph:
    """The graph with the values of parameters and buffers, and the places of its nodes."""
    module, options = request.module, request.options
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return PlacedGraph(
        captured.graph,
        {name: to_numpy(_tensor(tensors, name)) for name in captured.graph.parameters},
        _trained(module, request.optimizer),
        placed=division.ipus > 1,
        phased=division.ipus > 1 and options._execution_strategy.execution_mode == PHASED,
        scopes=options._module_namescope_enabled,
        groups={n: (g.kind.name, g.shards, g.retrieval.name) for n, g in request.groups.items()},
        proportions=options.available_memory_proportion,
    )


def _tensor(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A parameter or buffer by name. Error for one that forward has deleted."""
    if name not in tensors:
        raise Error(
            f"Parameter or buffer {name} is removed from the model when calling the forward method.",
            hint="forward may neither delete it nor the module that has it.",
        )
    return tensors[name]


def _trained(module: torch.nn.Module, optimizer: ProgramOptimizer | None) -> frozenset[str]:
    """The parameters that the optimizer changes: those of its groups that require a gradient, as in torch."""
    groups = [] if optimizer is None else optimizer.param_groups
    optimized = {id(parameter) for group in groups for parameter in group["params"]}
    return frozenset(
        name
        for name, p in module.named_parameters()
        if id(p) in optimized and p.requires_grad and p.is_floating_point()
    )
