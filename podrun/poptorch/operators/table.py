"""The table of ATen operators, name -> JAX function with the kind that planners know it by.

    @aten("relu", "relu6", kind="Relu")
    def relu(call, x):
        return jnp.maximum(x, 0)

    aten_expressions({"Transpose": {"mT numpy_T": lambda call, x: jnp.swapaxes(x, -1, -2)}})

A name without an overload stands for all overloads of that operator; one with an overload (``add.Tensor``) for that
one alone, and wins. `run_aten` runs one node of a captured graph.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.capture.graph import Argument, GraphNode, GraphValue
from podrun.poptorch.errors import Error

PythonNumber = bool | int | float
"""A number that the program's Python code gave, known while the model is compiled."""
Operand = Array | PythonNumber
"""An element-wise operator takes tensors and Python's numbers alike."""
Sizes = Sequence[int]
"""Torch's ``int[]``: a number for each dimension, or the numbers of dimensions."""
PerDimension = int | Sequence[int]
"""Torch's ``int[N]``: one number for all dimensions, or one for each (`spread`)."""
Dimensions = int | Sequence[int] | None
"""Dimensions counted from either end (`axes`); None for all of them."""

FAMILIES = (
    "pointwise",
    "activations",
    "shaping",
    "factories",
    "reductions",
    "sorting",
    "linear_algebra",
    "products",
    "layers",
    "pooling",
    "normalization",
    "indexing",
    "losses",
    "ipu",
)
"""Modules of this package that register operators."""


@dataclass(frozen=True, slots=True)
class Call:
    """One use of an operator: its results at capture, and a source of random keys."""

    results: tuple[GraphValue, ...]
    key: Callable[[], Array]
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


AtenResult = Array | Sequence[Array]
"""The result of an operator, or its results."""
AtenFunction = Callable[..., AtenResult]
"""``function(call, *arguments, **keywords)``: torch's arguments, tensors as arrays. Traceable by JAX."""
F = TypeVar("F", bound=AtenFunction)


@dataclass(frozen=True, slots=True)
class AtenOperator:
    """A registered function. ``kind``: the ONNX operator as which planners, recomputation and the tile model treat it;
    empty for an element-wise one.
    """

    name: str
    function: AtenFunction
    kind: str


_table: dict[str, AtenOperator] = {}


def aten(*names: str, kind: str = "") -> Callable[[F], F]:
    """Register the decorated function as these operators."""

    def register(function: F) -> F:
        for name in names:
            _table[name] = AtenOperator(name, function, kind)
        return function

    return register


def aten_expressions(rows: Mapping[str, Mapping[str, AtenFunction]]) -> None:
    """Register operators of one expression each: by kind (may be empty), and by names with spaces between them."""
    for kind, functions in rows.items():
        for names, function in functions.items():
            aten(*names.split(), kind=kind)(function)


@functools.cache
def all_operators() -> Mapping[str, AtenOperator]:
    """The whole table, by name."""
    for family in FAMILIES:
        importlib.import_module(f"podrun.poptorch.operators.{family}")
    return _table


def find(name: str) -> AtenOperator | None:
    """The operator called ``aten.add.Tensor``; None if the table lacks it."""
    namespace, _, rest = name.partition(".")
    if namespace != "aten":
        return all_operators().get(name)
    return all_operators().get(rest) or all_operators().get(rest.partition(".")[0])


def dtype_named(name: str) -> np.dtype[Any]:
    """A NumPy type by name, ``bfloat16`` among them."""
    return np.dtype(jnp.dtype(name))


def axes(dimensions: Dimensions, rank: int) -> tuple[int, ...] | None:
    """Dimensions counted from the front; None (all) if none are given."""
    if dimensions is None or (isinstance(dimensions, (tuple, list)) and not dimensions):
        return None
    chosen = dimensions if isinstance(dimensions, (tuple, list)) else (dimensions,)
    return tuple(int(d) % max(rank, 1) for d in chosen)


