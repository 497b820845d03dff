"""Convolutions as the CPU computes them fastest: calls into oneDNN, which is part of jaxlib.

XLA's own convolutions run on one thread at half its speed or less, and where the kernel is larger than the image at a
hundredth. jaxlib holds oneDNN and runs custom calls to it, but its compiler does not make them;
`podrun.device.xla.rewrite` puts these functions in the place of convolutions before XLA compiles.

Images lie channels last here. The transposes around each call cost nothing where XLA can choose the layout of what is
between two of them. Each output element is one sum in one order whatever the number of threads (tests/device assert
it).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import platform
from dataclasses import dataclass, replace
from typing import Any

Array = Any

KNOWN = ("0.10.2",)
"""Versions of jaxlib whose custom calls were tried: their configuration is no public interface and changed before."""

FEW_ROWS = 128
"""Up to so many output positions, bringing weights into oneDNN's order costs more than stacked patches do."""

LONGEST_SUM = 1024
"""Rows that one matrix product of a weight gradient sums over, at most."""

MANY_CHANNELS = 32
"""From so many input channels on a weight gradient is one product for each kernel position."""

SHORT_SUM = 256
"""Up to so many positions of all images, a weight gradient's patches take less time than turning its result does."""

FEW_VIEWS = 64
"""Up to so many positions of a result (of a weight gradient: of a kernel) each gets a view of its own to be stacked: a
gradient of an image has thousands, and XLA compiles them for minutes."""

LEAST_PRODUCTS = 1 << 16
"""Products of a convolution below which a call is not worth while."""


@functools.cache
def available() -> bool:
    """True iff this jaxlib holds oneDNN in the form that is known here."""
    import jaxlib.version

    return platform.machine() == "x86_64" and jaxlib.version.__version__ in KNOWN


@dataclass(frozen=True, slots=True)
class Convolution:
    """``[N, *in, C] * [*kernel, C/groups, M] -> [N, *out, M]``, float32, two spatial axes.

    ``dilation`` spreads the kernel; ``spread`` the image (the gradient of a stride); ``pads`` are (before, after),
    negative ones crop.
    """

    image: tuple[int, ...]
    weights: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    spread: tuple[int, ...] = (1, 1)
    groups: int = 1

    @property
    def out(self) -> tuple[int, ...]:
        """Spatial sizes of the result."""
        return tuple(
            ((n - 1) * u + 1 + before + after - (k - 1) * d - 1) // s + 1
            for n, u, (before, after), k, d, s in zip(
                self.image[1:3],
                self.spread,
                self.pads,
                self.weights[:2],
                self.dilation,
                self.strides,
                strict=True,
            )
        )

    @property
    def products(self) -> int:
        """Multiplications, those by padding and spread counted."""
        return self.image[0] * math.prod(self.out) * math.prod(self.weights)


@dataclass(frozen=True, slots=True)
class After:
    """What becomes of each sum before it is written: plus ``bias`` ``[M]``, plus ``other``, which has the result's
    shape, and then 0 if it is less. The library does it while the sum is in a register."""

    bias: Array = None
    other: Array = None
    relu: bool = False

    def apply(self, y: Array) -> Array:
        """The same on a finished result ``[N, *out, M]``."""
        import jax.numpy as jnp

        for addend in (self.bias, self.other):
            y = y if addend is None else y + addend
        return jnp.maximum(y, 0) if self.relu else y

    def fused(self, shape: tuple[int, ...], bias_rank: int = 1) -> tuple[dict[str, Any], list[Array]]:
        """Entries of a call's configuration, and the operands that they add to it."""
        operands = []
        if self.bias is not None:
            operands.append(self.bias.reshape((1,) * (bias_rank - 1) + (-1,)))
        if self.other is not None:
            operands.append(self.other.reshape(shape))
        there = (self.bias is not None, self.other is not None, self.relu)
        kinds = [kind for kind, on in zip(("BIAS", "BINARY_ADD", "RELU"), there, strict=True) if on]
        return ({"fusions": {"ops": kinds}} if kinds else {}), operands


NOTHING = After()


