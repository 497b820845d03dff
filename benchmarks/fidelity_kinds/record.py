"""A published measurement, what a prediction may use of it, and the one default for each parameter left
open."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podrun.costmodel.target import BOW, CHIPS, GC200, SYSTEMS, Chip

DEFAULTS: dict[str, dict[str, Any]] = {
    "amp_tile": {
        "input_type": "fp16",
        "partials_type": "fp16",
        "tiles": 1472,
        "rows": 1,
        "in_channels": 16,
        "out_channels": 16,
    },
    "vertex": {
        "batch": 1,
        "stride": 1,
        "input_type": "fp16",
        "partials_type": "fp32",
        "available_memory_proportion": 0.6,
        "tiles": 1,
        "part": "total",
        "scope": "program",
        "mode": "inference",
        "kernel_h": 1,
        "kernel_w": 1,
        "compute_sets": 1,
        "nested_instrumentation": False,
    },
    "memory_bandwidth": {"implementation": "optimised_cpp", "data_type": "fp32"},
    "exchange": {
        "implementation": "implicit",
        "phase": "total",
        "iterations": 1,
        "compute_cycles": 0,
        "data_type": "fp32",
    },
    "sync": {"ipus": 1, "compute_sets": 1},
    "host_stream": {"phase": "total", "bytes_to_device": 4, "bytes_from_device": 0, "data_type": "fp32"},
    "session_call": {"micro_batch": 1, "gradient_accumulation": 1, "replicas": 1, "samples": 1},
    "all_reduce": {"data_type": "fp16", "method": "default"},
    "ipu_link": {"ipus": 2},
    "gemm": {
        "input_type": "fp16",
        "partials_type": "fp16",
        "implementation": "library",
        "phase": "total",
        "serial_split_k": 1,
        "serial_split_variant": "switch",
        "chained": 1,
        "allocator": "optimised",
    },
    "sparse_matmul": {"m": 4096, "k": 4096, "block_size": 1, "input_type": "fp16", "pattern": "static"},
    "network": {
        "mode": "inference",
        "gradient_accumulation": 1,
        "replicas": 1,
        "ipus_per_replica": 1,
        "ipus": 1,
        "packing_factor": 1.0,
        "input_type": "fp16",
        "recompute": False,
        "phase": "total",
    },
    "memory": {
        "mode": "inference",
        "micro_batch": 1,
        "ipus": 1,
        "input_type": "fp16",
        "available_memory_proportion": 0.6,
        "norm": "batch",
    },
    "stencil": {
        "implementation": "stencil_codelet",
        "phase": "total",
        "depth": 1,
        "channels": 1,
        "ipus": 1,
        "data_type": "fp32",
        "size_is_per_ipu": False,
        "space_order": 2,
        "available_memory_proportion": 0.6,
    },
}
"""By kind: the value a parameter takes where the record leaves it open. One default per parameter."""

MK2_CHIP: dict[tuple[str, str], Chip] = {("gemm", "tflops"): BOW, ("sparse_matmul", "tflops"): BOW}
"""The chip taken for ``mk2`` (GC200 or Bow not stated) where a time or rate needs a clock; GC200
elsewhere."""

GC2_SERVER_IPUS = 16
"""IPUs of the largest GC2 system: eight cards in a server. Published."""

TYPES = {"fp8": "float8", "fp16": "float16", "fp32": "float32", "int32": "int32"}
BYTES = {"fp8": 1, "fp16": 2, "fp32": 4, "int32": 4}


class NotPredicted(Exception):
    """podrun does not model this record; the text says why."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a prediction may see: kind, target, metric and parameters (defaults filled in)."""

    kind: str
    target: str
    metric: str
    params: Mapping[str, Any]

    @property
    def chip(self) -> Chip:
        """The chip of the target.

        Raises:
            NotPredicted: the target does not say which chip.
        """
        name = re.sub(r"^\d+x", "", self.target)
        if name in CHIPS:
            return CHIPS[name]
        if name in SYSTEMS:
            return SYSTEMS[name].chip
        if name in ("mk2", "mk2-pod4"):
            return MK2_CHIP.get((self.kind, self.metric), GC200)
        if name == "ipu":
            # Not stated which: a GC2 server holds 16, so more of them are a POD of the next generation.
            return CHIPS["gc2" if self.ipus <= GC2_SERVER_IPUS else "gc200"]
        if name == "c600-or-bow":
            return CHIPS["c600"]
        raise NotPredicted(f"target {self.target!r} does not say which chip")

    @property
    def ipus(self) -> int:
        """IPUs of the target."""
        counted = re.match(r"^(\d+)x", self.target)
        if counted:
            return int(counted[1])
        if self.target in SYSTEMS:
            return SYSTEMS[self.target].ipus
        return 4 if self.target == "mk2-pod4" else 1

    def need(self, *names: str) -> list[Any]:
        """Parameters that must be there.

        Raises:
            NotPredicted: one is null and has no default.
        """
        missing = [name for name in names if self.params.get(name) is None]
        if missing:
            raise NotPredicted(f"not stated and no sensible default: {', '.join(missing)}")
        return [self.params[name] for name in names]

    def product_types(self) -> tuple[str, str]:
        """Types of a matrix product's operands and partial sums; singles are always summed in singles.

        Raises:
            NotPredicted: the chip's matrix unit does not take them.
        """
        operands, partials = (TYPES[self.params[key]] for key in ("input_type", "partials_type"))
        if f"amp_inputs_{operands}" not in self.chip.facts or partials not in ("float16", "float32"):
            raise NotPredicted(
                f"the matrix unit of {self.chip.title} takes no {operands} with {partials} partials"
            )
        return operands, "float32" if operands == "float32" else partials

    def rate(self, cycles: float, flops: float = 0.0, points: float = 0.0, nbytes: float = 0.0) -> float:
        """``cycles`` of one chip's clock as the record's metric."""
        if not math.isfinite(cycles) or cycles <= 0.0:
            raise NotPredicted("nothing of this kind happens with these parameters")
        seconds = cycles / self.chip.clock_hz
        made = {
            "cycles": cycles,
            "tile_mean_cycles": cycles,
            "time_s": seconds,
            "latency_ms": seconds * 1e3,
            "latency_ns": seconds * 1e9,
            "tflops": flops / seconds / 1e12,
            "gpoints_per_s": points / seconds / 1e9,
            "bandwidth_gb_s": nbytes / seconds / 1e9,
        }
        if self.metric not in made:
            raise NotPredicted(f"metric {self.metric!r} of kind {self.kind!r} is not modelled")
        value = made[self.metric]
        if not value:
            raise NotPredicted(f"metric {self.metric!r} needs a count that this workload does not fix")
        return value


def make_record(raw: Mapping[str, Any]) -> Record:
    """A Record from one of the file's objects: nulls filled with the kind's defaults."""
    kind = str(raw["kind"])
    params = dict(DEFAULTS.get(kind, {}))
    params.update({name: value for name, value in raw.get("params", {}).items() if value is not None})
    return Record(kind, str(raw["target"]), str(raw["metric"]), params)