def axis(dimension: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dimension % max(rank, 1)


def spread(values: PerDimension, count: int) -> tuple[int, ...]:
    """One number for each of ``count`` dimensions; a single one stands for all."""
    numbers = (values,) if isinstance(values, int) else tuple(values)
    return numbers * count if len(numbers) == 1 else numbers


def run_aten(
    node: GraphNode, values: Mapping[int, Array], key: Callable[[], Array], training: bool = False
) -> tuple[Array, ...]:
    """The results of one node. Raises `Error`, which names operator, module and line, if the table lacks it, or if a
    result's shape differs from torch's.
    """
    operator = find(node.operator)
    if operator is None:
        raise Error(
            f"operator {node.operator} is not supported on the IPU (module '{node.origin.module}', {node.origin.line})"
        )
    arguments = [_resolved(argument, values) for argument in node.arguments]
    keywords = {name: _resolved(argument, values) for name, argument in node.keywords.items()}
    if node.writes:
        results: AtenResult = (_written(operator.function, node, arguments, keywords, key),)
    else:
        call = Call(node.results, key, training)
        results = operator.function(call, *arguments, **keywords)
        if node.item is not None:
            results = (results[node.item],)
    if not isinstance(results, (tuple, list)):
        results = (jnp.asarray(results),)
    return tuple(_checked(node, value, array) for value, array in zip(node.results, results, strict=False))


def _resolved(argument: Argument, values: Mapping[int, Array]) -> Any:
    """An argument as operators take it, of any of the types of `Argument`, with arrays in place of values."""
    if isinstance(argument, GraphValue):
        return values[argument.number]
    if isinstance(argument, (tuple, list)):
        return tuple(_resolved(item, values) for item in argument)
    return argument


def _checked(node: GraphNode, value: GraphValue, array: Array) -> Array:
    array = jnp.asarray(array)
    if tuple(array.shape) != value.shape:
        raise Error(
            f"{node.operator} gives shape {list(array.shape)} on the IPU and {list(value.shape)} in torch "
            f"(module '{node.origin.module}', {node.origin.line})"
        )
    array = array.astype(dtype_named(value.dtype))
    if not node.differentiable and jnp.issubdtype(array.dtype, jnp.floating):
        array = lax.stop_gradient(array)
    return array


def _written(
    function: AtenFunction,
    node: GraphNode,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    key: Callable[[], Array],
) -> Array:
    """The first argument, with the second one where the view lies."""
    base: Array
    base, part, *rest = arguments
    part = jnp.asarray(part).astype(base.dtype)
    name = node.operator.split(".")[1]
    if name in ("detach", "alias", "view", "_unsafe_view", "unsqueeze", "squeeze", "reshape"):
        return jnp.reshape(part, base.shape)
    if name == "select":
        return base.at[(slice(None),) * (rest[0] % base.ndim) + (rest[1],)].set(part)
    if name == "slice":
        defaults: tuple[Any, ...] = (0, None, None, 1)
        dim, start, end, step = [*rest, *defaults[len(rest) :]]
        return base.at[(slice(None),) * (dim % base.ndim) + (slice(start, end, step),)].set(part)
    places = _places_of_view(function, node, base.shape, part.shape, rest, keywords, key)
    return base.reshape(-1).at[places.reshape(-1)].set(part.reshape(-1)).reshape(base.shape)


def _places_of_view(
    function: AtenFunction,
    node: GraphNode,
    shape: tuple[int, ...],
    part: tuple[int, ...],
    rest: Sequence[Any],
    keywords: Mapping[str, Any],
    key: Callable[[], Array],
) -> np.ndarray:
    """The element of the base that each element of the view is."""
    numbers = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    call = Call((GraphValue(0, part, "int32"),), key)
    with jax.ensure_compile_time_eval():
        seen = function(call, jnp.asarray(numbers), *rest, **keywords)
        return np.asarray(seen if node.item is None else seen[node.item])
