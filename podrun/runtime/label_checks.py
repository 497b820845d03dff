"""Labels that are no class and indices that are out of range: warned of when a run's data hold them."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Node

if TYPE_CHECKING:
    from podrun.core.executable import TensorSpec

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LOSSES = {"Nll": -1, "SoftmaxCrossEntropyLoss": 1, "NegativeLogLikelihoodLoss": 1}
"""Losses that have labels, and the axis of their first input that counts classes."""
_LOOKUPS = {"Gather": 1, "GroupedGather": 1, "GatherElements": 1, "Scatter": 1, "ScatterElements": 1,
            "ScatterReduce": 1, "OneHot": 0}  # fmt: skip
"""Operators with indices along their attribute ``axis``, and the input that holds the indices."""
_NO_GRADIENT = (
    "such a sample has a loss without a gradient, as in PopART. ignoreIndex leaves samples out on purpose"
)
_REFUSED = "PyTorch on a CPU refuses it, and what is computed here has no meaning"
_EFFECTS = {
    "Gather": "podrun reads the nearest row, and what an IPU reads is not defined",
    "Scatter": "podrun leaves the update out, and where an IPU writes it is not defined",
    "OneHot": "its row has the off value everywhere",
}
"""The effect of an index that is out of range, by a part of the operator's name."""
_LABEL_PRESERVING = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast", "Transpose", "Expand"}
"""Operators that pass labels and indices on unchanged."""


@dataclass(frozen=True, slots=True)
class LabelRange:
    """Integers that an input may have: ``lowest`` to ``classes`` - 1, and ``ignored``.

    ``effect``: what another integer does. ``reader``: the operator that takes them as indices; empty for labels.
    """

    classes: int
    ignored: int | None
    lowest: int = 0
    reader: str = ""
    effect: str = _NO_GRADIENT

    def strange(self, labels: np.ndarray) -> int | None:
        """A label that is not a class, or None."""
        if labels.dtype.kind not in "iu" or not labels.size:
            return None
        if int(labels.min()) >= self.lowest and int(labels.max()) < self.classes:
            return None
        wrong = labels[(labels < self.lowest) | (labels >= self.classes)]
        wrong = wrong if self.ignored is None else wrong[wrong != self.ignored]
        return int(wrong.reshape(-1)[0]) if wrong.size else None

    def warning(self, name: str, label: int) -> str:
        """The warning of a label of an input that is not a class."""
        is_index = f"the index {label}, but {self.reader} has {self.classes} places"
        problem = is_index if self.reader else f"the label {label}, but there are {self.classes} classes"
        return f"Input {name!r} has {problem} (0 to {self.classes - 1}): {self.effect}."


def label_ranges(
    nodes: Iterable[Node], tensors: Mapping[str, TensorSpec | Any], inputs: Iterable[str]
) -> dict[str, LabelRange]:
    """The inputs of a graph that are labels of a loss or indices, and the integers that each may have: those of the
    narrowest range, if several operators read an input.
    """
    known = set(inputs)
    ranges: dict[str, LabelRange] = {}
    makers: dict[str, Node] = {}
    for node in nodes:
        makers |= dict.fromkeys(node.outputs, node)
        source = (
            1 if node.hints.indices is not None or node.op_type in _LOSSES else _LOOKUPS.get(node.op_type)
        )
        if source is None or len(node.inputs) <= source:
            continue
        name = node.inputs[source]
        while name in makers and makers[name].kind in _LABEL_PRESERVING:
            name = makers[name].inputs[0]
        allowed = _range_of(node, tensors) if name in known else None
        if allowed is not None and (name not in ranges or allowed.classes < ranges[name].classes):
            ranges[name] = allowed
    return ranges


def _range_of(node: Node, tensors: Mapping[str, TensorSpec | Any]) -> LabelRange | None:
    """The labels or indices that an operator may read, or None if that is not known."""
    if node.hints.indices is not None:
        classes, *ignored = node.hints.indices
        reader = "" if ignored else node.op_type.split(".")[1]
        return LabelRange(classes, ignored[0] if ignored else None, 0, reader, _REFUSED)
    loss = node.op_type in _LOSSES
    spec = tensors.get(node.outputs[0] if node.op_type == "OneHot" else node.inputs[0])
    if spec is None:
        return None
    axis = _LOSSES[node.op_type] if loss else node.get("axis", -1 if node.op_type == "OneHot" else 0)
    if not -len(spec.shape) <= axis < len(spec.shape):
        return None
    classes = int(node.get("axis_size", spec.shape[axis]))
    if not loss:
        effect = next(said for part, said in _EFFECTS.items() if part in node.op_type)
        return LabelRange(classes, None, -classes, node.op_type, effect)
    ignored = node.get("ignoreIndex", node.get("ignore_index"))
    return LabelRange(classes, None if ignored is None else int(ignored))


def warn_of_strange_labels(ranges: dict[str, LabelRange], data: Mapping[str, np.ndarray]) -> None:
    """Warn of labels and indices that are out of range, once for each input, which is then removed from ``ranges``."""
    for name, allowed in list(ranges.items()):
        label = allowed.strange(data[name]) if name in data else None
        if label is not None:
            del ranges[name]
            warnings.warn(allowed.warning(name, label), stacklevel=_levels_to_program())


def _levels_to_program() -> int:
    """The ``stacklevel`` at which the caller's warning shows the program's line: the first outside podrun."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, levels = frame.f_back, levels + 1
    return levels
