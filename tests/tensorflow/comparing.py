"""One operation on both sides: TensorFlow on the CPU, and the front end's graph computed by the runtime's lowering.

`computed` traces a function as a program on an IPU, reads it into the runtime's graph, and computes that with JAX in
this process, without a machine: milliseconds for a case. Programs on machines are compared in test_operations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LARGEST_HALF = 65504.0
NO_GRADIENT_IN_TENSORFLOW = {
    "AdjustContrastv2", "AdjustSaturation", "AdjustHue", "Snapshot", "SegmentSumV2", "SegmentMaxV2", "SegmentMinV2",
    "SegmentProdV2",
}  # fmt: skip
"""Operations that TensorFlow does not differentiate, and podrun does."""


@dataclass(frozen=True)
class RawCase:
    """One call of ``tf.raw_ops.<op>``. Arrays among the arguments are inputs of the program, other values are part of
    it. ``skip_half``: why it is compared in float32 alone. ``outputs``: which are compared; None: all.
    """

    op: str
    label: str
    arguments: Mapping[str, Any]
    skip_half: str = ""
    gradient: bool = True
    outputs: tuple[int, ...] | None = None
    exact: bool = False
    tolerance: float = 2e-5
    half_tolerance: float = 6e-3
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are variables, by their starting values; what they are afterwards is compared too."""
    xla: bool = False
    """Whether TensorFlow computes it by XLA alone."""
    function: Callable[..., Any] | None = None
    """What is computed of the arrays in place of the operation alone."""

    @property
    def name(self) -> str:
        """For the test's identifier."""
        return f"{self.op}-{self.label}" if self.label else self.op


def case(op: str, label: str = "", /, **arguments: Any) -> RawCase:
    """A case. Options of `RawCase` come with a leading underscore, arguments of the operation without."""
    options = {k[1:]: arguments.pop(k) for k in list(arguments) if k.startswith("_")}
    return RawCase(op, label, arguments, **options)


def _arrays(case_: RawCase) -> list[np.ndarray]:
    arrays: list[np.ndarray] = []
    for value in case_.arguments.values():
        arrays += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, np.ndarray)]
    return arrays


def _call(case_: RawCase, tensors: Sequence[Any], handles: Mapping[str, Any]) -> list[Any]:
    """The results of the operation whose arrays are ``tensors``."""
    import tensorflow as tf

    remaining = iter(tensors)

    def own(value: Any) -> Any:
        if isinstance(value, list):
            return [own(item) for item in value]
        return next(remaining) if isinstance(value, np.ndarray) else value

    if case_.function is not None:
        return list(tf.nest.flatten(case_.function(*tensors)))
    arguments = {name: own(value) for name, value in case_.arguments.items()}
    results = getattr(tf.raw_ops, case_.op)(**arguments, **handles)
    if results is None or isinstance(results, tf.Operation):
        return []
    flat = list(results) if isinstance(results, (list, tuple)) else [results]
    return [r for i, r in enumerate(flat) if case_.outputs is None or i in case_.outputs]


def _weights(result: Any, place: int) -> Any:
    """What a result's gradient is multiplied with: numbers of both signs that no sum cancels."""
    import tensorflow as tf

    values = tf.cos(tf.cast(tf.range(tf.size(result)), tf.float32) * 1.7 + place) + 0.3
    return tf.reshape(tf.cast(values, result.dtype), tf.shape(result))


def function_of(case_: RawCase) -> Callable[..., list[Any]]:
    """Inputs and handles of variables -> results, then the gradients of the inputs that have one, else None."""
    import tensorflow as tf

    def run(tensors: Sequence[Any], handles: Mapping[str, Any]) -> list[Any]:
        sources = [t for t in tensors if t.dtype.is_floating]
        with tf.GradientTape() as tape:
            for source in sources:
                tape.watch(source)
            results = _call(case_, tensors, handles)
        able = [(r, _weights(r, i)) for i, r in enumerate(results) if r.dtype.is_floating]
        if not (case_.gradient and sources and able):
            return results
        try:
            gradients = tape.gradient([r for r, _ in able], sources, [w for _, w in able])
        except LookupError:  # TensorFlow knows no gradient of it.
            return results
        return [*results, *(None if g is None else tf.convert_to_tensor(g) for g in gradients)]

    return run


def half_of(array: np.ndarray, half: bool) -> np.ndarray:
    """The array in the type in which it is compared."""
    return array.astype(np.float16) if half and array.dtype == np.float32 else array