def supported(c: Convolution) -> bool:
    """True iff `convolve` has a formulation for it that is worth while."""
    if min((*c.out, *c.image, *c.weights)) < 1 or c.products < LEAST_PRODUCTS:
        return False
    if max(c.spread) > 1:
        return c.groups == 1 and max(c.strides) == 1 and max(c.dilation) == 1
    return c.groups == 1 or min(min(p) for p in c.pads) >= 0


HWIO = (0, 1, 2, 3)
FORWARD = (2, 3, 1, 0)
"""How a convolution reads weights ``[O, I, H, W]``."""
GRADIENT = (2, 3, 0, 1)
"""How the weights ``[O, I, H, W]`` of a convolution are read by the gradient of its image, after a reversal."""


def convolve(
    c: Convolution, x: Array, stored: Array, order: tuple[int, ...] = HWIO, after: After = NOTHING
) -> Array:
    """The convolution of x by w in the formulation that fits its shape, and what comes ``after`` it.

    ``stored.transpose(order)`` is w: oneDNN reads weights as they lie faster than XLA brings them into an order.
    """
    w = stored.transpose(order)
    if max(c.spread) > 1:
        return after.apply(_spread(c, x, w))
    if c.groups > 1:
        return _library(c, x, stored, order, after)
    x, c = _cropped(c, x)
    terms, results = math.prod(c.weights[:3]), c.image[0] * math.prod(c.out)
    short = (
        order == GRADIENT and terms <= SHORT_SUM and results >= 16 * terms and math.prod(c.out) <= FEW_VIEWS
    )
    if math.prod(c.weights[:2]) > 1 and (short or math.prod(c.weights[:2]) >= 4 * math.prod(c.out)):
        return after.apply(_weight_gradient(c, x, w))
    if max(c.weights[:2]) == 1 and not any(map(any, c.pads)):
        rows = x[:, :: c.strides[0], :: c.strides[1]].reshape(-1, c.image[3])
        if order == FORWARD:
            return _product(rows, stored[:, :, 0, 0], after, turned=True).reshape(_shape(c))
        return _product(rows, w[0, 0], after).reshape(_shape(c))
    if results <= FEW_ROWS and order == HWIO:
        patches = _patches(c, x).reshape(results, -1)
        return _product(patches, w.reshape(-1, c.weights[3]), after).reshape(_shape(c))
    if results <= FEW_ROWS:
        back = order == GRADIENT and c.strides == c.dilation == (1, 1)
        return after.apply(_few_rows_back(c, x, stored) if back else _few_rows(c, x, w))
    return _library(c, x, stored, order, after)


def _shape(c: Convolution) -> tuple[int, ...]:
    return (c.image[0], *c.out, c.weights[3])


def _cropped(c: Convolution, x: Array) -> tuple[Array, Convolution]:
    """Negative padding cut off."""
    if min(map(min, c.pads)) >= 0:
        return x, c
    from jax import lax

    cut = [(0, 0, 0), *((min(b, 0), min(a, 0), 0) for b, a in c.pads), (0, 0, 0)]
    x = lax.pad(x, x.dtype.type(0), cut)
    pads = tuple((max(b, 0), max(a, 0)) for b, a in c.pads)
    return x, replace(c, image=x.shape, pads=pads)


def _patches(c: Convolution, x: Array) -> Array:
    """``[N, *out, *kernel * C]``: what each output position reads."""
    import jax.numpy as jnp

    views = _views(c, x)
    return jnp.concatenate(views, axis=3) if len(views) > 1 else views[0]


def _views(c: Convolution, x: Array) -> list[Array]:
    """``[N, *out, C]`` for each kernel position: what output positions read there."""
    import jax.numpy as jnp

    x = jnp.pad(x, ((0, 0), *c.pads, (0, 0)))
    return [
        x[
            :,
            *(
                slice(k * d, k * d + (o - 1) * s + 1, s)
                for k, d, o, s in zip(at, c.dilation, c.out, c.strides, strict=True)
            ),
        ]
        for at in itertools.product(*map(range, c.weights[:2]))
    ]


