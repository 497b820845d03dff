"""From a model and a session's options to a Program for the compiler, with the TensorInfo of every tensor.

This is the front end's only place that knows both sides: reserved names, trainable weights and the
optimizer's rule on PopART's, `podrun.compiler.program.Program` on the compiler's.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.compiler.program import (
    FACTOR,
    RNG,
    AnchorSpec,
    Forward,
    InputSpec,
    ParameterSpec,
    Program,
    Tensors,
)
from podrun.compiler.program import PipelineSchedule as Order
from podrun.device.tiles.recompute import NOTHING
from podrun.executable import Reduction, TensorSpec, numpy_dtype
from podrun.popart import loader, names
from podrun.popart.builder import BROADCAST_KEY
from podrun.popart.dataflow import DataFlow
from podrun.popart.derived import Derived, derived_anchors, program_anchors, returned
from podrun.popart.enums import (
    AccumulateOuterFragmentSchedule,
    MeanReductionStrategy,
    PipelineSchedule,
    ReductionType,
)
from podrun.popart.errors import popart_exception
from podrun.popart.loss_scaling import FINAL, automatic_scaling, returning
from podrun.popart.memory_options import locations_of, recompute_of
from podrun.popart.observers import Observer, observers_of, seen
from podrun.popart.observers import tensors as observed_tensors
from podrun.popart.optimizers.base import Optimizer, UpdateContext
from podrun.popart.optimizers.sgd import SgdRule
from podrun.popart.options import SessionOptions
from podrun.popart.phases import phases_of
from podrun.popart.pipelining import RESTORED, restoring, stashed
from podrun.popart.tensor_info import InputShapeInfo, TensorInfo, data_type_of
from podrun.popart.tensor_proto import to_array
from podrun.popart.variable_settings import (
    check_variables,
    for_one_replica,
    group_of,
    host_values,
    settings_of,
)
from podrun.popart.variables import VariableSettings

if TYPE_CHECKING:
    from onnx import ModelProto

    from podrun.popart.lowering import Lowered
    from podrun.popart.optimizers.rules import Rule

SCHEDULES = {
    PipelineSchedule.Grouped: Order.GROUPED,
    PipelineSchedule.Interleaved: Order.INTERLEAVED,
    PipelineSchedule.Sequential: Order.GROUPED,  # Not pipelined at all.
}
GRADIENT = names.PREFIXES["Gradient"]
UPDATED = names.PREFIXES["UpdatedVar"]


@dataclass
class BuiltModel:
    """What a session works with: the program, its tensors, and the values that weights and state start
    from.
    """

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
    """Those of them that are worked out on the host."""
    settings: dict[str, VariableSettings] = field(default_factory=dict)
    observers: tuple[Observer, ...] = ()
    """What prints or aborts."""

    def observed(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors that observers look at, from what the program gave."""
        inputs = self.program.inputs
        return {
            o.tensor: given[anchor_alias(o.tensor, inputs)] for o in self.observers if o.tensor is not None
        }

    def anchor(self, name: str, given: Mapping[str, np.ndarray]) -> np.ndarray:
        """An anchor's values of one run, from those that the program gave."""
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
    """The leading dimension that all inputs share: PopART models use it for samples. None if they differ."""
    leading = {spec.shape[0] for name, spec in lowered.inputs.items() if spec.shape and name not in broadcast}
    return leading.pop() if len(leading) == 1 else None


def metadata(model: ModelProto, key: str, default: Any) -> Any:
    """A podrun entry of a model's metadata_props."""
    for entry in model.metadata_props:
        if entry.key == key:
            return json.loads(entry.value)
    return default


