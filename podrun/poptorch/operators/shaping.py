"""Views, joins and other moves of elements without arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.poptorch.capture.graph import DTypeArgument
from podrun.poptorch.operators.table import Call, Operand, Sizes, aten, aten_expressions, axis, dtype_named


@aten(
    "view",
    "_unsafe_view",
    "reshape",
    "view_copy",
    "_reshape_copy",
    "unsqueeze",
    "squeeze",
    "flatten",
    kind="Reshape",
)
def reshape(call: Call, x: Array, *rest: object) -> Array:
    """The same elements in the result's shape. ``view`` of another type reads the same bits."""
    if rest and isinstance(rest[0], DTypeArgument):
        return lax.bitcast_convert_type(x, dtype_named(rest[0].name)).reshape(call.shape)
    return x.reshape(call.shape)


@aten("transpose.int", "transpose_copy.int", "swapaxes", "swapdims", kind="Transpose")
def transpose(call: Call, x: Array, first: int, second: int) -> Array:
    """x with two dimensions swapped."""
    return jnp.swapaxes(x, first, second) if x.ndim else x


@aten("expand", "expand_copy", "broadcast_to", "expand_as", kind="Expand")
def expand(call: Call, x: Array, *rest: object, implicit: bool = False) -> Array:
    """x repeated along new and single dimensions."""
    return jnp.broadcast_to(x, call.shape)


@aten("clone", "lift_fresh", "lift_fresh_copy", "alias", "contiguous", "view_as", "positive", kind="Identity")
def identity(call: Call, x: Array, *rest: object) -> Array:
    """x in the shape of the result: these operators change no value."""
    return x.reshape(call.shape)


@aten("_to_copy", "to.dtype", "to.dtype_layout", "to.device", "to.other", "type_as", kind="Cast")
def convert(call: Call, x: Array, *rest: object, **keywords: object) -> Array:
    """x in the result's type; fractions are cut off on the way to integers, and every number but 0 becomes True."""
    target = call.dtype
    if target == jnp.bool_:
        return x != 0
    if jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(target, jnp.floating):
        return jnp.trunc(x).astype(target)
    return x.astype(target)


@aten("copy", "copy_", kind="Identity")
def copy(call: Call, x: Array, source: Array, non_blocking: bool = False) -> Array:
    """``source`` in the type and shape of x."""
    return jnp.broadcast_to(source.astype(x.dtype), x.shape)


