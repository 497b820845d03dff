"""From an ONNX model to a JAX function of (parameters, inputs, key).

An ONNX model enters and a `Lowered` leaves, which the estimate and the ONNX backend give to the compiler. Sessions read
a model once (`podrun.onnx_models.graph_reader`), place its operators and lower the graph.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from podrun.runtime.environment import import_jax

import_jax()

from podrun.onnx_models.graph_reader import read_graph  # noqa: E402
from podrun.onnx_models.ops.registry import OPERATORS  # noqa: E402
from podrun.runtime.lowering import Lowered, LoweringOptions, lower_graph  # noqa: E402

if TYPE_CHECKING:
    import numpy as np
    import onnx

__all__ = ["Lowered", "lower"]


def lower(
    model: "onnx.ModelProto",
    options: LoweringOptions | None = None,
    *,
    initial: "Mapping[str, np.ndarray]" = MappingProxyType({}),
    **wanted: Any,
) -> Lowered:
    """Read a model and lower it: `podrun.runtime.lowering.lower_graph`, whose keywords are ``wanted``.

    ``initial``: values of initializers whose data the model does not hold (`LightModel`). Fields of `LoweringOptions`
    may be given as keywords too.
    """
    fields = LoweringOptions.__dataclass_fields__
    fitting = {name: wanted.pop(name) for name in list(wanted) if name in fields}
    chosen = options or LoweringOptions(**fitting)
    return lower_graph(read_graph(model, initial), OPERATORS, chosen, **wanted)