def build(
    model: ModelProto,
    flow: DataFlow,
    options: SessionOptions,
    shapes: InputShapeInfo,
    ipus_per_replica: int,
    name: str,
    loss: str | None = None,
    optimizer: Optimizer | None = None,
) -> BuiltModel:
    """Lower and check a placed model. popart_exception for what the model or its anchors cannot be."""
    _compute_in_the_callers_thread()
    state, pruned = _take_state(model)
    replicas, settings = options.getGlobalReplicationFactor(), settings_of(model)
    pruned, grouped = for_one_replica(pruned, settings, replicas)
    watching = observers_of(pruned)
    lowered = _lower(pruned, flow, options, shapes, loss, observed_tensors(watching))
    needed = {name: None for node in lowered.graph.nodes for name in node.inputs}
    check_variables(grouped, lowered.parameters, lowered.state_updates, settings, replicas, needed)
    trainable = _trainable(lowered, loss) if loss is not None else set()
    mean = options.accumulationAndReplicationReductionType is ReductionType.Mean
    strategy = options.meanAccumulationAndReplicationReductionStrategy
    running = mean and strategy is MeanReductionStrategy.Running
    context = UpdateContext(
        replicas=options.getGlobalReplicationFactor(),
        accumulation=options.micro_batches,
        mean=mean,
        running=running,
        stochastic=options.enableStochasticRounding and loss is not None,
        automatic=options.automaticLossScalingSettings.enabled and loss is not None,
    )
    rule = optimizer.rule(context) if optimizer is not None else None
    _check_clipping(optimizer, trainable, options)
    infos = {tensor: _info(spec) for tensor, spec in lowered.tensors.items()}
    _add_reserved(
        infos,
        lowered,
        trainable,
        rule,
        loss,
        _loss_scaling(optimizer),
        options.enableGradientAccumulation,
    )
    kept = stashed(model, options, training=loss is not None)
    infos |= {RESTORED + n: infos[n] for n in kept if n in infos}
    _check_anchors(flow, infos)
    kept = {n: place for n, place in kept.items() if RESTORED + n in flow.anchors()}
    broadcast = set(metadata(model, BROADCAST_KEY, []))
    weights = {n: lowered.parameters[n] for n in trainable}
    watching = seen(watching, infos)
    derived = derived_anchors(flow.anchors(), weights, rule, grouped)
    scaling = None
    if loss is not None and optimizer is not None:
        able = _differentiable(lowered, loss)
        scaling = automatic_scaling(lowered, able, trainable, loss, optimizer, options, flow)
        lowered = returning(lowered, scaling)
    wanted = {a: flow.art(a).spec(anchor_alias(a, lowered.inputs)) for a in flow.anchors()}
    program = Program(
        name=name,
        forward=restoring(_aliasing(lowered, [*flow.anchors(), *observed_tensors(watching)]), kept),
        parameters={
            n: ParameterSpec(spec, n in trainable, group_of(settings, n, replicas))
            for n, spec in lowered.parameters.items()
        },
        inputs={n: InputSpec(spec, n in broadcast) for n, spec in lowered.inputs.items()},
        anchors=program_anchors(wanted, derived, _hidden(watching, lowered)),
        replicas=context.replicas,
        ipus_per_replica=ipus_per_replica,
        # The batches of a step that are in a pipeline together are the micro-batches of one run.
        accumulation_factor=flow.batchesPerStep() if options.overlaps_batches else context.accumulation,
        pipelined=options.overlaps,
        pipeline_schedule=SCHEDULES[options.pipelineSchedule],
        phases=phases_of(options),
        updates_each_micro_batch=options.overlaps_batches and bool(trainable),
        loss=loss,
        update=rule,
        loss_scaling=_loss_scaling(optimizer),
        reduction=Reduction.MEAN if running else Reduction.SUM,
        automatic_scaling=scaling,
        state_updates=lowered.state_updates,
        uses_random=lowered.uses_random,
        recompute=recompute_of(lowered.graph.nodes, options) if loss is not None else NOTHING,
        locations=locations_of(options),
        metadata={
            "anchors": flow.anchors(),
            "batches_per_step": flow.batchesPerStep(),
            "samples_per_micro_batch": _samples_per_micro_batch(lowered, broadcast),
        },
    )
    start = host_values(lowered.initial, grouped)
    return BuiltModel(program, lowered, rule, infos, start, state, wanted, derived, settings, watching)


def _hidden(watching: Sequence[Observer], lowered: Lowered) -> list[str]:
    """The anchors that printing and aborting need."""
    return [anchor_alias(item.tensor, lowered.inputs) for item in watching if item.tensor is not None]


