"""Pooling over windows: maxima and where they were, means, norms; over parts of an image; and back again.

Arrays are ``[N, C, *spatial]`` unless said otherwise. Max-pooling has a gradient of its own: XLA's derived one is many
times slower on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.core.errors import present
from podrun.numerics.gradients import with_gradient
from podrun.numerics.precision import lowest_of
from podrun.numerics.windows import Window, padded, reduced_by_window, shifted, unshifted


def _window_max(x: Array, window: Window) -> Array:
    """Maximum of x ``[N, C, *in]`` padded with the lowest value."""
    return reduced_by_window(padded(x, window, lowest_of(x.dtype)), window, jnp.maximum)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def maximum_of_windows(x: Array, window: Window) -> Array:
    """Max over each window: ``[N, C, *in] -> [N, C, *out]``. The gradient goes whole to each element that equals it.

    Source: PopART asks poplibs' poolInputGradient for the variant that is not scaled by the number of equals
    (graphcore/popart, willow/src/popx/op/maxpoolx.cpp).
    """
    return _window_max(x, window)


def _maximum_forward(x: Array, window: Window) -> tuple[Array, tuple[Array, Array]]:
    y = _window_max(x, window)
    return y, (x, y)


def _maximum_backward(window: Window, saved: tuple[Array, Array], gradient: Array) -> tuple[Array]:
    """The gradient, at each kernel position, of the elements there: that of the result if they equal the maximum, else
    0.
    """
    x, y = saved
    wide = padded(x, window, lowest_of(x.dtype))
    hits = (shifted(wide, window, position) == y for position in window.positions())
    return (_returned(gradient, hits, window, wide.shape),)


def _returned(gradient: Array, hits: Iterable[Array], window: Window, shape: tuple[int, ...]) -> Array:
    """The gradient of an image whose padded form has ``shape``. ``hits``: for each kernel position, which windows have
    their result from there.
    """
    zero = jnp.zeros((), gradient.dtype)
    total: Array | None = None
    for position, hit in zip(window.positions(), hits, strict=True):
        term = unshifted(jnp.where(hit, gradient, zero), window, position, shape)
        total = term if total is None else total + term
    back = [(0, 0, 0), (0, 0, 0)]
    back += [(-b, -(a + e), 0) for (b, a), e in zip(window.pads, window.extra, strict=True)]
    return lax.pad(present(total, "a window has positions"), zero, back)


maximum_of_windows.defvjp(_maximum_forward, _maximum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def first_maximum_of_windows(x: Array, window: Window) -> Array:
    """`maximum_of_windows` whose gradient goes to the first of the elements that equal the maximum, as TensorFlow's
    does on a CPU.
    """
    return _window_max(x, window)


def _first_backward(window: Window, saved: tuple[Array, Array], gradient: Array) -> tuple[Array]:
    x, y = saved
    wide = padded(x, window, lowest_of(x.dtype))
    positions = list(window.positions())
    kind = np.uint8 if len(positions) < 256 else np.int32
    place = jnp.asarray(len(positions), kind)
    for number, position in reversed(list(enumerate(positions))):
        place = jnp.where(shifted(wide, window, position) == y, kind(number), place)
    return (_returned(gradient, (place == number for number in range(len(positions))), window, wide.shape),)


first_maximum_of_windows.defvjp(_maximum_forward, _first_backward)


def maximum_with_places(x: Array, window: Window, places: Array) -> tuple[Array, Array]:
    """Max over each window, and the entry of ``places`` at the element that it is, the first of equals.

    ``places``: integers from 0 on, of x's shape or with 1 for samples and channels: how elements are counted.
    """
    wide = padded(x, window, lowest_of(x.dtype))
    wide_places = padded(places, window, np.asarray(-1, places.dtype))
    best: Array | None = None
    where: Array | None = None
    for position in window.positions():
        value, place = shifted(wide, window, position), shifted(wide_places, window, position)
        place = jnp.broadcast_to(place, value.shape)
        if best is None or where is None:
            best, where = value, place
            continue
        better = (value > best) | ((where < 0) & (place >= 0))
        best, where = jnp.where(better, value, best), jnp.where(better, place, where)
    return present(best, "a window has positions"), present(where, "a window has positions")


def sum_of_windows(x: Array, window: Window) -> Array:
    """Sum over each window; padding is 0."""
    return reduced_by_window(padded(x, window, jnp.zeros((), x.dtype)), window, jnp.add)


def average_of_windows(x: Array, window: Window, with_pads: bool, divisor: int | None = None) -> Array:
    """Mean over each window: its sum over ``divisor``, or over the number of its elements.

    Elements of padding count ``with_pads``; those that a partial window at the end lacks never do.
    """
    total = sum_of_windows(x, window)
    return total / (divisor or _counts(x.shape[2:], window, with_pads).astype(x.dtype))


def _counts(sizes: Sequence[int], window: Window, with_pads: bool) -> np.ndarray:
    """How many elements each window averages (at least 1), ``[1, 1, *out]``: the product over its axes."""
    counts = np.ones((), np.float32)
    for n, k, s, d, (before, after), out in zip(
        *(sizes, window.kernel, window.strides, window.dilations, window.pads, window.output(sizes)),
        strict=True,
    ):
        at = np.arange(out)[:, None] * s - before + np.arange(k) * d
        low, high = (-before, n + after) if with_pads else (0, n)
        inside = ((at >= low) & (at < high)).sum(axis=1)
        counts = counts[..., None] * np.maximum(inside, 1).astype(np.float32)
    return counts[None, None]


def norm_of_windows(x: Array, window: Window, p: float) -> Array:
    """The p-norm of each window."""
    return _power_mean(x, p, lambda powers: sum_of_windows(powers, window))


def norm_over(x: Array, axes: tuple[int, ...], p: float) -> Array:
    """The p-norm over axes, kept as 1."""
    return _power_mean(x, p, lambda powers: jnp.sum(powers, axis=axes, keepdims=True))


def _power_mean(x: Array, p: float, total: Callable[[Array], Array]) -> Array:
    """The p-norm from a sum of p-th powers."""
    return jnp.power(total(jnp.power(jnp.abs(x), p)), 1.0 / p).astype(x.dtype)


def _parts(x: Array, axis: int, count: int) -> list[Array]:
    """``count`` parts of an axis that cover it and may overlap by one element (torch's adaptive pooling)."""
    size = x.shape[axis]
    edges = ((i * size // count, -(-((i + 1) * size) // count)) for i in range(count))
    return [lax.slice_in_dim(x, low, high, 1, axis) for low, high in edges]


def adaptive_average(x: Array, out: Sequence[int]) -> Array:
    """Means over parts of the last ``len(out)`` axes, as many along each as ``out`` says."""
    for axis, count in zip(range(x.ndim - len(out), x.ndim), out, strict=True):
        x = jnp.stack([jnp.mean(part, axis) for part in _parts(x, axis, count)], axis)
    return x


def adaptive_maximum(x: Array, out: Sequence[int]) -> tuple[Array, Array]:
    """Maxima over parts of the last ``len(out)`` axes, and their places in these axes read row by row (int32)."""
    sizes = x.shape[x.ndim - len(out) :]
    places = jnp.broadcast_to(jnp.arange(int(np.prod(sizes)), dtype=jnp.int32).reshape(sizes), x.shape)
    for axis, count in zip(range(x.ndim - len(out), x.ndim), out, strict=True):
        picked = []
        for part, part_places in zip(_parts(x, axis, count), _parts(places, axis, count), strict=True):
            best = jnp.argmax(part, axis, keepdims=True)
            picked.append(tuple(jnp.take_along_axis(values, best, axis) for values in (part, part_places)))
        x, places = (jnp.concatenate([pair[i] for pair in picked], axis) for i in range(2))
    return x, places


def unpooled(x: Array, places: Array, count: int) -> Array:
    """Rows ``[rows, n]`` put at ``places [rows, n]`` of rows of ``count`` zeros.

    Of elements with one place the last stays; the gradient goes to all of them, as torch's does.
    """
    empty = jnp.zeros((x.shape[0], count), x.dtype)
    rows = jnp.arange(x.shape[0])[:, None]
    put = empty.at[rows, places].set(lax.stop_gradient(x))
    return with_gradient(put, empty.at[rows, places].add(x))
