"""Values of the host shared between instances: Horovod as programs of version 1 spell it, and ``ipu.distributed``.

Instances are the processes that ``podrun`` starts; alone a process is one instance. All instances make the same calls.
In eager mode calls happen in the program's order. In a graph operations may become ready in any order, so instance 0
says which one comes next and the others follow; operations that depend on no placeholder also wait for the one made
before. Gradients are reduced on the IPUs, so ``DistributedOptimizer`` is refused.
Source of names and defaults: Horovod's documentation, and the SDK's ``distributed`` and ``horovod`` modules.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NoReturn

import numpy as np
import tensorflow as tf

from podrun.core.errors import UnsupportedError, UsageError
from podrun.popdist import backends, collectives, core, mpi
from podrun.popdist.horovod_instances import instances_on_host as instances_on_host

Exchange = Callable[[np.ndarray], np.ndarray]
_numbers = itertools.count()
_last: weakref.WeakKeyDictionary[tf.Graph, tf.Operation] = weakref.WeakKeyDictionary()
"""Graph -> the collective that was made last and depends on no placeholder."""
_NOTE = 256
"""Bytes of the message with which instance 0 names the next collective."""


class InstanceReduction(Enum):
    """How a reduction combines the instances' values."""

    Average = 0
    Sum = 1
    Adasum = 2


Average, Sum, Adasum = InstanceReduction.Average, InstanceReduction.Sum, InstanceReduction.Adasum


class _Turns:
    """Whose turn it is among the collectives of a graph that are ready."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: str | None = None

    def take(self, name: str, exchange: Callable[[], np.ndarray]) -> np.ndarray:
        """Run ``exchange`` when all instances are to run the collective ``name``. UsageError for a collective of
        another type or shape than instance 0's.
        """
        if core.getNumInstances() == 1:
            return exchange()
        first = core.getInstanceIndex() == 0
        until = time.monotonic() + collectives.instance_groups.timeout
        with self._changed:
            while True:
                if self._next is None:
                    self._next = _told(name if first else "")
                    self._check(name)
                if self._next is not None and self._next.split("|")[0] == name.split("|", maxsplit=1)[0]:
                    try:
                        return exchange()
                    finally:
                        self._next = None
                        self._changed.notify_all()
                if not self._changed.wait(until - time.monotonic()):
                    raise UsageError(
                        f"Instance 0 runs the collective {self._next}, which this instance does not come to; it is at "
                        f"{name}: all instances must run the same ones."
                    )

    def _check(self, name: str) -> None:
        told = self._next or ""
        if told.split("|")[0] == name.split("|", maxsplit=1)[0] and told != name:
            raise UsageError(
                f"Instance 0 calls the collective {told}, instance {core.getInstanceIndex()} {name}: all instances "
                "must give the same type and shape."
            )


def _told(name: str) -> str:
    """What instance 0 says is next."""
    note = np.zeros(_NOTE, np.uint8)
    text = name.encode()[:_NOTE]
    note[: len(text)] = np.frombuffer(text, np.uint8)
    return collectives.broadcast(note, 0).tobytes().rstrip(b"\0").decode()


_turns = _Turns()


def _waits_for_nothing(tensor: tf.Tensor) -> bool:
    """Whether no placeholder leads to a tensor of a graph."""
    seen: set[str] = set()
    waiting = [tensor.op]
    while waiting:
        operation = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if operation.type.startswith("Placeholder") or operation.type in ("PyFunc", "EagerPyFunc"):
            return False
        waiting += [t.op for t in operation.inputs] + list(operation.control_inputs)
    return True


def _shared(
    value: tf.Tensor, exchange: Exchange, name: str | None, shape: Sequence[int | None] | None
) -> tf.Tensor:
    """``exchange`` of a value over all instances. ``shape``: the result's; None: the value's."""
    value = tf.convert_to_tensor(value)
    label = f"{name or 'collective'}#{next(_numbers)}"

    def run(array: np.ndarray, *, exact: bool = shape is None) -> np.ndarray:
        array = np.array(array, order="C")
        form = f"{array.dtype}{list(array.shape)}" if exact else str(array.dtype)
        return np.asarray(_turns.take(f"{label}|{form}", lambda: exchange(array)), array.dtype)

    if tf.executing_eagerly():
        return tf.constant(run(value.numpy()))
    graph = tf.compat.v1.get_default_graph()
    free = _waits_for_nothing(value)
    before = [_last[graph]] if free and graph in _last else []
    with tf.control_dependencies(before):
        result = tf.numpy_function(run, [value], value.dtype, stateful=True, name=name)
    if free:
        _last[graph] = result.op
    result.set_shape(value.shape if shape is None else shape)
    return result


def _checked_root(root_rank: int) -> int:
    if not 0 <= root_rank < core.getNumInstances():
        raise UsageError(f"There is no instance {root_rank} among {core.getNumInstances()}.")
    return root_rank


def _summed(array: np.ndarray) -> np.ndarray:
    flat = np.atleast_1d(array)
    result = np.empty_like(flat)
    mpi.COMM_WORLD.Allreduce(flat, result, mpi.SUM)
    return result.reshape(array.shape)


def horovod_allreduce(
    tensor: tf.Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    op: InstanceReduction | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """The average of all instances' tensors, or with ``op=Sum`` their sum. NotImplementedError for Adasum."""
    chosen = op or (Sum if average is False else Average)
    if chosen is Adasum:
        raise NotImplementedError("The Adasum reduction is not implemented.")
    count = core.getNumInstances() if chosen is Average else 1
    return _shared(tensor, lambda a: (_summed(a) / count).astype(a.dtype), name, None)


