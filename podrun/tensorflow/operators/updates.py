"""Updates of variables, in TensorFlow's own arithmetic: each function gives the new values of what it writes.

Source of the formulas: tensorflow/core/kernels/training_ops.cc and the operations' definitions.
"""

from __future__ import annotations

import jax.numpy as jnp

from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import Array, computes


@computes("AssignVariableOp")
def _assign(ctx: Context, node: Node, variable: Array, value: Array) -> Array:
    return jnp.asarray(value)


@computes("AssignAddVariableOp")
def _assign_add(ctx: Context, node: Node, variable: Array, value: Array) -> Array:
    return variable + value


@computes("AssignSubVariableOp")
def _assign_sub(ctx: Context, node: Node, variable: Array, value: Array) -> Array:
    return variable - value


@computes("ResourceApplyGradientDescent")
def _descent(ctx: Context, node: Node, variable: Array, rate: Array, gradient: Array) -> Array:
    return variable - rate * gradient


@computes("ResourceApplyMomentum", attributes="use_nesterov")
def _momentum(
    ctx: Context, node: Node, v: Array, m: Array, rate: Array, gradient: Array, momentum: Array
) -> tuple[Array, ...]:
    new = m * momentum + gradient
    step = gradient * rate + new * momentum * rate if node["use_nesterov"] else rate * new
    return v - step, new


@computes("ResourceApplyKerasMomentum", attributes="use_nesterov")
def _keras_momentum(
    ctx: Context, node: Node, v: Array, m: Array, rate: Array, gradient: Array, momentum: Array
) -> tuple[Array, ...]:
    new = m * momentum - rate * gradient
    return v + (new * momentum - rate * gradient if node["use_nesterov"] else new), new


@computes("ResourceApplyAdam", attributes="use_nesterov")
def _adam(
    ctx: Context, node: Node, v: Array, m: Array, s: Array, power1: Array, power2: Array, rate: Array, beta1: Array,
    beta2: Array, epsilon: Array, g: Array,
) -> tuple[Array, ...]:  # fmt: skip
    alpha = rate * jnp.sqrt(1 - power2) / (1 - power1)
    first, second = m + (g - m) * (1 - beta1), s + (g * g - s) * (1 - beta2)
    step = g * (1 - beta1) + beta1 * first if node["use_nesterov"] else first
    return v - step * alpha / (jnp.sqrt(second) + epsilon), first, second


@computes("ResourceApplyAdamWithAmsgrad")
def _amsgrad(
    ctx: Context, node: Node, v: Array, m: Array, s: Array, most: Array, power1: Array, power2: Array, rate: Array,
    beta1: Array, beta2: Array, epsilon: Array, g: Array,
) -> tuple[Array, ...]:  # fmt: skip
    alpha = rate * jnp.sqrt(1 - power2) / (1 - power1)
    first, second = m + (g - m) * (1 - beta1), s + (g * g - s) * (1 - beta2)
    highest = jnp.maximum(most, second)
    return v - first * alpha / (jnp.sqrt(highest) + epsilon), first, second, highest


@computes("ResourceApplyAdaMax")
def _adamax(
    ctx: Context, node: Node, v: Array, m: Array, s: Array, power1: Array, rate: Array, beta1: Array, beta2: Array,
    epsilon: Array, g: Array,
) -> tuple[Array, ...]:  # fmt: skip
    first, highest = m + (g - m) * (1 - beta1), jnp.maximum(beta2 * s, jnp.abs(g))
    return v - rate / (1 - power1) * (first / (highest + epsilon)), first, highest


@computes("ResourceApplyAdagrad", attributes="update_slots")
def _adagrad(ctx: Context, node: Node, v: Array, s: Array, rate: Array, g: Array) -> tuple[Array, ...]:
    total = s + g * g if node["update_slots"] else s
    return v - rate * g / jnp.sqrt(total), total


@computes("ResourceApplyAdagradV2", attributes="update_slots")
def _adagrad2(
    ctx: Context, node: Node, v: Array, s: Array, rate: Array, epsilon: Array, g: Array
) -> tuple[Array, ...]:
    total = s + g * g if node["update_slots"] else s
    return v - rate * g / (jnp.sqrt(total) + epsilon), total


@computes("ResourceApplyAdadelta")
def _adadelta(
    ctx: Context, node: Node, v: Array, s: Array, u: Array, rate: Array, rho: Array, epsilon: Array, g: Array
) -> tuple[Array, ...]:
    total = rho * s + (1 - rho) * g * g
    step = jnp.sqrt(u + epsilon) / jnp.sqrt(total + epsilon) * g
    return v - rate * step, total, rho * u + (1 - rho) * step * step


@computes("ResourceApplyRMSProp")
def _rmsprop(
    ctx: Context, node: Node, v: Array, s: Array, m: Array, rate: Array, rho: Array, momentum: Array, epsilon: Array,
    g: Array,
) -> tuple[Array, ...]:  # fmt: skip
    total = s + (g * g - s) * (1 - rho)
    new = m * momentum + rate * g / jnp.sqrt(total + epsilon)
    return v - new, total, new


