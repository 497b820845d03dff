"""Labels of a loss that are no class: PopART computes on, the loss has nothing to pick, and a program trains on
without a word. podrun computes the same and says so once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from podrun.core.executable import TensorSpec
    from podrun.onnx_models.ops.registry import Node

_LOSSES = {"Nll": -1, "SoftmaxCrossEntropyLoss": 1, "NegativeLogLikelihoodLoss": 1}
"""Losses of labels, and the axis of their first input that counts classes."""
_PASSING = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast", "Transpose"}
"""Operators behind which a label is what it was."""


@dataclass(frozen=True, slots=True)
class LabelRange:
    """Labels that an input may have: 0 to ``classes`` - 1, and ``ignored``."""

    classes: int
    ignored: int | None

    def strange(self, labels: np.ndarray) -> int | None:
        """A label that is no class, or None."""
        if labels.dtype.kind not in "iu" or not labels.size:
            return None
        if int(labels.min()) >= 0 and int(labels.max()) < self.classes:
            return None
        wrong = labels[(labels < 0) | (labels >= self.classes)]
        wrong = wrong if self.ignored is None else wrong[wrong != self.ignored]
        return int(wrong.reshape(-1)[0]) if wrong.size else None


def label_ranges(
    nodes: Iterable[Node], tensors: Mapping[str, TensorSpec | Any], inputs: Iterable[str]
) -> dict[str, LabelRange]:
    """The inputs of a graph that are labels of a loss, and what they may be."""
    known, found = set(inputs), {}
    makers: dict[str, Node] = {}
    for node in nodes:
        makers |= dict.fromkeys(node.outputs, node)
        if node.op_type not in _LOSSES or len(node.inputs) < 2:
            continue
        name = node.inputs[1]
        while name in makers and makers[name].op_type in _PASSING:
            name = makers[name].inputs[0]
        spec = tensors.get(node.inputs[0])
        axis = _LOSSES[node.op_type]
        if name in known and spec is not None and len(spec.shape) > max(axis, 0):
            ignored = node.get("ignoreIndex", node.get("ignore_index"))
            found[name] = LabelRange(int(spec.shape[axis]), None if ignored is None else int(ignored))
    return found


def warn_of_strange_labels(ranges: dict[str, LabelRange], data: Mapping[str, np.ndarray]) -> None:
    """Warn of labels that are no class, once for each input: it is taken out of ``ranges`` then."""
    for name, allowed in list(ranges.items()):
        label = allowed.strange(data[name]) if name in data else None
        if label is not None:
            del ranges[name]
            warnings.warn(
                f"Input {name!r} has the label {label}, but there are {allowed.classes} classes (0 to "
                f"{allowed.classes - 1}): such a sample has a loss without a gradient, as in PopART. "
                "ignoreIndex leaves samples out on purpose.",
                stacklevel=5,  # The program's call of run.
            )
