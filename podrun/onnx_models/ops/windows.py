"""Sliding windows over the spatial axes, shared by convolution and pooling: padding rules and shifted
views.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jax import lax

from podrun.onnx_models.ops.common import Array, ints
from podrun.onnx_models.ops.registry import Node


@dataclass(frozen=True, slots=True)
class Window:
    """Kernel, strides, dilations and padding over the spatial axes; ``pads`` are (before, after) for each
    axis.

    ``extra`` is what ``ceil_mode`` adds after each axis beyond the padding: windows there see no real
    elements of it.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    extra: tuple[int, ...]

    def extents(self) -> tuple[int, ...]:
        """What each window covers, dilation included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def output(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Number of windows along each axis of an input of the given spatial sizes."""
        return tuple(
            (n + before + after + extra - extent) // stride + 1
            for n, (before, after), extra, extent, stride in zip(
                sizes, self.pads, self.extra, self.extents(), self.strides, strict=True
            )
        )

    def positions(self) -> Iterator[tuple[int, ...]]:
        """Every kernel position, the last axis fastest."""
        return itertools.product(*(range(k) for k in self.kernel))


def window_of(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> Window:
    """The window of a convolution or pooling node over an input of spatial ``sizes`` (ONNX: auto_pad,
    ceil_mode).

    Raises ValueError if attributes do not fit the number of spatial axes.
    """
    rank = len(sizes)

    def per_axis(name: str, default: int) -> tuple[int, ...]:
        given = ints(node.get(name) or (default,) * rank)
        if len(given) != rank:
            raise ValueError(f"{name} has {len(given)} elements for {rank} spatial axes")
        return given

    strides, dilations = per_axis("strides", 1), per_axis("dilations", 1)
    if len(kernel) != rank:
        raise ValueError(f"kernel_shape has {len(kernel)} elements for {rank} spatial axes")
    if min((*strides, *dilations, *kernel), default=1) < 1:
        raise ValueError("kernel_shape, strides and dilations must be at least 1")
    extents = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    mode = node.get("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        pads = tuple(
            _same(n, e, s, mode == "SAME_UPPER") for n, e, s in zip(sizes, extents, strides, strict=True)
        )
    elif mode == "VALID":
        pads = ((0, 0),) * rank
    else:
        given = ints(node.get("pads") or (0,) * 2 * rank)
        if len(given) != 2 * rank:
            raise ValueError(
                f"pads has {len(given)} elements; it must have {2 * rank}, twice the spatial axes"
            )
        pads = tuple(zip(given[:rank], given[rank:], strict=True))
    extra = (0,) * rank
    if node.get("ceil_mode", 0):
        extra = tuple(
            _ceil_extra(n, p, e, s) for n, p, e, s in zip(sizes, pads, extents, strides, strict=True)
        )
    window = Window(tuple(kernel), strides, dilations, pads, extra)
    if min(window.output(sizes), default=1) < 1:
        raise ValueError(f"a window of {extents} does not fit an input of {tuple(sizes)} padded by {pads}")
    return window


def _same(size: int, extent: int, stride: int, upper: bool) -> tuple[int, int]:
    """Padding so that there are ceil(size / stride) windows; the odd one goes after (upper) or before."""
    total = max((-(-size // stride) - 1) * stride + extent - size, 0)
    small, large = total // 2, total - total // 2
    return (small, large) if upper else (large, small)


def _ceil_extra(size: int, pads: tuple[int, int], extent: int, stride: int) -> int:
    """What must be added for a last, partial window; none if it would start in the padding after (ONNX,
    PyTorch).
    """
    span = size + sum(pads) - extent
    windows = -(-span // stride) + 1
    if (windows - 1) * stride >= size + pads[0]:
        windows -= 1
    return max((windows - 1) * stride - span, 0)


def shifted(x: Array, window: Window, position: Sequence[int]) -> Array:
    """The elements of padded ``x`` ``[N, C, *spatial]`` under kernel ``position`` of every window: ``[N,
    C, *out]``.
    """
    sizes = x.shape[2:]
    starts = [p * d for p, d in zip(position, window.dilations, strict=True)]
    counts = [(n - e) // s + 1 for n, e, s in zip(sizes, window.extents(), window.strides, strict=True)]
    stops = [a + (c - 1) * s + 1 for a, c, s in zip(starts, counts, window.strides, strict=True)]
    return lax.slice(x, (0, 0, *starts), (*x.shape[:2], *stops), (1, 1, *window.strides))


def reduced(x: Array, window: Window, combine: Callable[[Array, Array], Array]) -> Array:
    """Padded ``x`` ``[N, C, *spatial]`` with every window combined to one element, one axis after another."""
    for axis, kernel, dilation, stride in zip(
        range(2, x.ndim), window.kernel, window.dilations, window.strides, strict=True
    ):
        count = (x.shape[axis] - (kernel - 1) * dilation - 1) // stride + 1
        stops = ((count - 1) * stride + 1 + k * dilation for k in range(kernel))
        views = (
            lax.slice_in_dim(x, k * dilation, stop, stride, axis)
            for k, stop in zip(range(kernel), stops, strict=True)
        )
        x = functools.reduce(combine, views)
    return x


def padded(x: Array, window: Window, value: Array) -> Array:
    """x with the window's padding (and ceil_mode's extra) filled with ``value``; negative padding crops."""
    config = [(0, 0, 0), (0, 0, 0)]
    config += [
        (before, after + extra, 0) for (before, after), extra in zip(window.pads, window.extra, strict=True)
    ]
    return lax.pad(x, value, config)