@computes("ResourceApplyCenteredRMSProp")
def _centred_rmsprop(
    ctx: Context, node: Node, v: Array, mean: Array, s: Array, m: Array, rate: Array, rho: Array, momentum: Array,
    epsilon: Array, g: Array,
) -> tuple[Array, ...]:  # fmt: skip
    total, centre = s + (g * g - s) * (1 - rho), mean + (g - mean) * (1 - rho)
    new = m * momentum + rate * g / jnp.sqrt(total - centre * centre + epsilon)
    return v - new, centre, total, new


@computes("ResourceScatterAdd")
def _scatter_add(ctx: Context, node: Node, v: Array, indices: Array, updates: Array) -> Array:
    return v.at[indices].add(updates)


@computes("ResourceScatterSub")
def _scatter_sub(ctx: Context, node: Node, v: Array, indices: Array, updates: Array) -> Array:
    return v.at[indices].add(-updates)


@computes("ResourceScatterUpdate")
def _scatter_update(ctx: Context, node: Node, v: Array, indices: Array, updates: Array) -> Array:
    return v.at[indices].set(updates)


@computes("Store")
def _store(ctx: Context, node: Node, variable: Array, value: Array) -> Array:
    """The value that a variable has after the step."""
    ctx.state_update(0, 0)
    return jnp.asarray(value).astype(variable.dtype).reshape(variable.shape)


@computes("ResourceScatterMul", "ResourceScatterDiv", "ResourceScatterMin", "ResourceScatterMax")
def _scatter_with(ctx: Context, node: Node, v: Array, indices: Array, updates: Array) -> Array:
    rows = v.at[indices]
    kind = node.op_type.removeprefix("ResourceScatter")
    return {"Mul": rows.multiply, "Div": rows.divide, "Min": rows.min, "Max": rows.max}[kind](updates)


@computes(
    "ResourceScatterNdUpdate", "ResourceScatterNdAdd", "ResourceScatterNdSub", attributes="bad_indices_policy"
)
def _scatter_places(ctx: Context, node: Node, v: Array, indices: Array, updates: Array) -> Array:
    places = v.at[tuple(jnp.moveaxis(indices, -1, 0))]
    if node.op_type.endswith("Update"):
        return places.set(updates)
    return places.add(updates if node.op_type.endswith("Add") else -updates)


@computes("ResourceApplyFtrl", "ResourceApplyFtrlV2", attributes="multiply_linear_by_lr")
def _ftrl(
    ctx: Context, node: Node, v: Array, total: Array, linear: Array, g: Array, rate: Array, l1: Array, l2: Array,
    *more: Array,
) -> tuple[Array, ...]:  # fmt: skip
    """Follow the regularised leader; the second version adds shrinkage of the gradient. ``linear`` may be kept as a
    multiple by the rate, and all that it meets is then too.
    """
    power = more[-1]
    shifted = g + 2 * more[0] * v if node.op_type.endswith("V2") else g
    new = total + g * g
    roots = new**-power - total**-power
    if node["multiply_linear_by_lr"]:
        line, square, l1 = linear + shifted * rate - roots * v, new**-power + 2 * l2 * rate, l1 * rate
    else:
        line, square = linear + shifted - roots / rate * v, new**-power / rate + 2 * l2
    clipped = jnp.clip(line, -l1, l1)
    return (clipped - line) / square, new, line


@computes("ResourceApplyProximalGradientDescent")
def _proximal(ctx: Context, node: Node, v: Array, rate: Array, l1: Array, l2: Array, g: Array) -> Array:
    step = v - rate * g
    return jnp.sign(step) * jnp.maximum(jnp.abs(step) - rate * l1, 0) / (1 + rate * l2)


@computes("ResourceApplyProximalAdagrad")
def _proximal_adagrad(
    ctx: Context, node: Node, v: Array, total: Array, rate: Array, l1: Array, l2: Array, g: Array
) -> tuple[Array, ...]:
    new = total + g * g
    own = rate / jnp.sqrt(new)
    step = v - own * g
    return jnp.sign(step) * jnp.maximum(jnp.abs(step) - own * l1, 0) / (1 + own * l2), new


@computes("ResourceApplyAdagradDA")
def _dual_averaging(
    ctx: Context, node: Node, v: Array, total: Array, squares: Array, g: Array, rate: Array, l1: Array, l2: Array,
    count: Array,
) -> tuple[Array, ...]:  # fmt: skip
    """Adagrad that starts from all gradients so far, of ``count`` steps."""
    new, square, steps = total + g, squares + g * g, jnp.asarray(count).astype(v.dtype)
    clipped = jnp.sign(new) * jnp.maximum(jnp.abs(new) - l1 * steps, 0)
    return -rate * clipped / (l2 * steps * rate + jnp.sqrt(square)), new, square


@computes("ResourceApplyAddSign", "ResourceApplyPowerSign")
def _signed(
    ctx: Context,
    node: Node,
    v: Array,
    m: Array,
    rate: Array,
    first: Array,
    decay: Array,
    beta: Array,
    g: Array,
) -> tuple[Array, ...]:
    new = m * beta + g * (1 - beta)
    agree = decay * jnp.sign(g) * jnp.sign(new)
    step = (first + agree) * g if node.op_type.endswith("AddSign") else jnp.exp(first * agree) * g
    return v - rate * step, new
