"""Stages of a Keras pipeline as programs write them: the scope `PipelineStage`, and assignments of calls to stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from podrun.tensorflow.capture.places import at_place
from podrun.tensorflow.capture.program_graphs import in_program
from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

if TYPE_CHECKING:
    from tf_keras import Model
    from tf_keras.layers import Layer

MAPPINGS: list[Sequence[int] | None] = []
"""For each pipelined model that is being traced, the IPU of each stage; None: stage n is on IPU n."""
SEEN: list[set[int]] = []
"""For each model that is being traced, the stages at which layers were called."""
_scopes: list[int] = []


def current_stage() -> int | None:
    """The stage of the scope in which the program is."""
    return _scopes[-1] if _scopes else None


@contextlib.contextmanager
def no_stage() -> Iterator[None]:
    """Code inside is in none of the scopes around it, and may open its own."""
    around = _scopes[:]
    _scopes.clear()
    try:
        yield
    finally:
        _scopes[:] = around


def at_stage(stage: int) -> contextlib.AbstractContextManager[None]:
    """Operations of the model that is being traced lie in ``stage``, on its IPU."""
    if not MAPPINGS:
        return contextlib.nullcontext()
    SEEN[-1].add(stage)
    mapping = MAPPINGS[-1]
    return at_place(stage if mapping is None or stage >= len(mapping) else mapping[stage], stage)


class PipelineStage:
    """Layers that are made, or called, inside belong to a stage of the model's pipeline. A call's stage goes before
    that of the layer. ValueError for a stage that is no natural number, RuntimeError outside of an IPU strategy's
    scope or inside another stage.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._place: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> PipelineStage:
        if not isinstance(self._stage, int) or isinstance(self._stage, bool) or self._stage < 0:
            raise ValueError(f"{self._stage} is not a valid pipeline stage.")
        if not isinstance(tf.distribute.get_strategy(), IPUStrategyV1):
            raise RuntimeError("PipelineStage may only be used from within an IPUStrategy context.")
        if _scopes:
            raise RuntimeError("Pipeline stages must not be nested.")
        _scopes.append(self._stage)
        if in_program():
            self._place = at_stage(self._stage)
            self._place.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        _scopes.pop()
        if self._place is not None:
            place, self._place = self._place, None
            place.__exit__(None, None, None)


class StageAssignment:
    """What an entry of a model's stage assignment has: the layer, and one call of it or None where it has one call."""

    def __init__(self, layer: Layer, node_index: int | None) -> None:
        self._layer, self._node_index = layer, node_index

    is_nested_model = False
    """Whether a model is called, whose layers have entries of their own."""

    @property
    def called(self) -> Layer:
        """The layer or model that is called."""
        return self._layer


class _LayerAssignment(StageAssignment):
    """A call of a layer at ``pipeline_stage``; None: not assigned yet."""

    def __init__(self, layer: Layer, node_index: int | None, pipeline_stage: int | None) -> None:
        super().__init__(layer, node_index)
        self.pipeline_stage = pipeline_stage

    @property
    def layer(self) -> Layer:
        """The layer that is called."""
        return self._layer


class _NestedAssignment(StageAssignment):
    """A call of a model inside a model, with the assignment of its layers for this call."""

    is_nested_model = True

    def __init__(
        self, model: Model, node_index: int | None, pipeline_stage_assignments: Sequence[StageAssignment]
    ) -> None:
        super().__init__(model, node_index)
        self._assignments = list(pipeline_stage_assignments)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "pipeline_stage":
            raise AttributeError(
                f"{self._layer.name} is a model with an entry for each of its layers, and has no stage of its own: set "
                "`pipeline_stage` of the entries in `pipeline_stage_assignments`."
            )
        super().__setattr__(name, value)

    @property
    def nested_model(self) -> Model:
        """The model inside."""
        return self._layer

    @property
    def pipeline_stage_assignments(self) -> list[StageAssignment]:
        """The assignment of the layers of the model inside, for this call."""
        return list(self._assignments)

    def _text(self, call: str) -> str:
        lines = "".join(f"\n  {a}" for a in self._assignments)
        return f"Model: {self._layer.name}{call} has the following pipeline stage assignments:{lines}"

    def __str__(self) -> str:
        return self._text("")


class _Call(StageAssignment):
    """One call among several of a layer."""

    @property
    def node_index(self) -> int | None:
        """Which call of the layer."""
        return self._node_index

    @property
    def inbound_layers(self) -> list[Layer]:
        """The layers whose results the call takes."""
        return [node.layer for node in self._layer._inbound_nodes[self._node_index].parent_nodes]


class ModelLayerPipelineStageAssignment(_LayerAssignment, _Call):
    """The stage of one call of a layer in a subclass of ``Model``."""

    def __init__(self, layer: Layer, node_index: int, pipeline_stage: int | None = None) -> None:
        super().__init__(layer, node_index, pipeline_stage)

    def __str__(self) -> str:
        return (
            f"Layer: {self._layer.name} (node index {self._node_index}) is assigned to pipeline stage: "
            f"{self.pipeline_stage}"
        )


class FunctionalLayerPipelineStageAssignment(ModelLayerPipelineStageAssignment):
    """The stage of one call of a layer in a functional model."""


class SequentialLayerPipelineStageAssignment(_LayerAssignment):
    """The stage of a layer in a sequential model."""

    def __init__(self, layer: Layer, pipeline_stage: int | None = None) -> None:
        super().__init__(layer, None, pipeline_stage)

    def __str__(self) -> str:
        return f"Layer: {self._layer.name} is assigned to pipeline stage: {self.pipeline_stage}"


class NestedModelPipelineStageAssignment(_NestedAssignment, _Call):
    """The stages of one call of a model inside a subclass of ``Model``."""

    def __init__(
        self, nested_model: Model, node_index: int, pipeline_stage_assignments: Sequence[StageAssignment]
    ) -> None:
        super().__init__(nested_model, node_index, pipeline_stage_assignments)

    def __str__(self) -> str:
        return self._text(f" (node index {self._node_index})")


class FunctionalNestedModelPipelineStageAssignment(NestedModelPipelineStageAssignment):
    """The stages of one call of a model inside a functional model."""


class SequentialNestedModelPipelineStageAssignment(_NestedAssignment):
    """The stages of a model inside a sequential model."""

    def __init__(self, nested_model: Model, pipeline_stage_assignments: Sequence[StageAssignment]) -> None:
        super().__init__(nested_model, None, pipeline_stage_assignments)
