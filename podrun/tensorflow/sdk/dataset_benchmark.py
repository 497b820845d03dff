"""``dataset_benchmark``: how fast the host draws elements of a dataset, as JSON text.

An operation in a graph, a value in eager mode. Source of names: the SDK's documentation of ``dataset_benchmark``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.tensorflow.execution.launching import SESSIONS, raising_itself
from podrun.tensorflow.sdk.ipu_infeed_queue import IPUInfeedQueue


def _drawn(dataset: tf.data.Dataset) -> tuple[Callable[[], Iterator[list[np.ndarray]]], list[tf.Operation]]:
    """A function that draws from the dataset from its start on, and what runs before it. In a graph the session that
    runs it draws, and what the session feeds is for the dataset too.
    """
    if tf.executing_eagerly():
        return lambda: ([np.asarray(t) for t in tf.nest.flatten(e)] for e in dataset), []
    graph = tf.compat.v1.get_default_graph()
    iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
    flat = tf.nest.flatten(iterator.get_next())

    def draw() -> Iterator[list[np.ndarray]]:
        options, session = tf.compat.v1.RunOptions(inter_op_thread_pool=-1), SESSIONS[graph]
        while True:
            yield session.run(flat, options=options)

    return draw, [iterator.initializer]


def dataset_benchmark(
    dataset: tf.data.Dataset,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    apply_debug_options: bool = True,
    do_memcpy: bool = True,
) -> tf.Tensor:
    """One JSON text, ``[1]``, with an entry for each epoch: elements, bytes, seconds, elements a second and gigabytes a
    second. OutOfRangeError for a dataset with fewer elements. ValueError for counts below 1.
    """
    if number_of_epochs < 1 or elements_per_epochs < 1:
        raise ValueError("number_of_epochs and elements_per_epochs must be at least 1.")
    draw, before = _drawn(dataset)

    def run() -> np.ndarray:
        elements, epochs = draw(), []
        for _ in range(number_of_epochs):
            start, size = time.perf_counter(), 0
            for _ in range(elements_per_epochs):
                try:
                    arrays = next(elements)
                except StopIteration:
                    raise tf.errors.OutOfRangeError(None, None, "The dataset has no more elements.") from None
                size += sum(np.array(a, copy=do_memcpy or None).nbytes for a in arrays)
            seconds = time.perf_counter() - start
            epochs.append(_epoch(elements_per_epochs, size, seconds))
            if print_stats:
                print(json.dumps(epochs[-1]))
        return np.array([json.dumps({"epochs": epochs}).encode()], object)

    if tf.executing_eagerly():
        return tf.constant(run())
    with tf.control_dependencies(before):
        text = tf.numpy_function(raising_itself(run), [], tf.string, stateful=True, name="dataset_benchmark")
    text.set_shape([1])
    return text


def _epoch(elements: int, size: int, seconds: float) -> dict[str, Any]:
    return {
        "elements_processed": elements,
        "total_bytes_processed": size,
        "time_elapsed": seconds,
        "elements_per_second": elements / seconds,
        "bandwidth": size / seconds / 1e9,
    }


def infeed_benchmark(
    infeed_queue: IPUInfeedQueue,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    do_memcpy: bool = True,
) -> tf.Tensor:
    """How fast the host reads the dataset of a queue: a tensor ``[1]`` with the text of the figures, JSON, as
    `dataset_benchmark` gives it. ``elements_per_epochs``: elements that an epoch reads; ``do_memcpy``: whether each is
    also copied. OutOfRangeError where the dataset ends before.
    """
    return dataset_benchmark(
        infeed_queue.dataset, number_of_epochs, elements_per_epochs, print_stats, do_memcpy=do_memcpy
    )


class BufferDataset:
    """``data.ops.dataset_ops.BufferDataset``: a dataset whose elements are drawn ahead, ``buffer_size`` at a time.
    Elements at its end that fill no buffer are left out.
    """

    def __new__(cls, input_dataset: tf.data.Dataset, buffer_size: int) -> tf.data.Dataset:
        """The dataset with a buffer."""
        return input_dataset.batch(buffer_size, drop_remainder=True).unbatch().prefetch(buffer_size)
