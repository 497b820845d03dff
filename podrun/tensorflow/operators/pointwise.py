"""Operations on elements and rows: arithmetic, comparisons, activations, casts, reductions, cross entropies."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.numerics.gradients import absolute, with_gradient
from podrun.numerics.precision import is_float
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import Array, computes


def _register(types: str, function: Callable[..., Array]) -> None:
    """Register a function of the inputs alone."""

    def call(ctx: Context, node: Node, *inputs: Array) -> Array:
        return function(*inputs)

    computes(*types.split())(call)


def _folded(types: str, name: str) -> None:
    """Register the function of that name of NumPy and of JAX."""

    def call(ctx: Context, node: Node, *inputs: Array) -> Array:
        return getattr(ctx.xp, name)(*inputs)

    computes(*types.split(), folds=True)(call)


for _types, _name in {
    "Add AddV2": "add", "Sub": "subtract", "Mul": "multiply", "Neg": "negative",
    "Equal": "equal", "NotEqual": "not_equal", "Less": "less", "LessEqual": "less_equal",
    "Greater": "greater", "GreaterEqual": "greater_equal", "LogicalAnd": "logical_and", "LogicalOr": "logical_or",
    "LogicalNot": "logical_not", "FloorMod": "mod", "Square": "square", "Sign": "sign",
    "Floor": "floor", "Ceil": "ceil", "OnesLike": "ones_like", "ZerosLike": "zeros_like",
    "RightShift": "right_shift", "LeftShift": "left_shift", "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor", "Invert": "invert",
}.items():  # fmt: skip
    _folded(_types, _name)


def _erf_gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _divide_no_nan(a: Array, b: Array) -> Array:
    zero = b == 0
    return jnp.where(zero, jnp.zeros((), a.dtype), a / jnp.where(zero, jnp.ones((), b.dtype), b))


def _multiply_no_nan(a: Array, b: Array) -> Array:
    """a * b, and 0 where b is 0, where the gradient of b is a nevertheless."""
    zero, none = b == 0, jnp.zeros((), a.dtype)
    carrier = jnp.where(zero, none, a * lax.stop_gradient(b)) + lax.stop_gradient(a) * b
    return with_gradient(jnp.where(zero, none, a * b), carrier)


def _clipped(x: Array, low: Array, high: Array) -> Array:
    """x clipped to limits. The gradient goes to a limit where x lies beyond it, and to x where they are equal."""
    bounded = jnp.where(x < low, low, jnp.where(x > high, high, x))
    return with_gradient(jnp.clip(x, low, high), bounded) if is_float(x) else jnp.clip(x, low, high)


def _relu6(x: Array) -> Array:
    return with_gradient(jnp.clip(x, 0, 6), jnp.where((x > 0) & (x < 6), x, jnp.zeros((), x.dtype)))


def _selu(x: Array) -> Array:
    """SELU; its slope at 0 is that above 0."""
    scale, alpha = jnp.asarray(1.0507009873554805, x.dtype), jnp.asarray(1.7580993408473768, x.dtype)
    below = x < 0
    return jnp.where(below, alpha * jnp.expm1(jnp.where(below, x, jnp.zeros((), x.dtype))), scale * x)


def _power(x: Array, y: Array) -> Array:
    return _float_power(x, y) if is_float(x) else jnp.power(x, y)


@jax.custom_jvp
def _float_power(x: Array, y: Array) -> Array:
    return jnp.power(x, y)


@_float_power.defjvp
def _float_power_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """The gradient of the exponent is 0 where x is not positive. Source: TensorFlow's math_grad."""
    (x, y), (own, exponents) = primals, tangents
    power = _float_power(x, y)
    logs = jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, jnp.ones((), x.dtype))), jnp.zeros((), x.dtype))
    return power, own * y * jnp.power(x, y - 1) + exponents * power * logs


def _log_no_zero(x: Array, y: Array) -> Array:
    zero = x == 0
    return jnp.where(zero, jnp.zeros((), y.dtype), x * jnp.log(jnp.where(zero, jnp.ones((), y.dtype), y)))


