"""LSTM, GRU and RNN as the library computes them: everything a step at a time, nothing for all steps at once.

The trace projects the inputs of all steps in one product and keeps what the derivative of each equation
reads. The library (popnn, with its default ``preCalcWeights=false``) joins input and state, multiplies
``[batch, input + hidden]`` by all gates' weights in every step, and keeps a fixed list of values for the
backward pass. That pass is a loop of the transposed weights' product, and a second one that adds each
step's weight gradient to an accumulator. So temporary data are those of one step, not of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.equations import Equation, FlatJaxpr, FlatTensor
from podrun.costmodel.operator_runs import OperatorRun, TracedOperator, Unexpected

Sets = tuple[tuple[str, int], ...]
"""Element-wise compute sets of a step, one after the other: a primitive, and of how many times
``[batch, hidden]`` values."""


@dataclass(frozen=True, slots=True)
class RecurrentCell:
    """``gates`` of a cell; how many times ``[batch, hidden]`` values a step ``keeps`` for the backward pass
    beside its output; its compute sets ``forward`` and ``backward``.
    """

    gates: int
    keeps: int
    forward: Sets
    backward: Sets


_ONE_MUL, _ONE_ADD = ("mul", 1), ("add", 1)
CELLS = {
    "LSTM": RecurrentCell(
        4,
        6,
        (("logistic", 3), ("tanh", 1), _ONE_MUL, _ONE_MUL, _ONE_ADD, ("tanh", 1), _ONE_MUL),
        (*(_ONE_MUL,) * 2, ("nonlinear_grad", 1), _ONE_ADD, ("mul", 3), ("nonlinear_grad", 4), _ONE_ADD),
    ),
    "GRU": RecurrentCell(
        3,
        3,
        (("logistic", 2), _ONE_MUL, ("tanh", 1), ("sub", 1), _ONE_MUL, _ONE_ADD),
        (*(_ONE_MUL,) * 3, ("nonlinear_grad", 3), _ONE_MUL, *(_ONE_ADD,) * 2),
    ),
    "RNN": RecurrentCell(1, 0, (("tanh", 1),), (_ONE_ADD, ("nonlinear_grad", 1))),
}
"""Cells by ONNX type. An LSTM keeps three gates, the candidate, tanh of the new cell state and the old cell state."""


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """Sizes of one direction. ``dtype``: of the values."""

    steps: int
    batch: int
    inputs: int
    hidden: int
    dtype: str
    cell: RecurrentCell

    @property
    def width(self) -> int:
        """Input and state side by side."""
        return self.inputs + self.hidden

    @property
    def gates(self) -> int:
        """Number of outputs of a step's product."""
        return self.cell.gates * self.hidden


@dataclass(slots=True)
class LoopBody:
    """Writes one turn of a loop. Values are numbered on their own, as in any loop's body."""

    flat: FlatJaxpr = field(default_factory=FlatJaxpr)

    def value(self, shape: Sequence[int], dtype: str) -> int:
        """Add a value of a shape and type; returns its number."""
        number = len(self.flat.tensors)
        self.flat.tensors[number] = FlatTensor(tuple(shape), dtype)
        return number

    def emit(
        self,
        primitive: str,
        inputs: Sequence[int],
        shape: Sequence[int],
        params: Mapping[str, Any] | None = None,
        scope: str = "",
    ) -> int:
        """Add an equation; its result."""
        tensors = self.flat.tensors
        operands = tuple(tensors[n] for n in inputs)
        output = self.value(shape, operands[0].dtype)
        self.flat.equations.append(
            Equation(primitive, params or {}, tuple(inputs), (output,), operands, (tensors[output],), scope)
        )
        return output

    def compute_sets(self, sets: Sets, shape: Sequence[int], dtype: str) -> None:
        """Element-wise operations, each a compute set of its own: separate scopes keep them from being fused."""
        for position, (primitive, times) in enumerate(sets):
            wide = (times, *shape)
            operands = [self.value(wide, dtype) for _ in range(1 if primitive in ("logistic", "tanh") else 2)]
            self.flat.results.append(self.emit(primitive, operands, wide, scope=str(position)))


