"""Keys under which models say of nodes and of themselves what ONNX has no words for.

Attributes of nodes are PopART's own, and files carry them. Metadata of models are podrun's.
"""

from __future__ import annotations

from typing import Any

from podrun.runtime.graph import Hints, Place
from podrun.runtime.graph_text import AVAILABLE_MEMORY as AVAILABLE_MEMORY
from podrun.runtime.graph_text import EXECUTION_PHASE as EXECUTION_PHASE
from podrun.runtime.graph_text import PIPELINE_STAGE as PIPELINE_STAGE
from podrun.runtime.graph_text import VIRTUAL_GRAPH as VIRTUAL_GRAPH

RECOMPUTE = "__recompute_output_in_backward_pass"
"""A number of RecomputeType."""
PARTIALS_TYPE = "__partials_type"
"""The type of partial sums: half or float."""
SOFTMAX_AXIS = "__softmax_axis"
"""Of a Nll whose probabilities a Softmax makes, joined with it: the axis of that."""
INPLACE_NAMES = "__inplace_op_names"
"""Forms of the operator that work in place, and"""
INPLACE_PRIORITIES = "__inplace_op_priorities"
"""how much each is preferred."""
SCHEDULE_PRIORITY = "__schedule_priority"
"""Which of several operators that could run is first."""
OUTLINE = "__outline"
"""Whether the operator may share code with others."""
EXCLUDE_PATTERNS = "__exclude_patterns"
"""Patterns that leave the operator alone."""
CONV_DITHERING = "__enable_conv_dithering"
"""Whether a convolution begins at a tile of its own."""
SERIALIZE_MODE = "__serialize_matmul_mode"
"""The dimension of a product that is computed in slices,"""
SERIALIZE_FACTOR = "__serialize_matmul_factor"
"""the number of slices,"""
SERIALIZE_PRECISION = "__serialize_matmul_precision"
"""and whether partial sums keep the precision of the partials."""
OUTPUT_LOCATION = "__output_tensor_location"
"""Where a result lies."""
COMM_GROUP = "__collectiveCommGroup"
"""The replicas that a collective spans."""
COLLECTIVE_OPERATOR = "__collectiveOperator"
"""How a collective combines their values."""

HOST_CONCAT_KEY = "hostConcatRunnerConfig"
"""Metadata of a model, and blob of a compiled file: which inputs the host joins, as JSON. The SDK's name is not
published."""
TRANSFERS_KEY = "podrun.input_transfers"
BROADCAST_KEY = "podrun.broadcast_inputs"
"""Metadata of a model: the inputs of which every replica gets the whole."""

VARIABLE_KEY = "podrun.variable_settings"
"""Metadata of a model: the VariableSettings of its variables, by name."""


def take_place(attributes: dict[str, Any]) -> Place:
    """The place among a node's attributes, taken out of them. PopART's number -1 means no IPU and no stage."""
    ipu, stage = attributes.pop(VIRTUAL_GRAPH, None), attributes.pop(PIPELINE_STAGE, None)
    return Place(
        None if ipu == -1 else ipu, None if stage == -1 else stage, attributes.pop(EXECUTION_PHASE, None)
    )


_RECOMPUTED = {1: False, 2: True}
"""PopART's numbers of RecomputeType: Checkpoint (kept) and Recompute (computed again)."""


def take_hints(attributes: dict[str, Any]) -> Hints:
    """The hints among a node's attributes, taken out of them."""
    recompute = _RECOMPUTED.get(attributes.pop(RECOMPUTE, None))
    return Hints(attributes.pop(AVAILABLE_MEMORY, None), recompute)
