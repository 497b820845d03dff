"""Which variables stay equal on all replicas: those of which every new value is computed from equal values alone.

All replicas start from the same values. What an infeed gives, random numbers and a replica's own number differ between
replicas; a sum or mean over all of them is equal again. So weights that a step updates with reduced gradients stay
equal, and a machine needs one copy of each; running statistics of batches do not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from podrun.runtime.graph import Node, reads, subgraphs
from podrun.tensorflow.operators.table import HANDLERS

_MEET = frozenset({"Podrun:cross_replica_sum", "Podrun:cross_replica_mean", "Podrun:all_gather"})
"""Collectives whose result is equal on all replicas, if they are over all."""
_OWN = frozenset({"Podrun:replication_index", "Podrun:reduce_scatter", "Podrun:all_to_all"})
"""Operations that give each replica something of its own."""


def equal_variables(
    nodes: Iterable[Node], written: Mapping[str, str], fed: Collection[str], replicas: int
) -> frozenset[str]:
    """The variables among ``written`` (variable -> the tensor that replaces it) that stay equal. ``fed``: what infeeds
    give. A collective over a group of ``replicas`` is one over all. The table of operations must be complete.
    """
    nodes, equal = tuple(nodes), frozenset(written)
    while True:
        differing = {*fed, *(written.keys() - equal)}
        _spread(nodes, differing, replicas)
        kept = frozenset(name for name in equal if written[name] not in differing)
        if kept == equal:
            return equal
        equal = kept


def _spread(nodes: Iterable[Node], differing: set[str], replicas: int) -> None:
    """Add to ``differing`` what the nodes make of it."""
    for node in nodes:
        if node.op_type == "Branch" and node.inputs[0] not in differing:
            differing.update(_of_branches(node, differing, replicas))
        elif _differs(node, differing, replicas):
            differing.update(node.outputs)


def _of_branches(node: Node, differing: set[str], replicas: int) -> set[str]:
    """The results of a branch that all replicas take alike, as far as they differ."""
    results: set[str] = set()
    for graph in subgraphs(node):
        inside = differing | {
            name for name, outer in zip(graph.inputs, node.inputs[1:], strict=False) if outer in differing
        }
        _spread(graph.nodes, inside, replicas)
        results.update(o for o, name in zip(node.outputs, graph.outputs, strict=False) if name in inside)
    return results


def _differs(node: Node, differing: Collection[str], replicas: int) -> bool:
    if node.op_type in _MEET and (node.attributes.get("group") or replicas) == replicas:
        return False
    return _is_own(node) or not reads(node).isdisjoint(differing)


def _is_own(node: Node) -> bool:
    """Whether an operation, or one inside it, gives each replica something of its own."""
    graphs = list(subgraphs(node))
    if graphs:
        return any(_is_own(inner) for graph in graphs for inner in graph.nodes)
    handler = HANDLERS.get(node.op_type)
    return node.op_type in _OWN or handler is None or handler.random
