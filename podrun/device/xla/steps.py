"""Compiles the steps of a program that is cut at its calls into the library, and runs one after the other."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from podrun.device.xla.cutting import Step, Steps

Compile = Callable[[Step], Callable[[list[Any]], Sequence[Any]]]
"""A step -> what runs it, from a list of arrays on its device."""


def compiled(steps: Steps, device: Any, compile_one: Compile) -> Callable[..., list[Any]]:
    """The program as a function of its arguments. Equal steps are compiled once. What no later step reads is freed."""
    calls: dict[str, Callable[[list[Any]], Sequence[Any]]] = {}
    for step in steps.steps:
        if step.text not in calls:
            calls[step.text] = compile_one(step)
    return _runner(steps, device, [calls[step.text] for step in steps.steps])


def compiler(threads: int, device: Any, options: Mapping[str, bool | str]) -> Compile:
    """What compiles steps for a ``jax.Device``, of a client with so many ``threads``, or takes them from XLA's cache.

    `jax.jit` would trace and lower a program for each: half of the time it takes to load ResNet-50's training.
    """
    import jax

    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    config: Any = importlib.import_module("jax._src.config")
    inner: Any = importlib.import_module("jax._src.compiler")
    client: Any = importlib.import_module("jaxlib.xla_client")
    mlir: Any = importlib.import_module("jax.interpreters.mlir")
    device = device or jax.devices("cpu")[0]
    devices, place = client.DeviceList((device,)), np.array([[device]])
    built = inner.get_compile_options(1, 1, place, env_options_overrides=dict(options), backend=device.client)
    context = mlir.make_ir_context()

    def compile_one(step: Step) -> Callable[[list[Any]], Sequence[Any]]:
        # XLA cannot write calls into oneDNN to its cache: what takes no longer than this to compile JAX keeps out of it
        kept = config.persistent_cache_min_compile_time_secs(math.inf) if step.call else nullcontext()
        with context, ir.Location.unknown(), kept:
            module = ir.Module.parse(step.text)
            # the cache knows programs by their text: one must not be taken for that of another number of threads
            module.operation.attributes["sym_name"] = ir.StringAttr.get(f"step_by_{threads}")
            loaded = inner.compile_or_get_cached(device.client, module, place[0], built, (), devices)
        run: Callable[[list[Any]], Sequence[Any]] = loaded.execute
        return run

    return compile_one


def _runner(
    steps: Steps, device: Any, calls: Sequence[Callable[[list[Any]], Sequence[Any]]]
) -> Callable[..., list[Any]]:
    import jax

    last = {v: place for place, step in enumerate(steps.steps) for v in step.reads}
    last |= dict.fromkeys(steps.results, len(calls))
    plan = [
        (call, step.reads, step.makes, [v for v in (*step.reads, *step.makes) if last.get(v, place) == place])
        for place, (call, step) in enumerate(zip(calls, steps.steps, strict=True))
    ]

    def run(*operands: Any) -> list[Any]:
        values = dict(enumerate(jax.device_put(list(operands), device)))
        for call, reads, makes, done in plan:
            values.update(zip(makes, call([values[v] for v in reads]), strict=True))
            for v in done:
                del values[v]
        return [values[v] for v in steps.results]

    return run