def _divided_by_zero(x: Array, y: Array) -> Array:
    zero = x == 0
    return jnp.where(zero, jnp.zeros((), x.dtype), x / jnp.where(zero, jnp.ones((), y.dtype), y))


def _one_minus_square(y: Array) -> Array:
    return 1 - y * y


@jax.custom_jvp
def _tanh(x: Array) -> Array:
    return jnp.tanh(x)


@_tanh.defjvp
def _tanh_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The slope as `TanhGrad` has it, to the bit."""
    y = _tanh(*primals)
    return y, tangents[0] * _one_minus_square(y)


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "Abs": absolute, "Exp": jnp.exp, "Expm1": jnp.expm1, "Log": jnp.log, "Log1p": jnp.log1p, "Sqrt": jnp.sqrt,
    "Rsqrt": lambda x: lax.rsqrt(x), "Sin": jnp.sin, "Cos": jnp.cos, "Tan": jnp.tan, "Asin": jnp.arcsin,
    "Acos": jnp.arccos, "Atan": jnp.arctan, "Atan2": jnp.arctan2, "Sinh": jnp.sinh, "Cosh": jnp.cosh,
    "Tanh": _tanh, "Sigmoid": jax.nn.sigmoid, "Erf": lax.erf, "Erfc": lax.erfc, "Lgamma": lax.lgamma,
    "Digamma": lax.digamma, "Relu": jax.nn.relu, "Relu6": _relu6, "Elu": jax.nn.elu, "Selu": _selu,
    "Softplus": jax.nn.softplus, "Softsign": jax.nn.soft_sign, "Reciprocal Inv": lambda x: 1 / x,
    "RealDiv": jnp.divide, "Div": lambda a, b: a / b if jnp.issubdtype(a.dtype, jnp.floating) else lax.div(a, b),
    "TruncateDiv": lambda a, b: lax.div(*jnp.broadcast_arrays(a, b)),
    "TruncateMod": lambda a, b: lax.rem(*jnp.broadcast_arrays(a, b)), "Mod": jnp.fmod,
    "DivNoNan": _divide_no_nan, "MulNoNan": _multiply_no_nan, "Xlogy": _log_no_zero, "Xdivy": _divided_by_zero,
    "Pow": _power, "SquaredDifference": lambda a, b: (a - b) ** 2, "Round": jnp.round, "Rint": jnp.round,
    "IsNan": jnp.isnan, "IsInf": jnp.isinf, "IsFinite": jnp.isfinite, "Asinh": jnp.arcsinh, "Acosh": jnp.arccosh,
    "Atanh": jnp.arctanh, "StopGradient PreventGradient": lax.stop_gradient, "SelectV2": jnp.where,
    "ClipByValue": _clipped,
}  # fmt: skip
for _types, _function in _FUNCTIONS.items():
    _register(_types, _function)


_SLOPES_OF_RESULTS: dict[str, Callable[[Array], Array]] = {
    "TanhGrad": _one_minus_square,
    "SigmoidGrad": lambda y: y * (1 - y),
    "SqrtGrad": lambda y: 0.5 / y,
    "RsqrtGrad": lambda y: -0.5 * y * y * y,
    "ReciprocalGrad InvGrad": lambda y: -(y * y),
}
"""The slope of a function by its result, which is the first input; the second is the gradient of the result."""
_SLOPES: dict[str, Callable[[Array], Array]] = {
    "ReluGrad": lambda x: (x > 0).astype(x.dtype),
    "Relu6Grad": lambda x: ((x > 0) & (x < 6)).astype(x.dtype),
    "SoftplusGrad": jax.nn.sigmoid,
    "SoftsignGrad": lambda x: 1 / jnp.square(1 + jnp.abs(x)),
    "EluGrad": lambda y: jnp.where(y < 0, y + 1, jnp.ones((), y.dtype)),
    "SeluGrad": lambda y: jnp.where(
        y < 0, y + jnp.asarray(1.7580993408473768, y.dtype), jnp.asarray(1.0507009873554805, y.dtype)
    ),
}
"""The slope of an activation: by the second input, where the first is the gradient."""
for _types, _slope in _SLOPES_OF_RESULTS.items():
    _register(_types, lambda y, gradient, slope=_slope: gradient * slope(y))
for _types, _slope in _SLOPES.items():
    _register(_types, lambda gradient, x, slope=_slope: gradient * slope(x))


@computes("LeakyReluGrad", attributes="alpha")
def _leaky_slope(ctx: Context, node: Node, gradient: Array, x: Array) -> Array:
    return jnp.where(x > 0, gradient, gradient * jnp.asarray(node["alpha"], x.dtype))


@computes("BiasAddGrad", attributes="data_format")
def _bias_gradient(ctx: Context, node: Node, gradient: Array) -> Array:
    channels = 1 if node.get("data_format", "NHWC") == "NCHW" else gradient.ndim - 1
    others = tuple(axis for axis in range(gradient.ndim) if axis != channels)
    return gradient.astype(jnp.float32).sum(others).astype(gradient.dtype)


@computes("Maximum", "Minimum", folds=True)
def _larger_or_smaller(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """The larger or the smaller of two; the gradient of equal ones goes to ``a``."""
    largest = node.op_type == "Maximum"
    value = (ctx.xp.maximum if largest else ctx.xp.minimum)(a, b)
    if ctx.xp is np or not is_float(value):
        return value
    return with_gradient(value, jnp.where(a >= b if largest else a <= b, a, b))


@computes("FloorDiv", folds=True)
def _floor_divide(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """Floats are divided and then rounded down: 1.0 by 0.1 is 10."""
    return ctx.xp.floor(a / b) if np.dtype(a.dtype).kind == "f" else ctx.xp.floor_divide(a, b)


@computes("L2Loss")
def _half_of_squares(ctx: Context, node: Node, x: Array) -> Array:
    return _in_float32(lambda wide: jnp.sum(wide * wide) / 2, x)


@computes("LeakyRelu", attributes="alpha")
def _leaky(ctx: Context, node: Node, x: Array) -> Array:
    return jnp.where(x > 0, x, x * jnp.asarray(node["alpha"], x.dtype))


@computes("Select")
def _select(ctx: Context, node: Node, condition: Array, x: Array, y: Array) -> Array:
    if condition.ndim == 1 and x.ndim > 1:
        condition = condition.reshape(condition.shape + (1,) * (x.ndim - 1))
    return jnp.where(condition, x, y)


@computes("AddN", "AccumulateNV2", attributes="shape")
def _add_all(ctx: Context, node: Node, *inputs: Array) -> Array:
    return sum(inputs[1:], inputs[0])


@computes("Cast", attributes="DstT output", folds=True)
def _cast(ctx: Context, node: Node, x: Array) -> Array:
    dtype = np.dtype(
        jnp.bfloat16 if node["output"] == "bfloat16" else _NAMES.get(node["output"], node["output"])
    )
    if ctx.xp is np:
        return np.asarray(x).astype(dtype)
    narrow = {"int64": np.int32, "float64": np.float32, "uint64": np.uint32}.get(dtype.name, dtype)
    x = jnp.asarray(x)
    if (
        jnp.issubdtype(x.dtype, jnp.floating)
        and np.dtype(narrow).itemsize < 4
        and np.dtype(narrow).kind in "iu"
    ):
        x = x.astype(np.int32)  # What does not fit wraps around.
    result = x.astype(narrow)
    if jnp.issubdtype(x.dtype, jnp.floating) and np.dtype(narrow) == np.int32:
        return jnp.where(jnp.isnan(x), jnp.asarray(np.iinfo(np.int32).min), result)
    return result


_NAMES = {"bool_": "bool", "bool": "bool"}


@computes("Const", attributes="value", folds=True)
def _const(ctx: Context, node: Node) -> Array:
    return np.asarray(node["value"])


@computes("Result")
def _result(ctx: Context, node: Node, x: Array) -> Array:
    """A tensor that leaves the program, under a name of its own."""
    return jnp.asarray(x)


@computes("BiasAdd", "BiasAddV1", attributes="data_format")
def _bias(ctx: Context, node: Node, x: Array, bias: Array) -> Array:
    if node.get("data_format", "NHWC") == "NCHW":
        bias = bias.reshape(bias.shape + (1,) * (x.ndim - 2))
    return x + bias


@computes("Softmax")
def _softmax(ctx: Context, node: Node, x: Array) -> Array:
    return _in_float32(jax.nn.softmax, x)


@computes("LogSoftmax")
def _log_softmax(ctx: Context, node: Node, x: Array) -> Array:
    return _in_float32(jax.nn.log_softmax, x)


def _in_float32(function: Callable[[Array], Array], x: Array) -> Array:
    return function(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


@computes("Cumsum", "Cumprod", attributes="exclusive reverse")
def _cumulative(ctx: Context, node: Node, x: Array, axis: Array) -> Array:
    axis = int(ctx.constant(1))
    if node["reverse"]:
        x = jnp.flip(x, axis)
    product = node.op_type == "Cumprod"
    total = jnp.cumprod(x, axis) if product else jnp.cumsum(x, axis)
    if node["exclusive"]:
        total = jnp.roll(total, 1, axis)
        first = [slice(None)] * x.ndim
        first[axis] = slice(0, 1)
        total = total.at[tuple(first)].set(1 if product else 0)
    return jnp.flip(total, axis) if node["reverse"] else total


_REDUCTIONS = {
    "Sum": "sum", "Mean": "mean", "Max": "max", "Min": "min", "Prod": "prod", "All": "all", "Any": "any",
    "EuclideanNorm": "",
}  # fmt: skip


@computes(*_REDUCTIONS, attributes="keep_dims", folds=True)
def _reduce(ctx: Context, node: Node, x: Array, axes: Array) -> Array:
    axis = tuple(int(a) for a in np.atleast_1d(np.asarray(ctx.constant(1))))
    if node.op_type == "EuclideanNorm":
        return _in_float32(
            lambda wide: jnp.sqrt(jnp.sum(wide * wide, axis=axis, keepdims=node["keep_dims"])), x
        )
    if ctx.xp is not np and node.op_type in ("Sum", "Prod", "Mean") and x.dtype == jnp.float16:
        wide = getattr(jnp, _REDUCTIONS[node.op_type])(
            x.astype(jnp.float32), axis=axis, keepdims=node["keep_dims"]
        )
        return wide.astype(x.dtype)
    result = getattr(ctx.xp, _REDUCTIONS[node.op_type])(x, axis=axis, keepdims=node["keep_dims"])
    if node.op_type == "Mean" and np.dtype(x.dtype).kind in "iu":
        return result.astype(x.dtype)
    return result if node.op_type in ("All", "Any") else result.astype(x.dtype)


@computes("SparseSoftmaxCrossEntropyWithLogits")
def _sparse(ctx: Context, node: Node, logits: Array, labels: Array) -> tuple[Array, ...]:
    wide = logits.astype(jnp.float32)
    logs = jax.nn.log_softmax(wide)
    loss = -jnp.take_along_axis(logs, labels[:, None].astype(jnp.int32), 1)[:, 0]
    hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)
    gradient = jax.lax.stop_gradient(jnp.exp(logs) - hot)
    return loss.astype(logits.dtype), gradient.astype(logits.dtype)


@computes("SoftmaxCrossEntropyWithLogits")
def _dense(ctx: Context, node: Node, logits: Array, labels: Array) -> tuple[Array, ...]:
    """The loss and its gradient, which is softmax minus labels, as in TensorFlow also where these do not sum to 1."""
    wide, target = jnp.broadcast_arrays(logits.astype(jnp.float32), labels.astype(jnp.float32))
    logs = jax.nn.log_softmax(wide)
    fixed, fixed_logs = lax.stop_gradient(target), lax.stop_gradient(logs)
    carrier = jax.nn.logsumexp(wide, -1) - jnp.sum(fixed * wide, -1) - jnp.sum(target * fixed_logs, -1)
    loss = with_gradient(-jnp.sum(fixed * fixed_logs, -1), carrier)
    return loss.astype(logits.dtype), (jnp.exp(fixed_logs) - fixed).astype(logits.dtype)
