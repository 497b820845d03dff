"""Rows of sequences copied between tensors (``slicing_ops``), and histograms (``statistics_ops``).

Source of meanings: the SDK's documentation of both modules. Gradients are the true derivatives of what is copied:
``dst`` has one where its values stay. In the SDK it has none.
"""

from __future__ import annotations

import tensorflow as tf


def copied_rows(
    dst: tf.Tensor,
    src: tf.Tensor,
    num_elems: tf.Tensor,
    src_offsets: tf.Tensor,
    dst_offsets: tf.Tensor,
    zero_unused: bool,
    name: str | None = None,
) -> tf.Tensor:
    """``dst [rows, ...]`` with ``num_elems[i]`` rows of ``src [rows, ...]`` from ``src_offsets[i]`` on, at
    ``dst_offsets[i]``, for each *i*; of slices that meet the last one stays. What is not copied is ``dst``'s, or zero
    with ``zero_unused``.

    ValueError for lists of different lengths, and for rows of different shapes.
    """
    dst, src = tf.convert_to_tensor(dst), tf.convert_to_tensor(src)
    count, start, at = _slices("num_elems, src_offsets and dst_offsets", num_elems, src_offsets, dst_offsets)
    return _with_rows(dst, src, count, start, at, zero_unused)


def _slices(names: str, *lists: tf.Tensor) -> list[tf.Tensor]:
    """The lists as tensors. ValueError, in the SDK's words, if they are no lists of one length."""
    tensors = [tf.convert_to_tensor(values) for values in lists]
    shapes = {tuple(tensor.shape.as_list()) for tensor in tensors}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 1 or not shape[0]:
        raise ValueError(f"{names} must have matching, nonzero shapes of rank 1.")
    return tensors


def _with_rows(
    dst: tf.Tensor,
    src: tf.Tensor,
    count: tf.Tensor,
    start: tf.Tensor,
    at: tf.Tensor,
    zero_unused: bool,
) -> tf.Tensor:
    if dst.shape[1:] != src.shape[1:]:
        raise ValueError("src and dst inner shapes must match.")
    rows = tf.range(dst.shape[0])[:, None]
    copied = (rows >= at) & (rows < at + count)  # [rows, slices]
    owner = tf.reduce_max(tf.compat.v2.where(copied, tf.range(count.shape[0]), -1), 1)
    place = rows[:, 0] + tf.gather(start - at, tf.maximum(owner, 0))
    taken = tf.gather(src, tf.clip_by_value(place, 0, src.shape[0] - 1))
    filled = tf.reshape(owner >= 0, [-1, *[1] * (dst.shape.rank - 1)])
    return tf.compat.v2.where(filled, taken, tf.zeros_like(dst) if zero_unused else dst)


def sequence_slice_unpack(
    src: tf.Tensor,
    num_elems: tf.Tensor,
    src_offsets: tf.Tensor,
    total_elements: int,
    name: str | None = None,
) -> tf.Tensor:
    """``[total_elements, ...]``: ``num_elems[i]`` rows of ``src [rows, ...]`` from ``src_offsets[i]`` on, for each *i*,
    one after the other. ValueError for lists of different lengths.
    """
    src = tf.convert_to_tensor(src)
    count, start = _slices("num_elems and src_offsets", num_elems, src_offsets)
    dst = tf.zeros([total_elements, *src.shape[1:]], src.dtype)
    return _with_rows(dst, src, count, start, tf.cumsum(count, exclusive=True), zero_unused=True)


def sequence_slice_pack(
    dst: tf.Tensor,
    src: tf.Tensor,
    num_elems: tf.Tensor,
    dst_offsets: tf.Tensor,
    zero_unused: bool,
    name: str | None = None,
) -> tf.Tensor:
    """``dst [rows, ...]`` with the next ``num_elems[i]`` rows of ``src [rows, ...]`` at ``dst_offsets[i]``, for each
    *i*: the inverse of `sequence_slice_unpack`. ValueError as `copied_rows`.
    """
    dst, src = tf.convert_to_tensor(dst), tf.convert_to_tensor(src)
    count, at = _slices("num_elems and dst_offsets", num_elems, dst_offsets)
    return _with_rows(dst, src, count, tf.cumsum(count, exclusive=True), at, zero_unused)


def fixed_width_bins(inputs: tf.Tensor, n_bins: int) -> tf.Tensor:
    """``n_bins`` levels at equal distances between the least and the greatest input."""
    least, most = tf.reduce_min(inputs), tf.reduce_max(inputs)
    steps = tf.cast(tf.range(n_bins), inputs.dtype) / tf.cast(max(n_bins - 1, 1), inputs.dtype)
    return least + (most - least) * steps


def histogram_normalize(hist: tf.Tensor) -> tf.Tensor:
    """The histogram divided by its sum."""
    return hist / tf.reduce_sum(hist, axis=0)


def counts_between_levels(inputs: tf.Tensor, levels: tf.Tensor, absolute_of_input: bool = False) -> tf.Tensor:
    """How many inputs lie between levels: of *n* levels *n + 1* counts, float32. ValueError for other types than
    float16 and float32, and for other ranks than 1.
    """
    inputs, levels = _checked_histogram("histogram", inputs, levels)
    values = tf.abs(inputs) if absolute_of_input else inputs
    place = tf.reduce_sum(tf.cast(values[:, None] >= tf.cast(levels, values.dtype)[None, :], tf.int32), 1)
    return tf.reduce_sum(tf.one_hot(place, levels.shape[0] + 1, dtype=tf.float32), 0)


def _checked_histogram(call: str, inputs: tf.Tensor, levels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    inputs, levels = tf.convert_to_tensor(inputs), tf.convert_to_tensor(levels)
    if inputs.dtype not in (tf.float16, tf.float32) or levels.dtype not in (tf.float16, tf.float32):
        raise ValueError(f"Only float16 and float32 types are supported for {call}.")
    if inputs.shape.rank != 1 or levels.shape.rank != 1:
        raise ValueError(f"{call} expects rank-1 tensor inputs.")
    return inputs, levels


def histogram_update(
    hist: tf.Tensor, inputs: tf.Tensor, levels: tf.Tensor, absolute_of_input: bool = False
) -> tf.Tensor:
    """The histogram with more inputs. ValueError as `counts_between_levels`, and for sizes that do not fit."""
    hist = tf.convert_to_tensor(hist)
    if hist.dtype != tf.float32:
        raise ValueError("hist must be of float32 type")
    inputs, levels = _checked_histogram("histogram_update", inputs, levels)
    if hist.shape.rank != 1 or hist.shape[0] != levels.shape[0] + 1:
        raise ValueError(
            "hist and levels shapes are incompatible. For n levels, hist must have n+1 elements."
        )
    return hist + counts_between_levels(inputs, levels, absolute_of_input)
