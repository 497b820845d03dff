"""Profiles to report on: traced and costed networks, small enough to read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from podrun.costmodel.cost import cost_jaxpr
from podrun.report import Profile, read_report
from podrun.report.document import Batching


def cost(width: int) -> dict[str, Any]:
    """The tile model's report of a training step of one layer."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            with jax.named_scope("dense <1>"):
                return jnp.sum(jax.nn.relu(x @ w))

        return w - 0.1 * jax.grad(loss)(w)

    half = jnp.float16
    shapes = jax.ShapeDtypeStruct((256, width), half), jax.ShapeDtypeStruct((32, 256), half)
    return cost_jaxpr(jax.make_jaxpr(step)(*shapes), "gc200")


def pipeline_report() -> dict[str, Any]:
    """A report in the compiler's shape: three segments of a pipeline on two IPUs, and an update."""
    first, second = cost(512), cost(1024)
    seconds = {"compute": 2e-5, "copies": 1e-6, "update": 3e-6, "all_reduce": 4e-6}
    return {
        "version": 1,
        "step": {"cycles": 37240, "seconds": sum(seconds.values()), "seconds_by_cause": seconds},
        "pipelined": True,
        "segments": [
            {"ipu": 0, "cycle": 0, "sent_bytes": 64, "report": first},
            {"ipu": 1, "cycle": 1, "sent_bytes": 32, "report": second},
            {"ipu": 0, "cycle": 2, "sent_bytes": 0, "report": first},
        ],
        "update": [{"ipu": 0, "report": first}],
    }


def pipeline_profile() -> Profile:
    """What is read from it: four replicas, six micro-batches of eight samples."""
    return read_report(
        pipeline_report(),
        name="training",
        replicas=4,
        ipus_per_replica=2,
        batching=Batching(6),
        samples_per_micro_batch=8,
    )
