"""Operations that programs and tests call by the names of the SDK's libraries: tensors that a running program sends to
the host (``gen_sendrecv_ops``), tables of the host that it looks up (``gen_pop_datastream_ops``), and group norms with
their statistics (``gen_popnn_ops``).

A tensor that was sent waits under its name until the host receives it in the same session. A table is a copy that
lives between its registration and the end of it: both are operations of a session.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.capture.markers import mark, reference
from podrun.tensorflow.capture.program_graphs import IpuGraph, innermost_program, outermost_program
from podrun.tensorflow.execution.launching import SESSIONS, launched_operation, raising_itself
from podrun.tensorflow.sdk.gradient_accumulation import zero_variable
from podrun.tensorflow.sdk.ipu_outfeed_queue import (
    pop_datastream_outfeed_dequeue,
    pop_datastream_outfeed_enqueue,
)


class NamedStream:
    """The values of a tensor that the programs of a graph sent in its session, oldest first: a queue of programs."""

    def __init__(self, name: str, graph: tf.Graph) -> None:
        self.name = name
        self._graph = weakref.ref(graph)
        self._program: weakref.ReferenceType[IpuGraph] | None = None
        self._session: weakref.ReferenceType[tf.compat.v1.Session] | None = None
        self._values: deque[np.ndarray] = deque()

    def sent_by(self, program: IpuGraph | None) -> None:
        """Remember the graph of the program that sends the tensor."""
        self._program = None if program is None else weakref.ref(program)

    @property
    def program(self) -> IpuGraph | None:
        """The graph of the program that sends the tensor, if any."""
        return None if self._program is None else self._program()

    def _forget_other_sessions(self) -> None:
        """Drop what was sent in a session before this one."""
        graph = self._graph()
        session = SESSIONS.get(graph) if graph is not None else None
        before = None if self._session is None else self._session()
        if session is not before:
            self._session = None if session is None else weakref.ref(session)
            self._values.clear()

    def take(self, place: int, value: np.ndarray) -> None:
        """Add what iterations sent."""
        self._forget_other_sessions()
        self._values.extend(np.array(row) for row in value)

    def received(self) -> np.ndarray:
        """The oldest value. FailedPreconditionError if nothing was sent."""
        self._forget_other_sessions()
        if not self._values:
            raise tf.errors.FailedPreconditionError(
                None, None, f"No program has sent the tensor '{self.name}' to the host."
            )
        return self._values.popleft()


_streams: weakref.WeakKeyDictionary[tf.Graph, dict[str, NamedStream]] = weakref.WeakKeyDictionary()
"""Graph of the host -> the tensors that its programs send, by name."""


def _stream(name: str) -> NamedStream:
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
    return _streams.setdefault(graph, {}).setdefault(name, NamedStream(name, graph))


def _effect(operation: tf.Operation) -> tf.Operation:
    """The operation, which the program around it runs whether or not it is returned."""
    program = innermost_program()
    if program is not None:
        program.control_outputs.append(operation)
    return operation


def ipu_send_to_host(
    inputs: tf.Tensor,
    tensor_name: str,
    send_device: str = "/device:IPU:0",
    send_device_incarnation: int = 0,
    recv_device: str = "/device:CPU:0",
    name: str | None = None,
) -> tf.Operation:
    """In a program: give a tensor to the host, for `ipu_recv_at_host` of that name."""
    stream = _stream(tensor_name)
    tensor = tf.convert_to_tensor(inputs)
    stream.sent_by(outermost_program())
    flag = tf.TensorSpec([], tf.bool)
    (done,) = mark(
        "enqueue", [tensor], [flag], stateful=True, name=name or "send_to_host", queue=reference(stream)
    )
    return _effect(done.op)


def ipu_recv_at_host(
    T: tf.DType,
    tensor_name: str,
    send_device: str = "/device:IPU:0",
    send_device_incarnation: int = 0,
    recv_device: str = "/device:CPU:0",
    name: str | None = None,
) -> tf.Tensor:
    """On the host: the next value of a tensor that a program sends, which it runs for that."""
    stream = _stream(tensor_name)
    if tf.executing_eagerly():
        return tf.constant(stream.received(), T)
    sender = launched_operation(stream.program)
    with tf.control_dependencies([] if sender is None else [sender]):
        received = raising_itself(stream.received)
        return tf.numpy_function(received, [], T, stateful=True, name=name or "recv_at_host")


# --- Tables of the host -------------------------------------------------------------------------------------------

_TABLES = "_podrun_host_tables"
"""Attribute of a graph -> its tables by their names, which end with it."""


@dataclass(slots=True)
class HostTable:
    """A table of the host. ``ended``: whether its end is among the operations of its graph."""

    variable: tf.Variable
    ended: bool = False


def _tables() -> dict[str, HostTable]:
    """The tables of the graph around programs; in eager mode, of the process."""
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, _TABLES):
        setattr(graph, _TABLES, {})
    tables: dict[str, HostTable] = getattr(graph, _TABLES)
    return tables


def _table(embedding_id: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
    """The table of a name. ValueError if it is registered with another shape or type."""
    tables, table = _tables(), _tables().get(embedding_id)
    if table is not None:
        lines, kind = table.variable.shape.as_list(), table.variable.dtype.base_dtype
        if (lines, kind) == (list(shape), dtype):
            return table.variable
        if not table.ended:
            raise ValueError(
                f"The host embedding '{embedding_id}' is {kind.name} {lines}, not {dtype.name} {list(shape)}: "
                "deregister it first."
            )
    tables[embedding_id] = HostTable(zero_variable(f"host_embedding_{embedding_id}", shape, dtype))
    return tables[embedding_id].variable


def ipu_device_embedding_lookup(
    indices: tf.Tensor, embedding_id: str, embedding_shape: Sequence[int], dtype: tf.DType, **options: object
) -> tf.Tensor:
    """In a program: rows of a table of the host."""
    return tf.gather(_table(embedding_id, embedding_shape, tf.as_dtype(dtype)), indices)


def ipu_device_embedding_update_add(
    looked_up: tf.Tensor,
    grads: tf.Tensor,
    indices: tf.Tensor,
    embedding_id: str,
    embedding_shape: Sequence[int],
    **options: object,
) -> tf.Operation:
    """In a program: add ``grads`` to the rows ``indices``, to each as often as it stands there."""
    table = _table(embedding_id, embedding_shape, grads.dtype)
    added = tf.raw_ops.ResourceScatterAdd(resource=table.handle, indices=indices, updates=grads)
    return _effect(added)


def ipu_device_embedding_notify(embedding_id: str, **options: object) -> tf.Operation:
    """In a program: note that the updates of a host's table are complete."""
    return tf.no_op()


