"""Keys of what a front end notes on the operators of a model, and on the model itself, for the session to read.

Names that start with two underscores are PopART's own (graphcore/popart, willow/include/popart/builder.hpp and
opidentifier.hpp); ONNX's checker leaves them alone.
"""

from __future__ import annotations

VIRTUAL_GRAPH = "__ipu_number"
PIPELINE_STAGE = "__pipeline_stage"
EXECUTION_PHASE = "__execution_phase"
RECOMPUTE = "__recompute_output_in_backward_pass"
AVAILABLE_MEMORY = "__available_memory"
PARTIALS_TYPE = "__partials_type"
INPLACE_NAMES = "__inplace_op_names"
INPLACE_PRIORITIES = "__inplace_op_priorities"
SCHEDULE_PRIORITY = "__schedule_priority"
OUTLINE = "__outline"
EXCLUDE_PATTERNS = "__exclude_patterns"
CONV_DITHERING = "__enable_conv_dithering"
SERIALIZE_MODE = "__serialize_matmul_mode"
SERIALIZE_FACTOR = "__serialize_matmul_factor"
SERIALIZE_PRECISION = "__serialize_matmul_precision"
OUTPUT_LOCATION = "__output_tensor_location"
COMM_GROUP = "__collectiveCommGroup"
COLLECTIVE_OPERATOR = "__collectiveOperator"
CUT = "__cut"
"""podrun's own, in placed models that are not pipelined: the stage that a node would have."""

BROADCAST_KEY = "podrun.broadcast_inputs"
"""Metadata of a model: the inputs that every replica gets whole."""

VARIABLE_KEY = "podrun.variable_settings"
"""Metadata of a model: the VariableSettings of its variables, by name."""

TRAINED_KEY = "podrun.trained"
"""Metadata of a model: the parameters that are trained. Without it, all floating-point ones that lead to the loss."""

UPDATES_KEY = "podrun.updates"
"""Metadata of a model: tensors that replace parameters after each micro-batch, whether or not anything reads them."""

KIND = "__kind"
"""The ONNX operator that planners, recomputation and the tile model treat an operator of another domain as."""

UNNAMED = "BuilderGraph"
"""The name of a graph that the program has given none."""
