"""Halves that overflow, as an IPU gives them: the greatest finite ones, or NaN.

Every result of an operation and every gradient passes here, hundreds in a program. So both are primitives of JAX, one
equation each, which are traced quickly; and the compiler drops those whose operand was clipped before
(`podrun.compiler.jaxprs.without_repeated_clips`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrun.core.names import CLIPPED
from podrun.core.quick_dataclass import dataclass
from podrun.private_apis.jax import TracedPrimitive, new_primitive
from podrun.runtime.graph import Node

Array = Any
"""An array of JAX, or of NumPy where an operation folds."""


_LINEAR = frozenset({
    "AccumulateNV2", "Add", "AddN", "AddV2", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "BiasAdd",
    "BiasAddGrad", "BiasAddV1", "Cast", "Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "Conv3D",
    "Conv3DBackpropFilterV2", "Conv3DBackpropInputV2", "Cross", "Cumsum", "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropFilter", "DepthwiseConv2dNativeBackpropInput", "Einsum", "L2Loss", "LeakyRelu",
    "Lgamma", "LogSoftmax", "MatMul", "Mean", "Mul", "MulNoNan", "Prod", "ScatterNd", "SegmentSum",
    "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "Sub", "Sum", "TensorScatterAdd",
    "TensorScatterSub", "UnsortedSegmentSum",
})  # fmt: skip
"""Operations whose gradients TensorFlow makes of their inputs and not of their results, and whose slopes are finite:
the gradients are what they would be if no result had overflowed. Those in `_SLOPES` are so too. Through an overflow of
another operation no gradient passes.
"""
Slope = Callable[..., Array]
"""``slope(clip, result, inputs, tangents)`` gives the tangent of a result, where ``clip`` clips what may overflow."""


def _of_division(clip: Slope, result: Array, inputs: Sequence[Array], tangents: Sequence[Array]) -> Array:
    (a, b), (above, below) = inputs, tangents
    return above / b + below * clip(clip(-a / b) / b)


def _of_power(clip: Slope, result: Array, inputs: Sequence[Array], tangents: Sequence[Array]) -> Array:
    """The gradient of the exponent is 0 where the base is not positive, and is made of the result."""
    import jax.numpy as jnp

    (x, y), (base, exponent) = inputs, tangents
    one = jnp.ones((), x.dtype)
    logs = jnp.log(jnp.where(x > 0, x, one))
    return base * y * clip(jnp.power(x, y - one)) + exponent * clip(result) * logs


def _without_nan(above: Array, below: Array) -> Array:
    """A quotient that is 0 where its divisor is 0."""
    import jax.numpy as jnp

    zero = below == 0
    return jnp.where(
        zero, jnp.zeros((), above.dtype), above / jnp.where(zero, jnp.ones((), below.dtype), below)
    )


def _of_division_without_nan(
    clip: Slope, _: Array, inputs: Sequence[Array], tangents: Sequence[Array]
) -> Array:
    (a, b), (above, below) = inputs, tangents
    outer = clip(_without_nan(clip(_without_nan(-a, b)), b))
    return _without_nan(above, b) + below * outer


def _of_product_with_log(offset: int) -> Slope:
    """The slope of ``x * log(offset + y)``."""

    def tangent(clip: Slope, result: Array, inputs: Sequence[Array], tangents: Sequence[Array]) -> Array:
        import jax.numpy as jnp

        (x, y), (factor, inside) = inputs, tangents
        logs = jnp.log1p(y) if offset else jnp.log(y)
        first = jnp.where(x == 0, jnp.zeros((), x.dtype), clip(logs))
        second = jnp.where(x == 0, jnp.zeros((), x.dtype), clip(x / (y + offset)))
        return factor * first + inside * second

    return tangent


def _of_division_without_zeros(
    clip: Slope, _: Array, inputs: Sequence[Array], tangents: Sequence[Array]
) -> Array:
    import jax.numpy as jnp

    (x, y), (above, below) = inputs, tangents
    zero, none = x == 0, jnp.zeros((), x.dtype)
    first = jnp.where(zero, none, clip(1 / y))
    return above * first + below * jnp.where(zero, none, clip(-x / clip(y * y)))


def _of_result(slope: Callable[[Slope, Array], Array]) -> Slope:
    """What becomes of the tangent of an operation with one input, of whose clipped result the slope is made."""

    def tangent(clip: Slope, result: Array, inputs: Sequence[Array], tangents: Sequence[Array]) -> Array:
        return tangents[0] * clip(slope(clip, clip(result)))

    return tangent


def _in_float32(slope: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A slope that is computed in float32 and rounded once."""

    def rounded(x: Array) -> Array:
        return slope(x.astype(np.float32)).astype(x.dtype)

    return rounded