def _compute_in_the_callers_thread() -> None:
    """Let JAX run what it is given in the thread that gives it, as machines of their own process do.

    Otherwise a thread of XLA's own may still be giving buffers back to Python when a script ends, which
    aborts the process. And let XLA count one thread, as in machines of their own process: it divides some sums by the
    number that it has, so that bits would depend on the host. Without effect if the script has computed with JAX
    before.
    """
    import importlib
    import os

    os.environ.setdefault("NPROC", "1")  # Read by XLA when its client starts.
    config: Any = importlib.import_module("jax").config
    config.update("jax_cpu_enable_async_dispatch", False)


def _check_clipping(optimizer: Optimizer | None, trainable: set[str], options: SessionOptions) -> None:
    """popart_exception for clipping of weights that are not trained, or with a schedule that has no place
    for it.
    """
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


def anchor_alias(anchor: str, inputs: Container[str]) -> str:
    """The name an anchor has in the Program: its own, but for inputs, whose names the streams to the device
    have.
    """
    return f"Input___{anchor}" if anchor in inputs else anchor


def _aliasing(lowered: Lowered, anchors: Sequence[str]) -> Forward:
    """The forward function that also gives anchored inputs, under their aliases."""
    anchored = [anchor for anchor in anchors if anchor in lowered.inputs]
    if not anchored:
        return lowered.forward

    def forward(parameters: Tensors, inputs: Tensors, key: Any) -> dict[str, Any]:
        values = lowered.forward(parameters, inputs, key)
        return values | {anchor_alias(name, lowered.inputs): inputs[name] for name in anchored}

    return forward


def _take_state(model: ModelProto) -> tuple[dict[str, np.ndarray], ModelProto]:
    """Optimizer state that modelToHost wrote into a model, and the model without it."""
    from onnx import ModelProto

    pruned = ModelProto()
    pruned.CopyFrom(model)
    state = {}
    kept = []
    for tensor in pruned.graph.initializer:
        if tensor.name.startswith(names.STATE_PREFIXES):
            state[tensor.name] = to_array(tensor)
        else:
            kept.append(tensor)
    inputs = [value for value in pruned.graph.input if value.name not in state]
    if state:
        del pruned.graph.initializer[:]
        pruned.graph.initializer.extend(kept)
        del pruned.graph.input[:]
        pruned.graph.input.extend(inputs)
    return state, pruned


def _lower(
    model: ModelProto,
    flow: DataFlow,
    options: SessionOptions,
    shapes: InputShapeInfo,
    loss: str | None,
    observed: Sequence[str] = (),
) -> Lowered:
    from podrun.popart.lowering import lower

    known = _tensors_of(model)
    wanted = dict.fromkeys(anchor for anchor in (*flow.anchors(), *observed) if anchor in known)
    if loss is not None:
        if loss not in known:
            raise popart_exception(
                f"The loss {loss!r} is no tensor of the model's main graph.{_near(loss, known)}"
            )
        wanted[loss] = None
    for anchor in flow.anchors():
        subject = anchor.removeprefix(GRADIENT).removeprefix(RESTORED)
        if subject != anchor and subject in known:
            wanted[subject] = None
    if not wanted:
        raise popart_exception(
            "All operations pruned: neither an anchor nor a loss needs any tensor of the model."
        )
    fixed = loader.input_shapes(model, shapes)
    casting = options.enableSupportedDataTypeCasting

    def lowered(outputs: list[str]) -> Lowered:
        return lower(
            model,
            training=loss is not None,
            outputs=outputs,
            input_shapes=fixed,
            casting=casting,
            replicas=options.getGlobalReplicationFactor(),
        )

    found = lowered(list(wanted))
    extra = [target for target in found.state_updates.values() if target not in wanted]
    if extra:
        found = lowered([*wanted, *extra])
    if loss is not None and found.tensors[loss].size != 1:
        raise popart_exception(
            f"The loss must be a scalar tensor; {loss!r} has shape {list(found.tensors[loss].shape)}. Reduce "
            "it, for "
            "example with aiGraphcore.identityloss."
        )
    return found


def _tensors_of(model: ModelProto) -> set[str]:
    graph = model.graph
    found = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    return found | {output for node in graph.node for output in node.output if output}


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=2)
    return f" Did you mean {' or '.join(repr(item) for item in near)}?" if near else ""


def _info(spec: TensorSpec) -> TensorInfo:
    return TensorInfo(data_type_of(numpy_dtype(spec.dtype)), spec.shape)


