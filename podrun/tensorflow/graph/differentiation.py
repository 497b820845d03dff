"""Where gradients were cut: the nodes between sources and targets move into a subgraph that JAX differentiates.

The node ``Differentiate`` gives the gradients, then the targets and every tensor of the subgraph that others read. If
two cuts share nodes (two losses of one model), the later one has copies, which XLA merges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from podrun.runtime.graph import Node, OperatorGraph, reads
from podrun.tensorflow.graph.builder import DOMAIN, GraphBuilder


def _between(builder: GraphBuilder, sources: Collection[str], targets: Sequence[str]) -> list[Node]:
    """The nodes on a path from a source to a target, in the order in which they were added."""
    depends: set[str] = set(sources)
    order = {id(node): i for i, node in enumerate(_all_nodes(builder))}
    for node in _all_nodes(builder):
        if not depends.isdisjoint(reads(node)):
            depends.update(node.outputs)
    needed: set[int] = set()
    waiting, seen = list(targets), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in depends:
            continue
        seen.add(name)
        maker = builder.originals.get(name)
        if maker is not None and not set(maker.outputs) <= set(sources):
            needed.add(id(maker))
            waiting.extend(reads(maker))
    return sorted((n for n in _all_nodes(builder) if id(n) in needed), key=lambda n: order[id(n)])


def _all_nodes(builder: GraphBuilder) -> Iterable[Node]:
    return list({id(node): node for node in builder.originals.values()}.values())


def _behind_others(builder: GraphBuilder, sources: Sequence[str]) -> list[str]:
    """The sources that depend on other sources."""
    depends: set[str] = set(sources)
    for node in _all_nodes(builder):
        if not depends.isdisjoint(reads(node)):
            depends.update(node.outputs)
    makers = ((name, builder.originals.get(name)) for name in sources)
    return [name for name, maker in makers if maker is not None and not depends.isdisjoint(reads(maker))]


def _behind(builder: GraphBuilder, names: Iterable[str]) -> set[int]:
    """The nodes that tensors depend on. Incoming gradients need theirs before the node that differentiates."""
    needed: set[int] = set()
    waiting = list(names)
    while waiting:
        maker = builder.originals.get(waiting.pop())
        if maker is not None and id(maker) not in needed:
            needed.add(id(maker))
            waiting.extend(reads(maker))
    return needed


def _shifted(path: Sequence[Node], names: Collection[str]) -> list[Node]:
    """The nodes where each of these tensors is its maker's result plus an input ``<name>/shift``, which is zero: the
    gradient of the input is that of the tensor, and gradients still pass through to what is before it.
    """
    nodes: list[Node] = []
    for node in path:
        own = [output for output in node.outputs if output in names]
        renamed = tuple(f"{o}/unshifted" if o in own else o for o in node.outputs)
        nodes.append(replace(node, outputs=renamed) if own else node)
        nodes += [
            Node("Podrun:watched", DOMAIN, f"{o}/shifted", (f"{o}/unshifted", f"{o}/shift"), (o,))
            for o in own
        ]
    return nodes


def _stopped(path: Sequence[Node], names: Collection[str]) -> list[Node]:
    """The nodes of ``path`` with a ``StopGradient`` behind the maker of each tensor in ``names``: gradients of
    the tensor do not reach what it was computed from.
    """
    nodes: list[Node] = []
    for node in path:
        own = [output for output in node.outputs if output in names]
        renamed = tuple(f"{o}/unstopped" if o in own else o for o in node.outputs)
        nodes.append(replace(node, outputs=renamed) if own else node)
        nodes += [Node("StopGradient", DOMAIN, f"{o}/stopped", (f"{o}/unstopped",), (o,)) for o in own]
    return nodes


def differentiate(
    builder: GraphBuilder,
    targets: Sequence[str],
    sources: Sequence[str],
    incoming: dict[int, str],
    zeros: Callable[[str], np.ndarray],
    stops: Collection[str] = (),
) -> list[str]:
    """Add the node; returns the names of the gradients, one for each source. ``zeros``: zeros like a source. ``stops``:
    tensors whose gradients do not reach what they were computed from."""
    behind = _behind_others(builder, sources)
    between = _between(builder, [s for s in sources if s not in behind], targets)
    cuts = {id(node) for node in between if node.op_type == "Differentiate"}
    path = _shifted(_stopped(between, stops), behind)
    shifts = {name: builder.constant(zeros(name)) for name in behind}
    label = builder.unique("gradients")
    gradients = [f"{label}:{i}" for i in range(len(sources))]
    staying = {id(node) for node in builder.nodes}
    names = {output for node in path for output in node.outputs}
    before = _behind(builder, incoming.values())
    taken = [
        n
        for n in builder.nodes
        if id(n) in staying
        and id(n) not in before
        and not names.isdisjoint(n.outputs)
        and (
            n.op_type != "Differentiate" or id(n) in cuts
        )  # An earlier cut gives some of these names as well.
    ]
    own = [output for node in taken for output in node.outputs]
    inner = tuple(f"{name}/shift" if name in shifts else name for name in sources)
    graph = OperatorGraph(f"{label}/forward", tuple(path), inner, (*targets, *own), {}, {})
    node = Node(
        "Differentiate",
        DOMAIN,
        label,
        (*(shifts.get(name, name) for name in sources), *incoming.values()),
        (*gradients, *own),
        {"graph": graph, "targets": len(targets), "sources": len(sources), "incoming": tuple(incoming)},
    )
    _replace(builder, taken, node)
    builder.originals.update(dict.fromkeys(gradients, node))
    return gradients


def _replace(builder: GraphBuilder, taken: Sequence[Node], node: Node) -> None:
    """Put ``node`` in the place of ``taken``: before it what it reads, after it what reads its results."""
    gone = {id(item) for item in taken}
    late = {output for item in taken for output in item.outputs}
    before: list[Node] = []
    after: list[Node] = []
    for item in builder.nodes:
        if id(item) in gone:
            continue
        if late.isdisjoint(reads(item)):
            before.append(item)
        else:
            late.update(item.outputs)
            after.append(item)
    builder.nodes = [*before, node, *after]


def trimmed(nodes: Sequence[Node], wanted: Collection[str]) -> list[Node]:
    """The nodes without what nothing reads, and ``Differentiate`` without outputs that nothing reads."""
    kept: list[Node] = []
    needed = set(wanted)
    for node in reversed(nodes):
        if needed.isdisjoint(node.outputs):
            continue
        if node.op_type == "Differentiate":
            node = _narrowed(node, needed)
        needed |= reads(node)
        kept.append(node)
    return kept[::-1]


def _narrowed(node: Node, needed: Collection[str]) -> Node:
    graph, sources = node["graph"], node["sources"]
    targets = graph.outputs[: node["targets"]]
    own = tuple(output for output in node.outputs[sources:] if output in needed)
    inner = replace(graph, outputs=(*targets, *own), nodes=tuple(trimmed(graph.nodes, {*targets, *own})))
    return replace(
        node, outputs=(*node.outputs[:sources], *own), attributes={**node.attributes, "graph": inner}
    )
