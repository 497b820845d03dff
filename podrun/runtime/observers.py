"""Operators with an effect on the host: PrintTensor prints values, Abort ends the run.

The machines fold replicas and micro-batches, so nothing prints while they compute. Instead the tensors are anchored
behind the scenes, and when a step is done its values are printed to standard error in the order in which an IPU would
have: batch by batch, micro-batch by micro-batch, the forward pass in the graph's order, gradients the other way round.
An Abort whose condition was true then raises, and the step gives no anchors.

The layout of a printed tensor is Poplar's ``PrintTensor``: a title, then values in brackets, cut in the middle beyond
``summariseThreshold`` elements to ``edgeItems`` at each end, ``digits`` digits (before and behind the point together),
lines of ``maxLineWidth`` characters. Gradients are titled ``<title>_gradient``, or by their own name where the operator
has no title (source: graphcore/popart, tests/integration/print_tensor_test.py).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from podrun.core.errors import ApplicationRuntimeError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Node
from podrun.runtime.tensor_names import gradient

DOMAIN = "ai.graphcore"
_FLOATS = {0: "g", 1: "f", 2: "e"}
"""floatFormat: automatic, fixed, scientific (PrintTensorFmt.FloatFormat; 3 is none)."""


@dataclass(frozen=True, slots=True)
class PrintLayout:
    """How a tensor is printed: the attributes of PrintTensor."""

    summariseThreshold: int = 1000
    edgeItems: int = 3
    maxLineWidth: int = 75
    digits: int = 8
    floatFormat: int = 0
    separator: str = " "
    openBracket: str = "["
    closeBracket: str = "]"

    def text(self, title: str, value: np.ndarray) -> str:
        """``title: [...]``, over several lines where the value has several axes or does not fit one."""
        style = _FLOATS.get(self.floatFormat, "g")
        wide = value.astype(np.float64) if value.dtype.kind not in "biu" else value
        formatter: dict[str, Any] = {}
        if style != "g" and wide.dtype.kind == "f":
            formatter["float_kind"] = lambda number: f"{number:.{self.digits}{style}}"
        body = np.array2string(
            wide,
            max_line_width=self.maxLineWidth,
            precision=self._decimals(wide) if style == "g" else self.digits,
            separator=self.separator,
            threshold=self.summariseThreshold,
            edgeitems=self.edgeItems,
            floatmode="fixed",
            formatter=formatter or None,  # type: ignore[arg-type]
        )
        swapped = str.maketrans({"[": self.openBracket, "]": self.closeBracket})
        return f"{title}: {body.translate(swapped)}"

    def _decimals(self, value: np.ndarray) -> int:
        """Decimals that leave ``digits`` digits in all for the greatest value: 1.0000000, 10.000000."""
        finite = np.abs(value[np.isfinite(value)]) if value.dtype.kind == "f" else np.zeros(0)
        whole = len(str(int(finite.max()))) if finite.size else 1
        return max(self.digits - whole, 0)


@dataclass(frozen=True, slots=True)
class Print:
    """A tensor that is printed for each micro-batch."""

    tensor: str
    title: str
    layout: PrintLayout
    gradient: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends the run if ``tensor`` has an element other than 0 (None: always)."""

    tensor: str | None
    node: str


Observer = Print | Abort


def observers_of(nodes: Iterable[Node]) -> tuple[Observer, ...]:
    """The PrintTensor and Abort operators of the main graph, in its order."""
    observers: list[Observer] = []
    for node in nodes:
        if node.domain != DOMAIN:
            continue
        if node.op_type == "Abort":
            observers.append(Abort(node.inputs[0] if node.inputs else None, node.name or "Abort"))
        if node.op_type == "PrintTensor":
            attributes = node.attributes
            wanted = {
                name: attributes[name] for name in PrintLayout.__dataclass_fields__ if name in attributes
            }
            layout = PrintLayout(**wanted)
            title = attributes.get("title", "")
            observers.append(Print(node.outputs[0], title or node.inputs[0], layout))
            if attributes.get("print_gradient", 1):
                behind = f"{title}_gradient" if title else gradient(node.inputs[0])
                observers.append(Print(gradient(node.outputs[0]), behind, layout, gradient=True))
    return tuple(observers)


def seen(observers: Sequence[Observer], gradients: Collection[str]) -> tuple[Observer, ...]:
    """Drop observers of gradients that do not exist."""
    return tuple(
        item
        for item in observers
        if not (isinstance(item, Print) and item.gradient) or item.tensor in gradients
    )


def tensors(observers: Sequence[Observer]) -> list[str]:
    """The observed tensors themselves, without the observed gradients, that must be computed."""
    return [
        item.tensor for item in observers if item.tensor and not (isinstance(item, Print) and item.gradient)
    ]


def observe(
    observers: Sequence[Observer], values: Mapping[str, np.ndarray], first_replica: int, many: bool
) -> None:
    """Print the values of a step; ApplicationRuntimeError if an Abort's condition was true.

    ``values``: ``[batches, micro-batches, replicas, *shape]`` for each tensor. ``many``: name the replica.
    """
    lines = []
    forward = [item for item in observers if not (isinstance(item, Print) and item.gradient)]
    backward = [item for item in observers if isinstance(item, Print) and item.gradient]
    order = [*forward, *reversed(backward)]
    stop: ApplicationRuntimeError | None = None
    for place in _places(values):
        for item in order:
            batch, micro_batch, replica = place
            if isinstance(item, Abort):
                if stop is None and (item.tensor is None or np.any(values[item.tensor][place] != 0)):
                    stop = ApplicationRuntimeError(
                        f"Abort Program: {item.node!r} in batch {batch}, micro-batch {micro_batch}, replica "
                        f"{first_replica + replica}.",
                    )
            elif stop is None:
                title = f"{item.title} (replica {first_replica + replica})" if many else item.title
                lines.append(item.layout.text(title, values[item.tensor][place]))
    if lines:
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
    if stop is not None:
        raise stop


def _places(values: Mapping[str, np.ndarray]) -> Iterator[tuple[int, int, int]]:
    shape = next((value.shape[:3] for value in values.values()), (1, 1, 1))
    batches, micro_batches, replicas = (range(length) for length in shape)
    yield from itertools.product(batches, micro_batches, replicas)
