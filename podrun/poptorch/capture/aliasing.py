"""Views and writes in place as values.

A storage has one current value. A view is a storage and a chain of view operators; reading it applies the chain to
the storage's current value. A write through a view puts the new elements back, one node for each view of the chain,
and the storage has a new value from then on. So ``x[0] += 1`` becomes four functional nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podrun.poptorch.capture.graph import Argument, GraphValue


@dataclass(frozen=True, slots=True, eq=False)
class ViewStep:
    """One view operator on what the chain before it gives. Steps are compared by identity."""

    operator: str
    arguments: tuple[Argument, ...]
    keywords: Mapping[str, Argument]
    shape: tuple[int, ...]
    dtype: str
    item: int | None = None


@dataclass(slots=True, eq=False)
class StorageState:
    """What a storage holds now. ``name``: of the parameter, buffer or argument it belongs to, if any."""

    root: Any
    value: GraphValue
    name: Any = None
    version: int = 0
    reads: dict[tuple[int, ...], GraphValue] = field(default_factory=dict)
    """Values of views at the current version, by the identities of their steps."""

    def replace(self, value: GraphValue) -> None:
        """Give the storage another value."""
        self.value, self.version = value, self.version + 1
        self.reads.clear()


@dataclass(frozen=True, slots=True)
class TensorView:
    """What a tensor of the traced program stands for."""

    storage: StorageState
    steps: tuple[ViewStep, ...] = ()


class Emitter(ABC):
    """What reads and writes need from a recorder: new numbers and a place to put nodes."""

    @abstractmethod
    def new_value(self, shape: tuple[int, ...], dtype: str) -> GraphValue:
        """A value that no node has given yet."""

    @abstractmethod
    def emit_view(self, step: ViewStep, base: GraphValue, result: GraphValue) -> None:
        """Add the node ``result = view(base)``."""

    @abstractmethod
    def emit_write(self, step: ViewStep, base: GraphValue, part: GraphValue, result: GraphValue) -> None:
        """Add the node ``result = base with part where the view lies``."""


def read(view: TensorView, emitter: Emitter, depth: int | None = None) -> GraphValue:
    """The current value of the first ``depth`` steps of a view (default: all)."""
    steps = view.steps if depth is None else view.steps[:depth]
    value = view.storage.value
    for count, step in enumerate(steps, 1):
        key = tuple(id(each) for each in steps[:count])
        known = view.storage.reads.get(key)
        if known is None:
            known = emitter.new_value(step.shape, step.dtype)
            emitter.emit_view(step, value, known)
            view.storage.reads[key] = known
        value = known
    return value


def write(view: TensorView, value: GraphValue, emitter: Emitter) -> None:
    """Replace what the view shows by ``value``."""
    bases = [read(view, emitter, depth) for depth in range(len(view.steps))]
    for step, base in zip(reversed(view.steps), reversed(bases), strict=True):
        whole = emitter.new_value(base.shape, base.dtype)
        emitter.emit_write(step, base, value, whole)
        value = whole
    view.storage.replace(value)
