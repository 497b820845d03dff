"""From a model and a session's options to a Program for the compiler, with the TensorInfo of every tensor.

This is the runtime's only place that knows both sides: on the front ends' side the tensors with reserved names
(`podrun.runtime.tensor_names`), trainable weights and the optimizer's rule, on the compiler's side
`podrun.compiler.program.Program`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.compiler.program import (
    AnchorSpec,
    AutomaticScaling,
    Forward,
    InputSpec,
    ParameterSpec,
    Program,
    Tensors,
)
from podrun.core.errors import UsageError
from podrun.core.executable import BATCHES_PER_PASS, TensorSpec
from podrun.core.names import in_float32
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.settings import NOTHING
from podrun.runtime.derived_anchors import Derived, derived_anchors, program_anchors, returned, update_anchors
from podrun.runtime.graph import VariableGroups
from podrun.runtime.loss_scaling import automatic_scaling, returning, scaling_type, widening
from podrun.runtime.model_lowering import (
    Request,
    UpdateSource,
    differentiable,
    lower_model,
    take_state,
    trainable,
)
from podrun.runtime.observers import Observer, observers_of, seen
from podrun.runtime.observers import tensors as observed_tensors
from podrun.runtime.optimizers.hyperparameters import UpdateContext
from podrun.runtime.own_steps import check_written
from podrun.runtime.pipelining import RESTORED, restoring, stage_count, stashed
from podrun.runtime.planning import arrangement_of, filled_ipus, plans_of, recompute_of, transfers_of
from podrun.runtime.replica_groups import (
    ReplicaStateRows,
    check_variables,
    for_one_replica,
    group_of,
    host_values,
    replica_state_rows,
)
from podrun.runtime.settings import RunPlan, RunSettings
from podrun.runtime.tensor_infos import (
    UPDATED,
    anchor_alias,
    check_anchors,
    tensor_infos,
    updated_when_copied,
)
from podrun.runtime.tensor_names import default_scalar

if TYPE_CHECKING:
    from podrun.runtime.graph import Model
    from podrun.runtime.lowering import Lowered
    from podrun.runtime.optimizers.rules import Rule


def aliasing(lowered: Lowered, anchors: Sequence[str]) -> Forward:
    """The forward function that also gives anchored inputs, under their aliases."""
    anchored = [anchor for anchor in anchors if anchor in lowered.inputs]
    if not anchored:
        return lowered.forward

    def forward(parameters: Tensors, inputs: Tensors, key: Any) -> dict[str, Any]:
        values = lowered.forward(parameters, inputs, key)
        return values | {anchor_alias(name, lowered.inputs): inputs[name] for name in anchored}

    return forward


@dataclass
class BuiltModel:
    """What a session works with: the program, its tensors, and the first values of weights and state."""

    program: Program
    lowered: Lowered
    rule: Rule | None
    infos: dict[str, TensorSpec]
    weights: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    """Optimizer state that starts from something else than its initial constant, by name."""
    wanted: dict[str, AnchorSpec]
    """The session's anchors, as they are to be returned."""
    derived: dict[str, Derived]
    """The anchors among them that the host computes."""
    groups: Mapping[str, VariableGroups] = field(default_factory=dict)
    observers: tuple[Observer, ...] = ()
    """The operators that print or abort."""
    replica_state: dict[str, ReplicaStateRows] = field(default_factory=dict)
    """Variables of which replicas keep values of their own."""

    def info(self, name: str) -> TensorSpec:
        """Type and shape of a tensor on the device. UsageError for an unknown one."""
        if name not in self.infos:
            raise UsageError(f"The session has no tensor {name!r}.")
        return self.infos[name]

    def observed(self, anchors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors that observers look at, from what the program returned."""
        inputs = self.program.inputs
        return {
            o.tensor: anchors[anchor_alias(o.tensor, inputs)] for o in self.observers if o.tensor is not None
        }

    def anchor(self, name: str, anchors: Mapping[str, np.ndarray]) -> np.ndarray:
        """An anchor's values of one run, from what the program returned."""
        spec = self.wanted[name]
        if name in self.derived and self.rule is not None:
            return returned(self.derived[name].value(anchors, self.rule), spec)
        value = anchors[spec.name]
        program = next(item for item in self.program.anchors if item.name == spec.name)
        return value if program == spec else returned(value, spec)

    @property
    def trained(self) -> list[str]:
        """Weights that the optimizer changes."""
        return [name for name, parameter in self.program.parameters.items() if parameter.trainable]


def _samples_per_micro_batch(lowered: Lowered, broadcast: Collection[str]) -> int | None:
    """The leading dimension that all inputs share, which is that of the samples. None if inputs differ."""
    leading = {spec.shape[0] for name, spec in lowered.inputs.items() if spec.shape and name not in broadcast}
    return leading.pop() if len(leading) == 1 else None


def build_model(model: Model, request: Request) -> BuiltModel:
    """Lower and check a placed model. UsageError for what the model or its anchors cannot be."""
    plan, settings, loss = request.plan, request.settings, request.loss
    lowered = (model_read := _read(model, request)).lowered
    trained = trainable(lowered, loss, model_read.trained) if loss is not None else set()
    rule = _update_rule(request, trained)
    scale = _loss_scaling(request.optimizer)
    stashes = stashed(model.graph, settings, training=loss is not None)
    infos = tensor_infos(lowered, trained, rule, loss, scale, settings.accumulates)
    infos |= {RESTORED + n: infos[n] for n in stashes if n in infos}
    check_anchors(plan.returned, infos)
    watching = seen(model_read.watching, infos)
    derived = _derived(lowered, request, trained, rule, model_read.grouped)
    lowered = returning(lowered, scaling := _automatic_scaling(lowered, request, trained))
    wanted = _wanted(plan, lowered, updated_when_copied(plan, trained, settings))
    program = Program(
        name=request.name,
        forward=_forward(lowered, plan, watching, stashes),
        parameters=model_read.parameters(trained),
        inputs={n: InputSpec(spec, n in model_read.broadcast) for n, spec in lowered.inputs.items()},
        anchors=program_anchors(wanted, derived, _hidden(watching, lowered)),
        loss=in_float32(loss) if loss is not None and lowered.wide else loss,
        update=rule,
        loss_scaling=scale,
        automatic_scaling=scaling,
        state_updates=lowered.state_updates,
        shared_state=model.shared & lowered.state_updates.keys(),
        uses_random=lowered.uses_random,
        rounds_stochastically=settings.stochastic_rounding,
        recompute=recompute_of(lowered.graph.nodes, settings) if loss is not None else NOTHING,
        ipus_per_replica=filled_ipus(request.ipus_per_replica),
        updates_each_micro_batch=settings.overlaps_batches and bool(trained),
        metadata=_step_metadata(plan, lowered, model_read.broadcast, settings),
        plans=plans_of(lowered.graph.nodes, settings),
        transfers=transfers_of(model.transfers, lowered, plan, settings),
        **arrangement_of(settings, plan, stage_count(model.graph)),
    )
    return BuiltModel(
        program=program,
        lowered=lowered,
        rule=rule,
        infos=infos,
        weights=host_values(lowered.initial, model_read.grouped),
        state=model_read.state,
        wanted=wanted,
        derived=derived,
        groups=model.groups,
        observers=watching,
        replica_state=model_read.replica_state,
    )


def _update_rule(request: Request, trained: set[str]) -> Rule | None:
    """How the optimizer updates the variables. None without one; UsageError for clipping that does not fit them."""
    _check_clipping(request.optimizer, trained, request.settings)
    if request.optimizer is None:
        return None
    return request.optimizer.rule(_update_context(request.settings, request.loss, request.own_copies))


def _forward(
    lowered: Lowered, plan: RunPlan, watching: Sequence[Observer], stash: Mapping[str, tuple[int, int]]
) -> Forward:
    """The function of a micro-batch, which also returns anchored, watched and restored tensors under separate names."""
    restored = {name: place for name, place in stash.items() if RESTORED + name in plan.returned}
    return restoring(aliasing(lowered, [*plan.returned, *observed_tensors(watching)]), restored)


def _automatic_scaling(lowered: Lowered, request: Request, trained: set[str]) -> AutomaticScaling | None:
    if request.loss is None or request.optimizer is None or request.settings.loss_scale is None:
        return None
    able = differentiable(lowered, request.loss)
    return automatic_scaling(lowered, able, trained, request.loss, request.settings.loss_scale)


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
    derived = derived_anchors(request.plan.returned, weights, rule, grouped, loss_type)
    return derived | update_anchors(request.plan, weights, rule, request.settings)


@dataclass(frozen=True, slots=True)
class _Read:
    """A model as one replica sees it, lowered, and what was taken out of it."""

    lowered: Lowered
    state: dict[str, np.ndarray]
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
    settings, loss = request.settings, request.loss
    replicas, sharing = settings.replicas, model.groups
    state, pruned = take_state(model)
    pruned, grouped = for_one_replica(pruned, sharing, replicas)
    watching = observers_of(pruned.graph.nodes)
    lowered = lower_model(pruned, request, [*observed_tensors(watching), *model.updates])
    check_written(model.stepped, lowered.state_updates)
    if loss is not None and settings.wide_loss_scale:
        lowered = widening(lowered, loss, request.plan.returned, request.settings.words)
    needed = {name: None for node in lowered.graph.nodes for name in node.inputs}
    check_variables(grouped, lowered.parameters, needed)
    forward_only = request.as_in_training or settings.keeps_replica_state
    own = lowered.state_updates.keys() - model.shared
    replica_state = replica_state_rows(sharing, own, replicas, all_needed=forward_only)
    groups = {
        n: replica_state[n].program if n in replica_state else group_of(sharing, n, replicas)
        for n in lowered.parameters
    }
    facts = (watching, model.broadcast, model.trained)
    return _Read(lowered, state, grouped, replica_state, groups, *facts)


def _wanted(plan: RunPlan, lowered: Lowered, updated: Collection[str]) -> dict[str, AnchorSpec]:
    """The role of each anchor in the program. ``updated``: weights that are copied after their update."""
    return {
        name: kind.spec(UPDATED + name if name in updated else anchor_alias(name, lowered.inputs))
        for name, kind in plan.returned.items()
    }


def _step_metadata(
    plan: RunPlan, lowered: Lowered, broadcast: Collection[str], settings: RunSettings
) -> dict[str, Any]:
    """Facts about a step for summaries and tools."""
    overlapped = {BATCHES_PER_PASS: plan.batches} if settings.overlaps_batches else {}
    return overlapped | {
        "anchors": list(plan.returned),
        "batches_per_step": plan.batches,
        "samples_per_micro_batch": _samples_per_micro_batch(lowered, broadcast),
    }


def _update_context(settings: RunSettings, loss: str | None, own_copies: bool) -> UpdateContext:
    return UpdateContext(
        replicas=settings.replicas,
        accumulation=settings.micro_batches,
        mean=settings.mean,
        running=settings.mean and settings.running_mean,
        stochastic=settings.stochastic_rounding and loss is not None,
        automatic=settings.loss_scale is not None and loss is not None,
        own_copies=own_copies,
    )


def _hidden(watching: Sequence[Observer], lowered: Lowered) -> list[str]:
    """The additional anchors that printing and aborting need."""
    return [anchor_alias(item.tensor, lowered.inputs) for item in watching if item.tensor is not None]


def _check_clipping(optimizer: UpdateSource | None, trainable: set[str], settings: RunSettings) -> None:
    """UsageError for clipping of weights that are not trained, or with a schedule that cannot clip."""
    if optimizer is None or not optimizer.clipping:
        return
    for group in optimizer.clipping:
        for name in group.weights or ():
            if name not in trainable:
                raise UsageError(
                    f"ClipNormSettings: could not find a varupdate for {name!r}; the weights that are "
                    f"trained are {sorted(trainable)}."
                )
    if settings.pipelined and settings.clips_serially:
        raise UsageError(settings.words.serial_clipping)
    if settings.overlaps_batches:
        raise UsageError(
            "Gradient clipping of a pipelined program needs gradient accumulation: without, stages update their "
            "weights at different times, and there is no norm over all of them.",
            hint=settings.words.accumulate,
        )


def _loss_scaling(optimizer: UpdateSource | None) -> float | str:
    if optimizer is None:
        return 1.0
    scaling = optimizer.loss_scaling
    return scaling.value if scaling.constant else default_scalar("lossScaling")
