"""Every registered operator, by properties that all share: gradients, batching, one rounding of halves."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

from podrun.core.errors import UnimplementedError, UnsupportedError
from podrun.onnx_models.lowering import Lowered, lower
from podrun.onnx_models.ops.registry import find_onnx_operator, operators
from tests.onnx_models import operator_table as table

ALL = table.names()
SMOOTH_STEP = 1e-6
QUICK = 36
"""Of the slow tables one operator in so many runs by default."""


def _sampled(rows: list[Any]) -> list[Any]:
    return [
        row if i % QUICK == 0 else pytest.param(row, marks=pytest.mark.slow) for i, row in enumerate(rows)
    ]


def _label(row: Any) -> str:
    return f"{row[0]}.{row[1]}"


def test_every_operator_has_an_example() -> None:
    elsewhere = ("refused by name", "between replicas")
    without = [
        n for n in ALL if not table.examples(*n) and table.reason_without_gradient(n[1]) not in elsewhere
    ]
    assert without == []


def test_reasons_name_operators_that_exist() -> None:
    known = {name for _, name in ALL}
    assert [n for names in table.NOT_DIFFERENTIABLE.values() for n in names if n not in known] == []


def test_every_function_says_what_it_means() -> None:
    assert [o.name for o in operators() if o.fixed and not (o.function.__doc__ or "").strip()] == []


def _values(example: table.Example, kind: Any, jitter: float = 0.0) -> dict[str, Any]:
    """Inputs by name, floats as ``kind`` and moved a little off points where functions have corners."""
    rng = np.random.default_rng(7)
    named = [
        i.name
        for i in example.model.graph.input
        if i.name not in {t.name for t in example.model.graph.initializer}
    ]
    values: dict[str, Any] = {}
    for name, value in zip(named, example.inputs, strict=False):
        values[name] = _converted(value, kind, jitter, rng)
    return values


def _converted(value: Any, kind: Any, jitter: float, rng: np.random.Generator) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_converted(v, kind, jitter, rng) for v in value)
    if value is None or (value.dtype.kind != "f" and value.dtype.name != "bfloat16"):
        return value
    wide = value.astype(np.float64)
    return (
        wide * (1 - jitter * rng.uniform(0.2, 1, wide.shape))
        + jitter * 0.01 * rng.uniform(0.2, 1, wide.shape)
    ).astype(kind)


def _split(lowered: Lowered, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Float inputs that may vary, and the others."""
    free = {n: v for n, v in values.items() if n not in lowered.specialised}
    floats = {n: v for n, v in free.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"}
    return floats, {n: v for n, v in free.items() if n not in floats}


@functools.cache
def _differentiable() -> list[tuple[str, str]]:
    return [n for n in ALL if table.reason_without_gradient(n[1]) is None]


@pytest.mark.parametrize("operator", _sampled(_differentiable()), ids=_label)
def test_gradients_equal_central_differences(operator: tuple[str, str]) -> None:
    """The gradient along a random direction equals the central difference, in float64."""
    checked = 0
    for example in table.examples(*operator):
        checked += _check_gradient(example)
    assert checked, f"{operator}: no example has a float input that may vary"


def _check_gradient(example: table.Example) -> int:
    values = _values(example, np.float64, 0.02)
    with jax.enable_x64(True):
        lowered = lower(example.model, input_values=values, x64=True)
        floats, others = _split(lowered, values)
        if not floats:
            return 0
        key = jax.random.key(0)

        def scalar(inputs: dict[str, Any]) -> Any:
            made = lowered.forward(lowered.initial, {**inputs, **others}, key)
            if example.model.graph.node[0].op_type == "BatchNormalization":
                made = made[lowered.returns[0]]  # running statistics carry no gradient by intent
            leaves = [v for v in jax.tree.leaves(made) if jnp.issubdtype(v.dtype, jnp.floating)]
            rng = np.random.default_rng(3)
            return sum(jnp.sum(v.astype(jnp.float64) * rng.uniform(0.5, 1.5, v.shape)) for v in leaves)

        run = jax.jit(jax.value_and_grad(scalar))
        rng = np.random.default_rng(11)
        direction = {n: rng.uniform(-1, 1, v.shape) for n, v in floats.items()}
        value, gradient = run(floats)
        assert np.isfinite(value), "the example's output is not finite"
        slope = sum(float(jnp.sum(gradient[n] * direction[n])) for n in floats)
        up, _ = run({n: v + SMOOTH_STEP * direction[n] for n, v in floats.items()})
        down, _ = run({n: v - SMOOTH_STEP * direction[n] for n, v in floats.items()})
        difference = float(up - down) / (2 * SMOOTH_STEP)
        size = max(abs(difference), abs(slope), 1e-3 * abs(float(value)), 1e-2)
        assert abs(slope - difference) <= 2e-5 * size, (example.name, slope, difference)
    return 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("operator", _sampled(ALL), ids=_label)
def test_an_operator_over_a_batch_gives_what_it_gives_for_each_sample(operator: tuple[str, str]) -> None:
    """``vmap`` over stacked inputs gives what running each gives: what folding replicas rests on."""
    for example in table.examples(*operator):
        values = _values(example, np.float32)
        if any(isinstance(v, (tuple, type(None))) for v in values.values()):
            continue
        try:
            lowered = _lowered(example, values)
        except (UnimplementedError, UnsupportedError):
            assert table.reason_without_gradient(operator[1]) == "refused by name"
            continue
        free = {n: v for n, v in values.items() if n not in lowered.specialised}
        if not free:
            continue
        with jax.enable_x64(True):
            keys = jax.random.split(jax.random.key(0), 2)
            second = {
                n: (v * np.asarray(0.5, v.dtype) if v.dtype == np.float32 else v) for n, v in free.items()
            }
            stacked = {n: np.stack([v, second[n]]) for n, v in free.items()}

            def run(inputs, key, low=lowered):
                return low.forward(low.initial, inputs, key)

            together = jax.tree.leaves(jax.jit(jax.vmap(run))(stacked, keys))
            run = jax.jit(run)
            for k, each in enumerate((free, second)):
                for a, b in zip(together, jax.tree.leaves(run(each, keys[k])), strict=True):
                    np.testing.assert_allclose(
                        np.asarray(a[k], np.float64),
                        np.asarray(b, np.float64),
                        rtol=2e-4,
                        atol=1e-5,
                        err_msg=example.name,
                    )


def _lowered(example: table.Example, values: dict[str, Any]) -> Lowered:
    with jax.enable_x64(True):
        return lower(example.model, input_values=values, x64=True)


@pytest.mark.parametrize("operator", _sampled(_differentiable()), ids=_label)
def test_halves_are_rounded_once(operator: tuple[str, str]) -> None:
    """The float16 result is the float32 result on the same inputs, rounded: never more than one unit off."""
    for example in table.examples(*operator):
        halves = _values(example, np.float16)
        wide = {n: _converted(v, np.float32, 0.0, np.random.default_rng(0)) for n, v in halves.items()}
        try:
            rough, exact = (_lowered(example, v) for v in (halves, wide))
        except (UnimplementedError, UnsupportedError):
            continue
        with jax.enable_x64(True):
            key = jax.random.key(0)
            outputs = []
            for lowered, values in ((rough, halves), (exact, wide)):
                free = {n: v for n, v in values.items() if n not in lowered.specialised}
                run = jax.jit(lowered.forward, compiler_options={"xla_allow_excess_precision": False})
                outputs.append(jax.tree.leaves(run(lowered.initial, free, key)))
            for a, b in zip(*outputs, strict=True):
                if a.dtype != jnp.float16:
                    continue
                want = np.asarray(b, np.float16)
                ulp = np.spacing(np.abs(want))
                far = np.abs(np.asarray(a, np.float64) - want.astype(np.float64)) > 1.01 * ulp.astype(
                    np.float64
                )
                assert not np.any(far & np.isfinite(want)), (
                    example.name,
                    np.asarray(a)[far][:4],
                    want[far][:4],
                )


NOT_THERE = {
    "ImageDecoder",
    "RegexFullMatch",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
}


def test_every_version_of_every_onnx_operator_is_there() -> None:
    """From opset 6 on, but for strings, images and text; and no version is declared that ONNX has not."""
    versions: dict[str, set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            versions.setdefault(schema.name, set()).add(schema.since_version)
    newest = onnx.defs.onnx_opset_version()
    missing = {
        (name, opset)
        for name, since in versions.items()
        for opset in range(max(6, min(since)), newest + 1)
        if find_onnx_operator(table.ONNX, name, opset) is None
    }
    assert {name for name, _ in missing} == NOT_THERE
    ours = {(o.name, o.since) for o in operators() if o.domain == table.ONNX and o.since <= newest}
    assert {(name, since) for name, since in ours if since not in versions[name]} == set()
