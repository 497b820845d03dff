"""Which value of a captured graph is the loss: the one loss that feeds no other."""

from __future__ import annotations

from podrun.poptorch.capture.graph import CapturedGraph, GraphNode, GraphValue
from podrun.poptorch.errors import Error

IDENTITY_LOSS = "podrun.identity_loss.default"

INFERENCE_ONLY = frozenset(("podrun.for_loop.default", "podrun.cond.default"))
"""Operators that have no gradient on an IPU."""

LOSSES = frozenset(
    (
        *("l1_loss", "mse_loss", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"),
        *(
            "nll_loss_forward",
            "nll_loss2d_forward",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
        ),
        *("kl_div", "poisson_nll_loss", "hinge_embedding_loss", "smooth_l1_loss", "huber_loss"),
        *("soft_margin_loss", "multilabel_margin_loss", "multi_margin_loss", "cosine_embedding_loss"),
        *("margin_ranking_loss", "triplet_margin_loss", "ctc_loss"),
    )
)
"""Operators of torch that are losses by themselves."""


def is_loss(node: GraphNode) -> bool:
    """Whether a node is a loss."""
    return node.operator == IDENTITY_LOSS or (
        node.operator.startswith("aten.") and node.operator.split(".")[1] in LOSSES
    )


def find_loss(graph: CapturedGraph) -> GraphValue:
    """The value to minimise. Error if there is none, or more than one that feeds no other."""
    for node in graph.nodes:
        if node.operator in INFERENCE_ONLY:
            raise Error(
                f"poptorch.{node.operator.split('.')[1]} is supported in inference models only",
                location=f"module '{node.origin.module}', {node.origin.line}",
                hint="Use torch.where, or a Python loop, in a model that is trained.",
            )
    candidates = {node.results[0].number: node for node in graph.nodes if is_loss(node)}
    if not candidates:
        raise Error(
            "Couldn't find a loss in the model",
            hint="End forward with a loss function of torch's, or mark a value with poptorch.identity_loss.",
        )
    leading = _leading_to_losses(graph, set(candidates))
    final = [node for number, node in candidates.items() if number not in leading]
    if len(final) > 1:
        places = ", ".join(f"{node.operator} ({node.origin.line})" for node in final)
        raise Error(
            f"Multiple independent losses found in the model: {places}",
            hint="Add them up and mark the sum with poptorch.identity_loss(total, reduction='none').",
        )
    return final[0].results[0]


def _leading_to_losses(graph: CapturedGraph, losses: set[int]) -> set[int]:
    """Losses whose value another loss is made from."""
    needed: set[int] = set()
    for node in reversed(graph.nodes):
        numbers = {result.number for result in node.results}
        if numbers & losses or numbers & needed:
            needed.update(value.number for value in node.reads())
    return needed & losses
