"""From a model and a session's options to a Program for the compiler, with the TensorInfo of every tensor.

This is the front end's only place that knows both sides: on PopART's side the tensors with reserved names
(`podrun.session.names`), trainable weights and the optimizer's rule, on the compiler's side
`podrun.compiler.program.Program`.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.compiler.program import (
    FACTOR,
    RNG,
    AnchorSpec,
    AutomaticScaling,
    Beside,
    Forward,
    InputSpec,
    ParameterSpec,
    Program,
    Tensors,
    Transfers,
)
from podrun.compiler.program import PipelineOrder as Order
from podrun.core.executable import BATCHES_PER_PASS, Reduction, TensorSpec, numpy_dtype
from podrun.core.names import NORM_ANCHOR, in_float32
from podrun.costmodel.recompute import NOTHING
from podrun.session import names
from podrun.session.dataflow import DataFlow
from podrun.session.enums import (
    AccumulateOuterFragmentSchedule,
    AnchorReturnTypeId,
    ExchangeStrategy,
    MeanReductionStrategy,
    PipelineSchedule,
    ReductionType,
)
from podrun.session.environment import import_jax
from podrun.session.exceptions import popart_exception
from podrun.session.optimizers.base import Optimizer, UpdateContext
from podrun.session.optimizers.sgd import SgdRule
from podrun.session.option_groups import locations_of, plans_of, recompute_of
from podrun.session.pipelining import RESTORED, restoring, stage_count, stashed
from podrun.session.program.derived import (
    ACCUM,
    REDUCED,
    Derived,
    derived_anchors,
    program_anchors,
    returned,
    scaling_anchors,
    update_anchors,
    update_specs,
)
from podrun.session.program.loss_scaling import automatic_scaling, returning, scaling_type, widening
from podrun.session.program.lowering_models import (
    Request,
    differentiable,
    lower_model,
    near,
    take_state,
    trainable,
)
from podrun.session.program.observers import Observer, observers_of, seen
from podrun.session.program.observers import tensors as observed_tensors
from podrun.session.session_options import SessionOptions
from podrun.session.tensor_info import TensorInfo, data_type_of
from podrun.session.variables import (
    ReplicaStateRows,
    VariableSettings,
    check_variables,
    for_one_replica,
    group_of,
    host_values,
    replica_state_rows,
    settings_of,
)
from podrun.session.virtual_graphs import phases_of

if TYPE_CHECKING:
    from podrun.runtime.graph import Model
    from podrun.runtime.lowering import Lowered
    from podrun.session.optimizers.rules import Rule


GRADIENT = names.PREFIXES["Gradient"]
UPDATED = names.PREFIXES["UpdatedVar"]


def info_of(spec: TensorSpec) -> TensorInfo:
    """Type and shape as PopART gives them."""
    return TensorInfo(data_type_of(numpy_dtype(spec.dtype)), spec.shape)


def tensor_infos(
    lowered: Lowered,
    trained: Collection[str],
    rule: Rule | None,
    loss: str | None,
    loss_scaling: float | str,
    accumulates: bool,
) -> dict[str, TensorInfo]:
    """Infos of the graph's tensors, and of gradients, updated weights, optimizer state and streamed scalars."""
    infos = {tensor: info_of(spec) for tensor, spec in lowered.tensors.items()}
    if loss is None:
        return infos
    infos |= {GRADIENT + name: infos[name] for name in differentiable(lowered, loss)}
    if isinstance(loss_scaling, str):
        infos[loss_scaling] = TensorInfo("FLOAT", [])
        if rule is not None and rule.context.automatic:
            infos[FACTOR] = TensorInfo("FLOAT", [])
        for name in scaling_anchors(rule, sorted(trained), scaling_type(lowered, loss)):
            infos[name] = TensorInfo("FLOAT16" if name.endswith("FLOAT16") else "FLOAT", [])
    if rule is not None:
        groups = range(len(rule.optimizer.clip_norm_settings))
        infos |= {f"{NORM_ANCHOR}{number}": TensorInfo("FLOAT", []) for number in groups}
    for name in trained:
        infos |= _of_weight(name, lowered.parameters[name], rule, accumulates)
    return infos


