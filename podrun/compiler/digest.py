"""What a Program is, as a digest: equal programs for one target have equal digests on every host.

A front end that knows what its forward function was made from (the model file, its options, the optimizer's
constants) can give a digest of that, and nothing needs to be traced. Otherwise the forward function and the
update rule are told by their StableHLO, which depends only on what they compute.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import jax

import podrun
from podrun.compiler.program import Program
from podrun.executable import EXECUTABLE_VERSION


def digest(program: Program, target: str, settings: dict[str, Any], identity: Iterable[bytes]) -> str:
    """Hexadecimal SHA-256. ``identity`` tells what the forward function and the update rule are."""
    description = {
        "podrun": podrun.__version__,
        "jax": jax.__version__,
        "format": EXECUTABLE_VERSION,
        "target": target,
        "settings": settings,
        "name": program.name,
        "parameters": {name: asdict(item) for name, item in program.parameters.items()},
        "inputs": {name: asdict(item) for name, item in program.inputs.items()},
        "anchors": [[item.name, item.retrieval.value, item.period] for item in program.anchors],
        "layout": [program.replicas, program.ipus_per_replica, program.accumulation_factor],
        "pipelined": [
            program.pipelined,
            program.pipeline_schedule.value,
            program.updates_each_micro_batch,
        ],
        "phases": None if program.phases is None else asdict(program.phases),
        "loss": [program.loss, program.loss_scaling, program.reduction.value],
        "automatic_scaling": None if program.automatic_scaling is None else asdict(program.automatic_scaling),
        "state_updates": dict(program.state_updates),
        "recompute": [
            program.recompute.rule,
            sorted(program.recompute.scopes),
            sorted(program.recompute.kept),
        ],
        "locations": asdict(program.locations),
        "metadata": dict(program.metadata),
    }
    found = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for part in identity:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()