def recurrent(op: TracedOperator) -> None:
    """The template of recurrent operators. Both directions of a bidirectional one run one after the other."""
    scans = [e for e in op.equations[op.forward.first : op.forward.end] if e.primitive == "scan"]
    states = [t.shape for e in scans for t in e.results if len(t.shape) == 2]
    if not states:
        raise Unexpected
    steps, (batch, hidden) = int(scans[0].params["length"]), states[0]
    cell = CELLS[op.place.kind]
    sequences = [n for n in op.forward.reads if op.shape(n)[:2] in ((steps, batch), (batch, steps))]
    if not sequences:
        raise Unexpected
    x = max(sequences, key=op.size)
    sizes = RecurrentSizes(steps, batch, op.size(x) // (steps * batch), hidden, op.tensors[x].dtype, cell)
    weights = [n for n in op.forward.reads if n != x and op.size(n) >= cell.gates * hidden**2]
    if not weights:
        raise Unexpected
    kept = _forward(op, sizes, len(scans), [x, *weights])
    if op.backward is not None:
        _backward(op, op.backward, sizes, len(scans), x, weights, kept)


def _loop(
    op: TracedOperator,
    run: OperatorRun,
    steps: int,
    body: LoopBody,
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> None:
    tensors = op.tensors
    run.library_form.append(
        Equation(
            "scan",
            {"length": steps},
            tuple(inputs),
            tuple(outputs),
            tuple(tensors[n] for n in inputs),
            tuple(tensors[n] for n in outputs),
            run.scope,
            (body.flat,),
        )
    )


def _product(m: int, k: int, n: int, **more: bool) -> dict[str, bool | int]:
    """A step's product, the longer side as rows where it stays on its tiles."""
    return {"groups": 1, "m": m, "k": k, "n": n, "rows_resident": True, **more}


def _forward(op: TracedOperator, sizes: RecurrentSizes, directions: int, inputs: Sequence[int]) -> int:
    """The forward loops; what they keep for the backward pass (or a value of no size)."""
    keeps = sizes.cell.keeps if op.backward is not None else 0
    write = op.writer(op.forward)
    kept = write.new((sizes.steps, sizes.batch, directions * keeps * sizes.hidden), sizes.dtype)
    state = (sizes.batch, sizes.hidden)
    for direction in range(directions):
        body = LoopBody()
        sliced = body.value((sizes.batch, sizes.width), sizes.dtype)
        joined = body.emit("copy", [sliced], (sizes.batch, sizes.width))
        weights = body.value((sizes.gates, sizes.width), sizes.dtype)
        params = _product(sizes.gates, sizes.width, sizes.batch)
        gates = body.emit("product", [weights, joined], (sizes.batch, sizes.gates), params)
        body.flat.results.append(gates)
        body.compute_sets(sizes.cell.forward, state, sizes.dtype)
        result = body.value((sizes.batch, (1 + keeps) * sizes.hidden), sizes.dtype)
        body.flat.results.append(body.emit("copy", [result], (sizes.batch, (1 + keeps) * sizes.hidden)))
        last = direction == directions - 1
        _loop(op, op.forward, sizes.steps, body, inputs, [*op.forward.written, kept] if last else [])
    return kept


def _backward(
    op: TracedOperator,
    run: OperatorRun,
    sizes: RecurrentSizes,
    directions: int,
    x: int,
    weights: Sequence[int],
    kept: int,
) -> None:
    """The loop of gradients and that of weight gradients, for each direction."""
    write = op.writer(run)
    wanted_x = next((n for n in run.written if op.shape(n) == op.shape(x)), None)
    shapes = [op.shape(n) for n in weights]
    wanted_weights = [n for n in run.written if n != wanted_x and op.shape(n) in shapes]
    rest = [n for n in run.written if n != wanted_x and n not in wanted_weights]
    if any(op.size(n) > directions * max(2 * sizes.gates, sizes.batch * sizes.hidden) for n in rest):
        raise Unexpected
    gates = write.new((sizes.steps, sizes.batch, directions * sizes.gates), sizes.dtype)
    turned = write.emit("transpose", weights[:1], shape=(sizes.gates, sizes.width))
    state = (sizes.batch, sizes.hidden)
    for direction in range(directions):
        body, last = LoopBody(), direction == directions - 1
        body.compute_sets(sizes.cell.backward, state, sizes.dtype)
        gate = body.value((sizes.batch, sizes.gates), sizes.dtype)
        params = _product(sizes.width, sizes.gates, sizes.batch)
        body.flat.results.append(body.emit("product", [gate, gate], (sizes.batch, sizes.width), params))
        outputs = [gates, *([wanted_x] if wanted_x is not None else [])] if last else []
        _loop(op, run, sizes.steps, body, [*op.arriving(), kept, turned], outputs)
        if wanted_weights:
            body = LoopBody()
            joined = body.value((sizes.batch, sizes.width), sizes.dtype)
            total = body.value((sizes.gates, sizes.width), sizes.dtype)
            params = _product(max(sizes.gates, sizes.width), sizes.batch, min(sizes.gates, sizes.width))
            product = body.emit(
                "product", [joined, total], (sizes.gates, sizes.width), params | {"transposed": True}
            )
            body.flat.results.append(body.emit("add_any", [product, total], (sizes.gates, sizes.width)))
            _loop(op, run, sizes.steps, body, [x, kept, gates], wanted_weights if last else [])
    for number in rest:
        rows = sizes.steps * sizes.batch
        write.emit(
            "reduce_sum", [gates], number, params={"axes": (0,)}, seen_as=(rows, directions * sizes.gates)
        )