def _trainable(lowered: Lowered, loss: str) -> set[str]:
    """Floating-point parameters that the loss depends on, other than through Detach or the statistics of a
    norm.
    """
    makers = {output: node for node in lowered.graph.nodes for output in node.outputs if output}
    reached: set[str] = set()
    queue = [loss]
    while queue:
        name = queue.pop()
        if name in reached:
            continue
        reached.add(name)
        node = makers.get(name)
        if node is None or node.op_type in ("Detach", "Shape", "Size"):
            continue
        queue.extend(item for item in node.inputs if item)
        queue.extend(_captured(node))
    return {
        name
        for name, spec in lowered.parameters.items()
        if name in reached and numpy_dtype(spec.dtype).kind == "f" and name not in lowered.state_updates
    } | {
        name
        for name, spec in lowered.parameters.items()
        if name in reached and spec.dtype == "bfloat16" and name not in lowered.state_updates
    }


def _captured(node: Any) -> set[str]:
    from podrun.popart.lowering.graph import subgraphs

    found: set[str] = set()
    for graph in subgraphs(node):
        found |= graph.captures()
    return found


def _add_reserved(
    infos: dict[str, TensorInfo],
    lowered: Lowered,
    trainable: set[str],
    rule: Rule | None,
    loss: str | None,
    loss_scaling: float | str,
    accumulates: bool,
) -> None:
    """Infos of gradients, updated weights, optimizer state and streamed scalars."""
    if loss is None:
        return
    for name in _differentiable(lowered, loss):
        infos[GRADIENT + name] = infos[name]
    if isinstance(loss_scaling, str):
        infos[loss_scaling] = TensorInfo("FLOAT", [])
        if rule is not None and rule.context.automatic:
            infos |= {name: TensorInfo("FLOAT", []) for name in (FACTOR, FINAL)}
    if rule is not None:
        groups = range(len(rule.optimizer.clip_norm_settings))
        infos |= {f"GlobalNorm___{number}": TensorInfo("FLOAT", []) for number in groups}
    for name in trainable:
        infos[UPDATED + name] = infos[name]
        if rule is not None and isinstance(rule, SgdRule) and rule.form(name) == 0:
            kind = data_type_of(numpy_dtype(rule.gradient_dtype(lowered.parameters[name])))
            infos[names.PREFIXES["FinalReducedGrad"] + name] = TensorInfo(kind, infos[name].shape())
        if accumulates and rule is not None and not (isinstance(rule, SgdRule) and rule.form(name) == 1):
            kind = data_type_of(numpy_dtype(rule.gradient_dtype(lowered.parameters[name])))
            infos[names.PREFIXES["Accum"] + name] = TensorInfo(kind, infos[name].shape())
        if rule is not None:
            for spec, _ in rule.state(lowered.parameters[name]).values():
                infos[spec.name] = _info(spec)
            for scalar in rule.scalars(name).keys() - {RNG}:
                infos[scalar] = TensorInfo("FLOAT", [])


def _differentiable(lowered: Lowered, loss: str) -> set[str]:
    """Floating-point tensors from which a path leads to the loss, and the loss itself."""
    makers = {output: node for node in lowered.graph.nodes for output in node.outputs if output}
    reached: set[str] = set()
    queue = [loss]
    while queue:
        name = queue.pop()
        spec = lowered.tensors.get(name)
        if name in reached or spec is None or np.dtype(numpy_dtype(spec.dtype)).kind in "iub":
            continue
        reached.add(name)
        node = makers.get(name)
        if node is not None and node.op_type not in ("Detach", "Shape", "Size"):
            queue.extend(item for item in node.inputs if item)
            queue.extend(_captured(node))
    return reached


def _check_anchors(flow: DataFlow, infos: Mapping[str, TensorInfo]) -> None:
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
        raise popart_exception(
            f"Anchor tensor {anchor!r} is not in the IR tensors.{hint}{_near(anchor, infos)}"
        )


def _loss_scaling(optimizer: Optimizer | None) -> float | str:
    if optimizer is None:
        return 1.0
    value = optimizer.lossScaling
    return value.val() if value.isConst() else names.default_scalar("lossScaling")
