"""What a step of a Keras model reports: values of each step and replica, as Keras and its callbacks get them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.capture.markers import reference
from podrun.tensorflow.keras.model_options import ModelOptions, ReplicatedMetricReductionMethod

if TYPE_CHECKING:
    from tf_keras import Model

StepValues = npt.NDArray[np.generic]


class ReportedValues:
    """The queue into which a traced step gives its results. ``watch`` gets the flat values of each step that all
    results have come of, ``[replicas, ...]`` each.
    """

    def __init__(self) -> None:
        self.number = reference(self)
        self.replicated = False
        """Whether values have a dimension of replicas when they arrive."""
        self.count = 0
        self.watch: Callable[[list[StepValues]], object] | None = None
        self._parts: list[list[StepValues]] = []
        self._seen = 0

    def start(self, watch: Callable[[list[StepValues]], object] | None) -> None:
        """Forget the values of the run before."""
        self._parts, self.watch, self._seen = [[] for _ in range(self.count)], watch, 0

    def take(self, place: int, value: StepValues) -> None:
        """StepValues of the result number ``place``, ``[steps, (replicas,) ...]``."""
        self._parts[place].append(value if self.replicated else value[:, None])
        if self.watch is None:
            return
        known = min(sum(len(part) for part in parts) for parts in self._parts)
        if known > self._seen:
            whole = self.values()
            for step in range(self._seen, known):
                self.watch([v[step] for v in whole])
            self._seen = known

    def values(self) -> list[StepValues]:
        """All values, ``[steps, replicas, ...]`` each."""
        return [np.concatenate(parts) if parts else np.zeros((0, 1), np.float32) for parts in self._parts]


def reduced_over_copies(value: StepValues, method: ReplicatedMetricReductionMethod) -> StepValues:
    """The value ``[replicas, ...]`` of a step as a program sees it."""
    if method is ReplicatedMetricReductionMethod.LIST:
        return value
    if method is ReplicatedMetricReductionMethod.SUM:
        return np.asarray(value.sum(0, dtype=value.dtype))
    if method is ReplicatedMetricReductionMethod.MEAN:
        return np.asarray(value.mean(0), value.dtype)
    return np.asarray(value[-1])


def copies_of_step(
    values: Sequence[StepValues], options: ModelOptions, kind: str
) -> Iterator[list[StepValues | float]]:
    """What asynchronous callbacks get of a step: the values of one replica after the other, or once those that all
    replicas have together. ``values``: ``[replicas, ...]`` each.
    """
    method = options.metric_reduction
    if kind != "predict" and method is not ReplicatedMetricReductionMethod.NONE:
        values = [reduced_over_copies(value, method)[None] for value in values]
    for copy in range(len(values[0]) if values else 0):
        flat = [np.asarray(value[copy]) for value in values]
        yield [v.item() if v.ndim == 0 and kind != "predict" else v for v in flat]


def shares_of_sum(
    results: Sequence[tf.Tensor], count: int, options: ModelOptions, *, training: bool
) -> list[tf.Tensor]:
    """What a mini-batch adds to the outfeed of a pipeline that accumulates ``count`` of them: its part of the mean, in
    the type that ``accumulate_outfeed_dtype`` says. A function for types gets tensors named as in the SDK, where the
    loss comes first in training.
    """
    shares = [(r if r.dtype.is_floating else tf.cast(r, tf.float32)) / count for r in results]
    dtype = options.pipeline_arguments.get("accumulate_outfeed_dtype")
    if dtype is None or not shares:
        return shares
    if not callable(dtype) or isinstance(dtype, type):
        return [tf.cast(share, dtype) for share in shares]
    before = shares[:1] if training else []
    named = tf.raw_ops.IdentityN(input=[*before, *shares], name="PipelineStage")
    return [tf.cast(share, dtype(share)) for share in named[len(before) :]]


def reported(values: Sequence[StepValues], options: ModelOptions, summed: int = 0) -> list[StepValues]:
    """What an execution reports: the last step's values, or the sums of the last ``summed`` ones. Zeros if nothing
    came: data are synthetic.
    """

    def whole(value: StepValues) -> StepValues:
        together = value[-summed:].sum(0, dtype=value.dtype) if summed else value[-1]
        return reduced_over_copies(np.asarray(together), options.metric_reduction)

    return [whole(value) if len(value) else np.zeros((), np.float32) for value in values]


class CallbackThread:
    """Calls a model's callbacks for every step while the devices run, in a thread of its own."""

    def __init__(self, call: Callable[[int, list[StepValues]], object]) -> None:
        self._call = call
        self._waiting: SimpleQueue[tuple[int, list[StepValues]] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._steps = 0
        self._thread = threading.Thread(target=self._run, name="podrun-keras-callbacks", daemon=True)
        self._thread.start()

    def __call__(self, values: list[StepValues]) -> None:
        """Report a step."""
        self._waiting.put((self._steps, values))
        self._steps += 1

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._error is None:
                try:
                    self._call(*item)
                except BaseException as error:
                    self._error = error

    def finish(self) -> None:
        """Wait until all callbacks have returned. Raises what one raised."""
        self._waiting.put(None)
        self._thread.join()
        if self._error is not None:
            self._raise(self._error)

    def _raise(self, error: BaseException) -> NoReturn:
        raise error


@dataclass(frozen=True, slots=True)
class BatchCallbacks:
    """The callbacks for batches whose calls by Keras are held back, because they are made for every step. ``first``:
    the first step of the execution; ``begin`` and ``end``: Keras' own methods, with the batch and its values.
    """

    first: int
    begin: Callable[[int], object]
    end: Callable[[int, object], object]

    def __call__(self, step: int, logs: object) -> None:
        """Call them for a step of the execution."""
        self.begin(self.first + step)
        self.end(self.first + step, logs)


_HELD = "_podrun_callbacks"


def hold_back(model: Model, callbacks: BatchCallbacks | None) -> None:
    """Let callbacks wait for the execution of a model that comes next; None: none wait."""
    object.__setattr__(model, _HELD, callbacks)


def held_back(model: Model) -> BatchCallbacks | None:
    """The callbacks that wait for the execution of a model."""
    waiting: BatchCallbacks | None = model.__dict__.get(_HELD)
    return waiting