def _of_weight(name: str, spec: TensorSpec, rule: Rule | None, accumulates: bool) -> dict[str, TensorInfo]:
    """Infos of what an update reads and writes of one weight."""
    found = {UPDATED + name: info_of(spec)}
    if rule is None:
        return found
    form = rule.form(name) if isinstance(rule, SgdRule) else None
    gradient = TensorInfo(data_type_of(numpy_dtype(rule.gradient_dtype(spec))), spec.shape)
    if form == 0:
        found[REDUCED + name] = gradient
    if accumulates and form != 1:
        found[ACCUM + name] = gradient
    found |= {state.name: info_of(state) for state, _ in rule.state(spec).values()}
    found |= {anchor: info_of(made) for anchor, made in update_specs(rule, spec).items()}
    return found | {scalar: TensorInfo("FLOAT", []) for scalar in rule.scalars(name).keys() - {RNG}}


def check_anchors(flow: DataFlow, infos: Mapping[str, TensorInfo]) -> None:
    """popart_exception for an anchor that is not a tensor, with the reason where it is known."""
    for anchor in flow.anchors():
        if anchor in infos:
            continue
        hint = ""
        if anchor.startswith(GRADIENT):
            subject = anchor.removeprefix(GRADIENT)
            hint = (
                f" No gradient path leads from the loss to {subject!r}."
                if subject in infos
                else f" There is no tensor {subject!r} either."
            )
        elif anchor.startswith(names.PREFIXES["Stashed"]):
            hint = f" A stash is a ring in an IPU's memory: {RESTORED + anchor[10:]} is what comes out of it."
        raise popart_exception(f"Anchor tensor `{anchor}' not in Ir Tensors.{hint}{near(anchor, infos)}")


def anchor_alias(anchor: str, inputs: Container[str]) -> str:
    """The name of an anchor in the Program: its own, except for inputs, because the streams to the device have their
    names.
    """
    return f"Input___{anchor}" if anchor in inputs else anchor


def updated_when_copied(flow: DataFlow, trained: Collection[str], options: SessionOptions) -> set[str]:
    """The anchored weights that have been updated when they are copied to the host.

    Weights are copied when the backward pass is done, with Final when the step is. Without gradient accumulation the
    update is part of the backward pass, in a pipeline of that of the weight's stage; with it, the update comes after
    the last micro-batch. (Source: graphcore/popart, willow/src/popx/irlowering.cpp: copies wait for the weight's update
    and come with the highest stage that reads it; and tests/integration/external_tensorproto_data_test.py.)
    """
    early = not options.enableGradientAccumulation
    final = AnchorReturnTypeId.Final
    return {name for name in flow.anchors() if name in trained and (early or flow.art(name).id() is final)}


def aliasing(lowered: Lowered, anchors: Sequence[str]) -> Forward:
    """The forward function that also gives anchored inputs, under their aliases."""
    anchored = [anchor for anchor in anchors if anchor in lowered.inputs]
    if not anchored:
        return lowered.forward

    def forward(parameters: Tensors, inputs: Tensors, key: Any) -> dict[str, Any]:
        values = lowered.forward(parameters, inputs, key)
        return values | {anchor_alias(name, lowered.inputs): inputs[name] for name in anchored}

    return forward


SCHEDULES = {
    PipelineSchedule.Grouped: Order.GROUPED,
    PipelineSchedule.Interleaved: Order.INTERLEAVED,
    PipelineSchedule.Sequential: Order.GROUPED,  # Not pipelined at all.
}


