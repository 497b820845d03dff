"""ai.graphcore's collectives between replicas, inside of a model.

``ReplicatedAllReduce``, ``ReplicatedAllReduceInplace`` (the same values: nothing works in place here),
``ReplicatedReduceScatter`` and ``ReplicatedAllGather``. Attributes: ``__collectiveOperator`` (also
``collectiveOperator``, ``op``), the number of a CollectiveOperator (`podrun.compiler.exchange.Operator`, default 0:
Add); ``__collectiveCommGroup`` (also ``commGroup``), type and size (default: all replicas). With one replica they
compute what one replica would get.

Shapes (PopART, willow/src/op/collectives): all-reduce keeps the shape; reduce-scatter gives ``[ceil(elements / group
size)]``, its last part padded with zeros; all-gather gives ``[elements * group size]``. Gradients are those of the sum
of all replicas' losses: of a sum over replicas the same sum of the gradients.
"""

from __future__ import annotations

from podrun.collectives.replica_groups import GroupKind, replica_groups
from podrun.compiler import exchange
from podrun.errors import UsageError
from podrun.popart.building.attributes import COLLECTIVE_OPERATOR, COMM_GROUP
from podrun.popart.ops.common import Array
from podrun.popart.ops.registry import GRAPHCORE, Context, Node, operator

KINDS = {0: GroupKind.ALL, 1: GroupKind.CONSECUTIVE, 2: GroupKind.ORTHOGONAL, 3: GroupKind.NONE}
"""CommGroupType by its number."""


@operator(GRAPHCORE, "ReplicatedAllReduce")
@operator(GRAPHCORE, "ReplicatedAllReduceInplace")
def replicated_all_reduce(ctx: Context, node: Node, x: Array, *linked: Array) -> Array:
    """x combined over the replicas of its group. Further inputs only link shards in PopART."""
    return exchange.all_reduce(x, _operator(node), _groups(ctx, node))


@operator(GRAPHCORE, "ReplicatedReduceScatter")
def replicated_reduce_scatter(ctx: Context, node: Node, x: Array, *linked: Array) -> Array:
    """This replica's part of x combined over its group."""
    return exchange.reduce_scatter(x, _operator(node), _groups(ctx, node))


@operator(GRAPHCORE, "ReplicatedAllGather")
def replicated_all_gather(ctx: Context, node: Node, x: Array, *linked: Array) -> Array:
    """The group's values end to end."""
    return exchange.all_gather(x, _groups(ctx, node))


def _operator(node: Node) -> exchange.Operator:
    number = node.get(COLLECTIVE_OPERATOR, node.get("collectiveOperator", node.get("op", 0)))
    try:
        return exchange.Operator(number)
    except ValueError:
        known = ", ".join(f"{item.value} {item.name}" for item in exchange.Operator)
        raise UsageError(
            f"{node.describe()}: there is no collective operator {number!r}",
            hint=f"The operators are: {known}",
        ) from None


def _groups(ctx: Context, node: Node) -> exchange.Groups:
    given = node.get(COMM_GROUP, node.get("commGroup", (0, 0)))
    numbers = [int(value) for value in given] + [0]
    kind, size = numbers[0], numbers[1]
    if len(given) > 2 or kind not in KINDS:
        raise UsageError(
            f"{node.describe()}: {list(given)} is no group of replicas",
            hint="commGroup is a CommGroupType's number (0 to 3) and a group size.",
        )
    try:
        return replica_groups(ctx.replicas, KINDS[kind], size)
    except UsageError as error:
        raise UsageError(f"{node.describe()}: {error.message}", hint=error.hint) from None
