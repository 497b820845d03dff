"""Special functions, colours, quantisation that is pretended, and random numbers of other distributions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.numerics.gradients import absolute, with_gradient
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import Array, computes


def _register(types: str, function: Callable[..., Array]) -> None:
    """Register a function of the inputs alone, computed in float32."""

    def call(ctx: Context, node: Node, *inputs: Array) -> Array:
        dtype = inputs[0].dtype
        floats = [x.astype(jnp.float32) if x.dtype == jnp.float16 else x for x in inputs]
        return function(*floats).astype(dtype)

    computes(*types.split())(call)


def _next_after(x: Array, towards: Array) -> Array:
    x, towards = jnp.broadcast_arrays(x, towards)
    return with_gradient(jnp.nextafter(lax.stop_gradient(x), lax.stop_gradient(towards)), x)


def _log1p_no_zero(x: Array, y: Array) -> Array:
    zero = x == 0
    return jnp.where(zero, jnp.zeros((), y.dtype), x * jnp.log1p(jnp.where(zero, jnp.zeros((), y.dtype), y)))


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "Erfinv": lax.erf_inv,
    "Ndtri": jax.scipy.special.ndtri,
    "Igamma": jax.scipy.special.gammainc,
    "Igammac": jax.scipy.special.gammaincc,
    "Betainc": lambda a, b, x: jax.scipy.special.betainc(a, b, x),
    "Polygamma": lambda n, x: jax.scipy.special.polygamma(n.astype(jnp.int32), x),
    "Zeta": jax.scipy.special.zeta,
    "BesselI0e": lax.bessel_i0e,
    "BesselI1e": lax.bessel_i1e,
    "BesselI0": lambda x: lax.bessel_i0e(x) * jnp.exp(absolute(x)),
    "BesselI1": lambda x: lax.bessel_i1e(x) * jnp.exp(absolute(x)),
    "Xlog1py": _log1p_no_zero,
    "NextAfter": _next_after,
    "PopulationCount": lax.population_count,
}
_FUNCTIONS["IpuGelu"] = lambda x: jax.nn.gelu(
    x, approximate=True
)  # Of SavedModels that were converted for IPUs.
for _types, _function in _FUNCTIONS.items():
    _register(_types, _function)


@computes("ApproximateEqual", attributes="tolerance")
def _nearly(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    return jnp.abs(a - b) < node["tolerance"]


def _hue(rgb: Array) -> tuple[Array, Array, Array]:
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    most, span = rgb.max(-1), rgb.max(-1) - rgb.min(-1)
    safe = jnp.where(span > 0, span, 1)
    hue = jnp.where(
        most == red,
        (green - blue) / safe,
        jnp.where(most == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    hue = jnp.where(span > 0, hue / 6 % 1, 0)
    return hue, jnp.where(most > 0, span / jnp.where(most > 0, most, 1), 0), most


def _colour(hue: Array, saturation: Array, value: Array) -> Array:
    spread = jnp.stack([hue * 6 - 3, hue * 6 - 2, hue * 6 - 4], -1)
    signs = jnp.asarray([1.0, -1.0, -1.0])
    offsets = jnp.asarray([-1.0, 2.0, 2.0])
    chroma = jnp.clip(jnp.abs(spread) * signs + offsets, 0, 1)
    return ((chroma - 1) * saturation[..., None] + 1) * value[..., None]


@computes("RGBToHSV")
def _to_hsv(ctx: Context, node: Node, x: Array) -> Array:
    return jnp.stack(_hue(x), -1)


@computes("HSVToRGB")
def _to_rgb(ctx: Context, node: Node, x: Array) -> Array:
    return _colour(x[..., 0], x[..., 1], x[..., 2]).astype(x.dtype)


@computes("AdjustContrastv2")
def _contrast(ctx: Context, node: Node, x: Array, factor: Array) -> Array:
    mean = x.mean((-3, -2), keepdims=True)
    return (x - mean) * factor.astype(x.dtype) + mean


@computes("AdjustSaturation", "AdjustHue")
def _adjusted(ctx: Context, node: Node, x: Array, change: Array) -> Array:
    hue, saturation, value = _hue(x)
    if node.op_type == "AdjustHue":
        return _colour((hue + change) % 1, saturation, value).astype(x.dtype)
    return _colour(hue, jnp.clip(saturation * change, 0, 1), value).astype(x.dtype)


def _fake(x: Array, least: Array, most: Array, bits: int, narrow: bool) -> Array:
    """``x`` rounded to as many steps as the bits have, between limits that are moved so that 0 is a step. The gradient
    goes to ``x`` where it lies between the limits, else to the limit that it exceeds.
    """
    low, high = float(narrow), float(2**bits - 1)
    scale = (most - least) / (high - low)
    zero = jnp.clip(jnp.round(low - least / scale), low, high)
    moved_low, moved_high = (low - zero) * scale, (high - zero) * scale
    clipped = jnp.clip(x, moved_low, moved_high)
    steps = jnp.floor((clipped - moved_low) / scale + 0.5) * scale + moved_low
    carrier = jnp.where(x < moved_low, least, jnp.where(x > moved_high, most, x))
    return with_gradient(lax.stop_gradient(steps), carrier)


@computes("FakeQuantWithMinMaxArgs", attributes="min max num_bits narrow_range")
def _fake_args(ctx: Context, node: Node, x: Array) -> Array:
    least, most = np.float32(node["min"]), np.float32(node["max"])
    return _fake(x, least, most, node["num_bits"], node["narrow_range"])


@computes("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel", attributes="num_bits narrow_range")
def _fake_vars(ctx: Context, node: Node, x: Array, least: Array, most: Array) -> Array:
    return _fake(x, least, most, node["num_bits"], node["narrow_range"])


@computes("Multinomial", attributes="output output_dtype", random=True)
def _multinomial(ctx: Context, node: Node, logits: Array, count: Array) -> Array:
    shape = (logits.shape[0], int(ctx.constant(1)))
    drawn = jax.random.categorical(ctx.key(), logits[:, None, :].astype(jnp.float32), shape=shape)
    return drawn.astype(jnp.int32)


@computes("RandomGamma", random=True)
def _gamma(ctx: Context, node: Node, shape: Array, alpha: Array) -> Array:
    sizes = tuple(int(v) for v in np.atleast_1d(ctx.constant(0)))
    return jax.random.gamma(ctx.key(), alpha.astype(jnp.float32), (*sizes, *alpha.shape)).astype(alpha.dtype)


@computes("StatelessRandomUniformInt", "StatelessRandomUniformIntV2")
def _stateless_int(ctx: Context, node: Node, shape: Array, seed: Array, *more: Array) -> Array:
    words = jnp.asarray(seed).reshape(-1)
    key = jax.random.fold_in(jax.random.key(words[0]), words[-1])
    sizes = tuple(int(v) for v in np.atleast_1d(ctx.constant(0))) if np.size(ctx.constant(0)) else ()
    low, high = more[-2:]
    return jax.random.randint(key, sizes, low, high, jnp.int32)