def _few_rows(c: Convolution, x: Array, w: Array) -> Array:
    """Patches times weights, channels first within both: weights that lie as ``[O, I, H, W]`` stay."""
    import jax.numpy as jnp

    patches = jnp.stack(_views(c, x), axis=4).reshape(c.image[0] * math.prod(c.out), -1)
    weights = w.transpose(3, 2, 0, 1).reshape(c.weights[3], -1)
    return _product(weights, patches.T).T.reshape(_shape(c))


def _few_rows_back(c: Convolution, x: Array, stored: Array) -> Array:
    """The same for a gradient: each row of x times all weights as they lie, and what falls on one position added.

    The reversal that is taken off here is the one that JAX put on; XLA drops both.
    """
    import jax.numpy as jnp
    from jax import lax

    (kh, kw), (ph, pw), (oh, ow) = c.weights[:2], (c.pads[0][0], c.pads[1][0]), c.out
    lying = jnp.flip(stored, (2, 3)).reshape(stored.shape[0], -1)
    products = _product(x.reshape(-1, c.image[3]), lying).reshape(*c.image[:3], c.weights[3], kh, kw)
    total: Any = None
    for i, j in itertools.product(range(kh), range(kw)):
        # x[q] times the weights at i lands on q + i - (kh - 1 - ph)
        spans = [(i - (kh - 1 - ph), oh, c.image[1]), (j - (kw - 1 - pw), ow, c.image[2])]
        config = [(0, 0, 0), *((at, size - n - at, 0) for at, size, n in spans), (0, 0, 0)]
        part = lax.pad(products[..., i, j], x.dtype.type(0), config)
        total = part if total is None else total + part
    return total


def _weight_gradient(c: Convolution, x: Array, w: Array) -> Array:
    """A kernel of many positions and a small result: the gradient of weights.

    There the image's batch is the weights' input channels, its channels are the batch, and the kernel is the gradient
    of the result. Patches of the small result's positions, transposed, times that gradient.
    """
    import jax.numpy as jnp

    image = x.transpose(3, 1, 2, 0)
    turned = replace(
        c,
        image=image.shape,
        weights=(*c.out, c.image[0], c.weights[3]),
        strides=c.dilation,
        dilation=c.strides,
        pads=tuple(
            (before, (k - 1) * d + (o - 1) * s + 1 - before - n)
            for n, (before, _), k, d, o, s in zip(
                c.image[1:3], c.pads, c.weights[:2], c.dilation, c.out, c.strides, strict=True
            )
        ),
    )
    image, turned = _cropped(turned, image)
    gradient = w.transpose(2, 0, 1, 3).reshape(-1, c.weights[3])
    if len(gradient) <= SHORT_SUM:  # positions innermost: the result lies as weights do
        patches = jnp.stack(_views(turned, image), axis=4).reshape(len(gradient), -1)
        made = _product(gradient, patches, transposed=True)
        return made.reshape(c.weights[3], c.image[0], *c.out).transpose(1, 2, 3, 0)
    if c.image[0] >= MANY_CHANNELS:  # views need not be stacked to fill a product
        products = [
            _product(gradient, view.reshape(-1, c.image[0]), transposed=True)
            for view in _views(turned, image)
        ]
        made = jnp.stack(products, axis=1)
    else:
        patches = _patches(turned, image).reshape(-1, math.prod(turned.weights[:3]))
        made = _product(gradient, patches, transposed=True)
    return made.reshape(c.weights[3], *c.out, c.image[0]).transpose(3, 1, 2, 0)


