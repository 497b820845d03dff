"""From an ONNX model to a JAX function of (parameters, inputs, key): the front end of the compiler.

``graph`` reads the protobuf into plain values, ``trace`` runs a graph's operators on ``tensors`` inside a JAX trace,
``lower`` ties them into a `Lowered`. Which JAX function computes an operator is the business of ``podrun.popart.ops``.
"""

from podrun.popart.lowering.lower import Lowered, lower

__all__ = ["Lowered", "lower"]
