"""Transfers that overlap with computing: what the marks and options have to be.

`podrun.poptorch.set_overlap_for_input` and ``set_overlap_for_output`` mark tensors. On hardware, tiles that only move
data then load the next micro-batch and store the last one while the others compute. Here it changes no number and no
modelled time; the rules are the SDK's, so that a program that runs here runs there.
"""

from __future__ import annotations

from typing import Any

from podrun.poptorch.capture.graph import CapturedGraph, GraphNode, GraphValue
from podrun.poptorch.enums import OutputMode, OverlapMode
from podrun.poptorch.errors import Error
from podrun.poptorch.strategies import PIPELINED

INPUT, OUTPUT = "podrun.overlap_input.default", "podrun.overlap_output.default"
LEAST_IO_TILES = 32


def check_overlap(graph: CapturedGraph, options: Any) -> None:
    """Error for marks where they cannot be, and for options that they do not go with."""
    marks = [node for node in graph.nodes if node.operator in (INPUT, OUTPUT)]
    for node in marks:
        (_check_input if node.operator == INPUT else _check_output)(node, graph)
    if any(node.arguments[1] != OverlapMode.NoOverlap.value for node in marks):
        _check_options(options)


def _check_options(options: Any) -> None:
    if options._execution_strategy.execution_mode == PIPELINED:
        raise Error(
            "overlapped transfers need another execution strategy than PipelinedExecution",
            hint="Use options.setExecutionStrategy(poptorch.ShardedExecution()).",
        )
    if options.TensorLocations.num_io_tiles < LEAST_IO_TILES:
        raise Error(
            "overlapped transfers need tiles that only move data",
            hint=f"Use options.TensorLocations.numIOTiles({LEAST_IO_TILES}) or more.",
        )
    if options.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            f"overlapped transfers need outputMode All or Sum, not {options.output_mode.name}",
            hint="Use options.outputMode(poptorch.OutputMode.All).",
        )


def _check_input(node: GraphNode, graph: CapturedGraph) -> None:
    given = node.arguments[0]
    if given.number not in {value.number for value in graph.inputs.values()}:
        raise Error(
            f"poptorch.set_overlap_for_input takes inputs of the model as they are ({node.origin.line})"
        )
    users = sum(given.number in {v.number for v in other.reads()} for other in graph.nodes)
    if users > 1:
        raise Error(
            f"an input is used beside poptorch.set_overlap_for_input ({node.origin.line})",
            hint="Use what set_overlap_for_input gives everywhere.",
        )


def _check_output(node: GraphNode, graph: CapturedGraph) -> None:
    made = node.results[0].number
    returned = sum(isinstance(each, GraphValue) and each.number == made for each in graph.outputs)
    used = any(made in {v.number for v in other.reads()} for other in graph.nodes)
    if returned != 1 or used:
        raise Error(
            f"what poptorch.set_overlap_for_output gives must be returned once, and used nowhere else "
            f"({node.origin.line})"
        )
