"""Host embeddings: tables that stay on the host, of which programs look up rows, and descend on those they looked up.

The table is a variable outside of the program. A lookup is a gather; when the program computes gradients, those of the
rows are subtracted from the table, scaled by the rate, at once or (`HostEmbeddingSGDGAOptimizerSpec`) after so many
iterations. Source of meaning: the SDK's documentation of ``embedding_ops``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import tensorflow as tf

from podrun.core.errors import UsageError
from podrun.tensorflow.capture.gradient_cuts import watch_gradient
from podrun.tensorflow.capture.program_graphs import innermost_program, stays_on_host
from podrun.tensorflow.sdk.gradient_accumulation import Accumulation


class HostEmbeddingOptimizerSpec:
    """Stochastic gradient descent on the rows that are looked up. A rate of 0 or None leaves the table as it is."""

    def __init__(self, learning_rate: float | None, optimizer_name: str | None = None) -> None:
        if optimizer_name not in (None, "SGD"):
            raise ValueError(f"Host embeddings descend with SGD, not {optimizer_name}.")
        self._learning_rate = learning_rate
        self.accumulation = 1

    def get_learning_rate(self) -> float | None:
        """The factor of gradients in each update; 0 or None for no updates."""
        return self._learning_rate


class HostEmbeddingSGDGAOptimizerSpec(HostEmbeddingOptimizerSpec):
    """Descent with the sum of ``accumulation_factor`` iterations' gradients."""

    def __init__(self, learning_rate: float, accumulation_factor: int) -> None:
        super().__init__(learning_rate)
        if accumulation_factor < 1:
            raise ValueError(f"accumulation_factor must be at least 1, not {accumulation_factor}.")
        self.accumulation = accumulation_factor

    def get_accumulation_factor(self) -> int:
        """The number of iterations whose gradients an update sums."""
        return self.accumulation


class HostEmbedding:
    """A table ``[rows, size]`` on the host."""

    def __init__(
        self,
        name: str,
        table: tf.Variable,
        partition_strategy: str = "TOKEN",
        optimizer_spec: HostEmbeddingOptimizerSpec | None = None,
    ) -> None:
        if optimizer_spec is not None and not isinstance(optimizer_spec, HostEmbeddingOptimizerSpec):
            raise ValueError("optimizer_spec is not a HostEmbeddingOptimizerSpec or None.")
        if partition_strategy not in ("TOKEN", "ENCODING"):
            raise ValueError(f"partition_strategy must be TOKEN or ENCODING, not {partition_strategy}.")
        self._name, self._table, self._spec = name, table, optimizer_spec
        count = 1 if optimizer_spec is None else optimizer_spec.accumulation
        self._accumulation = Accumulation(count)

    def get_embedding_tensor(self) -> tf.Variable:
        """The variable with the table's rows."""
        return self._table

    def register(self, session: tf.compat.v1.Session | None = None) -> AbstractContextManager[HostEmbedding]:
        """A context manager that gives this embedding, and in which programs look up its rows. Raises ValueError where
        a graph is built and there is no session.
        """
        if session is None and not tf.executing_eagerly():
            raise ValueError("HostEmbedding.register requires a session when eager execution is disabled.")
        return nullcontext(self)

    def lookup(self, indices: tf.Tensor, clip_indices: bool = True) -> tf.Tensor:
        """The rows of ``indices``, ``[*indices, size]``. UsageError outside of a program."""
        program = innermost_program()
        if program is None:
            raise UsageError("HostEmbedding.lookup is called outside of a program on an IPU.")
        indices = tf.convert_to_tensor(indices)
        if clip_indices:
            indices = tf.clip_by_value(indices, 0, int(self._table.shape[0]) - 1)
        stays_on_host(self._table)
        rows = tf.gather(tf.stop_gradient(self._table), indices)
        rate = None if self._spec is None else self._spec.get_learning_rate()
        if not rate:
            return rows

        def descend(gradient: tf.Tensor) -> None:
            program.control_outputs.append(self._descended(indices, gradient, rate))

        return watch_gradient(rows, descend)

    def _descended(self, indices: tf.Tensor, gradient: tf.Tensor, rate: float) -> tf.Operation:
        flat = tf.reshape(indices, [-1])
        updates = tf.reshape(gradient, [-1, int(self._table.shape[1])])
        dense = tf.scatter_nd(flat[:, None], updates, self._table.shape.as_list())

        def update(pairs: Sequence[tuple[tf.Tensor, tf.Variable]]) -> tf.Operation:
            return tf.group(*[v.assign_sub(rate * g, read_value=False) for g, v in pairs])

        return self._accumulation.apply([(dense, self._table)], update)


def create_host_embedding(
    name: str,
    shape: Sequence[int],
    dtype: tf.DType,
    partition_strategy: str = "TOKEN",
    optimizer_spec: HostEmbeddingOptimizerSpec | None = None,
    initializer: object = None,
) -> HostEmbedding:
    """A table as a variable of the host. ValueError for another rank than 2, and for types that are not floats."""
    if len(tf.TensorShape(shape)) != 2:
        raise ValueError(f"Host embeddings are of rank 2, not {len(tf.TensorShape(shape))}.")
    if not tf.as_dtype(dtype).is_floating:
        raise ValueError(f"Host embeddings hold floats, not {tf.as_dtype(dtype).name}.")
    table = tf.compat.v1.get_variable(name, shape, dtype, initializer, trainable=False, use_resource=True)
    return HostEmbedding(name, table, partition_strategy, optimizer_spec)