def _spread(c: Convolution, x: Array, w: Array) -> Array:
    """Of a spread image most products are by zeros: each residue of output positions has a small kernel of its own."""
    import jax.numpy as jnp

    (uh, uw), (oh, ow) = c.spread, c.out
    heights, widths = -(-oh // uh), -(-ow // uw)
    rows = []
    for row in range(uh):
        parts = []
        for column in range(uw):
            taps = [
                _taps(r, u, k, p[0])
                for r, u, k, p in zip((row, column), c.spread, c.weights[:2], c.pads, strict=True)
            ]
            kernel = w[taps[0][0] :: uh, taps[1][0] :: uw]
            if 0 in kernel.shape:
                parts.append(jnp.zeros((c.image[0], heights, widths, c.weights[3]), x.dtype))
                continue
            pads = tuple(
                (-first, count + k - 1 + first - n)
                for (_, first), count, k, n in zip(
                    taps, (heights, widths), kernel.shape, c.image[1:3], strict=False
                )
            )
            part = replace(c, weights=kernel.shape, pads=pads, spread=(1, 1))
            parts.append(convolve(part, x, kernel))
        rows.append(jnp.stack(parts, axis=3))
    y = jnp.stack(rows, axis=2)
    return y.reshape(c.image[0], heights * uh, widths * uw, c.weights[3])[:, :oh, :ow]


def _taps(residue: int, spread: int, kernel: int, before: int) -> tuple[int, int]:
    """For output positions ``residue + spread * q``: the first kernel position that meets an element and not a gap,
    and which element that is for q = 0."""
    first = (before - residue) % spread
    return min(first, kernel), (residue + first - before) // spread


def _library(
    c: Convolution, x: Array, stored: Array, order: tuple[int, ...], after: After = NOTHING
) -> Array:
    """oneDNN's convolution."""
    fusions, more = after.fused(_shape(c))
    height, width, inputs, outputs = (str(place) for place in order)
    layout = {"data": {"batch_dim": "0", "feature_dim": "3", "spatial_dims": ["1", "2"]}}
    configuration = {
        "dims": "4",
        "input": layout,
        "kernel": {
            "filter": {
                "input_feature_dim": inputs,
                "output_feature_dim": outputs,
                "spatial_dims": [height, width],
            }
        },
        "output": layout,
        "window": {
            "strides": [str(s) for s in c.strides],
            "pad_left": [str(before) for before, _ in c.pads],
            "pad_right": [str(after) for _, after in c.pads],
            "window_dilations": [str(d) for d in c.dilation],
        },
        "feature_groups": str(c.groups),
        **fusions,
    }
    return _call("__onednn$convolution", {"onednn_conv_config": configuration}, _shape(c), x, stored, *more)


def _product(
    a: Array, b: Array, after: After = NOTHING, transposed: bool = False, turned: bool = False
) -> Array:
    """``a @ b`` (``turned``: ``a @ b.T``) and what comes ``after`` it, or ``a.T @ b``, of matrices.

    A long sum oneDNN divides by the number of threads; it is divided here instead, into parts that follow from its
    length alone, which are then added in order.
    """
    if not transposed:
        shape = (a.shape[0], b.shape[0 if turned else 1])
        fusions, more = after.fused(shape, bias_rank=2)
        configuration = {"onednn_matmul_config": {"transpose_b": turned, **fusions}}
        return _call("__onednn$matmul", configuration, shape, a, b, *more)
    configuration = {"onednn_matmul_config": {"transpose_a": True}}
    parts, shape = _parts(a.shape[0]), (a.shape[1], b.shape[1])
    if parts == 1:
        return _call("__onednn$matmul", configuration, shape, a, b)
    stacks = [_padded(m, parts).reshape(parts, -1, m.shape[1]) for m in (a, b)]
    products = _call("__onednn$matmul", configuration, (parts, *shape), *stacks)
    return functools.reduce(lambda total, part: total + part, [products[i] for i in range(parts)])


def _parts(length: int) -> int:
    """Into how many equal parts a sum of so many products is divided so that none has more than `LONGEST_SUM`."""
    wanted = -(-length // LONGEST_SUM)
    return next((n for n in range(wanted, 4 * wanted) if length % n == 0), wanted)


def _padded(matrix: Array, parts: int) -> Array:
    """With rows of zeros, if need be, so that they divide evenly."""
    import jax.numpy as jnp

    missing = -matrix.shape[0] % parts
    return jnp.pad(matrix, ((0, missing), (0, 0))) if missing else matrix


def _call(target: str, configuration: dict[str, Any], shape: tuple[int, ...], *operands: Array) -> Array:
    import jax

    result = jax.ShapeDtypeStruct(shape, operands[0].dtype)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call(
        target, result, custom_call_api_version=2, legacy_backend_config=json.dumps(configuration)
    )
    return call(*operands)
