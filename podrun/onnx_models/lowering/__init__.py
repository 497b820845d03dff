"""From an ONNX model to a JAX function of (parameters, inputs, key): the front end of the compiler.

An ONNX model enters and a `Lowered` leaves, which sessions, the estimate and the ONNX backend give to the compiler.
`graph` reads the protobuf into plain values, `evaluate` runs a graph's operators inside a JAX trace, `lower` makes the
`Lowered` of them, `folding` computes once what all inputs share. `podrun.onnx_models.ops` has the JAX functions of
operators.
"""

from podrun.session.environment import import_jax

import_jax()

from podrun.onnx_models.lowering.lower import Lowered, lower  # noqa: E402

__all__ = ["Lowered", "lower"]
