"""Rows of sequences copied between tensors (``slicing_ops``), and histograms (``statistics_ops``).

Source of meanings: the SDK's documentation of both modules.
"""

from __future__ import annotations

import tensorflow as tf


def _spread(condition: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """A condition ``[batch, rows]`` for tensors ``[batch, rows, ...]``."""
    return tf.reshape(condition, [*condition.shape, *[1] * (like.shape.rank - condition.shape.rank)])


def copied_rows(
    dst: tf.Tensor,
    src: tf.Tensor,
    num_elems: tf.Tensor,
    src_offsets: tf.Tensor,
    dst_offsets: tf.Tensor,
    zero_unused: bool,
    name: str | None = None,
) -> tf.Tensor:
    """``dst`` with ``num_elems[i]`` rows of ``src[i]`` from ``src_offsets[i]`` on, at ``dst_offsets[i]``. ``[batch,
    rows, ...]``; what is not copied is ``dst``'s, or zero with ``zero_unused``.
    """
    dst, src = tf.convert_to_tensor(dst), tf.convert_to_tensor(src)
    rows = tf.range(dst.shape[1])[None, :]
    count, start, at = (tf.convert_to_tensor(v)[:, None] for v in (num_elems, src_offsets, dst_offsets))
    copied = (rows >= at) & (rows < at + count)
    taken = tf.gather(src, tf.clip_by_value(rows - at + start, 0, src.shape[1] - 1), batch_dims=1)
    return tf.compat.v2.where(_spread(copied, dst), taken, tf.zeros_like(dst) if zero_unused else dst)


def sequence_slice_unpack(
    src: tf.Tensor,
    num_elems: tf.Tensor,
    src_offsets: tf.Tensor,
    total_elements: int,
    name: str | None = None,
) -> tf.Tensor:
    """``[total_elements, ...]``: ``num_elems[i]`` rows of each ``src[i]`` from ``src_offsets[i]`` on, one after the
    other.
    """
    src = tf.convert_to_tensor(src)
    count, start = tf.convert_to_tensor(num_elems), tf.convert_to_tensor(src_offsets)
    ends = tf.cumsum(count)
    place = tf.range(total_elements)
    owner = tf.reduce_sum(tf.cast(place[:, None] >= ends[None, :], tf.int32), 1)
    valid = owner < count.shape[0]
    owner = tf.minimum(owner, count.shape[0] - 1)
    row = place - tf.gather(ends - count, owner) + tf.gather(start, owner)
    rows = tf.gather_nd(src, tf.stack([owner, tf.clip_by_value(row, 0, src.shape[1] - 1)], 1))
    return tf.compat.v2.where(_spread(valid, rows), rows, tf.zeros_like(rows))


def sequence_slice_pack(
    dst: tf.Tensor,
    src: tf.Tensor,
    num_elems: tf.Tensor,
    dst_offsets: tf.Tensor,
    zero_unused: bool,
    name: str | None = None,
) -> tf.Tensor:
    """``dst`` with the rows of ``src [rows, ...]``, ``num_elems[i]`` of them at ``dst_offsets[i]`` of each
    ``dst[i]``.
    """
    dst, src = tf.convert_to_tensor(dst), tf.convert_to_tensor(src)
    count, at = tf.convert_to_tensor(num_elems)[:, None], tf.convert_to_tensor(dst_offsets)[:, None]
    first = tf.cumsum(count, 0, exclusive=True)
    rows = tf.range(dst.shape[1])[None, :]
    copied = (rows >= at) & (rows < at + count)
    taken = tf.gather(src, tf.clip_by_value(rows - at + first, 0, src.shape[0] - 1))
    return tf.compat.v2.where(_spread(copied, dst), taken, tf.zeros_like(dst) if zero_unused else dst)


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
