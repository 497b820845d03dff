"""The table of operations: a function for each type, and the attributes that it knows.

An operation with an attribute that its function does not know is refused: an attribute that is passed over gives wrong
numbers. Functions are registered by the modules of this room (`computes`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from podrun.core.errors import UnimplementedError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context, Operator, OperatorFunction
from podrun.tensorflow.graph.builder import DOMAIN

Array = Any
"""An array of JAX, or of NumPy where an operation folds: no type of either library has what both offer."""
FAMILIES = (
    "pointwise",
    "forming",
    "picking",
    "contractions",
    "backward",
    "images",
    "updates",
    "branches_and_loops",
    "random",
    "ipu",
    "recurrent",
    "linear_algebra",
    "segments",
    "special_functions",
)


@dataclass(frozen=True, slots=True)
class Handler:
    """A function, the attributes that it reads, and attributes with the only values that it takes."""

    function: OperatorFunction
    attributes: frozenset[str]
    folds: bool
    random: bool


HANDLERS: dict[str, Handler] = {}


def computes(
    *types: str, attributes: str = "", folds: bool = False, random: bool = False
) -> Callable[[OperatorFunction], OperatorFunction]:
    """Register a function for operations of these types. ``attributes``: names that it knows, with spaces between."""

    def register(function: OperatorFunction) -> OperatorFunction:
        handler = Handler(function, frozenset(attributes.split()), folds, random)
        HANDLERS.update(dict.fromkeys(types, handler))
        return function

    return register


EXACT = frozenset({
    "Const", "Result", "Store", "Reshape", "Transpose", "ConcatV2", "Pack", "Unpack", "GatherV2", "Slice",
    "StridedSlice", "Squeeze", "ExpandDims", "Relu", "MaxPool", "Branch", "Loop",
    "CustomGradient", "ReadVariableOp", "Bitcast",
})  # fmt: skip
"""Operations that make no value greater than they are given, or whose parts are looked at one by one."""


@dataclass(frozen=True, slots=True)
class HalfPrecision:
    """What becomes of halves that overflow: the largest finite ones, or NaN (``nan_on_overflow``). A division of a half
    by zero gives NaN in both cases. Source: the SDK's tests of floating-point control.
    """

    nan_on_overflow: bool = False

    def results(self, node: Node, inputs: Sequence[Array], results: Array) -> Array:
        """The results of an operation in the form that an IPU gives them."""
        single = not isinstance(results, tuple)
        values = [self._value(node, inputs, r) for r in ((results,) if single else results)]
        return values[0] if single else tuple(values)

    def _value(self, node: Node, inputs: Sequence[Array], value: Array) -> Array:
        import jax.numpy as jnp

        if not _is_float16(value):
            return value
        value = _clipped(value, self.nan_on_overflow)
        if node.op_type in ("RealDiv", "Div"):
            value = jnp.where(inputs[1] == 0, jnp.asarray(np.nan, jnp.float16), value)
        return value

    def passed(self, value: Array) -> Array:
        """``value``, where gradients of halves that overflow on their way back become what other halves become."""
        return _with_clipped_gradient(self.nan_on_overflow)(value) if _is_float16(value) else value


def _is_float16(value: Array) -> bool:
    """Whether a value is computed on the device, in halves."""
    return getattr(value, "dtype", None) == np.float16 and not isinstance(value, np.ndarray)


def _clipped(value: Array, nan_on_overflow: bool) -> Array:
    import jax.numpy as jnp

    most = jnp.asarray(np.finfo(np.float16).max, jnp.float16)
    limit = jnp.asarray(np.nan, jnp.float16) if nan_on_overflow else jnp.sign(value) * most
    return jnp.where(jnp.isinf(value), limit, value)


@functools.cache
def _with_clipped_gradient(nan_on_overflow: bool) -> Callable[[Array], Array]:
    """A function that gives its argument, and clips the gradient."""
    import jax

    @jax.custom_vjp
    def same(value: Array) -> Array:
        return value

    same.defvjp(lambda value: (value, None), lambda _, gradient: (_clipped(gradient, nan_on_overflow),))
    return same


_FOR_GRADIENTS = ContextVar("_FOR_GRADIENTS", default=False)
"""Whether this thread traces the forward pass of a gradient."""


@contextlib.contextmanager
def tracing_gradients() -> Iterator[None]:
    """While the operations are traced that JAX differentiates."""
    token = _FOR_GRADIENTS.set(True)
    try:
        yield
    finally:
        _FOR_GRADIENTS.reset(token)


def load_table() -> None:
    """Let `HANDLERS` be complete."""
    for family in FAMILIES:
        importlib.import_module(f"podrun.tensorflow.operators.{family}")


class TensorFlowOperators:
    """`podrun.runtime.operators.OperatorTable` of operations of TensorFlow."""

    def __init__(self, halves: HalfPrecision = HalfPrecision()) -> None:
        self.halves = halves
        load_table()

    def lookup(self, node: Node) -> Operator:
        """The function of a node. `UnimplementedError` for an unknown type, or an attribute that it does not know."""
        handler = HANDLERS.get(node.op_type)
        if handler is None:
            raise UnimplementedError(
                f"{node.describe()}: podrun has no TensorFlow operation {node.op_type!r}.",
                hint="Compute it on the host, outside of the program on the IPU, or write it with other operations.",
            )
        unknown = sorted(node.attributes.keys() - handler.attributes)
        if unknown:
            raise UnimplementedError(
                f"{node.describe()}: podrun does not know the attribute {unknown[0]!r} of {node.op_type}."
            )
        fixed = node.op_type != "Podrun:user_op"
        function, halves = handler.function, self.halves
        if node.op_type in EXACT:
            return Operator(DOMAIN, node.op_type, 1, function, handler.folds, handler.random, fixed)

        def run(ctx: Context, item: Node, *inputs: Array) -> Array | tuple[Array, ...]:
            if not _FOR_GRADIENTS.get():
                return halves.results(item, inputs, function(ctx, item, *inputs))
            inputs = tuple(map(halves.passed, inputs))
            results = halves.results(item, inputs, function(ctx, item, *inputs))
            if isinstance(results, tuple):
                return tuple(map(halves.passed, results))
            return halves.passed(results)

        return Operator(DOMAIN, node.op_type, 1, run, handler.folds, handler.random, fixed)