@dataclass
class BuiltModel:
    """What a session works with: the program, its tensors, and the first values of weights and state."""

    program: Program
    lowered: Lowered
    rule: Rule | None
    infos: dict[str, TensorInfo]
    weights: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    """Optimizer state that starts from something else than its initial constant, by name."""
    wanted: dict[str, AnchorSpec]
    """The session's anchors, as they are to be returned."""
    derived: dict[str, Derived]
    """The anchors among them that the host computes."""
    settings: dict[str, VariableSettings] = field(default_factory=dict)
    observers: tuple[Observer, ...] = ()
    """The operators that print or abort."""
    replica_state: dict[str, ReplicaStateRows] = field(default_factory=dict)
    """Variables of which replicas keep values of their own."""

    def info(self, name: str) -> TensorInfo:
        """Type and shape of a tensor on the device. popart_exception for an unknown one."""
        if name not in self.infos:
            raise popart_exception(f"The session has no tensor {name!r}.")
        return self.infos[name]

    def observed(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors that observers look at, from what the program returned."""
        inputs = self.program.inputs
        return {
            o.tensor: given[anchor_alias(o.tensor, inputs)] for o in self.observers if o.tensor is not None
        }

    def anchor(self, name: str, given: Mapping[str, np.ndarray]) -> np.ndarray:
        """An anchor's values of one run, from what the program returned."""
        spec = self.wanted[name]
        if name in self.derived:
            assert self.rule is not None
            return returned(self.derived[name].value(given, self.rule), spec)
        value = given[spec.name]
        program = next(item for item in self.program.anchors if item.name == spec.name)
        return value if program == spec else returned(value, spec)

    @property
    def trained(self) -> list[str]:
        """Weights that the optimizer changes."""
        return [name for name, parameter in self.program.parameters.items() if parameter.trainable]


def _samples_per_micro_batch(lowered: Lowered, broadcast: Collection[str]) -> int | None:
    """The leading dimension that all inputs share, which PopART models use for samples. None if inputs differ."""
    leading = {spec.shape[0] for name, spec in lowered.inputs.items() if spec.shape and name not in broadcast}
    return leading.pop() if len(leading) == 1 else None


def build(model: Model, request: Request) -> BuiltModel:
    """Lower and check a placed model. popart_exception for what the model or its anchors cannot be."""
    from podrun.device.xla.clients import on_one_thread_device

    import_jax()
    with on_one_thread_device():
        return _built(model, request)


def _built(model: Model, request: Request) -> BuiltModel:
    flow, options, loss, optimizer = request.flow, request.options, request.loss, request.optimizer
    found = _read(model, request)
    lowered = found.lowered
    trained = trainable(lowered, loss, found.trained) if loss is not None else set()
    _check_clipping(optimizer, trained, options)
    rule = (
        optimizer.rule(_update_context(options, loss, request.own_copies)) if optimizer is not None else None
    )
    scale = _loss_scaling(optimizer)
    stashes = stashed(model.graph, options, training=loss is not None)
    infos = tensor_infos(lowered, trained, rule, loss, scale, options.enableGradientAccumulation)
    infos |= {RESTORED + n: infos[n] for n in stashes if n in infos}
    check_anchors(flow, infos)
    watching = seen(found.watching, infos)
    derived = _derived(lowered, request, trained, rule, found.grouped)
    scaling = _automatic_scaling(lowered, request, trained)
    lowered = returning(lowered, scaling)
    wanted = _wanted(flow, lowered, updated_when_copied(flow, trained, options))
    program = Program(
        name=request.name,
        forward=_forward(lowered, flow, watching, stashes),
        parameters=found.parameters(trained),
        inputs={n: InputSpec(spec, n in found.broadcast) for n, spec in lowered.inputs.items()},
        anchors=program_anchors(wanted, derived, _hidden(watching, lowered)),
        loss=in_float32(loss) if loss is not None and lowered.wide else loss,
        update=rule,
        loss_scaling=scale,
        automatic_scaling=scaling,
        state_updates=lowered.state_updates,
        uses_random=lowered.uses_random,
        rounds_stochastically=options.enableStochasticRounding,
        recompute=recompute_of(lowered.graph.nodes, options) if loss is not None else NOTHING,
        ipus_per_replica=_filled(request.ipus_per_replica),
        updates_each_micro_batch=options.overlaps_batches and bool(trained),
        metadata=_step_metadata(flow, lowered, found.broadcast, options),
        plans=plans_of(lowered.graph.nodes, options),
        transfers=_transfers(model.transfers, lowered, flow, options),
        **_arrangement(options, flow, stage_count(model.graph)),
    )
    return BuiltModel(
        program=program,
        lowered=lowered,
        rule=rule,
        infos=infos,
        weights=host_values(lowered.initial, found.grouped),
        state=found.state,
        wanted=wanted,
        derived=derived,
        settings=found.settings,
        observers=watching,
        replica_state=found.replica_state,
    )


def _forward(
    lowered: Lowered, flow: DataFlow, watching: Sequence[Observer], stash: Mapping[str, tuple[int, int]]
) -> Forward:
    """The function of a micro-batch, which also returns anchored, watched and restored tensors under separate names."""
    restored = {name: place for name, place in stash.items() if RESTORED + name in flow.anchors()}
    return restoring(aliasing(lowered, [*flow.anchors(), *observed_tensors(watching)]), restored)


def _automatic_scaling(lowered: Lowered, request: Request, trained: set[str]) -> AutomaticScaling | None:
    if request.loss is None or request.optimizer is None:
        return None
    able = differentiable(lowered, request.loss)
    return automatic_scaling(lowered, able, trained, request.loss, request.optimizer, request.options)


def _derived(
    lowered: Lowered,
    request: Request,
    trained: set[str],
    rule: Rule | None,
    grouped: Mapping[str, np.ndarray],
) -> dict[str, Derived]:
    """Anchors that the host computes."""
    weights = {n: lowered.parameters[n] for n in sorted(trained)}
    loss_type = scaling_type(lowered, request.loss) if request.loss is not None else "float32"
    derived = derived_anchors(request.flow.anchors(), weights, rule, grouped, loss_type)
    return derived | update_anchors(request.flow, weights, rule, request.options)


@dataclass(frozen=True, slots=True)
class _Read:
    """A model as one replica sees it, lowered, and what was taken out of it."""

    lowered: Lowered
    state: dict[str, np.ndarray]
    settings: dict[str, VariableSettings]
    grouped: dict[str, np.ndarray]
    replica_state: dict[str, ReplicaStateRows]
    group_of: dict[str, tuple[int, ...]]
    watching: tuple[Observer, ...]
    broadcast: frozenset[str]
    trained: frozenset[str] | None
    """The names of the trained parameters, if the model states them."""

    def parameters(self, trained: Collection[str]) -> dict[str, ParameterSpec]:
        """The program's parameters: whether they are trained, and which replicas share them."""
        specs = self.lowered.parameters
        return {n: ParameterSpec(spec, n in trained, self.group_of[n]) for n, spec in specs.items()}


def _read(model: Model, request: Request) -> _Read:
    options, loss = request.options, request.loss
    replicas, settings = options.getGlobalReplicationFactor(), settings_of(model)
    state, pruned = take_state(model)
    pruned, grouped = for_one_replica(pruned, settings, replicas)
    watching = observers_of(pruned.graph.nodes)
    lowered = lower_model(pruned, request, [*observed_tensors(watching), *model.updates])
    if loss is not None and options.ensureFp32LossScaleTensor:
        lowered = widening(lowered, loss, request.flow.anchors())
    needed = {name: None for node in lowered.graph.nodes for name in node.inputs}
    check_variables(grouped, lowered.parameters, needed)
    forward_only = request.as_in_training or options.createImplicitPipeliningFwdOnlyProgram
    replica_state = replica_state_rows(settings, lowered.state_updates, replicas, all_needed=forward_only)
    groups = {
        n: replica_state[n].program if n in replica_state else group_of(settings, n, replicas)
        for n in lowered.parameters
    }
    facts = (watching, model.broadcast, model.trained)
    return _Read(lowered, state, settings, grouped, replica_state, groups, *facts)


def _wanted(flow: DataFlow, lowered: Lowered, updated: Collection[str]) -> dict[str, AnchorSpec]:
    """The role of each anchor in the program. ``updated``: weights that are copied after their update."""
    return {
        a: flow.art(a).spec(UPDATED + a if a in updated else anchor_alias(a, lowered.inputs))
        for a in flow.anchors()
    }


def _step_metadata(
    flow: DataFlow, lowered: Lowered, broadcast: Collection[str], options: SessionOptions
) -> dict[str, Any]:
    """Facts about a step for summaries and tools."""
    overlapped = {BATCHES_PER_PASS: flow.batchesPerStep()} if options.overlaps_batches else {}
    return overlapped | {
        "anchors": flow.anchors(),
        "batches_per_step": flow.batchesPerStep(),
        "samples_per_micro_batch": _samples_per_micro_batch(lowered, broadcast),
    }


def _filled(ipus_per_replica: int) -> int:
    """The IPUs that fill machines: a power of two, so that a model of three IPUs becomes one of four with an
    idle one.
    """
    return 1 << (ipus_per_replica - 1).bit_length()


def _arrangement(options: SessionOptions, flow: DataFlow, stages: int) -> dict[str, Any]:
    """The parts of a Program that options determine: replicas, micro-batches, their order, locations in memory."""
    return {
        "replicas": options.getGlobalReplicationFactor(),
        # The batches of a step that are in a pipeline together are the micro-batches of one run.
        "accumulation_factor": flow.batchesPerStep() if options.overlaps_batches else options.micro_batches,
        # In one stage micro-batches of a batch follow each other, pipelined or not: then it is not, to the last bit.
        "pipelined": options.overlaps and (stages > 1 or options.overlaps_batches),
        "pipeline_schedule": SCHEDULES[options.pipelineSchedule],
        "phases": phases_of(options),
        "reduction": Reduction.MEAN if _running_mean(options) else Reduction.SUM,
        "locations": locations_of(options),
    }


BESIDE = {
    ExchangeStrategy.JustInTime: Beside.NOTHING,
    ExchangeStrategy.OverlapInnerLoop: Beside.MICRO_BATCHES,
    ExchangeStrategy.OverlapLoops: Beside.BATCHES,
    ExchangeStrategy.OverlapStep: Beside.BATCHES,
}
"""What runs while a tensor with an exchange strategy crosses."""


def _transfers(
    inputs: Mapping[str, str], lowered: Lowered, flow: DataFlow, options: SessionOptions
) -> Transfers | None:
    """How transfers are arranged: by ``inputs`` (exchange strategies by name), anchors and numIOTiles. None if nothing
    says so."""
    strategies = {name: ExchangeStrategy[strategy] for name, strategy in inputs.items()}
    for name in flow.anchors():
        strategies[anchor_alias(name, lowered.inputs)] = flow.art(name).exchangeStrategy()
    beside = {n: BESIDE[s] for n, s in strategies.items() if s is not ExchangeStrategy.JustInTime}
    return Transfers(options.numIOTiles, beside) if beside or options.numIOTiles else None


def _update_context(options: SessionOptions, loss: str | None, own_copies: bool) -> UpdateContext:
    return UpdateContext(
        replicas=options.getGlobalReplicationFactor(),
        accumulation=options.micro_batches,
        mean=options.accumulationAndReplicationReductionType is ReductionType.Mean,
        running=_running_mean(options),
        stochastic=options.enableStochasticRounding and loss is not None,
        automatic=options.automaticLossScalingSettings.enabled and loss is not None,
        own_copies=own_copies,
    )


def _running_mean(options: SessionOptions) -> bool:
    strategy = options.meanAccumulationAndReplicationReductionStrategy
    mean = options.accumulationAndReplicationReductionType is ReductionType.Mean
    return mean and strategy is MeanReductionStrategy.Running


def _hidden(watching: Sequence[Observer], lowered: Lowered) -> list[str]:
    """The additional anchors that printing and aborting need."""
    return [anchor_alias(item.tensor, lowered.inputs) for item in watching if item.tensor is not None]


def _check_clipping(optimizer: Optimizer | None, trainable: set[str], options: SessionOptions) -> None:
    """popart_exception for clipping of weights that are not trained, or with a schedule that cannot clip."""
    if optimizer is None or not optimizer.clip_norm_settings:
        return
    for settings in optimizer.clip_norm_settings:
        for name in settings.weightIds:
            if name not in trainable:
                raise popart_exception(
                    f"ClipNormSettings: could not find a varupdate for {name!r}; the weights that are "
                    f"trained are {sorted(trainable)}."
                )
    schedule = options.accumulateOuterFragmentSettings.schedule
    if options.enablePipelining and schedule is AccumulateOuterFragmentSchedule.Serial:
        raise popart_exception(
            "Gradient clipping of a pipelined program needs another accumulateOuterFragmentSettings.schedule "
            "than Serial."
        )
    if options.overlaps_batches:
        raise popart_exception(
            "Gradient clipping of a pipelined program needs gradient accumulation: without, stages update their "
            "weights at different times, and there is no norm over all of them.",
            hint="Set enableGradientAccumulation and accumulationFactor.",
        )


def _loss_scaling(optimizer: Optimizer | None) -> float | str:
    if optimizer is None:
        return 1.0
    value = optimizer.lossScaling
    return value.val() if value.isConst() else names.default_scalar("lossScaling")
