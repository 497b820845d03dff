"""The table of ATen operators: name -> JAX function, with the kind that planners know it by.

    @aten("relu", "relu6", kind="Relu")
    def relu(call, x):
        return jnp.maximum(x, 0)

A name without an overload stands for all overloads of that operator; one with an overload (``add.Tensor``) for that
one alone, and wins.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from podrun.poptorch.capture.graph import GraphValue

Array = Any
"""A ``jax.Array`` or tracer."""

FAMILIES = (
    "pointwise",
    "activations",
    "shaping",
    "factories",
    "reductions",
    "sorting",
    "products",
    "linear_algebra",
    "special_functions",
    "convolutions",
    "pooling",
    "resizing",
    "normalization",
    "indexing",
    "losses",
    "connectionist",
    "randomness",
    "recurrent",
    "attention",
    "ipu",
)
"""Modules of this package that register operators."""


@dataclass(frozen=True, slots=True)
class Call:
    """One use of an operator: the results that were seen when it was captured, and a source of random keys."""

    results: tuple[GraphValue, ...]
    key: Callable[[], Any]
    """Gives a JAX random key; every use of an operator has one of its own."""
    training: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.results[0].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the first result."""
        return dtype_named(self.results[0].dtype)


Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True, slots=True)
class AtenOperator:
    """A registered function. ``kind``: the ONNX operator that planners, recomputation and the tile model treat it as;
    empty for an element-wise one."""

    name: str
    function: Function
    kind: str


_table: dict[str, AtenOperator] = {}


def aten(*names: str, kind: str = "") -> Callable[[F], F]:
    """Register the decorated function as these operators."""

    def register(function: F) -> F:
        for name in names:
            _table[name] = AtenOperator(name, function, kind)
        return function

    return register


@functools.cache
def load() -> Mapping[str, AtenOperator]:
    """The whole table, by name."""
    for family in FAMILIES:
        importlib.import_module(f"podrun.poptorch.operators.{family}")
    return _table


def find(name: str) -> AtenOperator | None:
    """The operator called ``aten.add.Tensor``; None if the table lacks it."""
    namespace, _, rest = name.partition(".")
    if namespace != "aten":
        return load().get(name)
    return load().get(rest) or load().get(rest.partition(".")[0])


def supported(name: str) -> bool:
    """Whether the table has an operator."""
    return find(name) is not None


def dtype_named(name: str) -> np.dtype[Any]:
    """A NumPy type by name, ``bfloat16`` among them."""
    return np.dtype(jnp.dtype(name))


def widened(x: Array) -> Array:
    """Float32 of a half; any other array unchanged. Composite operators compute in float32 and round once."""
    return x.astype(jnp.float32) if x is not None and x.dtype in (jnp.float16, jnp.bfloat16) else x


@jax.custom_jvp
def with_gradient_of(source: Array, value: Array) -> Array:
    """``value``, whose gradient goes to ``source`` as if it were that."""
    return value


@with_gradient_of.defjvp
def _gradient_of_source(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[1], tangents[0]


def absolute(x: Array) -> Array:
    """|x|, whose gradient at 0 is 0, as torch's is (JAX's is 1)."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.abs(x)
    return with_gradient_of(x * jax.lax.stop_gradient(jnp.sign(x)), jnp.abs(x))


def is_array(x: Any) -> bool:
    """Whether an argument is a tensor."""
    return hasattr(x, "dtype") and hasattr(x, "shape")


def axes(dimensions: Any, rank: int) -> tuple[int, ...] | None:
    """Dimensions counted from the front; None (all) for none given."""
    if dimensions is None or (isinstance(dimensions, (tuple, list)) and not dimensions):
        return None
    if not isinstance(dimensions, (tuple, list)):
        dimensions = (dimensions,)
    return tuple(int(d) % max(rank, 1) for d in dimensions)


def axis(dimension: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dimension % max(rank, 1)


def spread(values: Any, count: int) -> tuple[int, ...]:
    """One number for each of ``count`` dimensions; a single one stands for all."""
    if isinstance(values, int):
        values = (values,)
    return tuple(values) * count if len(values) == 1 else tuple(values)
