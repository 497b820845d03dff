"""From one micro-batch to one batch: pipeline, accumulation, weight update, all-reduce, streamed state, host input.

Every second of a batch has a named cause. A batch of G micro-batches on P IPUs per replica:

* each IPU holds a forward and a backward stage, so the pipeline has 2P - 1 stages and runs G + 2P - 2 steps;
* a step takes its slowest IPU, plus the copy of activations and gradients to the neighbours, or the host's
input if
  that is slower (it is prefetched);
* then once per batch: gradients all-reduced, weights updated, optimizer state streamed if it lives off chip.
"""

from __future__ import annotations

import math

from podrun.core.cluster import IPUS_PER_MACHINE, MAX_ILD_IPUS
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel import exchange, vertices
from podrun.costmodel.exchange import (
    RELEASE_SECONDS,
    STREAM_BYTES_PER_SECOND,
    WAIT_SECONDS,
    global_sync_cycles,
    launch_cycles,
)
from podrun.costmodel.target import Chip

STREAMING_BYTES_PER_SECOND = 20e9
"""Streaming memory of a machine, shared by its IPUs. Recalled, no measurement was found; DDR peak is
38.4e9."""
DOMAIN_SECONDS = 2.5e-3
"""Seconds in which IPU-Link domains wait for each other, once a batch and per doubling of domains. Derived from two
ResNet-50 rows, POD128 and POD256: GW-Link latency and the start of several hosts are not published apart.
"""
UPDATE_PASSES = {"sgd": 2, "momentum": 3, "lars": 6, "adam": 10, "lamb": 14}
"""Element-wise passes over the weights that an optimizer takes (its norms included)."""


@dataclass(frozen=True, slots=True)
class BatchWork:
    """The facts about a batch that the model needs.

    ``stage_cycles``: cycles of one micro-batch on the slowest IPU, forward, backward and recomputation together.
    ``boundary_bytes``: activations that cross to the next IPU. ``weights``: parameters on the fullest IPU, with
    ``gradient_bytes`` and ``state_bytes`` each (state only if it is off chip). ``input_bytes``: of one micro-batch.
    ``sharded``: each replica keeps and updates its part of the optimizer state (replicated tensor sharding) and gathers
    the weights, of ``weight_bytes`` each.
    """

    stage_cycles: float
    stages: int = 1
    accumulation: int = 1
    replicas: int = 1
    boundary_bytes: float = 0.0
    weights: float = 0.0
    gradient_bytes: float = 4.0
    state_bytes: float = 0.0
    optimizer: str = "momentum"
    input_bytes: float = 0.0
    training: bool = True
    weight_bytes: float = 2.0
    sharded: bool = False


def batch_seconds(chip: Chip, batch: BatchWork) -> dict[str, float]:
    """Seconds of one batch by cause: compute, copies, ramp, host, update, all_reduce (or reduce_scatter and
    all_gather), domains, state, sync."""
    stage = batch.stage_cycles / chip.clock_hz
    ipus = batch.stages * batch.replicas
    copies = 0.0
    if batch.stages > 1:
        crossings = 2.0 if batch.training else 1.0
        copies = crossings * exchange.neighbour_seconds(chip, batch.boundary_bytes)
        copies += crossings * global_sync_cycles(chip, batch.stages) / chip.clock_hz
    sharing = min(IPUS_PER_MACHINE, ipus) / min(IPUS_PER_MACHINE, batch.stages)
    host = batch.input_bytes * sharing / STREAM_BYTES_PER_SECOND
    steady = max(stage + copies, host)
    ramp = (2 * batch.stages - 2) if batch.training else (batch.stages - 1)
    causes = {
        "compute": batch.accumulation * stage,
        "copies": batch.accumulation * copies,
        "ramp": ramp * steady,
        "host": batch.accumulation * max(0.0, host - stage - copies),
        "sync": global_sync_cycles(chip, ipus) / chip.clock_hz,
    }
    if not batch.training:
        causes["host"] += WAIT_SECONDS + RELEASE_SECONDS
        return causes
    parts = batch.replicas if batch.sharded else 1
    per_tile = math.ceil(batch.weights / parts / chip.tiles)
    passes = UPDATE_PASSES[batch.optimizer]
    update_cycles = vertices.scaled_add_cycles(per_tile, "float32") + launch_cycles(chip)
    causes["update"] = passes * update_cycles / chip.clock_hz
    causes |= _exchanged(chip, batch)
    domains = math.ceil(ipus / MAX_ILD_IPUS)
    causes["domains"] = DOMAIN_SECONDS * math.log2(domains) if domains > 1 else 0.0
    streamed = 2.0 * batch.weights / parts * batch.state_bytes * min(IPUS_PER_MACHINE, ipus)
    causes["state"] = streamed / STREAMING_BYTES_PER_SECOND
    return causes


def _exchanged(chip: Chip, batch: BatchWork) -> dict[str, float]:
    """Seconds of the exchange between replicas, once a batch. With sharded state each replica updates its part of the
    weights: the gradients' sum is scattered, and the new weights are gathered.
    """
    ranks, gradients = batch.replicas, batch.weights * batch.gradient_bytes
    if not batch.sharded:
        seconds = exchange.all_reduce_seconds(chip, ranks, gradients, ipus_per_replica=batch.stages)
        return {"all_reduce": seconds}
    weights = batch.weights * batch.weight_bytes
    return {
        "reduce_scatter": exchange.reduce_scatter_seconds(
            chip, ranks, gradients, ipus_per_replica=batch.stages
        ),
        "all_gather": exchange.all_gather_seconds(chip, ranks, weights, ipus_per_replica=batch.stages),
    }
