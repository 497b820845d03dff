"""Sliding windows over spatial axes, as pooling and convolution move them: padding rules and shifted views.

Arrays are ``[N, C, *spatial]``. `fitted_window` turns kernel, strides and a padding rule into a `Window` over an input;
`padded` and `shifted` then give, for every kernel position, the elements that all windows have there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.core.errors import InputMismatch
from podrun.core.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Kernel, strides, dilations and padding over the spatial axes; ``pads`` are (before, after) for each axis.

    ``extra`` is what ``ceil_mode`` adds after each axis beyond the padding: windows there see no real elements of it.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    extra: tuple[int, ...]

    def extents(self) -> tuple[int, ...]:
        """The extent of each window, dilation included."""
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


def fitted_window(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int] = (),
    dilations: Sequence[int] = (),
    padding: str | Sequence[int] = (),
    ceil: bool = False,
) -> Window:
    """The window over an input of spatial ``sizes``; what is left out is 1 (strides, dilations) or 0 (padding).

    ``padding``: what to add before each axis and then after each (``2 * len(sizes)`` numbers), or ONNX's rule
    ``SAME_UPPER``, ``SAME_LOWER`` (as many windows as strides fit, the odd element of padding after or before) or
    ``VALID``. ``ceil``: a last, partial window counts, unless it would start in the padding after (ONNX, PyTorch).
    Raises InputMismatch if the numbers do not fit the spatial axes, or no window fits the input.
    """
    rank = len(sizes)
    strides, dilations = (
        _per_axis(name, setting, rank) for name, setting in (("strides", strides), ("dilations", dilations))
    )
    if len(kernel) != rank:
        raise InputMismatch(f"kernel_shape has {len(kernel)} elements for {rank} spatial axes")
    if min((*strides, *dilations, *kernel), default=1) < 1:
        raise InputMismatch("kernel_shape, strides and dilations must be at least 1")
    extents = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    pads = _pads(padding, sizes, extents, strides)
    extra = (0,) * rank
    if ceil:
        extra = tuple(
            _ceil_extra(n, p, e, s) for n, p, e, s in zip(sizes, pads, extents, strides, strict=True)
        )
    window = Window(tuple(kernel), strides, dilations, pads, extra)
    if min(window.output(sizes), default=1) < 1:
        raise InputMismatch(f"a window of {extents} does not fit an input of {tuple(sizes)} padded by {pads}")
    return window


def _per_axis(name: str, values: Sequence[int], rank: int) -> tuple[int, ...]:
    if values and len(values) != rank:
        raise InputMismatch(f"{name} has {len(values)} elements for {rank} spatial axes")
    return tuple(values) or (1,) * rank


def _pads(
    padding: str | Sequence[int], sizes: Sequence[int], extents: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    rank = len(sizes)
    if padding in ("SAME_UPPER", "SAME_LOWER"):
        return tuple(
            _same(n, e, s, padding == "SAME_UPPER") for n, e, s in zip(sizes, extents, strides, strict=True)
        )
    if padding == "VALID" or not padding:
        return ((0, 0),) * rank
    if isinstance(padding, str):
        raise InputMismatch(f"padding {padding!r} is none of SAME_UPPER, SAME_LOWER, VALID")
    if len(padding) != 2 * rank:
        raise InputMismatch(
            f"pads has {len(padding)} elements; it must have {2 * rank}, twice the spatial axes"
        )
    return tuple(zip(padding[:rank], padding[rank:], strict=True))


def _same(size: int, extent: int, stride: int, upper: bool) -> tuple[int, int]:
    """Padding so that there are ceil(size / stride) windows; the odd one goes after (upper) or before."""
    total = max((-(-size // stride) - 1) * stride + extent - size, 0)
    small, large = total // 2, total - total // 2
    return (small, large) if upper else (large, small)


def _ceil_extra(size: int, pads: tuple[int, int], extent: int, stride: int) -> int:
    """Padding to add for a last, partial window; none if the window would start in the padding after (ONNX,
    PyTorch).
    """
    span = size + sum(pads) - extent
    windows = -(-span // stride) + 1
    if (windows - 1) * stride >= size + pads[0]:
        windows -= 1
    return max((windows - 1) * stride - span, 0)


def shifted(x: Array, window: Window, position: Sequence[int]) -> Array:
    """The elements of padded ``x`` ``[N, C, *spatial]`` under kernel ``position`` of every window: ``[N, C, *out]``."""
    sizes = x.shape[2:]
    starts = [p * d for p, d in zip(position, window.dilations, strict=True)]
    counts = [(n - e) // s + 1 for n, e, s in zip(sizes, window.extents(), window.strides, strict=True)]
    stops = [a + (c - 1) * s + 1 for a, c, s in zip(starts, counts, window.strides, strict=True)]
    return lax.slice(x, (0, 0, *starts), (*x.shape[:2], *stops), (1, 1, *window.strides))


def reduced_by_window(x: Array, window: Window, combine: Callable[[Array, Array], Array]) -> Array:
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


def padded(x: Array, window: Window, value: Array | np.ndarray) -> Array:
    """x with the window's padding (and ceil_mode's extra) filled with ``value``; negative padding crops."""
    config = [(0, 0, 0), (0, 0, 0)]
    config += [
        (before, after + extra, 0) for (before, after), extra in zip(window.pads, window.extra, strict=True)
    ]
    return lax.pad(x, value, config)


def slices(window: Window, position: Sequence[int], counts: Sequence[int]) -> tuple[slice, ...]:
    """The elements of each padded axis under kernel ``position`` of ``counts`` windows."""
    return tuple(
        slice(p * d, p * d + (c - 1) * s + 1, s)
        for p, d, c, s in zip(position, window.dilations, counts, window.strides, strict=True)
    )


def unshifted(g: Array, window: Window, position: Sequence[int], shape: Sequence[int]) -> Array:
    """The transpose of `shifted`: g put back at the elements of the padded input (of ``shape``) it came from."""
    config = [(0, 0, 0), (0, 0, 0)]
    for size, count, at, dilation, stride in zip(
        shape[2:], g.shape[2:], position, window.dilations, window.strides, strict=True
    ):
        start = at * dilation
        config.append((start, size - start - ((count - 1) * stride + 1), stride - 1))
    return lax.pad(g, jnp.zeros((), g.dtype), config)
