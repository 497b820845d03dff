"""The seam to the tile model: what one batch holds and takes on the tiles of an IPU.

The model reads the jaxpr of one replica and one micro-batch (forward and backward, not folded) and that of
the update.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from podrun.compiler import jax_internals
from podrun.compiler.abstract import abstract, buffer
from podrun.compiler.arenas import trained
from podrun.compiler.program import Program
from podrun.compiler.trace import Trace, evaluate


def micro_batch_jaxpr(program: Program, traced: Trace) -> ClosedJaxpr:
    """Forward, and backward if there is a loss, of one micro-batch on one replica. Arguments as in
    `Trace`."""
    weights = [spec.name for spec in trained(program)]
    names = (*traced.parameters, *traced.inputs)

    def run(*arguments: Any) -> Any:
        named = dict(zip(names, arguments[:-1], strict=True))

        def forward(chosen: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            values = evaluate(traced, [*(named | chosen).values(), arguments[-1]], {})
            return values[program.loss] if program.loss else jnp.float32(0), values

        if not weights:
            return forward({})[1]
        loss, pull_back, values = jax.vjp(forward, {n: named[n] for n in weights}, has_aux=True)
        return values, pull_back(jnp.ones_like(loss))

    specs = [abstract(program.parameters[n].spec) for n in traced.parameters]
    specs += [abstract(program.inputs[n].spec) for n in traced.inputs]
    return jax_internals.pruned(jax.make_jaxpr(run)(*specs, buffer((2,), "uint32")))


def update_jaxpr(program: Program) -> ClosedJaxpr | None:
    """The update of every weight, on one replica; None if there is none."""
    rule = program.update
    weights = trained(program)
    if rule is None or not weights:
        return None

    def run(weights_now: Any, gradients: Any, states: Any, scalars: Any) -> Any:
        return [
            rule.apply(spec.name, w, g, s, {n: scalars[n] for n in rule.scalars(spec.name)})
            for spec, w, g, s in zip(weights, weights_now, gradients, states, strict=True)
        ]

    tensors = [abstract(spec) for spec in weights]
    states = [{p: abstract(s) for p, (s, _) in sorted(rule.state(spec).items())} for spec in weights]
    names = sorted({name for spec in weights for name in rule.scalars(spec.name)})
    scalars = {name: buffer((), "float32") for name in names}
    return jax.make_jaxpr(run)(tensors, tensors, states, scalars)


def tile_report(program: Program, traced: Trace, target: str) -> dict[str, Any]:
    """The report of ``podrun.device.tiles`` for one batch, or a report that says that there is no model
    yet."""
    try:
        from podrun.device.tiles.cost import cost_jaxpr
    except ModuleNotFoundError as missing:
        if missing.name is None or not missing.name.startswith("podrun.device"):
            raise
        return {"step": {"cycles": None, "seconds": None}, "note": "This build has no tile model."}
    pieces = {"micro_batch": (micro_batch_jaxpr(program, traced), program.accumulation_factor)}
    update = update_jaxpr(program)
    if update is not None:
        pieces["update"] = (update, 1)
    reports = {name: cost_jaxpr(jaxpr, target) for name, (jaxpr, _) in pieces.items()}
    counts = {name: count for name, (_, count) in pieces.items()}
    step = {
        key: sum(counts[name] * report["step"][key] for name, report in reports.items())
        for key in ("cycles", "seconds")
    }
    return {"step": step, "pieces": reports, "counts": counts}