@aten("slice.Tensor", "slice_copy.Tensor", kind="Slice")
def slice_dimension(
    call: Call, x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    """Elements ``start`` to ``end`` of a dimension, every ``step``-th."""
    first, last = slice_bounds(x.shape[dim], start, end)
    return lax.slice_in_dim(x, first, max(first, last), step, axis(dim, x.ndim))


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Python's bounds of a slice, counted from the front."""
    first, last, _ = slice(start, end).indices(size)
    return first, last


@aten("select.int", "select_copy.int", kind="Slice")
def select(call: Call, x: Array, dim: int, index: int) -> Array:
    """One element of a dimension, which disappears."""
    return lax.index_in_dim(x, index % x.shape[dim], axis(dim, x.ndim), keepdims=False)


@aten("narrow", kind="Slice")
def narrow(call: Call, x: Array, dim: int, start: int, length: int) -> Array:
    """``length`` elements of a dimension from ``start`` on."""
    return lax.slice_in_dim(x, start, start + length, 1, axis(dim, x.ndim))


@aten("cat", "concat", "concatenate", kind="Concat")
def concatenate(call: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    """Tensors one behind the other; empty ones of one dimension are left out, as torch does."""
    parts = [tensor.astype(call.dtype) for tensor in tensors if tensor.shape != (0,) or len(call.shape) == 1]
    return jnp.concatenate(parts, dim)


@aten("stack", kind="Concat")
def stack(call: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    """Tensors side by side along a new dimension."""
    return jnp.stack([tensor.astype(call.dtype) for tensor in tensors], dim)


@aten("split.Tensor", "split_copy.Tensor", kind="Split")
def split(call: Call, x: Array, size: int, dim: int = 0) -> tuple[Array, ...]:
    """Parts of ``size`` elements each, the last one perhaps smaller."""
    return tuple(jnp.split(x, list(range(size, x.shape[dim], size)), dim)) if size else (x,)


@aten("split_with_sizes", "split.sizes", "split_with_sizes_copy", kind="Split")
def split_by_sizes(call: Call, x: Array, sizes: Sizes, dim: int = 0) -> tuple[Array, ...]:
    """Parts of given sizes."""
    return tuple(jnp.split(x, list(np.cumsum(sizes))[:-1], dim))


@aten("unbind.int", "unbind_copy.int", kind="Split")
def unbind(call: Call, x: Array, dim: int = 0) -> tuple[Array, ...]:
    """All elements of a dimension, which disappears."""
    return tuple(lax.index_in_dim(x, i, axis(dim, x.ndim), keepdims=False) for i in range(x.shape[dim]))


@aten("roll", kind="Concat")
def roll(call: Call, x: Array, shifts: Sizes, dims: Sizes = ()) -> Array:
    """Elements moved along dimensions; those that fall out come in at the other end."""
    if not dims:
        return jnp.roll(x, shifts[0])
    return jnp.roll(x, tuple(shifts), tuple(dims))


@aten("repeat_interleave.self_int", kind="Tile")
def repeat_elements(
    call: Call, x: Array, count: int, dim: int | None = None, output_size: int | None = None
) -> Array:
    """Each element several times, one behind the other."""
    return jnp.repeat(x, count, dim)


@aten("diagonal", "diagonal_copy", kind="Gather")
def diagonal(call: Call, x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """The diagonal of two dimensions, as the last one."""
    elements: Array = jnp.diagonal(x, offset, dim1, dim2)
    return elements


@aten("diag_embed")
def diagonal_matrix(call: Call, x: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    """The last dimension on a diagonal, with zeros elsewhere."""
    size = x.shape[-1] + abs(offset)
    rows = np.arange(x.shape[-1]) + max(-offset, 0)
    columns = np.arange(x.shape[-1]) + max(offset, 0)
    matrix = jnp.zeros((*x.shape[:-1], size, size), x.dtype).at[..., rows, columns].set(x)
    return jnp.moveaxis(matrix, (-2, -1), (dim1, dim2))


@aten("unfold", "unfold_copy", kind="Gather")
def unfold(call: Call, x: Array, dim: int, size: int, step: int) -> Array:
    """Windows of a dimension, their elements as the last dimension."""
    if not x.ndim:
        return x[None]
    dim = axis(dim, x.ndim)
    starts = range(0, x.shape[dim] - size + 1, step)
    windows = jnp.stack([lax.slice_in_dim(x, i, i + size, 1, dim) for i in starts], dim)
    return jnp.moveaxis(windows, dim + 1, -1)


@aten("as_strided", "as_strided_copy", kind="Gather")
def as_strided(call: Call, x: Array, size: Sizes, stride: Sizes, offset: int | None = None) -> Array:
    """Elements of x, read one behind the other, by strides."""
    return x.reshape(-1)[strided_places(size, stride, offset)]


def strided_places(size: Sizes, stride: Sizes, offset: int | None) -> np.ndarray:
    """The elements that strides select, where x is read row by row."""
    where = np.asarray(offset or 0)
    for dimension, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = (-1,) + (1,) * (len(size) - 1 - dimension)
        where = where + np.arange(count).reshape(shape) * step
    return where.astype(np.int32).reshape(tuple(size))


def _pairs(padding: Sizes, rank: int) -> list[tuple[int, int]]:
    """Torch's padding, last dimension first, as (before, after) for each dimension."""
    count = len(padding) // 2
    pairs = [(padding[2 * i], padding[2 * i + 1]) for i in reversed(range(count))]
    return [(0, 0)] * (rank - count) + pairs


@aten("constant_pad_nd", kind="Pad")
def pad_constant(call: Call, x: Array, padding: Sizes, value: Operand = 0) -> Array:
    """A constant around x; negative padding cuts."""
    return lax.pad(x, jnp.asarray(value).astype(x.dtype), [(*pair, 0) for pair in _pairs(padding, x.ndim)])


@aten("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", kind="Pad")
def pad_reflected(call: Call, x: Array, padding: Sizes) -> Array:
    """x around itself, mirrored without its edge."""
    return _padded(x, padding, "reflect")


@aten("replication_pad1d", "replication_pad2d", "replication_pad3d", kind="Pad")
def pad_edge(call: Call, x: Array, padding: Sizes) -> Array:
    """The edge of x around it; negative padding cuts."""
    for where, (before, after) in enumerate(_pairs(padding, x.ndim)):
        size = x.shape[where]
        if before or after:
            x = jnp.take(x, jnp.clip(jnp.arange(size + before + after) - before, 0, size - 1), where)
    return x


def _padded(x: Array, padding: Sizes, mode: str) -> Array:
    pairs = _pairs(padding, x.ndim)
    for where, (before, after) in enumerate(pairs):
        x = lax.slice_in_dim(x, max(-before, 0), x.shape[where] - max(-after, 0), 1, where)
    return jnp.pad(x, [(max(before, 0), max(after, 0)) for before, after in pairs], mode)


@aten("pixel_shuffle", kind="Transpose")
def pixel_shuffle(call: Call, x: Array, factor: int) -> Array:
    """Channels as pixels: ``[..., C r r, H, W]`` to ``[..., C, H r, W r]``."""
    *lead, channels, height, width = x.shape
    parts = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    parts = jnp.moveaxis(parts, (-4, -3), (-3, -1))
    return parts.reshape(call.shape)


@aten("pixel_unshuffle", kind="Transpose")
def pixel_unshuffle(call: Call, x: Array, factor: int) -> Array:
    """Pixels as channels: ``[..., C, H r, W r]`` to ``[..., C r r, H, W]``."""
    *lead, channels, height, width = x.shape
    parts = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    parts = jnp.moveaxis(parts, (-3, -1), (-4, -3))
    return parts.reshape(call.shape)


@aten("meshgrid", "meshgrid.indexing")
def mesh_grid(call: Call, tensors: Sequence[Array], indexing: str = "ij") -> tuple[Array, ...]:
    """Coordinates of the points of a grid: a tensor for each axis, in the grid's shape."""
    return tuple(jnp.meshgrid(*[tensor.reshape(-1) for tensor in tensors], indexing=indexing))


@aten("cartesian_prod")
def cartesian_product(call: Call, tensors: Sequence[Array]) -> Array:
    """Every combination of one element of each tensor, a row each."""
    grid = jnp.meshgrid(*[tensor.reshape(-1) for tensor in tensors], indexing="ij")
    return (
        jnp.stack([coordinates.reshape(-1) for coordinates in grid], -1)
        .reshape(call.shape)
        .astype(call.dtype)
    )


@aten("diagonal_scatter", kind="ScatterElements")
def replace_diagonal(
    call: Call, x: Array, source: Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Array:
    """x with the diagonal of two dimensions replaced."""
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    count = source.shape[-1]
    rows, columns = np.arange(count) + max(-offset, 0), np.arange(count) + max(offset, 0)
    replaced = moved.at[..., rows, columns].set(source.astype(x.dtype))
    return jnp.moveaxis(replaced, (-2, -1), (dim1, dim2))


@aten("as_strided_scatter", kind="ScatterElements")
def replace_strided(
    call: Call, x: Array, source: Array, size: Sizes, stride: Sizes, offset: int | None = None
) -> Array:
    """x with the elements that `as_strided` shows replaced; of equal places the last one stays."""
    places = strided_places(size, stride, offset).reshape(-1)
    kept = {int(place): index for index, place in enumerate(places)}
    chosen = np.asarray(list(kept.values()), np.int32)
    flat = x.reshape(-1).at[places[chosen]].set(source.reshape(-1)[chosen].astype(x.dtype))
    return flat.reshape(x.shape)


aten_expressions(
    {
        "Transpose": {
            "t numpy_T mT numpy_T.default": lambda call, x: jnp.swapaxes(x, -1, -2) if x.ndim > 1 else x,
            "permute permute_copy": lambda call, x, order: jnp.transpose(x, [axis(d, x.ndim) for d in order]),
            "movedim": lambda call, x, source, destination: jnp.moveaxis(x, source, destination),
        },
        "Detach": {
            # x without its gradient.
            "detach": lambda call, x: lax.stop_gradient(x),
        },
        "Split": {
            "chunk": lambda call, x, chunks, dim=0: split(call, x, -(-x.shape[dim] // chunks), dim),
        },
        "Reverse": {
            "flip": lambda call, x, dims: jnp.flip(x, dims),
        },
        "Tile": {
            "repeat tile": lambda call, x, counts: jnp.tile(x, tuple(counts)),
        },
        "": {
            "tril": lambda call, x, diagonal=0: jnp.tril(x, diagonal),
            "triu": lambda call, x, diagonal=0: jnp.triu(x, diagonal),
        },
        "Pad": {
            "_pad_circular": lambda call, x, padding: _padded(x, padding, "wrap"),
        },
    }
)
