"""Sampling of images at positions that data determine: grids and regions of interest."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from podrun.core.errors import InputMismatch
from podrun.numerics.interpolation import CUBIC

MODES = ("nearest", "linear", "cubic")


def _reflected(p: Array, low: float, high: float) -> Array:
    """Positions outside [low, high] mirrored back in, as often as need be."""
    span = high - low
    if span == 0:
        return jnp.full_like(p, low)
    away = jnp.abs(p - low) % (2 * span)
    return low + jnp.where(away > span, 2 * span - away, away)


def _pixel(image: Array, index: tuple[Array, ...], padding: str, align: bool) -> Array:
    """``image [C, *spatial]`` at whole positions, with the padding rule for those outside."""
    inside: Array | bool = True
    places = []
    for at, size in zip(index, image.shape[1:], strict=True):
        if padding == "zeros":
            inside = inside & (at >= 0) & (at <= size - 1)
        elif padding == "reflection":
            at = _reflected(at, 0.0, size - 1.0) if align else _reflected(at, -0.5, size - 0.5)
        places.append(jnp.clip(at, 0, size - 1).astype(jnp.int32))
    values = image[(slice(None), *places)]
    return jnp.where(inside, values, jnp.zeros((), image.dtype)) if padding == "zeros" else values


def _cubic_weights(t: Array) -> list[Array]:
    a = CUBIC
    near = [((a + 2) * d - (a + 3)) * d * d + 1 for d in (t, 1 - t)]
    far = [((a * d - 5 * a) * d + 8 * a) * d - 4 * a for d in (t + 1, 2 - t)]
    return [far[0], near[0], near[1], far[1]]


def _places(grid: Array, sizes: Sequence[int], padding: str, align: bool) -> list[Array]:
    """Positions from -1 to 1, last axis first, as indices of each axis; mirrored or held inside if padding says so."""
    places = []
    for a, size in enumerate(sizes):
        g = grid[..., len(sizes) - 1 - a]
        p = (g + 1) / 2 * (size - 1) if align else ((g + 1) * size - 1) / 2
        if padding == "reflection":
            p = _reflected(p, 0.0, size - 1.0) if align else _reflected(p, -0.5, size - 0.5)
        elif padding == "border":
            p = jnp.clip(p, 0, size - 1)
        places.append(p)
    return places


def _sample(image: Array, grid: Array, mode: str, padding: str, align: bool) -> Array:
    """``image [C, *spatial]`` at ``grid [*out, rank]``."""
    moved = "zeros" if mode == "cubic" else padding  # A cubic kernel mirrors its elements, not its position.
    places = _places(grid, image.shape[1:], moved, align)
    if mode == "nearest":
        return _pixel(image, tuple(jnp.round(p) for p in places), padding, align)
    floors = [jnp.floor(p) for p in places]
    if mode == "linear":
        weights = [[1 - (p - f), p - f] for p, f in zip(places, floors, strict=True)]
        first = 0
    else:
        weights = [_cubic_weights(p - f) for p, f in zip(places, floors, strict=True)]
        first = -1
    total: Array | int = 0
    for corner in np.ndindex(*(len(w) for w in weights)):
        weight: Array | int = 1
        for w, k in zip(weights, corner, strict=True):
            weight = weight * w[k]
        index = tuple(f + (k + first) for f, k in zip(floors, corner, strict=True))
        total = total + weight * _pixel(image, index, padding, align)
    return jnp.asarray(total)


def sampled(x: Array, grid: Array, mode: str, padding: str, align: bool) -> Array:
    """``[N, C, *in]`` at normalised positions ``[N, *out, rank]``, which name the last axis first: ``[N, C, *out]``.

    ``mode``: nearest, linear or cubic. ``padding``: what lies outside: zeros, the border, or a reflection. ``align``:
    -1 and 1 are the middles of the outermost elements, not their ends.
    """
    if mode not in MODES:
        raise InputMismatch(f"mode '{mode}' is not known")
    return jax.vmap(lambda image, at: _sample(image, at, mode, padding, align))(x, grid)


def affine_positions(theta: Array, spatial: Sequence[int], align: bool) -> Array:
    """Normalised positions of an image of ``spatial`` sizes moved by affine maps ``[N, rank, rank + 1]``:
    ``[N, *spatial, rank]``.
    """
    lines = [np.linspace(-1, 1, n) if align and n > 1 else (np.arange(n) * 2 + 1) / n - 1 for n in spatial]
    mesh = np.meshgrid(*lines, indexing="ij")
    points = np.stack([*reversed(mesh), np.ones(spatial)], axis=-1).astype(theta.dtype)
    return jnp.einsum("nij,...j->n...i", theta, jnp.asarray(points))


def region_positions(start: Array, size: Array, bins: int, samples: int) -> Array:
    """Sampling positions along one axis of one region: ``[bins, samples]``."""
    step = size / bins
    inner = (jnp.arange(samples) + 0.5) / samples
    return start + (jnp.arange(bins)[:, None] + inner[None, :]) * step


def region_pooled(image: Array, y: Array, x: Array, mode: str) -> Array:
    """Bilinear samples of ``[C, H, W]`` at rows ``[bh, sh]`` and columns ``[bw, sw]``, pooled to ``[C, bh, bw]``."""
    height, width = image.shape[1:]

    def sides(p: Array, size: int) -> tuple[Array, Array, Array, Array]:
        valid = (p >= -1.0) & (p <= size)
        p = jnp.clip(p, 0, None)
        low = jnp.clip(jnp.floor(p), 0, size - 1)
        high = jnp.clip(low + 1, 0, size - 1)
        away = jnp.where(low >= size - 1, 0.0, p - low)
        return low.astype(jnp.int32), high.astype(jnp.int32), away.astype(image.dtype), valid

    y0, y1, ly, vy = sides(y[:, :, None, None], height)
    x0, x1, lx, vx = sides(x[None, None, :, :], width)
    valid = (vy & vx).astype(image.dtype)
    terms = [
        w * image[:, a, b]
        for w, a, b in (
            ((1 - ly) * (1 - lx), y0, x0),
            ((1 - ly) * lx, y0, x1),
            (ly * (1 - lx), y1, x0),
            (ly * lx, y1, x1),
        )
    ]
    if mode == "max":
        best = jnp.maximum(jnp.maximum(terms[0], terms[1]), jnp.maximum(terms[2], terms[3])) * valid
        return jnp.max(best, axis=(2, 4))
    return jnp.mean((terms[0] + terms[1] + terms[2] + terms[3]) * valid, axis=(2, 4))


def maximum_of_regions(x: Array, regions: Array, bins: tuple[int, int], scale: float) -> Array:
    """The maximum over each cell of a grid of ``bins`` laid on each region (batch, x1, y1, x2, y2): ``[R, C, *bins]``.

    Source: Girshick, Fast R-CNN, 2015, as Caffe computes it.
    """
    height, width = x.shape[2:]
    rows, columns = bins

    def edges(first: Array, last: Array, bins: int, size: int) -> Array:
        start = jnp.round(first * scale)
        length = jnp.maximum(jnp.round(last * scale) - start + 1, 1)
        k = jnp.arange(bins)
        low = jnp.clip(jnp.floor(k * length / bins) + start, 0, size)
        high = jnp.clip(jnp.ceil((k + 1) * length / bins) + start, 0, size)
        at = jnp.arange(size)
        return (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])

    def one(roi: Array) -> Array:
        image = x[roi[0].astype(jnp.int32)]
        down = edges(roi[2], roi[4], rows, height)
        across = edges(roi[1], roi[3], columns, width)
        inside = down[:, None, :, None] & across[None, :, None, :]
        best = jnp.max(jnp.where(inside, image[:, None, None], -jnp.inf), axis=(3, 4))
        return jnp.where(jnp.any(inside, axis=(2, 3)), best, 0).astype(x.dtype)

    return jax.vmap(one)(regions)
