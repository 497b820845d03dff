"""The SDK's methods with which programs read, set, reset and print the stages of a Keras model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import tf_keras

from podrun.tensorflow.keras.accumulating_optimizers import on_ipu
from podrun.tensorflow.keras.model_options import options_of
from podrun.tensorflow.keras.stage_assignment import (
    assignment_of,
    calls_of,
    checked_assignment,
    has_scopes,
    is_built_subclass,
    is_functional,
    is_sequential,
    node_index,
)
from podrun.tensorflow.keras.stage_classes import StageAssignment
from podrun.tensorflow.keras.stage_tracing import pipeline_assignment

if TYPE_CHECKING:
    from tf_keras import Model

_WIDTH = 89
_SEQUENTIAL = (("Layer (type)", 0.5), ("Pipeline Stage", 1.0))
_GRAPH = (("Layer (type) (node index)", 0.4), ("Input Layers", 0.8), ("Pipeline Stage", 1.0))


class StageExtension:
    """The methods for stages, which Keras' model class gets."""

    def get_pipeline_stage_assignment(self) -> list[StageAssignment]:
        """The entries of the calls of the model's layers, in order. RuntimeError for a subclass that is not built."""
        return assignment_of(self)

    def set_pipeline_stage_assignment(self, pipeline_stage_assignment: list[StageAssignment]) -> None:
        """Set the entries; for a sequential model also a list of stages. ValueError if they break a rule of stages."""
        entries = checked_assignment(self, pipeline_stage_assignment)
        options = options_of(self)
        options.assignment, options.assignment_reset = entries, False
        options.version += 1

    def reset_pipeline_stage_assignment(self) -> None:
        """Let the model be no pipeline any more."""
        options = options_of(self)
        options.assignment, options.assignment_reset = None, True
        options.version += 1

    def print_pipeline_stage_assignment_summary(
        self, line_length: int | None = None, print_fn: Callable[[str], object] | None = None
    ) -> None:
        """Print a table of the layers and their stages. ``print_fn`` gets it line by line."""
        for line in summary_lines(self, line_length or _WIDTH):
            (print_fn or print)(line)

    @property
    def _pipeline_stage_assignment_valid(self) -> bool:
        return pipeline_assignment(self) is not None

    def _is_pipelined(self) -> bool:
        return pipeline_assignment(self) is not None or (is_built_subclass(self) and has_scopes(self))


class _Extended(type):
    """Classes for ``isinstance`` alone. A model made under an IPU strategy is an instance if `is_sort_of` says so."""

    is_sort_of: Callable[[Model], bool]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, tf_keras.Model) and on_ipu(instance) and cls.is_sort_of(instance)


class SequentialExtension(metaclass=_Extended):
    """``isinstance(model, SequentialExtension)``: a sequential model on IPUs."""

    @staticmethod
    def is_sort_of(model: Model) -> bool:
        """Whether a model is sequential."""
        return is_sequential(model)


class FunctionalExtension(metaclass=_Extended):
    """``isinstance(model, FunctionalExtension)``: a model on IPUs that is a graph of layers, but not sequential."""

    @staticmethod
    def is_sort_of(model: Model) -> bool:
        """Whether a model is a graph of layers."""
        return is_functional(model)


class SubclassExtension(metaclass=_Extended):
    """``isinstance(model, SubclassExtension)``: a model on IPUs whose class has a ``call`` of its own."""

    @staticmethod
    def is_sort_of(model: Model) -> bool:
        """Whether a model is neither sequential nor a graph of layers."""
        return not is_functional(model) and not is_sequential(model)


def summary_lines(model: Model, width: int) -> Iterator[str]:
    """The table of a model's stages, and of the models inside it."""
    columns = _SEQUENTIAL if is_sequential(model) else _GRAPH
    ends = [int(width * part) for _, part in columns]
    yield f'Model: "{model.name}"'
    yield "_" * width
    yield _row([title for title, _ in columns], ends)
    yield "=" * width
    inside: list[tuple[Model, list[StageAssignment]]] = []
    rows = list(_rows(model, assignment_of(model), inside))
    for place, lines in enumerate(rows):
        yield from (_row(line, ends) for line in lines)
        yield ("=" if place == len(rows) - 1 else "_") * width
    for nested, assignment in inside:
        yield from _nested_lines(nested, assignment, width)


def _nested_lines(model: Model, assignment: list[StageAssignment], width: int) -> Iterator[str]:
    options = options_of(model)
    before, options.assignment = options.assignment, assignment
    try:
        yield from summary_lines(model, width)
    finally:
        options.assignment = before


def _rows(
    model: Model,
    assignment: Sequence[StageAssignment],
    inside: list[tuple[Model, list[StageAssignment]]],
) -> Iterator[list[list[str]]]:
    """The lines of each entry. ``inside`` gets the models inside with their entries."""
    nodes = [None] * len(assignment) if is_sequential(model) else calls_of(model)
    for node, entry in zip(nodes, assignment, strict=True):
        layer = entry.called
        label = f"{layer.name} ({type(layer).__name__})"
        stage = str(getattr(entry, "pipeline_stage", ""))
        if hasattr(entry, "pipeline_stage_assignments"):
            inside.append((layer, entry.pipeline_stage_assignments))
        if node is None:
            yield [[label, stage]]
            continue
        sources = [parent.layer.name for parent in node.parent_nodes] or [""]
        first = [f"{label} ({node_index(node)})", sources[0], stage]
        yield [first, *(["", source, ""] for source in sources[1:])]


def _row(fields: Sequence[str], ends: Sequence[int]) -> str:
    line = ""
    for text, end in zip(fields, ends, strict=True):
        line = (line + text)[: end - 1].ljust(end)
    return line
