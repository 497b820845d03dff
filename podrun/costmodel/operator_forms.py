"""The library's form of each operator: one template an ONNX type (see `flatten`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from podrun.costmodel.operator_runs import RunWriter, Template, TracedOperator, Unexpected
from podrun.costmodel.recurrent_forms import CELLS, recurrent


def _convolution(op: TracedOperator) -> None:
    """Forward, data gradient and weight gradient, each one product of the library's planner."""
    y = op.main_output()
    out = op.shape(y)
    pairs = [
        (x, w)
        for x in op.forward.reads
        for w in op.forward.reads
        if x != w and _is_convolution(op.shape(x), op.shape(w), out)
    ]
    if len(pairs) != 1:
        raise Unexpected
    x, w = pairs[0]
    form = _conv_form(op.shape(x), op.shape(w), out)
    write = op.writer(op.forward)
    others = [n for n in op.forward.reads if n not in (x, w)]
    product = write.emit("product", [x, w], None if others else y, shape=out, params=form["forward"])
    if others:
        write.emit("add", [product, others[0]], y)
    op.finish(op.forward, {y}, y)
    if op.backward is None:
        return
    g, write = op.gradient(y), op.writer(op.backward)
    done: set[int] = set()
    for source, operands, name in ((w, [x, g], "weights"), (x, [g, w], "data")):
        wanted = op.wanted(source)
        if wanted is None or wanted in done:
            continue
        done.add(wanted)
        extra = [n for n in op.arriving() if n != g and op.shape(n) == op.shape(wanted)]
        product = write.emit(
            "product", operands, None if extra else wanted, shape=op.shape(source), params=form[name]
        )
        if extra:
            write.emit("add_any", [product, extra[0]], wanted)
    for other in others:
        wanted = op.wanted(other)
        if wanted is not None and wanted not in done:
            done.add(wanted)
            write.emit(
                "reduce_sum", [g], wanted, params={"axes": (0,)}, seen_as=(out[0] * _field(out), out[1])
            )
    op.finish(op.backward, done, g)


def _field(shape: Sequence[int]) -> int:
    return math.prod(shape[2:])


