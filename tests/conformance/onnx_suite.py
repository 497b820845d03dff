"""One runner for every backend: the cases that ship in the onnx wheel, run the same way, counted the same
way.

    python tests/conformance/onnx_suite.py podrun            # or onnxruntime, reference
    python tests/conformance/onnx_suite.py podrun --kinds node --match conv --verbose
    python tests/conformance/onnx_suite.py podrun --record   # rewrite tests/conformance/record.json

A case *passes* if every data set gives the expected outputs (shape, type, value within the case's tolerance), is
*wrong* if it runs and gives others, and *refused* if the backend raises.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import glob
import importlib.util
import json
import os
import pkgutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx.backend.test.case import base as case_base
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner
from onnx.reference.ops import op_pool_common

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
RECORD = Path(__file__).with_name("record.json")

Run = Callable[[list[Any]], Any]
Prepare = Callable[[onnx.ModelProto], Run]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a case: ``pass``, ``wrong`` or ``refused``, and why."""

    name: str
    result: str
    reason: str = ""


def reason_of(outcome: Outcome) -> str:
    """The record's one-line reason for a case that does not pass."""
    text = f"{outcome.name}: {outcome.reason}"
    for part, reason in (
        ("holds strings", "strings are not computed on IPUs"),
        ("strings are not computed", "strings are not computed on IPUs"),
        ("attribute 'seed'", "the attribute seed is refused; the session's seed decides"),
        ("no seed is given", "random without a seed: which numbers are right is not defined"),
        ("ImageDecoder", "decoding images is the host's business"),
        ("preview.training", "training-only form: optimizers and gradients belong to the session"),
        ("ai.onnx.ml", "classical machine learning (ai.onnx.ml) is not a domain of the device"),
        ("TfIdfVectorizer", "text features are the host's business"),
    ):
        if part in text:
            return reason
    if outcome.result == "wrong":
        return f"gives other numbers: {outcome.reason}"
    return outcome.reason


def cases(kinds: tuple[str, ...] = KINDS) -> tuple[TestCase, ...]:
    """All cases of the given kinds, in order."""
    return tuple(case for kind in kinds for case in _of_kind(kind))


def some_node_cases(every: int) -> tuple[TestCase, ...]:
    """The cases of every so-many-th file of operators: making those of all takes most of the time. They are made anew,
    whatever the process has imported, and not listed among onnx's."""
    modules = sorted(
        module.name for module in pkgutil.iter_modules(node_cases.__path__, node_cases.__name__ + ".")
    )
    ours: list[TestCase] = []
    with _quickly_made(), mock.patch.multiple(node_cases, _NodeTestCases=ours, _existing_names={}):
        for name in modules[::every]:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.loader is not None
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return tuple(ours)


@functools.cache
def _of_kind(kind: str) -> list[TestCase]:
    with _quickly_made():
        return list(load_model_tests(kind=kind))


@contextlib.contextmanager
def _quickly_made() -> Iterator[None]:
    """Make cases without their warnings, pool by `quick_pool`, and read no source: for its documentation onnx keeps the
    lines of the function that makes a case, and finding these takes half of the time of making all cases.
    """
    with (
        warnings.catch_warnings(),
        mock.patch.object(op_pool_common, "pool", quick_pool),
        mock.patch.object(case_base, "process_snippet", lambda operator, name, _: (name or operator, "")),
    ):
        warnings.simplefilter("ignore")
        yield


