"""PyTorch's own operator samples (OpInfo), run through capture and the table and compared with torch.

    python -m tests.poptorch.operators.opinfo [NAME ...]

prints each operator with samples that agree, differ or are refused, and the counts that `test_opinfo` holds.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

from podrun.poptorch.capture.capture import capture
from podrun.poptorch.capture.graph import GraphValue, flatten
from podrun.poptorch.capture.torch_names import to_numpy
from podrun.poptorch.compile.aten_table import supported
from podrun.poptorch.operators.table import run_aten
from tests.poptorch.operators.cases import Case, Numbers, operator_of

SAMPLES = 2
"""Samples of each operator that are tried."""
UNDEFINED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operators whose elements torch leaves undefined: only shapes and types are compared."""


class Applied(torch.nn.Module):
    """One operator as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass
class Verdict:
    """The verdict on an operator's samples."""

    agree: int = 0
    gradients: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def _as_float32(call: Any) -> Any:
    """The same call with halves widened."""
    return _in_type(call, torch.float16, torch.float32)


def _in_type(call: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """The same call with another type of its tensors."""
    leaves, structure = flatten(call)
    changed = [
        e.detach().to(new).requires_grad_(e.requires_grad)
        if isinstance(e, torch.Tensor) and e.dtype == old
        else new
        if e is old
        else e
        for e in leaves
    ]
    return structure.rebuild(iter(changed))


def _anywhere(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords without the host as the device: what a factory makes there is not the model's."""
    return {name: each for name, each in kwargs.items() if name != "device"}


def replay(
    graph: Any,
    parameters: dict[str, Any],
    inputs: dict[int, Any],
    key: jax.Array,
    training: bool = False,
) -> tuple[list[object], dict[str, Any]]:
    """The results of forward (leaves in order) and the new values of parameters and buffers."""
    values: dict[int, Any] = {}
    for name, value in graph.parameters.items():
        values[value.number] = jax.numpy.asarray(parameters[name])
    for place, value in graph.inputs.items():
        values[value.number] = jax.numpy.asarray(inputs[place])
    for number, (_, data) in graph.constants.items():
        values[number] = jax.numpy.asarray(data)
    for place, node in enumerate(graph.nodes):
        results = run_aten(node, values, functools.partial(jax.random.fold_in, key, place), training)
        values.update({value.number: array for value, array in zip(node.results, results, strict=True)})
    outputs = [values[leaf.number] if isinstance(leaf, GraphValue) else leaf for leaf in graph.outputs]
    return outputs, {name: values[value.number] for name, value in graph.updates.items()}


def compare_shapes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Shapes and types of one sample's results against torch; AssertionError where they differ."""
    module = Applied(function)
    expected, _ = flatten(module(*args, **kwargs))
    captured = capture(module, args, _anywhere(kwargs), supported=supported)
    leaves, _ = flatten((args, kwargs))
    inputs = {place: to_numpy(leaves[place]) for place in captured.graph.inputs}
    outputs = jax.jit(lambda values: replay(captured.graph, {}, values, jax.random.key(0))[0])(inputs)
    for made, wanted in zip(outputs, expected, strict=True):
        assert (made.shape, made.dtype.name) == (tuple(wanted.shape), to_numpy(wanted).dtype.name)


def compare(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float = 2e-4) -> bool:
    """Forward and gradient of one sample against torch; AssertionError where they differ. Whether it has a gradient.

    Halves are compared with what torch computes in float32 from them, and float32 where it differs with float64: torch
    may be the one that is off.
    """
    module = Applied(function)
    args, kwargs = _contiguous((args, kwargs))
    torch.manual_seed(0)
    reference_call = _as_float32((args, kwargs))
    expected, _ = flatten(module(*reference_call[0], **reference_call[1]))
    captured = capture(module, args, _anywhere(kwargs), supported=supported)
    leaves, _ = flatten((args, kwargs))
    inputs = {place: to_numpy(leaves[place]) for place in captured.graph.inputs}

    def run(values: dict[int, Any]) -> list[Any]:
        made = replay(captured.graph, {}, values, jax.random.key(0))[0]
        return [each if hasattr(each, "dtype") else None for each in made]

    outputs = jax.jit(run)(inputs)
    try:
        _assert_close(outputs, expected, tolerance)
    except AssertionError:
        torch.manual_seed(0)
        exact_call = _in_type(reference_call, torch.float32, torch.float64)
        _assert_close(outputs, flatten(module(*exact_call[0], **exact_call[1]))[0], tolerance)
    return _compare_gradients(module, reference_call, captured.graph, inputs, run, tolerance)


def _assert_close(outputs: list[Any], expected: list[Any], tolerance: float) -> None:
    for made, wanted in zip(outputs, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            reference = wanted.detach().resolve_conj().resolve_neg()
            np.testing.assert_allclose(
                np.asarray(made, np.float64), to_numpy(reference).astype(np.float64), tolerance, tolerance
            )


def _contiguous(call: Any) -> Any:
    """The same arguments, each on memory of its own, as they reach an IPU."""
    leaves, structure = flatten(call)
    fresh = [
        leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        else leaf
        for leaf in leaves
    ]
    return structure.rebuild(iter(fresh))


def _compare_gradients(
    module: Any, call: Any, graph: Any, inputs: dict[int, Any], run: Any, tolerance: float
) -> bool:
    leaves, structure = flatten(call)
    wanted = [p for p in graph.inputs if leaves[p].is_floating_point() and leaves[p].requires_grad]
    if not wanted:
        return False
    fresh = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    args, kwargs = structure.rebuild(iter(fresh))
    expected = [e for e in flatten(module(*args, **kwargs))[0] if isinstance(e, torch.Tensor)]
    places = [i for i, e in enumerate(expected) if e.requires_grad]
    if not places:
        return False
    generator = np.random.default_rng(1)
    seeds = [generator.standard_normal(tuple(expected[i].shape)).astype(np.float32) for i in places]
    reference = torch.autograd.grad(
        [expected[i] for i in places],
        [fresh[p] for p in wanted],
        [torch.from_numpy(np.asarray(s)).to(expected[i].dtype) for s, i in zip(seeds, places, strict=True)],
        allow_unused=True,
    )

    def scalar(values: dict[int, Any]) -> Any:
        outputs = [
            o for o, e in zip(run(inputs | values), graph.outputs, strict=True) if isinstance(e, GraphValue)
        ]
        return sum((outputs[i] * s).sum() for i, s in zip(places, seeds, strict=True))

    made = jax.jit(jax.grad(scalar))({p: jax.numpy.asarray(inputs[p]) for p in wanted})
    for place, gradient in zip(wanted, reference, strict=True):
        if gradient is not None:
            np.testing.assert_allclose(
                np.asarray(made[place], np.float64),
                gradient.double().numpy(),
                25 * tolerance,
                2.5 * tolerance,
                err_msg="gradient",
            )
    return True


def compare_case(case: Case, dtype: torch.dtype) -> None:
    """One case of `operator_cases` in a type: forward, and the gradient if it has one. AssertionError if it differs.

    What torch cannot compute in halves on the CPU is compared with float32 from the same halves.
    """
    call = (case.arguments(Numbers(dtype)), dict(case.keywords))
    function = operator_of(case.form, *_as_float32(call))
    tolerance = 4e-3 if dtype is torch.float16 else 2e-4
    leaves, structure = flatten(call)
    floats = [i for i, e in enumerate(leaves) if isinstance(e, torch.Tensor) and e.is_floating_point()]
    try:
        _compare_with_gradients_of(floats if case.smooth else [], leaves, structure, function, tolerance)
    except RuntimeError as error:
        if "differentiable" not in str(error) and "derivative" not in str(error):
            raise
        _compare_with_gradients_of(floats[:1], leaves, structure, function, tolerance)


def _compare_with_gradients_of(
    places: list[int], leaves: list[Any], structure: Any, function: Any, tolerance: float
) -> None:
    chosen = [e.detach().requires_grad_() if i in places else e for i, e in enumerate(leaves)]
    args, keywords = structure.rebuild(iter(chosen))
    compare(function, args, keywords, tolerance)


def operator_names() -> list[str]:
    """All operators of PyTorch's data base that take float32."""
    from torch.testing._internal.common_methods_invocations import op_db

    named = [info.name + (f".{info.variant_test_name}" if info.variant_test_name else "") for info in op_db]
    return list(dict.fromkeys(named))


def verdicts(names: list[str], samples: int = SAMPLES) -> dict[str, Verdict]:
    """What becomes of each operator of PyTorch's data base (all of them for no names), float32."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, Verdict] = {}
    for info in op_db:
        name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
        if (names and name not in names) or torch.float32 not in info.dtypes:
            continue
        verdict = found.setdefault(name, Verdict())
        torch.manual_seed(0)
        try:
            drawn = list(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd))[
                :samples
            ]
        except Exception as error:
            verdict.reasons[f"no samples: {error}"] += 1
            continue
        for sample in drawn:
            try:
                call = (sample.input, *sample.args), dict(sample.kwargs)
                if info.name in UNDEFINED:
                    compare_shapes(info.op, *call)
                else:
                    verdict.gradients += compare(info.op, *call)
                verdict.agree += 1
            except Exception as error:
                text = str(error).strip().split("\n")
                verdict.reasons[f"{type(error).__name__}: {' '.join(text[:3])[:150]}"] += 1
    return found


def main(names: list[str]) -> None:
    """Print what does not agree, as it is found, and the counts."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names or operator_names():
        verdict = verdicts([name]).get(name, Verdict())
        found[name] = verdict
        if verdict.reasons:
            print(f"{name}: {verdict.agree} agree; {dict(verdict.reasons)}", flush=True)
    whole = sum(v.agree > 0 and not v.reasons for v in found.values())
    some = sum(v.agree > 0 for v in found.values())
    print(f"{len(found)} operators; all samples agree for {whole}, some for {some}")
    print(f"{sum(v.agree for v in found.values())} samples agree")


if __name__ == "__main__":
    main(sys.argv[1:])
