"""From an ONNX model to a JAX function of (parameters, inputs, key): the front end of the compiler.

``graph`` reads the protobuf into plain values, ``trace`` runs a graph's operators on ``tensors`` inside a JAX trace,
``lower`` ties them into a `Lowered`. The JAX functions of operators are in ``podrun.onnx_models.ops``.
"""

from podrun.session.environment import import_jax

import_jax()

from podrun.onnx_models.lowering.lower import Lowered, lower  # noqa: E402

__all__ = ["Lowered", "lower"]