def quick_pool(
    padded: np.ndarray,
    x_shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    out_shape: Sequence[int],
    pooling_type: str,
    pads_required: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    count_include_pad: int = 0,
    p: int = 1,
) -> np.ndarray:
    """What ``onnx.reference.ops.op_pool_common.pool`` gives, but for roundings, of all windows at once: one by one they
    take two thirds of the time in which the suite's cases are made. A slow test compares the two.
    """
    count = len(x_shape) - 2
    required, pad = (
        [0] * 2 * count if v is None else list(v) * (2 * count if len(v) == 1 else 1)
        for v in (pads_required, pads)
    )
    values, inside = padded.astype(np.float64), np.ones([1] * 2 * count, bool)
    for i in range(count):
        step, gap = (strides or [1] * count)[i], 1 if dilations is None else dilations[i]
        room = x_shape[i + 2] + required[i] + required[i + count] - (1 + (kernel[i] - 1) * gap)
        places = step * np.arange(int(room / step + 1))[:, None] + gap * np.arange(kernel[i])
        within = places < x_shape[i + 2] + pad[i] + pad[i + count]
        inside = inside & np.expand_dims(within, [a for a in range(2 * count) if a // 2 != i])
        # Each axis becomes two: of windows, and of places in a window.
        values = values.take(np.minimum(places, padded.shape[i + 2] - 1), 2 + 2 * i)
    used = np.broadcast_to(inside, values.shape)
    if not (count_include_pad == 1 and pooling_type != "MAX"):
        used = used & ~np.isnan(values)
    axes = tuple(range(3, 3 + 2 * count, 2))
    match pooling_type:
        case "MAX":
            pooled = values.max(axes, where=used, initial=-np.inf)
        case "AVG":
            pooled = values.sum(axes, where=used) / used.sum(axes)
        case _:
            pooled = (np.abs(values) ** p).sum(axes, where=used) ** (1.0 / p)
    y = np.zeros([*x_shape[:2], *out_shape])
    y[tuple(slice(n) for n in pooled.shape)] = pooled
    return y.astype(padded.dtype)


def model_of(case: TestCase) -> onnx.ModelProto:
    """The case's model, from memory or from the wheel's file."""
    return case.model if case.model is not None else onnx.load(os.path.join(case.model_dir, "model.onnx"))


def data_of(case: TestCase, model: onnx.ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
    """The case's data sets: inputs and expected outputs."""
    if case.data_sets is not None:
        for inputs, outputs in case.data_sets:
            yield [_plain(i) for i in inputs], [_plain(o) for o in outputs]
        return
    for folder in sorted(glob.glob(os.path.join(case.model_dir, "test_data_set_*"))):
        yield (
            _read(folder, "input", [v.type for v in model.graph.input]),
            _read(folder, "output", [v.type for v in model.graph.output]),
        )


def _plain(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _read(folder: str, what: str, types: list[onnx.TypeProto]) -> list[Any]:
    values = []
    for index in range(len(glob.glob(os.path.join(folder, f"{what}_*.pb")))):
        data = Path(folder, f"{what}_{index}.pb").read_bytes()
        kind = types[index].WhichOneof("value")
        if kind == "sequence_type":
            values.append(onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(data)))
        elif kind == "optional_type":
            values.append(onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(data)))
        else:
            values.append(onnx.numpy_helper.to_array(onnx.TensorProto.FromString(data)))
    return values


def light_model(case: TestCase, seed: int = 0) -> onnx.ModelProto:
    """The model of a real architecture in the wheel, with weights.

    The wheel's files make all large weights of one value by ConstantOfShape; here they become initializers
    of normal numbers scaled by their fan-in (variances: positive), so that outputs depend on every weight.
    """
    model = onnx.load(os.path.join(os.path.dirname(onnx.__file__), "..", case.url))
    model.ir_version = max(model.ir_version, 4)  # initializers need not be inputs
    graph, rng = model.graph, np.random.default_rng(seed)
    shapes = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    kept = []
    for node in graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in shapes:
            kept.append(node)
            continue
        shape = tuple(int(d) for d in shapes[node.input[0]])
        spread = np.sqrt(2 / max(int(np.prod(shape[1:])), 1)) if len(shape) > 1 else 0.1
        values = rng.normal(scale=spread, size=shape)
        if len(shape) == 1 and any(
            part in node.output[0] for part in ("var", "scale", "_w_", "gamma", "riv")
        ):
            values = 1 + np.abs(values)
        graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), node.output[0]))
    del graph.node[:]
    graph.node.extend(kept)
    used = {i for n in kept for i in n.input}
    weights = [t for t in graph.initializer if t.name in used]
    names = {t.name for t in weights}
    inputs = [v for v in graph.input if v.name in used and v.name not in names]
    for field, left in ((graph.initializer, weights), (graph.input, inputs)):
        del field[:]
        field.extend(left)
    return model