def ipu_host_embedding_register(
    values: tf.Variable, embedding_id: str, optimizer: str = "SGD", **options: object
) -> tf.Operation:
    """On the host: let a table be the variable ``values``."""
    table = _table(embedding_id, values.shape.as_list(), values.dtype.base_dtype)
    return table.assign(tf.convert_to_tensor(values), read_value=False)


def ipu_host_embedding_deregister(
    values: tf.Variable, embedding_id: str, **options: object
) -> tf.Tensor | tf.Operation:
    """On the host: give the variable back what programs made of the table, which ends."""
    table = _table(embedding_id, values.shape.as_list(), values.dtype.base_dtype)
    back = values.assign(table.read_value())
    if tf.executing_eagerly():
        _tables().pop(embedding_id)
    else:
        _tables()[embedding_id].ended = True
    return back


# --- Group norms --------------------------------------------------------------------------------------------------


def _in_groups(x: tf.Tensor, data_format: str, groups: int, strided: bool) -> tf.Tensor:
    """``[batch, places, groups, channels of a group]``. Strided: channel c is in group ``c % groups``."""
    last = x if data_format == "NHWC" else tf.transpose(x, [0, *range(2, x.shape.rank), 1])
    channels = int(last.shape[-1])
    if strided:
        parts = tf.reshape(last, [last.shape[0], -1, channels // groups, groups])
        return tf.transpose(parts, [0, 1, 3, 2])
    return tf.reshape(last, [last.shape[0], -1, groups, channels // groups])


def popnn_group_norm_statistics(
    inputs: tf.Tensor,
    data_format: str = "NHWC",
    epsilon: float = 0.001,
    num_groups: int = 1,
    strided_channel_grouping: bool = True,
    **options: object,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and 1 / standard deviation ``[batch * groups]`` in float32, of the biased variance with ``epsilon``."""
    parts = _in_groups(tf.cast(inputs, tf.float32), data_format, num_groups, strided_channel_grouping)
    mean, variance = tf.nn.moments(parts, [1, 3])
    return tf.reshape(mean, [-1]), tf.reshape(tf.math.rsqrt(variance + epsilon), [-1])


def popnn_group_norm_inference(
    inputs: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    mean: tf.Tensor,
    inv_std_dev: tf.Tensor,
    data_format: str = "NHWC",
    epsilon: float = 0.001,
    num_groups: int = 1,
    strided_channel_grouping: bool = True,
    **options: object,
) -> tf.Tensor:
    """The inputs normalized with these statistics, then scaled by ``gamma`` and moved by ``beta`` ``[channels]``."""
    x = tf.convert_to_tensor(inputs)
    parts = _in_groups(tf.cast(x, tf.float32), data_format, num_groups, strided_channel_grouping)
    shape = [x.shape[0], 1, num_groups, 1]
    parts = (parts - tf.reshape(tf.cast(mean, tf.float32), shape)) * tf.reshape(
        tf.cast(inv_std_dev, tf.float32), shape
    )
    if strided_channel_grouping:
        parts = tf.transpose(parts, [0, 1, 3, 2])
    places = x.shape[1:-1] if data_format == "NHWC" else x.shape[2:]
    last = tf.reshape(parts, [x.shape[0], *places, -1])
    last = tf.cast(last * tf.cast(gamma, tf.float32) + tf.cast(beta, tf.float32), x.dtype)
    return (
        last
        if data_format == "NHWC"
        else tf.transpose(last, [0, x.shape.rank - 1, *range(1, x.shape.rank - 1)])
    )


def popnn_group_norm_training(
    inputs: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, **options: object
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The normalized inputs, and the statistics with which they are. Options as of the other two."""
    mean, inverse = popnn_group_norm_statistics(inputs, **options)  # type: ignore[arg-type]
    normed = popnn_group_norm_inference(inputs, gamma, beta, mean, inverse, **options)  # type: ignore[arg-type]
    kind = normed.dtype
    return normed, tf.cast(mean, kind), tf.cast(inverse, kind)


BY_MODULE = {
    "gen_sendrecv_ops": (ipu_send_to_host, ipu_recv_at_host),
    "gen_pop_datastream_ops": (
        ipu_device_embedding_lookup,
        ipu_device_embedding_update_add,
        ipu_device_embedding_notify,
        ipu_host_embedding_register,
        ipu_host_embedding_deregister,
        pop_datastream_outfeed_enqueue,
        pop_datastream_outfeed_dequeue,
    ),
    "gen_popnn_ops": (popnn_group_norm_statistics, popnn_group_norm_inference, popnn_group_norm_training),
}
"""Module of the SDK's libraries -> its operations that are here."""
