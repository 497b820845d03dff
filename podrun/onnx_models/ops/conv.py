"""Convolution (ONNX and PopART), computed by `podrun.numerics.convolution`: plain, transposed, deformable, causal with
state, several at once, and folding columns into images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from podrun.core.errors import InputMismatch
from podrun.numerics.convolution import along_channels, convolved, deformed, image_of, transposed
from podrun.numerics.precision import rounds_once, widen
from podrun.numerics.windows import Window, fitted_window
from podrun.onnx_models.ops.common import Array, ints, same_dtype
from podrun.onnx_models.ops.pooling import window_of
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


@operator(ONNX, "Conv", since=(1, 11, 22))
def conv(ctx: Context, node: Node, x: Array, w: Array, bias: Array = None) -> Array:
    """Convolution (correlation) of ``[N, C, *in]`` with ``[M, C/group, *kernel]`` to ``[N, M, *out]`` (ONNX Conv)."""
    same_dtype(*(t for t in (x, w, bias) if t is not None))
    kernel = node.get("kernel_shape")
    if kernel and tuple(kernel) != w.shape[2:]:
        raise InputMismatch(f"kernel_shape {tuple(kernel)} is not that of the weights, {w.shape[2:]}")
    window = window_of(node, x.shape[2:], w.shape[2:])
    half_sums = node.get("__partials_type") == "HALF"
    return convolved(x, w, bias, node.get("group", 1), window, half_sums=half_sums, grouped=ctx.grouped)


def _transposed_pads(
    node: Node,
    sizes: tuple[int, ...],
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    extra: tuple[int, ...],
    former: bool,
) -> tuple[tuple[int, int], ...]:
    """What is cut from the full transposed convolution (ONNX ConvTranspose: pads, output_shape, auto_pad)."""
    rank = len(sizes)
    wanted = node.get("output_shape")
    mode = node.get("auto_pad", "NOTSET")
    full = tuple((n - 1) * s + e + x for n, s, e, x in zip(sizes, strides, extents, extra, strict=True))
    if wanted or mode in ("SAME_UPPER", "SAME_LOWER"):
        target = ints(wanted)[-rank:] if wanted else tuple(n * s for n, s in zip(sizes, strides, strict=True))
        cuts = []
        for size, asked in zip(full, target, strict=True):
            total = size - asked
            small, large = total // 2, total - total // 2
            # Before opset 11 ONNX had it the other way round, and the SDK has it so for opset 11 too.
            cuts.append((small, large) if (mode == "SAME_UPPER") != former else (large, small))
        return tuple(cuts)
    pads = ints(node.get("pads") or (0,) * 2 * rank) if mode == "NOTSET" else (0,) * 2 * rank
    return tuple(zip(pads[:rank], pads[rank:], strict=True))


@operator(ONNX, "ConvTranspose", since=(1, 11, 22))
@rounds_once
def conv_transpose(ctx: Context, node: Node, x: Array, w: Array, bias: Array = None) -> Array:
    """The transpose of convolution: ``[N, C, *in]`` with ``[C, M/group, *kernel]`` (ONNX ConvTranspose)."""
    same_dtype(x, w)
    rank, groups = x.ndim - 2, node.get("group", 1)
    kernel = w.shape[2:]
    strides = ints(node.get("strides") or (1,) * rank)
    dilations = ints(node.get("dilations") or (1,) * rank)
    extra = ints(node.get("output_padding") or (0,) * rank)
    extents = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    cuts = _transposed_pads(node, x.shape[2:], extents, strides, extra, ctx.sdk is not None)
    window = Window(tuple(kernel), strides, dilations, cuts, (0,) * rank)
    y = transposed(x, w, groups, window, extra, one_by_one=True)
    return y if bias is None else y + along_channels(bias, x.ndim)


@operator(GRAPHCORE, "MultiConv")
def multi_conv(ctx: Context, node: Node, *inputs: Array) -> tuple[Array, ...]:
    """Several convolutions at once: (x, w) or (x, w, bias) after one another; attributes one list per convolution.

    PopART flattens the lists of ``strides``, ``dilations`` and ``pads``, and keeps lengths by the inputs' ranks.
    """
    groups = _triples(node, inputs)
    offsets = {"strides": 0, "dilations": 0, "pads": 0}
    results = []
    for x, w, b in groups:
        rank = x.ndim - 2
        own: dict[str, tuple[int, ...]] = {"strides": (), "dilations": (), "pads": ()}
        for name, length in (("strides", rank), ("dilations", rank), ("pads", 2 * rank)):
            flat = _flat(node.get(name) or ())
            if flat:
                own[name] = flat[offsets[name] : offsets[name] + length]
                offsets[name] += length
        window = fitted_window(x.shape[2:], w.shape[2:], own["strides"], own["dilations"], own["pads"])
        results.append(convolved(x, w, b, x.shape[1] // w.shape[1], window))
    return tuple(results)


def _flat(values: Iterable[int | Sequence[int]]) -> tuple[int, ...]:
    return tuple(int(v) for item in values for v in (item if isinstance(item, (tuple, list)) else (item,)))


def _triples(node: Node, inputs: tuple[Array, ...]) -> list[tuple[Array, Array, Array | None]]:
    """Data, weights and bias of each: by the attribute ``counts``, else a vector behind weights is a bias."""
    triples: list[tuple[Array, Array, Array | None]] = []
    rest, counts = list(inputs), list(node.get("counts") or ())
    while rest:
        x, w = rest.pop(0), rest.pop(0)
        biased = counts.pop(0) == 3 if counts else bool(rest) and rest[0] is not None and rest[0].ndim == 1
        triples.append((x, w, rest.pop(0) if biased else None))
    return triples


@operator(ONNX, "CausalConvWithState", since=(27,))
def causal_conv_with_state(
    ctx: Context, node: Node, x: Array, w: Array, bias: Array = None, past: Array = None
) -> tuple[Array, Array]:
    """Depthwise convolution over past and present only; also the last k - 1 positions (ONNX CausalConvWithState)."""
    width = w.shape[-1]
    before = jnp.zeros((*x.shape[:2], width - 1), x.dtype) if past is None else past
    line = jnp.concatenate([before, x], axis=2)
    window = fitted_window(line.shape[2:], w.shape[2:])
    y = convolved(line, w, bias, x.shape[1], window)
    if node.get("activation", "none") in ("silu", "swish"):
        wide = widen(y)
        y = (wide * jax.nn.sigmoid(wide)).astype(y.dtype)
    return y, line[..., line.shape[2] - (width - 1) :]


@operator(ONNX, "DeformConv", since=(19, 22))
@rounds_once
def deform_conv(
    ctx: Context, node: Node, x: Array, w: Array, offset: Array, bias: Array = None, mask: Array = None
) -> Array:
    """Convolution whose sampling positions are moved by ``offset`` and weighted by ``mask`` (ONNX DeformConv)."""
    window = window_of(node, x.shape[2:], w.shape[2:])
    groups = node.get("group", 1), node.get("offset_group", 1)
    y = deformed(x, w, offset, mask, window, groups)
    return y if bias is None else y + along_channels(bias, x.ndim)


@operator(ONNX, "Col2Im", since=(18,))
def col2im(ctx: Context, node: Node, x: Array, image_shape: Array, block_shape: Array) -> Array:
    """Columns ``[N, C * block, L]`` summed back to where they came from in an image (ONNX Col2Im)."""
    image, block = ints(ctx.constant(1)), ints(ctx.constant(2))
    strides, dilations, pads = (ints(node.get(name) or ()) for name in ("strides", "dilations", "pads"))
    return image_of(x, image, fitted_window(image, block, strides, dilations, pads))