def expected(case_: RawCase, half: bool) -> list[np.ndarray | None]:
    """What TensorFlow computes in float32, from values that are rounded to halves where those are compared."""
    import tensorflow as tf

    def full(array: np.ndarray) -> np.ndarray:
        rounded = half_of(array, half)
        return rounded.astype(np.float32) if rounded.dtype == np.float16 else rounded

    arrays = [full(a) for a in _arrays(case_)]
    variables = {name: tf.Variable(full(value)) for name, value in case_.variables.items()}
    run = function_of(case_)

    def traced(*tensors: Any) -> list[Any]:
        present = run(tensors, {name: v.handle for name, v in variables.items()})
        kept[:] = [r is not None for r in present]
        return [r for r in present if r is not None]

    kept: list[bool] = []
    program = tf.function(traced, autograph=False, jit_compile=case_.xla)
    values = iter([np.asarray(v) for v in program(*(tf.constant(a) for a in arrays))])
    return [*(next(values) if there else None for there in kept), *(v.numpy() for v in variables.values())]


def computed(case_: RawCase, half: bool) -> list[np.ndarray | None]:
    """What podrun computes for the case."""
    import tensorflow as tf

    from podrun.tensorflow.capture.program_graphs import IpuGraph, parameter, trace
    from podrun.tensorflow.execution.step_program import StepSource, read_step

    arrays = [half_of(a, half) for a in _arrays(case_)]
    variables = {name: tf.Variable(half_of(value, half)) for name, value in case_.variables.items()}
    graph = IpuGraph("case", 0, automatic=True)
    tensors = [
        parameter(graph, tf.TensorSpec(a.shape, a.dtype), f"argument_{i}") for i, a in enumerate(arrays)
    ]
    run = function_of(case_)
    results = trace(
        graph, lambda: run(tensors, {n: graph.capture(v.handle) for n, v in variables.items()}), []
    )
    handles = [graph.capture(v.handle) for v in variables.values()]
    names = {t.name: f"input/{i}" for i, t in enumerate(tensors)}
    names |= {t.name: f"variable/{i}" for i, t in enumerate(handles)}
    keys = [f"variable/{i}" for i in range(len(handles))]
    source = StepSource(
        "case",
        graph,
        names,
        frozenset(keys),
        [r for r in results if r is not None],
        graph.control_outputs,
        {},
    )
    step = read_step(source)
    held = {f"input/{i}": a for i, a in enumerate(arrays)}
    held |= {key: v.numpy() for key, v in zip(keys, variables.values(), strict=True)}
    outputs = _lowered(step, held)
    values = iter(outputs[: len(step.results)])
    stored = dict(zip(step.written, outputs[len(step.results) :], strict=True))
    return [*(None if r is None else next(values) for r in results), *(stored.get(k, held[k]) for k in keys)]


def _lowered(step: Any, held: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Results and written variables of a step."""
    import jax

    from podrun.runtime.graph import OperatorGraph
    from podrun.runtime.lowering import lower_graph
    from podrun.tensorflow.operators.table import TensorFlowOperators

    out = (*step.results, *step.written.values())
    lowered = lower_graph(OperatorGraph("case", step.nodes, (), out, dict(held), {}), TensorFlowOperators())
    forward = jax.jit(lambda parameters: lowered.forward(parameters, {}, jax.random.key(1)))
    values = forward(dict(lowered.initial))
    return [np.asarray(values[name]) for name in out]


def check_agreement(case_: RawCase, half: bool) -> None:
    """AssertionError unless both sides agree: as many results and gradients, and each within its tolerance."""
    theirs, mine = expected(case_, half), computed(case_, half)
    if case_.op in NO_GRADIENT_IN_TENSORFLOW:
        mine = mine[: len(theirs)]
    assert [v is None for v in mine] == [v is None for v in theirs], "other inputs have gradients"
    tolerance = case_.half_tolerance if half else case_.tolerance
    for place, (got, want) in enumerate(zip(mine, theirs, strict=True)):
        if got is None or want is None:
            continue
        assert got.shape == want.shape, f"value {place}: shapes {got.shape} and {want.shape}"
        wide = want.astype(np.float64)
        if half and got.dtype == np.float16:
            wide = np.clip(wide, -LARGEST_HALF, LARGEST_HALF)
        if want.dtype.kind != "f" or case_.exact:
            np.testing.assert_array_equal(got.astype(np.float64), wide, f"value {place}")
            continue
        finite = np.abs(wide[np.abs(wide) < LARGEST_HALF])
        scale = (finite.max() if finite.size else 0.0) + 1e-3
        np.testing.assert_allclose(
            got.astype(np.float64), wide, rtol=tolerance, atol=tolerance * scale, err_msg=f"value {place}"
        )
