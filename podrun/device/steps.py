"""Compiles the steps of a program that is cut at its calls into the library, and runs one after the other."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from podrun.device.cutting import Step, Steps

_TYPES = {
    "i1": "bool",
    "ui8": "uint8",
    "ui16": "uint16",
    "ui32": "uint32",
    "ui64": "uint64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
}
Compile = Callable[[Any], Callable[..., Any]]
"""A ``jax.stages.Lowered`` -> what runs it."""


def compiled(steps: Steps, threads: int, device: Any, compile_one: Compile) -> Callable[..., list[Any]]:
    """The program as a function of its arguments. ``device``: of the client with so many ``threads``; None: JAX's own.

    Equal steps are compiled once. What no later step reads is freed.
    """
    config: Any = importlib.import_module("jax._src.config")
    calls: dict[str, Callable[..., Any]] = {}
    for step in steps.steps:
        if step.text not in calls:
            # what takes no longer than this to compile JAX keeps out of the cache
            with config.persistent_cache_min_compile_time_secs(math.inf) if step.call else nullcontext():
                calls[step.text] = compile_one(_lowered(step, threads, device))
    return _runner(steps, [calls[step.text] for step in steps.steps])


def _runner(steps: Steps, calls: Sequence[Callable[..., Any]]) -> Callable[..., list[Any]]:
    last = {v: place for place, step in enumerate(steps.steps) for v in step.reads}
    last |= dict.fromkeys(steps.results, len(calls))
    plan = [
        (call, step.reads, step.makes, [v for v in (*step.reads, *step.makes) if last.get(v, place) == place])
        for place, (call, step) in enumerate(zip(calls, steps.steps, strict=True))
    ]

    def run(*operands: Any) -> list[Any]:
        values = dict(enumerate(operands))
        for call, reads, makes, done in plan:
            values.update(zip(makes, call(*[values[v] for v in reads]), strict=True))
            for v in done:
                del values[v]
        return [values[v] for v in steps.results]

    return run


def _lowered(step: Step, threads: int, device: Any) -> Any:
    """A step as JAX lowers programs: another with the same signature, its insides exchanged.

    Its name has the number of threads, so that XLA's cache does not take one for the other.
    """
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    jax: Any = importlib.import_module("jax")
    placed = {}
    if device is not None:
        one = jax.sharding.SingleDeviceSharding(device)
        placed = {"in_shardings": one, "out_shardings": one}
    with jax.enable_x64(True):
        shapes, results = (
            [jax.ShapeDtypeStruct(shape, _TYPES[kind]) for kind, shape in side]
            for side in (step.takes, step.gives)
        )

        def program(*_: Any) -> list[Any]:
            return [jax.numpy.zeros(s.shape, s.dtype) for s in results]

        program.__name__ = f"step_by_{threads}"
        lowered = jax.jit(program, keep_unused=True, **placed).lower(*shapes)
        module = lowered.compiler_ir("stablehlo")
        with module.context, ir.Location.unknown():
            for old in list(module.body.operations):
                old.operation.erase()
            parsed = ir.Module.parse(step.text)
            for new in parsed.body.operations:
                module.body.append(new.operation.clone())
    return lowered
