"""Records about structured grids: what each named kernel does per point, and how its codelet is written."""

from __future__ import annotations

from typing import Any

from fidelity_kinds import stencil
from fidelity_kinds.record import BYTES, TYPES, NotPredicted, Record
from podrun.costmodel import exchange
from podrun.costmodel.matmul import plan_product
from podrun.costmodel.products import Product

STENCILS: dict[str, dict[str, Any]] = {
    "gaussian_blur_3x3": {"taps": 9, "flops": 18, "values": 4, "code": None},
    "stencil_2d_32b": {"taps": 5, "flops": 10, "values": 8, "code": "scalar"},
    "lbm_d2q9": {"taps": 14, "flops": 15, "values": 9, "code": "scalar"},
    "heat_2d": {"taps": 5, "flops": 6, "values": 1, "code": "optimised_vertex"},
    "heat_3d": {"taps": 7, "flops": 8, "values": 1, "code": "optimised_vertex"},
    "diffusion_3d": {"taps": 13, "flops": 15, "values": 1, "code": "generated"},
    "acoustic_wave_3d": {"taps": 18, "flops": 20, "values": 1, "code": "generated"},
    "aliev_panfilov_2d": {"taps": 14, "flops": 28, "values": 2, "code": "optimised_vertex"},
}
"""What each named kernel does per value; ``code`` None: scalar or vector by the record's vector width."""


def grid_kernel(record: Record) -> float:
    """A structured-grid kernel."""
    params, chip = record.params, record.chip
    (name,) = record.need("name")
    if name not in STENCILS:
        raise NotPredicted(f"no stencil model for {name!r}")
    spec = STENCILS[name]
    ipus = max(record.ipus, params["ipus"])
    width, height, depth = record.need("width", "height", "depth")
    item = BYTES[params["data_type"]]
    if ipus & (ipus - 1):
        raise NotPredicted(f"{ipus} IPUs: systems hold powers of two")
    values = params["channels"] if name == "gaussian_blur_3x3" else spec["values"]
    lanes = int(params.get("vector_width") or 1) if spec["code"] is None else 1
    code = spec["code"] or ("vector" if lanes > 1 else "scalar")
    if params["implementation"] in stencil.TAP_CYCLES and spec["code"]:
        code = params["implementation"]
    if params["implementation"] == "poplin_conv":
        return _convolution(record, width, height, params["channels"], ipus)
    radius = max(1, params["space_order"] // 2)
    grid = stencil.StencilGrid(
        width,
        height,
        depth,
        values,
        item,
        spec["taps"]
        if radius == 1 or spec["taps"] > 9
        else spec["taps"] + (radius - 1) * 2 * (3 if depth > 1 else 2),
        radius,
        code,
        ipus,
        arranged=spec["code"] is None or name in ("stencil_2d_32b", "lbm_d2q9"),
        lanes=lanes,
        per_ipu=bool(params["size_is_per_ipu"]),
        smallest=(
            int(params.get("partition_h") or stencil.SMALLEST),
            int(params.get("partition_w") or stencil.SMALLEST),
        ),
    )
    phases = stencil.sweep(chip, grid)
    if record.metric == "fraction":
        raise NotPredicted("the source's roofline counts operations in a way the record does not say")
    phase = params["phase"]
    if phase != "total" and phase not in phases:
        raise NotPredicted(f"phase {phase!r} of a stencil is not modelled")
    cycles = sum(phases.values()) if phase == "total" else phases[phase]
    sweeps = 1
    if record.metric not in RATES and phase == "total":
        (sweeps,) = record.need("sweeps")
    traffic = float(grid.points * values * item * spec["taps"])
    return record.rate(
        cycles * sweeps, flops=float(grid.points) * spec["flops"], points=grid.points, nbytes=traffic
    )


RATES = ("tflops", "gpoints_per_s", "bandwidth_gb_s")
"""Metrics that do not depend on how many sweeps are made."""


def _convolution(record: Record, width: int, height: int, channels: int, ipus: int) -> float:
    """The blur written as a grouped convolution with the library."""
    input_type = TYPES[record.params["data_type"]]
    if input_type not in ("float16", "float32"):
        raise NotPredicted(f"no library convolution of {input_type}")
    # Every output channel sees every input channel: a dense convolution with few channels.
    product = Product(
        1,
        width * height // ipus,
        channels,
        channels,
        input_type,
        input_type,
        "float32",
        kernel=9,
        row_length=width,
        proportion=record.params["available_memory_proportion"],
    )
    chip = record.chip
    plan = plan_product(chip, product)
    launch, sync = plan.overhead(chip)
    phases = {"compute": plan.compute + launch, "pre_arrange": plan.rearrange, "exchange": plan.exchange}
    phases["sync"] = sync
    if ipus > 1:
        rim = height * channels * BYTES[record.params["data_type"]]
        phases["global_exchange"] = exchange.neighbour_seconds(chip, rim) * chip.clock_hz
        phases["sync"] += exchange.global_sync_cycles(chip, ipus) + stencil.GLOBAL_SKEW
    phase = record.params["phase"]
    if phase != "total" and phase not in phases:
        raise NotPredicted(f"phase {phase!r} of a library convolution is not separated")
    if phase != "total":
        return record.rate(phases[phase])
    sweeps = 1
    if record.metric not in RATES:
        (sweeps,) = record.need("sweeps")
    return record.rate(sum(phases.values()) * sweeps, flops=2.0 * product.macs, points=width * height)