def _is_convolution(x: Sequence[int], w: Sequence[int], y: Sequence[int]) -> bool:
    return (
        len(x) == len(w) == len(y) >= 3
        and x[0] == y[0]
        and w[0] == y[1]
        and x[1] % w[1] == 0
        and w[0] % (x[1] // w[1]) == 0
        and all(a >= b for a, b in zip(x[2:], y[2:], strict=True))
    )


def _conv_form(x: Sequence[int], w: Sequence[int], y: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The three products' sizes, as arguments of `matmul.Product`."""
    groups, kernel = x[1] // w[1], _field(w)
    stride = max(1, round(x[2] / y[2]))
    batch, spread = x[0], round(_field(x) / _field(y)) or 1
    sparse = kernel < spread
    return {
        "forward": {
            "groups": groups,
            "m": batch * _field(y),
            "k": w[1],
            "n": w[0] // groups,
            "kernel": kernel,
            "row_length": y[-1],
            "stride": min(stride, max(w[2:])) if kernel > 1 else 1,
        },
        "data": {
            "groups": groups,
            # Input pixels that no output reads have no gradient and take no work.
            "m": batch * _field(y if sparse else x),
            "k": w[0] // groups,
            "n": w[1],
            "kernel": max(1, round(kernel / spread)),
            "row_length": (y if sparse else x)[-1],
        },
        "weights": {
            "groups": groups,
            "m": w[1] * kernel,
            "k": batch * _field(y),
            "n": w[0] // groups,
            "transposed": True,
            "reuse": kernel,
        },
    }


def _normalisation(op: TracedOperator) -> None:
    """The library's programs: sums for mean and power together, then a pass over all values for each vector that is
    added or multiplied. The gradient whitens its input again, and reduces once for the input and once for the
    parameters. Source: ``poplin/Norms.cpp`` of the library, and its callers in PopART and TensorFlow.
    """
    x, y = op.main_input(), op.main_output()
    if op.size(x) != op.size(y):
        raise Unexpected
    shape, axes = _reduced(op, x)
    parameters = [n for n in op.forward.reads if n != x and op.size(n) < op.size(x)][:2]
    if len(parameters) < 2:
        raise Unexpected
    scale, bias = parameters
    pen = _Passes(op, op.writer(op.forward), op.shape(x))
    sums = pen.sums([x], shape, axes)
    deviation = pen.vector("rsqrt", sums, sums)
    if axes == tuple(range(len(shape) - 1)):
        # Statistics of channels go into one factor and one addend.
        factor = pen.vector("mul", deviation, scale)
        addend = pen.vector("sub", factor, bias)
        pen.over("add", pen.over("mul", x, factor), addend, output=y)
    else:
        whitened = pen.over("mul", pen.over("sub", x, sums), deviation)
        pen.over("add", pen.over("mul", whitened, scale), bias, output=y)
    op.finish(op.forward, {y}, sums, y)
    if op.backward is None:
        return
    g, pen = op.gradient(y), _Passes(op, op.writer(op.backward), op.shape(x))
    whitened = pen.over("mul", pen.over("sub", x, sums), deviation)
    channels = op.shape(scale)
    gradients = [n for n in op.backward.written if op.shape(n) == channels][:2]
    dx = next((n for n in op.backward.written if op.size(n) == op.size(x) and n not in gradients), None)
    if dx is not None:
        scaled = pen.over("mul", g, scale)
        deltas = pen.sums([pen.over("mul", whitened, scaled), scaled], shape, axes)
        centred = pen.over("add", pen.over("copy", scaled), deltas)
        gradient = pen.over("add", centred, pen.over("mul", whitened, deltas))
        extra = [n for n in op.arriving() if n != g and op.shape(n) == op.shape(x)]
        by_deviation = pen.over("mul", gradient, deviation, output=None if extra else dx)
        if extra:
            pen.over("add_any", by_deviation, extra[0], output=dx)
    if gradients:
        rows = op.size(x) // op.size(scale)
        both = pen.sums([pen.over("mul", whitened, g), g], (rows, op.size(scale)), (0,))
        for wanted in gradients:
            pen.write.emit("slice", [both], wanted)
    op.finish(op.backward, {*gradients, *([] if dx is None else [dx])}, g)


class _Passes:
    """Writes vertices over all values of a tensor, each a compute set of its own."""

    def __init__(self, op: TracedOperator, write: RunWriter, shape: Sequence[int]) -> None:
        self.op, self.write, self.shape = op, write, shape

    def over(self, primitive: str, *inputs: int, output: int | None = None) -> int:
        """One pass over the tensor, with another or with a vector that is broadcast over it."""
        return self.write.emit(primitive, inputs, output, shape=self.shape, params={"alone": True})

    def vector(self, primitive: str, *inputs: int) -> int:
        """The same over the values of the first vector."""
        return self.write.emit(primitive, inputs, shape=self.op.shape(inputs[0]), params={"alone": True})

    def sums(self, sources: Sequence[int], shape: Sequence[int], axes: Sequence[int]) -> int:
        """Two sums over ``axes`` of tensors seen as ``shape``, in the same compute sets; a vector of each."""
        left = [d for d in range(len(shape)) if d not in axes]
        seen = [2 * size if d == left[-1] else size for d, size in enumerate(shape)]
        reduced_shape = [1 if d in axes else size for d, size in enumerate(shape)]
        return self.write.emit(
            "reduce_sum", sources, shape=reduced_shape, params={"axes": tuple(axes)}, seen_as=seen
        )


def _reduced(op: TracedOperator, x: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and axes of the statistics' sums, with channels last as on the tiles.

    Raises:
        Unexpected: no sum over values of ``x``'s size.
    """
    for equation in op.equations[op.forward.first : op.forward.end]:
        if equation.primitive == "reduce_sum" and equation.operands[0].size == op.size(x):
            shape, axes = equation.operands[0].shape, tuple(equation.params["axes"])
            break
    else:
        raise Unexpected
    whole = op.shape(x)
    if len(whole) > 2 and axes == (0, *range(2, len(whole))):
        return (whole[0], *whole[2:], whole[1]), tuple(range(len(whole) - 1))
    if len(whole) > 2 and len(shape) > 1 and shape[0] == whole[0] and 0 not in axes:
        groups = shape[1]
        size = whole[1] // groups if whole[1] % groups == 0 else 1
        return (whole[0], math.prod(whole[2:]), groups, size), (1, 3)
    rows = math.prod(s for d, s in enumerate(shape) if d not in axes)
    return (rows, op.size(x) // rows), (1,)


def _pooling(op: TracedOperator) -> None:
    """One pass of windows forward, one backward."""
    x, y = op.main_input(), op.main_output()
    joined = ("max", "add", "min")
    window = 1 + sum(
        1
        for e in op.equations[op.forward.first : op.forward.end]
        if e.primitive in joined and e.results[0].shape == op.shape(y)
    )
    if window == 1:
        raise Unexpected
    params = {"window_dimensions": (window,)}
    op.writer(op.forward).emit("reduce_window_max", [x], y, params=params)
    op.finish(op.forward, {y}, y)
    if op.backward is None:
        return
    g, wanted = op.gradient(y), op.wanted(x)
    write, done = op.writer(op.backward), set()
    if wanted is not None:
        write.emit("select_and_scatter_add", [x, g], wanted, params=params)
        done.add(wanted)
    op.finish(op.backward, done, x)


def _field_mean(op: TracedOperator) -> None:
    """Mean over rows and columns: a sum with channels last; its gradient is broadcast."""
    x, y = op.main_input(), op.main_output()
    shape = op.shape(x)
    seen = (shape[0], *shape[2:], shape[1])
    write = op.writer(op.forward)
    total = write.emit(
        "reduce_sum", [x], shape=op.shape(y), params={"axes": tuple(range(1, len(shape) - 1))}, seen_as=seen
    )
    write.emit("copy", [total], y)
    op.finish(op.forward, {y}, y)
    if op.backward is None:
        return
    wanted = op.wanted(x)
    write = op.writer(op.backward)
    reads = op.arriving()
    if wanted is None or not reads:
        raise Unexpected
    write.emit("copy" if len(reads) == 1 else "add", sorted(reads, key=op.size, reverse=True), wanted)
    op.finish(op.backward, {wanted}, wanted)


def _pointwise(forward: str, backward: str, *, keeps_output: bool) -> Template:
    """A nonlinearity: one vertex forward, one backward that reads its output or its input."""

    def template(op: TracedOperator) -> None:
        x, y = op.main_input(), op.main_output()
        if op.size(x) != op.size(y) or len(op.forward.reads) != 1:
            raise Unexpected
        op.writer(op.forward).emit(forward, [x], y)
        op.finish(op.forward, {y}, y)
        if op.backward is None:
            return
        g, wanted = op.gradient(y), op.wanted(x)
        if wanted is None:
            raise Unexpected
        extra = [n for n in op.arriving() if n != g and op.shape(n) == op.shape(x)]
        write = op.writer(op.backward)
        result = write.emit(
            backward, [g, y if keeps_output else x], None if extra else wanted, shape=op.shape(x)
        )
        if extra:
            write.emit("add_any", [result, extra[0]], wanted)
        op.finish(op.backward, {wanted}, wanted)

    return template


def _dropout(op: TracedOperator) -> None:
    """The generator runs inside the vertex; the backward pass runs it again from the same seed, so no mask is kept."""
    floating = [n for n in op.forward.reads if op.tensors[n].dtype.startswith(("float", "bfloat"))]
    if not floating:
        raise Unexpected
    x, y = max(floating, key=op.size), op.main_output()
    if op.size(x) != op.size(y):
        raise Unexpected
    op.writer(op.forward).emit("dropout", [x], y)
    op.finish(op.forward, {y}, y)
    if op.backward is None:
        return
    g, wanted = op.gradient(y), op.wanted(x)
    if wanted is None:
        raise Unexpected
    op.writer(op.backward).emit("dropout", [g], wanted)
    op.finish(op.backward, {wanted}, wanted)


def _ctc_loss(op: TracedOperator) -> None:
    """Loss and the gradient of the log-probabilities in one go; the backward pass scales what was kept."""
    log_p, y = op.main_input(), op.main_output()
    targets = [n for n in op.forward.reads if len(op.shape(n)) == 2 and op.shape(n)[0] == op.shape(log_p)[1]]
    if len(op.shape(log_p)) != 3 or len(targets) != 1:
        raise Unexpected
    params = {"label": op.shape(targets[0])[1], "gradient": op.backward is not None}
    write = op.writer(op.forward)
    if op.backward is None:
        write.emit("ctc_loss", [log_p], y, params=params)
        op.finish(op.forward, {y}, y)
        return
    kept = write.emit("ctc_loss", [log_p], shape=op.shape(log_p), params=params)
    write.emit("copy", [kept], y, seen_as=op.shape(y))
    op.finish(op.forward, {y}, y)
    wanted = op.wanted(log_p)
    if wanted is None:
        raise Unexpected
    # A loss that ends the program has the constant one as its gradient.
    g = [n for n in op.arriving() if op.size(n) == op.size(y)][:1]
    op.writer(op.backward).emit("mul" if g else "copy", [kept, *g], wanted)
    op.finish(op.backward, {wanted}, wanted)


def _ctc_beam_search(op: TracedOperator) -> None:
    """One search for each batch entry. The width is that of the candidates it keeps."""
    log_p, y = op.main_input(), op.main_output()
    if len(op.shape(log_p)) != 3 or op.backward is not None:
        raise Unexpected
    steps, batch, _ = op.shape(log_p)
    kept = [
        t.shape[1]
        for e in op.equations[op.forward.first : op.forward.end]
        for t in e.results
        if len(t.shape) == 3 and (t.shape[0], t.shape[2]) == (batch, steps)
    ]
    if not kept:
        raise Unexpected
    op.writer(op.forward).emit("ctc_beam_search", [log_p], y, params={"beams": max(kept)})
    op.finish(op.forward, {y}, y)


TEMPLATES: dict[str, Template] = {
    "Conv": _convolution,
    **dict.fromkeys(
        ("BatchNormalization", "GroupNormalization", "LayerNormalization", "InstanceNormalization"),
        _normalisation,
    ),
    **dict.fromkeys(("MaxPool", "AveragePool"), _pooling),
    "GlobalAveragePool": _field_mean,
    "Relu": _pointwise("relu", "nonlinear_grad", keeps_output=True),
    "Sigmoid": _pointwise("logistic", "nonlinear_grad", keeps_output=True),
    "Tanh": _pointwise("tanh", "nonlinear_grad", keeps_output=True),
    "Swish": _pointwise("swish", "nonlinear_grad", keeps_output=False),
    "Gelu": _pointwise("gelu", "gelu_grad", keeps_output=False),
    "Dropout": _dropout,
    "Ctc": _ctc_loss,
    "CtcBeamSearchDecoder": _ctc_beam_search,
    **dict.fromkeys(CELLS, recurrent),
}
"""How the library computes each operator, by ONNX type."""