def _slope_of_inverse(name: str) -> Callable[[Array], Array]:
    """The slope of ``Erfinv`` and ``Ndtri``: that of the function which they invert is a bell's."""

    def slope(x: Array) -> Array:
        import jax.numpy as jnp
        from jax import lax
        from jax.scipy.special import ndtri

        if name == "Erfinv":
            return np.float32(np.sqrt(np.pi) / 2) * jnp.exp(lax.erf_inv(x) ** 2)
        return np.float32(np.sqrt(2 * np.pi)) * jnp.exp(ndtri(x) ** 2 / 2)

    return slope


def _trigamma(x: Array) -> Array:
    from jax.scipy.special import polygamma

    return polygamma(1, x)


def _of_one(slope: Callable[[Array], Array]) -> Slope:
    """What becomes of the tangent of an operation with one input, of whose value the slope is made."""

    def tangent(clip: Slope, result: Array, inputs: Sequence[Array], tangents: Sequence[Array]) -> Array:
        return tangents[0] * clip(slope(inputs[0]))

    return tangent


def _hyperbolic(name: str) -> Callable[[Array], Array]:
    def function(x: Array) -> Array:
        import jax.numpy as jnp

        return getattr(jnp, name)(x)

    return function


_SLOPES: dict[str, Slope] = {
    "Square": _of_one(lambda x: 2 * x),
    "SquaredDifference": lambda clip, _, pair, of: 2 * (of[0] - of[1]) * clip(pair[0] - pair[1]),
    "RealDiv": _of_division,
    "Div": _of_division,
    "Pow": _of_power,
    "Sinh": _of_one(_hyperbolic("cosh")),
    "Cosh": _of_one(_hyperbolic("sinh")),
    "Expm1": _of_one(_hyperbolic("exp")),
    "Exp": _of_result(lambda clip, y: y),
    "Reciprocal": _of_result(lambda clip, y: -clip(y * y)),
    "Inv": _of_result(lambda clip, y: -clip(y * y)),
    "Rsqrt": _of_one(_in_float32(lambda x: -0.5 / (x * x**0.5))),
    "Log": _of_one(lambda x: 1 / x),
    "Log1p": _of_one(lambda x: 1 / (1 + x)),
    "Atanh": _of_one(lambda x: 1 / (1 - x * x)),
    "Digamma": _of_one(_in_float32(_trigamma)),
    "Erfinv": _of_one(_in_float32(_slope_of_inverse("Erfinv"))),
    "Ndtri": _of_one(_in_float32(_slope_of_inverse("Ndtri"))),
    "DivNoNan": _of_division_without_nan,
    "Xlogy": _of_product_with_log(0),
    "Xlog1py": _of_product_with_log(1),
    "Xdivy": _of_division_without_zeros,
}
"""Operations whose slopes can overflow too, which then are the greatest half or NaN as other halves, so that a gradient
of zero stays zero. Source of the formulas: TensorFlow's gradient functions.
"""


@dataclass(frozen=True, slots=True)
class HalfPrecision:
    """What becomes of halves that overflow: the largest finite ones, or NaN (``nan_on_overflow``). A division of a half
    by zero gives NaN in both cases. Source: the SDK's tests of floating-point control.
    """

    nan_on_overflow: bool = False

    def results(
        self, node: Node, inputs: Sequence[Array], results: Array, differentiated: bool = False
    ) -> Array:
        """The results of an operation in the form that an IPU gives them. ``differentiated``: gradients are taken."""
        if differentiated and node.op_type in _SLOPES and _is_float16(results):
            results = _sloped()(node.op_type, self.nan_on_overflow, results, *inputs)
        single = not isinstance(results, tuple)
        values = [self._value(node, inputs, r) for r in ((results,) if single else results)]
        return values[0] if single else tuple(values)

    def _value(self, node: Node, inputs: Sequence[Array], value: Array) -> Array:
        import jax.numpy as jnp

        if not _is_float16(value):
            return value
        clip = _primitives()[2 if node.op_type in _LINEAR or node.op_type in _SLOPES else 0]
        value = clip.bind(value, nan_on_overflow=self.nan_on_overflow)
        if node.op_type in ("RealDiv", "Div"):
            value = jnp.where(inputs[1] == 0, jnp.asarray(np.nan, jnp.float16), value)
        return value

    def passed(self, value: Array) -> Array:
        """``value``, where gradients of halves that overflow on their way back become what other halves become."""
        if not _is_float16(value):
            return value
        return _primitives()[1].bind(value, nan_on_overflow=self.nan_on_overflow)