def distributed_allreduce(
    value: tf.Tensor, reduce_op: tf.distribute.ReduceOp, tensor_name: str | None = None
) -> tf.Tensor:
    """The sum or mean of all instances' values. ValueError for another operation."""
    if reduce_op not in (tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN):
        raise ValueError(f"Unsupported reduce_op {reduce_op}: use tf.distribute.ReduceOp.SUM or MEAN.")
    chosen = Sum if reduce_op == tf.distribute.ReduceOp.SUM else Average
    return horovod_allreduce(value, op=chosen, name=tensor_name)


def _gathered(array: np.ndarray) -> np.ndarray:
    rows = np.atleast_1d(array)
    lengths = collectives.allGather(np.array([len(rows)], np.int64))[:, 0]
    padded = np.zeros((int(lengths.max()), *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    parts = collectives.allGather(padded)
    return np.concatenate([part[:length] for part, length in zip(parts, lengths, strict=True)])


def tensor_allgather(value: tf.Tensor, tensor_name: str | None = None) -> tf.Tensor:
    """All instances' values one after the other along axis 0, where their lengths may differ."""
    value = tf.convert_to_tensor(value)
    return _shared(value, _gathered, tensor_name, [None, *value.shape[1:]])


def tensor_broadcast(value: tf.Tensor, root_rank: int = 0, tensor_name: str | None = None) -> tf.Tensor:
    """The value of instance ``root_rank``, in all of them."""
    root = _checked_root(root_rank)

    def run(array: np.ndarray) -> np.ndarray:
        flat = np.atleast_1d(array)
        return collectives.broadcast(flat, root).reshape(array.shape)

    return _shared(value, run, tensor_name, None)


def broadcast_variables(variables: Iterable[tf.Variable], root_rank: int) -> tf.Operation:
    """Give all instances the values that ``root_rank``'s variables have."""
    return tf.group(*[v.assign(tensor_broadcast(v, root_rank)) for v in variables])


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """`broadcast_variables` of all variables of the graph."""
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A hook that broadcasts all variables when a session is made."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._broadcast: tf.Operation | None = None

    def begin(self) -> None:
        """Make the operation."""
        self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: tf.compat.v1.Session, coord: object) -> None:
        """Give every instance the root's variables, in the new session."""
        session.run(self._broadcast)


def init_instances(*_: object, **__: object) -> None:
    """Start. May be called again."""
    backends.init()


def end_instances() -> None:
    """End; nothing more is to be done."""


def instance_count() -> int:
    """Number of instances."""
    return core.getNumInstances()


def instance_rank() -> int:
    """This instance among all."""
    return core.getInstanceIndex()


def rank_on_host() -> int:
    """This instance among those of its host."""
    return core.getLocalInstanceIndex()


def host_gradient_optimizer(*_: object, **__: object) -> NoReturn:
    """Refused: gradients are reduced on the IPUs."""
    raise UnsupportedError(
        "horovod.tensorflow.DistributedOptimizer reduces gradients on the host; IPUs reduce them themselves",
        hint="Use ipu.optimizers.CrossReplicaOptimizer around the plain optimizer.",
    )


def no_mpi() -> bool:
    """False: there is no MPI."""
    return False
