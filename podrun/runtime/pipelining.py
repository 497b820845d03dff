"""Pipelines: the stages of a model, and what PopART refuses of a pipelined session.

Source of what is refused: PopART's pipeline transform (graphcore/popart, willow/src/transforms/pipeline.cpp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from podrun.compiler.program import Forward, Tensors, tap
from podrun.core.errors import UsageError
from podrun.core.names import RESTORE, place_scopes
from podrun.runtime.graph import Node, OperatorGraph, reads
from podrun.runtime.settings import Recomputation, RunSettings
from podrun.runtime.tensor_names import PREFIXES
from podrun.runtime.words import Words

RESTORED = PREFIXES["Restored"]

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
_FLOATS = ("float32", "float16", "bfloat16")
"""Types of variables. Initializers of integer types are shapes and indices, that is, constants."""


def described(node: Node) -> str:
    """The node for messages, as PopART names it."""
    return f"{node.op_type} making {list(node.outputs)}"


def computing(graph: OperatorGraph) -> list[Node]:
    """The nodes that have a place: all but constants."""
    return [node for node in graph.nodes if node.op_type != "Constant"]


def check_pipeline(graph: OperatorGraph, settings: RunSettings, batches: int, *, training: bool) -> None:
    """UsageError for a placed model that cannot be pipelined. No-op where micro-batches do not overlap."""
    if not settings.overlaps:
        return
    if training or not settings.constant_weights:
        check_homes(graph)
    _check_depth(graph, settings, batches, training=training)
    if training and settings.checks_restores and settings.recomputation is Recomputation.PIPELINE:
        _check_restores(graph, settings.words)


def check_homes(graph: OperatorGraph) -> None:
    """UsageError unless each variable is on one virtual graph: pipelines copy results of stages, not variables."""
    for name, nodes in variable_readers(graph).items():
        home = nodes[0].ipu
        for node in nodes:
            if node.ipu != home:
                raise UsageError(
                    f"Can not copy variable tensor {name!r} between virtual graphs when pipelining: "
                    f"{described(nodes[0])} is on {home}, {described(node)} on {node.ipu}. All pipeline stages using "
                    "this tensor should be on the same graph.",
                    hint="Several stages may be on one virtual graph: put these stages there.",
                )


def variable_readers(graph: OperatorGraph) -> dict[str, list[Node]]:
    """The nodes that read each variable, in order."""
    variables = {name for name, value in graph.initializers.items() if value.dtype.name in _FLOATS}
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in sorted(variables & reads(node)):
            readers.setdefault(name, []).append(node)
    return readers


def with_stages(graph: OperatorGraph) -> OperatorGraph:
    """The graph whose nodes have a stage: their own, else the number of their IPU; neighbours on one IPU are one stage.

    UsageError for invalid stages.
    """
    nodes = computing(graph)
    stages = _named_stages(nodes) or [node.ipu for node in nodes]
    merged = iter(_merged(nodes, stages))
    return graph.each_node(lambda node: node if node.op_type == "Constant" else node.at(stage=next(merged)))


def with_cuts(graph: OperatorGraph) -> OperatorGraph:
    """The graph with cuts in the place of stages, for a model on several IPUs without pipelining.

    Cuts are the stages that the model would have in a pipeline, so that both compute the same pieces and agree to the
    bit: the program's stages, else its IPUs in order. A model that cannot be pipelined either way has no cuts.
    """
    chosen = _cuts(computing(graph))
    cuts = iter(chosen if len(set(chosen)) > 1 else ())
    return graph.each_node(
        lambda node: node.at(stage=None, cut=None if node.op_type == "Constant" else next(cuts, None))
    )


def _cuts(nodes: Sequence[Node]) -> list[int]:
    used = sorted({node.ipu for node in nodes})
    try:
        named = _named_stages(nodes)
        if named:
            return _merged(nodes, named)
    except UsageError:
        # Without pipelining PopART does not look at stages, so wrong ones count as none.
        pass
    try:
        return _merged(nodes, [used.index(node.ipu) for node in nodes])
    except UsageError:
        # Work returns to an IPU that it has left: there is no pipeline to agree with.
        return []


def _named_stages(nodes: Sequence[Node]) -> list[int]:
    """The stages that nodes have; empty if none has one. UsageError if only some have."""
    stages = [node.place.stage for node in nodes if node.place.stage is not None]
    if stages and len(stages) < len(nodes):
        unset = next(node for node in nodes if node.place.stage is None)
        raise UsageError(
            f"Only some ops have had their pipeline stage set. {described(unset)} has none.",
            hint="Set all or none.",
        )
    return stages


def _merged(nodes: Sequence[Node], stages: Sequence[int]) -> list[int]:
    """The stage of each node, where consecutive stages on one virtual graph count as one, as in PopART: they cannot
    overlap.

    UsageError for invalid stages.
    """
    _check_order(nodes, stages)
    homes: dict[int, tuple[int, Any]] = {}
    for node, stage in zip(nodes, stages, strict=True):
        before, first = homes.setdefault(stage, (node.ipu, node))
        if before != node.ipu:
            raise UsageError(
                f"Ops {described(first)} and {described(node)} have the same pipeline stage {stage}, but lie on "
                f"virtual graphs {before} and {node.ipu}: a stage has one virtual graph."
            )
    used = sorted(homes)
    if used != list(range(len(used))):
        raise UsageError(f"Pipeline stages must be numbered without gaps from 0; there are {used}.")
    merged = [0]
    for before, ipu in pairwise(homes[stage][0] for stage in used):
        merged.append(merged[-1] + (ipu != before))
    return [merged[stage] for stage in stages]


def _check_order(nodes: Sequence[Node], stages: Sequence[int]) -> None:
    sources = {output: (at, node) for node, at in zip(nodes, stages, strict=True) for output in node.outputs}
    for node, stage in zip(nodes, stages, strict=True):
        for name in node.inputs:
            if name in sources and sources[name][0] > stage:
                later, producer = sources[name]
                raise UsageError(
                    f"Tensor {name} is consumed in an earlier pipeline stage than it is produced: {described(node)} "
                    f"reads it in stage {stage}, {described(producer)} in stage {later}."
                )


def stage_count(graph: OperatorGraph) -> int:
    """Forward pipeline stages of a placed model."""
    return 1 + max((node.stage for node in graph.nodes), default=0)


def _check_depth(graph: OperatorGraph, settings: RunSettings, batches: int, *, training: bool) -> None:
    """UsageError if a pipeline has fewer micro-batches to work on than stages."""
    forward = stage_count(graph)
    stages = 2 * forward - 1 if training else forward
    accumulated = training and settings.accumulates
    depth, what = (
        (settings.accumulation, "gradient accumulation factor")
        if accumulated
        else (batches, "batchesPerStep")
    )
    if depth < stages:
        raise UsageError(
            f"For pipelining, depth ({what}) must equal at least the number of pipeline stages ({stages}); "
            f"it is {depth}."
        )


def _check_restores(graph: OperatorGraph, words: Words) -> None:
    """UsageError unless each stage is recomputed for at most one other stage of its virtual graph.

    With `Recomputation.PIPELINE` a virtual graph stashes its inputs. A stage's results are recomputed from them where
    a later stage on the same virtual graph, forward or backward, reads them.
    """
    placed = [(node, node.stage, node.ipu) for node in computing(graph)]
    last, lasting = stage_count(graph) - 1, _lasting(graph)
    for stage, ipu in sorted({(stage, ipu) for _, stage, ipu in placed}):
        near = [(node, at) for node, at, where in placed if where == ipu]
        own = [node for node, at in near if at == stage]
        here = {output for node, _ in near for output in node.outputs} | lasting
        for name in sorted({n for node in own for n in node.inputs if n} - here):
            again = _made_of(name, own)
            stages = {at for node, at in near if again.intersection(node.inputs)}
            stages |= {2 * last - at for node, at in near if again.intersection(_read_back(node))}
            stages -= {stage}
            if len(stages) > 1:
                raise UsageError(
                    f"{words.pipeline_recomputation} is not compatible with the partitioning of operations "
                    f"over pipeline stages. To-stash Tensor {name!r}, which comes to "
                    f"virtual graph {ipu} in stage {stage}, must be restored for recomputation of a descendent in "
                    f"stages {', '.join(map(str, sorted(stages)))}; more than one is not supported.",
                    hint="Put the stages that share what they make on different virtual graphs, or do not recompute.",
                )


def stashed(graph: OperatorGraph, settings: RunSettings, *, training: bool) -> dict[str, tuple[int, int]]:
    """The tensors that are stashed, because a later stage of their virtual graph reads them: stage and virtual graph.

    Gradients read what PopART's read. With `Recomputation.PIPELINE` these are inputs of the model, and checkpoints.
    """
    if not training or not settings.overlaps:
        return {}
    nodes = computing(graph)
    last = stage_count(graph) - 1
    homes: dict[str, tuple[int, int]] = {}
    latest: dict[tuple[str, int], int] = {}
    for node in nodes:
        stage, ipu = node.stage, node.ipu
        for name in node.inputs:
            homes.setdefault(name, (stage, ipu))
        homes |= dict.fromkeys(node.outputs, (stage, ipu))
        read = dict.fromkeys(node.inputs, stage) | dict.fromkeys(_read_back(node), 2 * last - stage)
        for name, when in read.items():
            latest[name, ipu] = max(when, latest.get((name, ipu), 0))
    lasting = _lasting(graph)
    if settings.recomputation is Recomputation.PIPELINE:
        lasting |= {name for node in nodes for name in node.outputs} - _checkpoints(nodes)
    return {
        name: (stage, ipu)
        for name, (stage, ipu) in homes.items()
        if name and name not in lasting and latest.get((name, ipu), stage) > stage
    }


def _checkpoints(nodes: list[Node]) -> set[str]:
    """Results of operators that are marked as kept, and what passes them on unchanged."""
    checkpoints: set[str] = set()
    for node in nodes:
        if node.hints.recompute is False or (
            node.kind == "Identity" and not checkpoints.isdisjoint(node.inputs)
        ):
            checkpoints.update(node.outputs)
    return checkpoints


def _lasting(graph: OperatorGraph) -> set[str]:
    """Tensors that need no restoring: variables and constants."""
    constants = (output for node in graph.nodes if node.op_type == "Constant" for output in node.outputs)
    return {*graph.initializers, *constants}


def _made_of(name: str, nodes: Sequence[Node]) -> set[str]:
    """The tensors that ``nodes``, in order, compute from a tensor."""
    derived = {name}
    for node in nodes:
        if not derived.isdisjoint(node.inputs):
            derived.update(output for output in node.outputs if output)
    return derived - {name}


def restoring(forward: Forward, restored: Mapping[str, tuple[int, int]]) -> Forward:
    """The forward function that also gives ``Restored___x`` of some tensors, as their backward stage restores them.

    ``restored``: as of `stashed`.
    """
    if not restored:
        return forward

    def run(parameters: Tensors, inputs: Tensors, key: object) -> dict[str, Any]:
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


def _read_back(node: Node) -> Iterable[str]:
    """The inputs and outputs of a node that its gradient reads."""
    if node.kind in _READ_NOTHING:
        return ()
    return node.outputs if node.kind in _READ_OUTPUTS else node.inputs
