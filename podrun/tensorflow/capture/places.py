"""Where operations of a program lie: IPUs of a replica, and stages of a pipeline.

Version-1 pipelines and sharding, and Keras' pipelines, say it in the same way. While a program is traced::

    with at_place(ipu=1, stage=1):
        values = second_stage(values)
    shape_pipeline(graph, shape_of_pipeline(8, [0, 1], training=True))

``graph`` is the `IpuGraph` whose one iteration is one mini-batch: the body of the loop that takes from the infeed, or
the traced step itself. Its iterations run one after the other, with the numbers of a pipeline; what the tile model
reports of the program (time, memory, the schedule) is that of the pipeline (`podrun.tensorflow.execution.modelling`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import tensorflow as tf

from podrun.compiler.program import Locations, PipelineOrder
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Place


class OperationGraph(Protocol):
    """What is used of a graph of TensorFlow."""

    def get_operations(self) -> Sequence[tf.Operation]:
        """The operations, in the order in which they were made."""


@dataclass(frozen=True, slots=True)
class StateStorage:
    """What a program keeps in streaming memory, and what it cuts into a part for each replica: names of fields of
    `Locations`. ``least``: the bytes of the smallest tensors for which that is done.
    """

    offloaded: frozenset[str] = frozenset()
    sharded: frozenset[str] = frozenset()
    least: int = 128

    def locations(self, replicas: int) -> Locations:
        """Where variables are on so many replicas."""
        whole, least = Locations(), max(1, self.least // 4)
        chosen = whole
        for kind in sorted(self.offloaded | self.sharded):
            place = replace(
                getattr(whole, kind),
                off_chip=kind in self.offloaded,
                shards=replicas if kind in self.sharded else 1,
                min_off_chip=least,
                min_sharded=least,
            )
            chosen = replace(chosen, **{kind: place})
        return chosen


KEPT_WHOLE = StateStorage()
"""All on the chip, on each replica."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline: ``micro_batches`` to a weight update, the ``order`` of their work (None: one after the other), the
    IPU of each stage in ``mapping``, whether activations are computed again, and tiles of each IPU that only move data.
    """

    micro_batches: int
    order: PipelineOrder | None
    mapping: tuple[int, ...]
    recomputes: bool = False
    io_tiles: int = 0
    wrong: str = ""
    """Why the pipeline cannot run, which a program is told when it runs."""
    storage: StateStorage = KEPT_WHOLE


@dataclass(frozen=True, slots=True)
class CountOfUpdates:
    """The number of mini-batches of an update where a program has it when it starts: the ``tensor`` in the loop's body,
    and what is called with its value.
    """

    tensor: tf.Tensor
    check: Callable[[int], None]


_PLACES = "ipu_places"
_PIPELINE = "ipu_pipeline"


def places_in(graph: OperationGraph) -> Mapping[str, Place]:
    """Operation -> its place, for those that have one."""
    places: dict[str, Place] = getattr(graph, _PLACES, {})
    return places


@contextlib.contextmanager
def at_place(ipu: int, stage: int | None = None) -> Iterator[None]:
    """Operations that are made inside lie on the IPU number ``ipu`` of the replica, in the pipeline's ``stage``. The
    innermost place holds.
    """
    graph: OperationGraph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    places = dict(places_in(graph))
    for operation in graph.get_operations()[before:]:
        places.setdefault(operation.name, Place(ipu, stage))
    setattr(graph, _PLACES, places)
    take_shards(graph, ipu + 1)


def take_shards(graph: object, count: int) -> None:
    """Let the program of ``graph``, and those around it, have so many IPUs for each replica."""
    program: object = graph
    while program is not None:
        if hasattr(program, "ordinal"):
            program.shards = max(getattr(program, "shards", 1), count)  # type: ignore[attr-defined]
        program = getattr(program, "outer_graph", None)


def shape_pipeline(graph: object, shape: PipelineShape) -> None:
    """Let one iteration of ``graph`` be one mini-batch of a pipeline."""
    setattr(graph, _PIPELINE, shape)
    take_shards(graph, max(shape.mapping) + 1)


def pipeline_of(graph: object) -> PipelineShape | None:
    """The pipeline that a graph is one mini-batch of."""
    shape: PipelineShape | None = getattr(graph, _PIPELINE, None)
    return shape
