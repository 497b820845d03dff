"""Checks of a captured graph before it is compiled: its loss, and the marks of overlapped transfers.

A graph must have one loss that feeds no other, and sound marks of overlapped transfers.
`podrun.poptorch.set_overlap_for_input` and ``set_overlap_for_output`` mark tensors: tiles that only move data then
load the next micro-batch and store the last one while the others compute. The marks change modelled time and no number;
the rules are the SDK's, so that a program that runs here runs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from podrun.poptorch.api.enums import OutputMode, OverlapMode
from podrun.poptorch.api.strategies import PIPELINED
from podrun.poptorch.capture.graph import HOST_CALL, CapturedGraph, GraphNode, GraphValue
from podrun.poptorch.compile.session_model import OVERLAPPED_INPUT, OVERLAPPED_OUTPUT
from podrun.poptorch.errors import Error

if TYPE_CHECKING:
    from podrun.poptorch.api.options import Options

IDENTITY_LOSS = "podrun.identity_loss.default"

INFERENCE_ONLY = frozenset(("podrun.for_loop.default", "podrun.cond.default", HOST_CALL))
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


def _name_of(operator: str) -> str:
    """What programs call one of `INFERENCE_ONLY`."""
    return "CPU" if operator == HOST_CALL else operator.split(".")[1]


def find_loss(graph: CapturedGraph) -> GraphValue:
    """The value to minimise. Error if there is none, or more than one that feeds no other."""
    for node in graph.nodes:
        if node.operator in INFERENCE_ONLY:
            raise Error(
                f"poptorch.{_name_of(node.operator)} is supported in inference models only",
                location=f"module '{node.origin.module}', {node.origin.line}",
                hint="Use torch.where, or a Python loop, in a model that is trained.",
            )
    candidates = {node.results[0].number: node for node in graph.nodes if is_loss(node)}
    if not candidates:
        raise Error(
            "Couldn't find a loss in graph",
            hint="End forward with a loss function of torch's, or mark a value with poptorch.identity_loss.",
        )
    leading = _leading_to_losses(graph, set(candidates))
    final = [node for number, node in candidates.items() if number not in leading]
    if len(final) > 1:
        raise Error(
            "Multiple independent losses found in graph. Graph must have one final loss. "
            "Wrap final graph loss in poptorch.identity_loss.",
            location="\n".join(f"{node.operator}, {node.origin.line}" for node in final),
            hint="Add them up and mark the sum with poptorch.identity_loss(total, reduction='none').",
        )
    return final[0].results[0]


def _leading_to_losses(graph: CapturedGraph, losses: set[int]) -> set[int]:
    """Losses from whose value another loss is computed."""
    needed: set[int] = set()
    for node in reversed(graph.nodes):
        numbers = {result.number for result in node.results}
        if numbers & losses or numbers & needed:
            needed.update(value.number for value in node.reads())
    return needed & losses


LEAST_IO_TILES = 32


def check_overlap(graph: CapturedGraph, options: Options, inputs: Sequence[str]) -> None:
    """Error for marks in wrong places, and for options that marks do not go with. ``inputs``: the arguments' names."""
    marks = [node for node in graph.nodes if node.operator in (OVERLAPPED_INPUT, OVERLAPPED_OUTPUT)]
    for node in marks:
        if node.operator == OVERLAPPED_INPUT:
            _check_input(node, graph, inputs)
        else:
            _check_output(node, graph)
    if any(node.arguments[1] != OverlapMode.NoOverlap.value for node in marks):
        _check_options(options)


def _check_options(options: Options) -> None:
    if options._execution_strategy.execution_mode == PIPELINED:
        raise Error(
            "Overlapped IO is not supported with poptorch.PipelinedExecution. If you are using only one IPU, please "
            "switch to poptorch.ShardedExecution.",
            hint="options.setExecutionStrategy(poptorch.ShardedExecution())",
        )
    if options.TensorLocations.num_io_tiles < LEAST_IO_TILES:
        raise Error(
            f"No IO tiles allocated. You must allocate at least {LEAST_IO_TILES} IO tiles using "
            "poptorch.Options().TensorLocations.numIOTiles.",
            hint=f"options.TensorLocations.numIOTiles({LEAST_IO_TILES})",
        )
    if options.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            f"overlapped transfers need outputMode All or Sum, not {options.output_mode.name}",
            hint="Use options.outputMode(poptorch.OutputMode.All).",
        )


def _check_input(node: GraphNode, graph: CapturedGraph, inputs: Sequence[str]) -> None:
    marked = node.arguments[0]
    places = [place for place, value in graph.inputs.items() if value == marked]
    if not isinstance(marked, GraphValue) or not places:
        raise Error(
            "poptorch.set_overlap_for_input applied on a node which is not a tensor input to the model.",
            location=node.origin.line,
        )
    users = sum(marked.number in {v.number for v in other.reads()} for other in graph.nodes)
    if users > 1:
        raise Error(
            "poptorch.set_overlap_for_input must be the only op applied to an input. This is not the case for input "
            f"{inputs[places[0]]} to the model.",
            location=node.origin.line,
            hint="Use the result of set_overlap_for_input everywhere.",
        )


def _check_output(node: GraphNode, graph: CapturedGraph) -> None:
    marked, source = node.results[0], node.arguments[0]
    numbers = [leaf.number for leaf in graph.outputs if isinstance(leaf, GraphValue)]
    if marked.number not in numbers:
        raise Error(
            "poptorch.set_overlap_for_output applied on a node which is not a tensor output to the model.",
            location=node.origin.line,
        )
    if numbers.count(marked.number) > 1 or (isinstance(source, GraphValue) and source.number in numbers):
        raise Error(
            "poptorch.set_overlap_for_output cannot be used with a tensor that is returned twice. Please check all "
            "returned tensors including those nested in tuples/lists.",
            location=node.origin.line,
        )