def random_inputs(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal float32 inputs of the shapes that the model declares."""
    rng = np.random.default_rng(seed)
    given = {t.name for t in model.graph.initializer}
    return {
        v.name: rng.normal(size=[d.dim_value or 1 for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in model.graph.input
        if v.name not in given
    }


def run_case(case: TestCase, prepare: Prepare) -> Outcome:
    """Run one case on a backend."""
    model = model_of(case)
    try:
        run = prepare(model)
        got = [(list(run(inputs)), expected) for inputs, expected in data_of(case, model)]
    except Exception as error:  # whatever a backend raises is a refusal; the reason is kept
        return Outcome(
            case.name,
            "refused",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )
    try:
        for outputs, expected in got:
            compare(expected, outputs, case.rtol, case.atol)
    except (AssertionError, TypeError, AttributeError, IndexError) as error:
        return Outcome(case.name, "wrong", " ".join(str(error).split())[:300])
    return Outcome(case.name, "pass")


BFLOAT16_RTOL = 2**-6
"""Two units in the last place. ONNX's expected values of bfloat16 are rounded after every step of its reference, and
ours where the operator is done: of attention's, a quarter of the expected ones are not the nearest to the exact value
(`test_bfloat16_attention.py`). Which of ours differ from them changes with a processor's order of sums."""


def compare(expected: list[Any], outputs: list[Any], rtol: float, atol: float) -> None:
    """ONNX's own comparison for tensors, with `BFLOAT16_RTOL` whatever the wheel's version says; sequences element by
    element. AssertionError if they differ."""
    if len(expected) != len(outputs):
        raise AssertionError(f"{len(outputs)} outputs, {len(expected)} expected")
    for want, got in zip(expected, outputs, strict=True):
        if isinstance(want, (list, tuple)):
            compare(list(want), list(got), rtol, atol)
        elif want is None or got is None:
            assert want is got, f"{got} is not {want}"
        else:
            wanted, given = np.asarray(want), np.asarray(got)
            each = rtol
            if wanted.dtype == given.dtype and wanted.dtype.name == "bfloat16":
                wanted, given, each = (
                    wanted.astype(np.float32),
                    given.astype(np.float32),
                    max(rtol, BFLOAT16_RTOL),
                )
            Runner.assert_similar_outputs([wanted], [given], each, atol)


def prepare_podrun(model: onnx.ModelProto) -> Run:
    """Ours."""
    import podrun.onnx_backend

    return podrun.onnx_backend.prepare(model).run


def prepare_reference(model: onnx.ModelProto) -> Run:
    """onnx.reference."""
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(model)
    return lambda inputs: session.run(None, dict(zip(session.input_names, inputs, strict=False)))


def prepare_onnxruntime(model: onnx.ModelProto) -> Run:
    """onnxruntime on the CPU."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return lambda inputs: session.run(None, dict(zip(names, inputs, strict=False)))


BACKENDS: dict[str, Prepare] = {
    "podrun": prepare_podrun,
    "reference": prepare_reference,
    "onnxruntime": prepare_onnxruntime,
}


def main() -> None:
    """Run cases and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--match", default="")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    started = time.process_time()
    outcomes = []
    for case in cases(tuple(options.kinds)):
        if options.match not in case.name:
            continue
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = run_case(case, BACKENDS[options.backend])
        outcomes.append(outcome)
        if options.verbose and outcome.result != "pass":
            print(f"{outcome.result:8} {outcome.name}: {outcome.reason}", flush=True)
    counts = collections.Counter(o.result for o in outcomes)
    print(
        f"{options.backend}: {len(outcomes)} cases, {dict(counts)}, {time.process_time() - started:.0f} s of CPU"
    )
    if options.record:
        write_record(outcomes)


def write_record(outcomes: list[Outcome]) -> None:
    """Write what does not pass, by reason."""
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.result != "pass":
            reasons.setdefault(reason_of(outcome), []).append(outcome.name)
    passing = sum(o.result == "pass" for o in outcomes)
    record = {
        "onnx": onnx.__version__,
        "cases": len(outcomes),
        "passing": passing,
        "not_passing": {reason: sorted(names) for reason, names in sorted(reasons.items())},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
