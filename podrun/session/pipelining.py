"""Pipelines: the stages of a model, and what PopART refuses of a pipelined session.

Source of what is refused: PopART's pipeline transform (graphcore/popart, willow/src/transforms/pipeline.cpp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from podrun.compiler.program import Forward, Tensors, tap
from podrun.core.names import RESTORE, place_scopes
from podrun.session import names
from podrun.session.enums import RecomputationType
from podrun.session.exceptions import popart_exception
from podrun.session.names import CUT, PIPELINE_STAGE, VIRTUAL_GRAPH
from podrun.session.session_options import SessionOptions
from podrun.session.virtual_graphs import (
    integer_attribute,
    kind_of,
    label,
    place_attribute,
    remove_attributes,
    set_attribute,
)

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

RESTORED = names.PREFIXES["Restored"]

# fmt: off
_READ_NOTHING = frozenset({
    "Add", "Cast", "Concat", "Detach", "Expand", "Flatten", "Identity", "IdentityLoss", "Neg", "Pad", "ReduceMean",
    "ReduceSum", "Reshape", "Slice", "Split", "Squeeze", "Sub", "Sum", "Transpose", "Unsqueeze",
})
"""Operators whose gradient needs neither their inputs nor their outputs."""
_READ_OUTPUTS = frozenset({
    "BatchNormalization", "Dropout", "Elu", "Exp", "GRU", "GroupNormalization", "InstanceNormalization", "LSTM",
    "LeakyRelu", "MaxPool", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softmax", "Sqrt", "Tanh",
})
"""Operators whose gradient reads their outputs; the gradient of all others reads their inputs."""
# fmt: on
_FLOATS = frozenset({1, 10, 16})
"""FLOAT, FLOAT16 and BFLOAT16 in ONNX. Initializers of integer types are shapes and indices, that is, constants."""


def check_pipeline(model: ModelProto, options: SessionOptions, batches: int, *, training: bool) -> None:
    """popart_exception for a placed model that cannot be pipelined. No-op where micro-batches do not overlap."""
    if not options.overlaps:
        return
    if training or not options.constantWeights:
        _check_variables(model)
    _check_depth(model, options, batches, training=training)
    implicit = not (options.enableExplicitMainLoops or options.explicitRecomputation)
    if training and implicit and options.autoRecomputation is RecomputationType.Pipeline:
        _check_restores(model)


def _check_variables(model: ModelProto) -> None:
    """popart_exception unless each variable is on one virtual graph: pipelines copy results of stages, not
    variables.
    """
    for name, nodes in variable_readers(model).items():
        homes = [_virtual_graph(node) for node in nodes]
        for node, home in zip(nodes, homes, strict=True):
            if home != homes[0]:
                raise popart_exception(
                    f"Can not copy variable tensor {name!r} between virtual graphs when pipelining: {label(nodes[0])} "
                    f"is on {homes[0]}, {label(node)} on {home}. All pipeline stages using this tensor should be on "
                    "the same graph.",
                    hint="Several stages may be on one virtual graph: put these stages there.",
                )


def variable_readers(model: ModelProto) -> dict[str, list[NodeProto]]:
    """The nodes that read each variable, in order."""
    variables = {tensor.name for tensor in model.graph.initializer if tensor.data_type in _FLOATS}
    found: dict[str, list[NodeProto]] = {}
    for node in model.graph.node:
        for name in sorted(variables.intersection(_reads(node))):
            found.setdefault(name, []).append(node)
    return found


def _reads(node: NodeProto) -> Iterator[str]:
    """The inputs of a node, and everything that its subgraphs take from outside."""
    yield from node.input
    for attribute in node.attribute:
        graphs: list[GraphProto] = [attribute.g, *attribute.graphs]
        for inner in (inner for graph in graphs for inner in graph.node):
            yield from _reads(inner)


def set_stages(nodes: list[NodeProto]) -> None:
    """Give every node (changed in place) a stage: its own, else the number of its IPU; neighbours on one IPU are one
    stage.

    popart_exception for invalid stages.
    """
    counted = [node for node in nodes if node.op_type != "Constant"]
    stages = _named_stages(counted) or {id(node): _virtual_graph(node) for node in counted}
    for node, stage in zip(counted, _merged(counted, stages), strict=True):
        set_attribute(node, PIPELINE_STAGE, stage)


def set_cuts(nodes: list[NodeProto]) -> None:
    """Put cuts in the place of stages (nodes are changed in place), for a model on several IPUs without pipelining.

    Cuts are the stages that the model would have in a pipeline, so that both compute the same pieces and agree to the
    bit: the program's stages, else its IPUs in order. A model that cannot be pipelined either way has no cuts.
    """
    counted = [node for node in nodes if node.op_type != "Constant"]
    cuts = _cuts(counted)
    for node in nodes:
        remove_attributes(node, PIPELINE_STAGE)
    if len(set(cuts)) > 1:
        for node, cut in zip(counted, cuts, strict=True):
            set_attribute(node, CUT, cut)


def _cuts(nodes: list[NodeProto]) -> list[int]:
    used = sorted({_virtual_graph(node) for node in nodes})
    try:
        named = _named_stages(nodes)
        if named:
            return _merged(nodes, named)
    except popart_exception:
        # Without pipelining PopART does not look at stages, so wrong ones count as none.
        pass
    try:
        return _merged(nodes, {id(node): used.index(_virtual_graph(node)) for node in nodes})
    except popart_exception:
        # Work returns to an IPU that it has left: there is no pipeline to agree with.
        return []


def _named_stages(nodes: list[NodeProto]) -> dict[int, int]:
    """Stages by node (its identity) where nodes have some; popart_exception if only some have."""
    named = {id(node): place_attribute(node, PIPELINE_STAGE) for node in nodes}
    found = {node: stage for node, stage in named.items() if stage is not None}
    if found and len(found) < len(nodes):
        unset = next(node for node in nodes if id(node) not in found)
        raise popart_exception(
            f"Only some ops have had their pipeline stage set. {label(unset)} has none.",
            hint="Set all or none.",
        )
    return found


def _virtual_graph(node: NodeProto) -> int:
    return integer_attribute(node, VIRTUAL_GRAPH) or 0


def _merged(nodes: list[NodeProto], stages: Mapping[int, int]) -> list[int]:
    """The stage of each node, where consecutive stages on one virtual graph count as one, as in PopART: they cannot
    overlap.

    popart_exception for invalid stages.
    """
    _check_order(nodes, stages)
    homes: dict[int, tuple[int, Any]] = {}
    for node in nodes:
        stage, ipu = stages[id(node)], _virtual_graph(node)
        before, first = homes.setdefault(stage, (ipu, node))
        if before != ipu:
            raise popart_exception(
                f"Ops {label(first)} and {label(node)} have the same pipeline stage {stage}, but lie on virtual graphs "
                f"{before} and {ipu}: a stage has one virtual graph."
            )
    used = sorted(homes)
    if used != list(range(len(used))):
        raise popart_exception(f"Pipeline stages must be numbered without gaps from 0; there are {used}.")
    merged = [0]
    for before, ipu in pairwise(homes[stage][0] for stage in used):
        merged.append(merged[-1] + (ipu != before))
    return [merged[stages[id(node)]] for node in nodes]


def _check_order(nodes: list[NodeProto], stages: Mapping[int, int]) -> None:
    made = {output: (stages[id(node)], node) for node in nodes for output in node.output}
    for node in nodes:
        for name in node.input:
            if name in made and made[name][0] > stages[id(node)]:
                stage, producer = made[name]
                raise popart_exception(
                    f"Tensor {name} is consumed in an earlier pipeline stage than it is produced: {label(node)} reads "
                    f"it in stage {stages[id(node)]}, {label(producer)} in stage {stage}."
                )


def stage_count(model: ModelProto) -> int:
    """Forward pipeline stages of a placed model."""
    found = [integer_attribute(node, PIPELINE_STAGE) for node in model.graph.node]
    return 1 + max((stage for stage in found if stage is not None), default=0)


def _check_depth(model: ModelProto, options: SessionOptions, batches: int, *, training: bool) -> None:
    """popart_exception if a pipeline has fewer micro-batches to work on than stages."""
    forward = stage_count(model)
    stages = 2 * forward - 1 if training else forward
    accumulated = training and options.enableGradientAccumulation
    depth, what = (
        (options.accumulationFactor, "gradient accumulation factor")
        if accumulated
        else (batches, "batchesPerStep")
    )
    if depth < stages:
        raise popart_exception(
            f"For pipelining, depth ({what}) must equal at least the number of pipeline stages ({stages}); "
            f"it is {depth}."
        )


def _check_restores(model: ModelProto) -> None:
    """popart_exception unless each stage is recomputed for at most one other stage of its virtual graph.

    With RecomputationType.Pipeline a virtual graph stashes its inputs. A stage's results are recomputed from them where
    a later stage on the same virtual graph, forward or backward, reads them.
    """
    placed = [(node, *_place(node)) for node in model.graph.node if node.op_type != "Constant"]
    last, lasting = stage_count(model) - 1, _lasting(model)
    for stage, ipu in sorted({(stage, ipu) for _, stage, ipu in placed}):
        near = [(node, at) for node, at, where in placed if where == ipu]
        own = [node for node, at in near if at == stage]
        here = {output for node, _ in near for output in node.output} | lasting
        for name in sorted({n for node in own for n in node.input if n} - here):
            again = _made_of(name, own)
            stages = {at for node, at in near if again.intersection(node.input)}
            stages |= {2 * last - at for node, at in near if again.intersection(_read_back(node))}
            stages -= {stage}
            if len(stages) > 1:
                raise popart_exception(
                    "SessionOptions::autoRecomputation == RecomputationType::Pipeline is not compatible with the "
                    f"partitioning of operations over pipeline stages. To-stash Tensor {name!r}, which comes to "
                    f"virtual graph {ipu} in stage {stage}, must be restored for recomputation of a descendent in "
                    f"stages {', '.join(map(str, sorted(stages)))}; more than one is not supported.",
                    hint="Put the stages that share what they make on different virtual graphs, or do not recompute.",
                )


def stashed(model: ModelProto, options: SessionOptions, *, training: bool) -> dict[str, tuple[int, int]]:
    """The tensors that are stashed, because a later stage of their virtual graph reads them: stage and virtual graph.

    Gradients read what PopART's read. With RecomputationType.Pipeline only inputs of the model are stashed as such.
    """
    if not training or not options.overlaps:
        return {}
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    last = stage_count(model) - 1
    homes: dict[str, tuple[int, int]] = {}
    latest: dict[tuple[str, int], int] = {}
    for node in nodes:
        stage, ipu = _place(node)
        for name in node.input:
            homes.setdefault(name, (stage, ipu))
        homes |= dict.fromkeys(node.output, (stage, ipu))
        read = dict.fromkeys(node.input, stage) | dict.fromkeys(_read_back(node), 2 * last - stage)
        for name, when in read.items():
            latest[name, ipu] = max(when, latest.get((name, ipu), 0))
    lasting = _lasting(model)
    if options.autoRecomputation is RecomputationType.Pipeline:
        lasting |= {name for node in nodes for name in node.output}
    return {
        name: (stage, ipu)
        for name, (stage, ipu) in homes.items()
        if name and name not in lasting and latest.get((name, ipu), stage) > stage
    }


def _place(node: NodeProto) -> tuple[int, int]:
    """Stage and virtual graph."""
    return integer_attribute(node, PIPELINE_STAGE) or 0, _virtual_graph(node)


def _lasting(model: ModelProto) -> set[str]:
    """Tensors that need no restoring: variables and constants."""
    constants = (output for node in model.graph.node if node.op_type == "Constant" for output in node.output)
    return {tensor.name for tensor in model.graph.initializer}.union(constants)


def _made_of(name: str, nodes: list[NodeProto]) -> set[str]:
    """The tensors that ``nodes``, in order, compute from a tensor."""
    found = {name}
    for node in nodes:
        if not found.isdisjoint(node.input):
            found.update(output for output in node.output if output)
    return found - {name}


def restoring(forward: Forward, restored: Mapping[str, tuple[int, int]]) -> Forward:
    """The forward function that also gives ``Restored___x`` of some tensors, as their backward stage restores them.

    ``restored``: as of `stashed`.
    """
    if not restored:
        return forward

    def run(parameters: Tensors, inputs: Tensors, key: Any) -> dict[str, Any]:
        import jax

        values = forward(parameters, inputs, key)
        for name, (stage, ipu) in restored.items():
            with contextlib.ExitStack() as scopes:
                for scope in (*place_scopes(ipu, stage), RESTORE):
                    scopes.enter_context(jax.named_scope(scope))
                value = inputs[name] if name in inputs else values[name]
                values[RESTORED + name] = tap(RESTORED + name, value)
        return values

    return run


def _read_back(node: NodeProto) -> Iterable[str]:
    """The inputs and outputs of a node that its gradient reads."""
    kind = kind_of(node)
    if kind in _READ_NOTHING:
        return ()
    return node.output if kind in _READ_OUTPUTS else node.input
