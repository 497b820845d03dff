"""Small things that operators share: axes, dtypes, the size of what is folded, tables of formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch, UnsupportedError
from podrun.core.quick_dataclass import dataclass
from podrun.onnx_models.ops.registry import ONNX, operator
from podrun.runtime.device_types import device_dtype
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context, OperatorFunction

Array = Any
"""A ``jax.Array`` (or tracer), or a ``numpy.ndarray`` while folding."""


def axis_in(axis: int, rank: int) -> int:
    """``axis`` counted from the front. Raises InputMismatch if it is outside ``[-rank, rank)``."""
    if not -rank <= axis < max(rank, 1):
        raise InputMismatch(f"axis {axis} is outside [-{rank}, {rank})")
    return axis % rank if rank else 0


def axes_in(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, sorted; InputMismatch if one is out of range or there twice."""
    positive = sorted(axis_in(int(a), rank) for a in axes)
    if len(set(positive)) != len(positive):
        raise InputMismatch(f"axes {tuple(axes)} name one axis twice")
    return tuple(positive)


def ints(values: np.ndarray | Iterable[int]) -> tuple[int, ...]:
    """A tuple of Python ints from a shape-like tensor."""
    return tuple(int(v) for v in np.asarray(values).reshape(-1))


def index_dtype(ctx: Context) -> np.dtype[Any]:
    """ONNX's int64 as the device has it: int32, or int64 where 64-bit types are computed as such."""
    return np.dtype(np.int64 if ctx.x64 else np.int32)


def same_dtype(*inputs: Array) -> None:
    """Refuse inputs of different types: ONNX has no implicit casts. Raises InputMismatch naming them."""
    kinds = {np.dtype(x.dtype).name for x in inputs}
    if len(kinds) > 1:
        raise InputMismatch(
            f"inputs have different types ({', '.join(sorted(kinds))}); ONNX has no implicit casts"
        )


def onnx_dtype(element_type: int, ctx: Context) -> np.dtype[Any]:
    """The NumPy dtype of an ONNX element type as it is computed here. Refuses strings and, on the device, DOUBLE."""
    import onnx

    if element_type == onnx.TensorProto.STRING:
        raise UnsupportedError("strings are not computed on IPUs")
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element_type))
    return dtype if ctx.xp is np else device_dtype(dtype, ctx.x64)


MOST_FOLDED = 1 << 20
"""Elements of the largest tensor that is computed while tracing, unless an operator needs its value."""


def fold_module(ctx: Context, shape: Iterable[int]) -> Any:
    """``ctx.xp``, but ``jax.numpy`` for a result too large to be computed while tracing.

    For operators that make large tensors of small ones. Raises ValueError for a shape that no array can have.
    """
    sizes = [int(d) for d in shape]
    if any(d < 0 for d in sizes):
        raise InputMismatch(f"shape {sizes} has a negative dimension")
    count = 1
    for d in sizes:
        count *= d
    if count > 2**62:
        raise InputMismatch(f"shape {sizes} has more elements than can be counted")
    return ctx.xp if count <= MOST_FOLDED else jnp


@dataclass(frozen=True, slots=True)
class Formula:
    """An operator that is one expression of its inputs, for `register_formulas`.

    ``compute``: a function of the inputs, whose keyword-only parameters are attributes of the node (numbers in the
    type of the first input), or the name of a function that NumPy and JAX share.
    """

    meaning: str
    compute: Callable[..., Array] | str
    since: tuple[int, ...] = (1,)
    folds: bool = False

    def of_node(self, ctx: Context, node: Node, *inputs: Array) -> Array:
        """The operator's result."""
        if isinstance(self.compute, str):
            return getattr(ctx.xp, self.compute)(*inputs)
        defaults = getattr(self.compute, "__kwdefaults__", None) or {}
        attributes = {name: node.get(name, default) for name, default in defaults.items()}
        dtype = inputs[0].dtype
        return self.compute(
            *inputs,
            **{n: v if isinstance(v, str) else np.asarray(v, dtype) for n, v in attributes.items()},
        )


def register_formulas(
    domain: str,
    formulas: Mapping[str, Formula],
    around: Callable[[OperatorFunction], OperatorFunction] | None = None,
) -> None:
    """Register formulas by the operators' names. ``around``: what checks or prepares inputs, or rounds results."""
    for name, formula in formulas.items():

        def apply(ctx: Context, node: Node, *inputs: Array, formula: Formula = formula) -> Array:
            return formula.of_node(ctx, node, *inputs)

        function = around(apply) if around else apply
        function.__name__ = name.lower()
        function.__doc__ = f"{formula.meaning} ({'ONNX' if domain == ONNX else 'PopART'} {name})."
        operator(domain, name, formula.since, folds=formula.folds)(function)