def _is_float16(value: Array) -> bool:
    """Whether a value is computed on the device, in halves."""
    return getattr(value, "dtype", None) == np.float16 and not isinstance(value, np.ndarray)


def _clipped(value: Array, *, nan_on_overflow: bool) -> Array:
    """``value``, halves or float32 on their grid, with NaN or the greatest half in place of infinities."""
    from jax import lax

    if nan_on_overflow:
        return lax.select(_is_infinite(value), lax.full_like(value, np.nan), value)
    most = np.finfo(np.float16).max.astype(value.dtype)
    return lax.clamp(-most, value, most)


def _is_infinite(value: Array) -> Array:
    from jax import lax

    return lax.eq(lax.abs(value), np.asarray(np.inf, value.dtype))


@functools.cache
def _sloped() -> Callable[..., Array]:
    """``sloped(op_type, nan_on_overflow, result, *inputs)`` is the result, whose gradient is that of `_SLOPES`."""
    import jax

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
    def sloped(op_type: str, nan_on_overflow: bool, result: Array, *inputs: Array) -> Array:
        return result

    @sloped.defjvp
    def rule(op_type: str, nan_on_overflow: bool, values: Sequence[Array], tangents: Sequence[Array]) -> Any:
        def clip(value: Array) -> Array:
            return _primitives()[2].bind(value, nan_on_overflow=nan_on_overflow)

        result, *inputs = values
        return result, _SLOPES[op_type](clip, result, inputs, tangents[1:])

    return sloped


@functools.cache
def _primitives() -> tuple[TracedPrimitive, TracedPrimitive, TracedPrimitive]:
    """One that clips a value, one that gives it and clips its gradient, and one that clips a value and lets gradients
    pass where it does.
    """
    from jax import lax
    from jax.core import ShapedArray
    from jax.interpreters import ad, batching, mlir

    clip_p, pass_p = new_primitive(CLIPPED), new_primitive("with_clipped_gradient")
    open_p = new_primitive(CLIPPED)

    def slope(
        values: Sequence[Array], tangents: Sequence[Array], *, nan_on_overflow: bool
    ) -> tuple[Array, Array]:
        (value,), (tangent,) = values, tangents
        if not isinstance(tangent, ad.Zero):  # An infinity's is 0.
            tangent = lax.select(_is_infinite(value), lax.full_like(tangent, 0), tangent)
        return clip_p.bind(value, nan_on_overflow=nan_on_overflow), tangent

    def whole(
        values: Sequence[Array], tangents: Sequence[Array], *, nan_on_overflow: bool
    ) -> tuple[Array, Array]:
        return open_p.bind(values[0], nan_on_overflow=nan_on_overflow), tangents[0]

    def passed(
        values: Sequence[Array], tangents: Sequence[Array], *, nan_on_overflow: bool
    ) -> tuple[Array, Array]:
        (tangent,) = tangents
        zero = isinstance(tangent, ad.Zero)
        return values[0], tangent if zero else pass_p.bind(tangent, nan_on_overflow=nan_on_overflow)

    def transposed(gradient: Array, value: Array, *, nan_on_overflow: bool) -> list[Array]:
        zero = isinstance(gradient, ad.Zero)
        return [gradient if zero else clip_p.bind(gradient, nan_on_overflow=nan_on_overflow)]

    for primitive, function, rule in (
        (clip_p, _clipped, slope),
        (open_p, _clipped, whole),
        (pass_p, lambda value, *, nan_on_overflow: value, passed),
    ):
        primitive.def_abstract_eval(lambda value, *, nan_on_overflow: ShapedArray(value.shape, value.dtype))
        primitive.def_impl(function)
        ad.primitive_jvps[primitive] = rule
        batching.defvectorized(primitive)
        mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    ad.primitive_transposes[pass_p] = transposed
    return clip_p, pass_p, open_p
