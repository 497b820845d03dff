"""Records about kernels: vertices, whole matrix products, stencils."""

from __future__ import annotations

import math
from typing import Any

from fidelity_kinds.record import BYTES, TYPES, NotPredicted, Record
from podrun.device.tiles import amp, bandwidth, ctc, exchange, host, sparse, stencil, vertices
from podrun.device.tiles.matmul import Product, plan_product

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


def gemm(record: Record) -> float:
    """A whole matrix product."""
    m, k, n = record.need("m", "k", "n")
    chip, params = record.chip, record.params
    flops = 2.0 * m * k * n * params["chained"]
    if params["implementation"] == "custom_codelet":
        return _matrix_vector(record, m, k, n)
    input_type, partials = TYPES[params["input_type"]], TYPES[params["partials_type"]]
    if input_type == "float32":
        partials = "float32"
    if params["phase"] not in ("total", "compute", "exchange"):
        raise NotPredicted(f"phase {params['phase']!r} of a library product is not separated")
    splits = params["serial_split_k"]
    if params.get("tiles") == 1:
        cycles = _one_tile(chip, m, k, n, input_type, partials, splits, params["serial_split_variant"])
        return record.rate(cycles, flops=flops)
    product = Product(1, max(m, n), k, min(m, n), input_type, input_type, partials)
    plan = plan_product(chip, product)
    part = {"total": plan.cycles(chip), "compute": plan.compute, "exchange": plan.exchange}[params["phase"]]
    if params["allocator"] == "linear":
        part += (m * k + k * n) * BYTES[params["input_type"]] / chip.tiles / chip.exchange_bytes
    # A library's suite reports cycles of a layer's three training passes; a rate is that of one product.
    passes = params.get("passes") or (
        3.0 if record.metric == "cycles" and params["phase"] == "total" else 1.0
    )
    return record.rate(part * params["chained"] * passes, flops=flops)


def _matrix_vector(record: Record, m: int, k: int, n: int) -> float:
    """The tutorial's product: one hand-written C++ vertex per output, operands mapped linearly."""
    chip, item = record.chip, BYTES[record.params["input_type"]]
    per_tile = m * n / chip.tiles
    rounds = math.ceil(per_tile / vertices.WORKERS)
    moved = (m * k / chip.tiles + k * n) * item / chip.exchange_bytes
    nbytes = (m * k + k * n + m * n) * item
    streams = host.stream_copy(chip, nbytes)
    phases = {
        "compute": vertices.WORKERS * rounds * (30.0 + k * CPP_MAC),
        "exchange": exchange.PHASE_CYCLES + moved * LINEAR_FRAGMENTS,
        # Waiting for the host at both ends of the program shows as sync.
        "sync": 3.0 * exchange.sync_cycles(chip) + streams["begin"] + streams["end"],
        "host": host.TRANSFER_CYCLES + nbytes / host.PCIE_BYTES_PER_SECOND * chip.clock_hz,
    }
    phase = record.params["phase"]
    if phase == "total":
        raise NotPredicted(
            "the host's own time between its calls is inside the total and is not published apart"
        )
    return record.rate(phases[phase] if phase in phases else sum(phases.values()), flops=2.0 * m * k * n)


CPP_MAC = 2.33
"""Issue slots per element of a compiled dot product: two loads, a co-issued multiply-add, a third of a
branch."""
LINEAR_FRAGMENTS = 1.1
"""Schedule length over word bound when a linearly mapped matrix moves to row-wise vertices. Derived."""


def _one_tile(
    chip: Any, m: int, k: int, n: int, input_type: str, partials: str, splits: int, variant: str
) -> float:
    """A product on one tile with a serial split: slices and outputs are rearranged in every turn of the
    loop."""
    part = math.ceil(k / splits)
    item = 2.0 if input_type == "float16" else 4.0
    units = chip.conv_units(input_type, partials)
    turn = float(amp.matmul_cycles(m, part, n, input_type=input_type, partials_type=partials, units=units))
    turn += exchange.ARRANGE_PER_BYTE * item * (m * part + part * n + m * n)
    join = vertices.scaled_add_cycles(m * n, partials)
    clear = vertices.fill_cycles(m * n, partials)
    joins = splits if variant == "zeroing" else splits - 1
    control = {"if": 120.0, "switch": 0.0, "zeroing": 0.0}[variant] * splits
    return splits * turn + joins * join + control + (clear if variant == "zeroing" else 0.0)


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
    values = params["channels"] if name == "gaussian_blur_3x3" else spec["values"]
    lanes = int(params.get("vector_width") or 1) if spec["code"] is None else 1
    code = spec["code"] or ("vector" if lanes > 1 else "scalar")
    if params["implementation"] in stencil.TAP_CYCLES and spec["code"]:
        code = params["implementation"]
    if params["implementation"] == "poplin_conv":
        return _convolution(record, width, height, params["channels"], ipus)
    radius = max(1, params["space_order"] // 2)
    grid = stencil.Grid(
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
        return _roofline(record, grid, phases)
    phase = params["phase"]
    if phase != "total" and phase not in phases:
        raise NotPredicted(f"phase {phase!r} of a stencil is not modelled")
    cycles = sum(phases.values()) if phase == "total" else phases[phase]
    sweeps = 1 if record.metric in ("tflops", "gpoints_per_s", "bandwidth_gb_s") else params["sweeps"]
    if record.metric == "time_s":
        record.need("sweeps")
        if record.params.get("sweeps") == 1 and phase == "total":
            raise NotPredicted("the number of sweeps is not stated")
    traffic = float(grid.points * values * item * spec["taps"])
    return record.rate(
        cycles * sweeps, flops=float(grid.points) * spec["flops"], points=grid.points, nbytes=traffic
    )


def _roofline(record: Record, grid: stencil.Grid, phases: dict[str, float]) -> float:
    """Share of the vector unit's roofline: intensity 0.55 (FP32 0.275) FLOP per byte against 16 B per
    cycle."""
    raise NotPredicted("the source's roofline counts operations in a way the record does not say")


def _convolution(record: Record, width: int, height: int, channels: int, ipus: int) -> float:
    """The blur written as a grouped convolution with the library."""
    input_type = TYPES[record.params["data_type"]]
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
    extra = 0.0
    if ipus > 1:
        extra = (
            stencil.links.neighbour_seconds(chip, height * channels * BYTES[record.params["data_type"]])
            * chip.clock_hz
        )
        extra += exchange.global_sync_cycles(chip, ipus) + stencil.GLOBAL_SKEW
    return record.rate((plan.cycles(chip) + extra) * record.params["sweeps"])


def vertex(record: Record) -> float:
    """A library operation or codelet."""
    (op,) = record.need("op")
    makers = {
        "conv_nx1": _conv_nx1,
        "avg_pool": _avg_pool,
        "reduce_add": _reduce,
        "reduce_max": _reduce,
        "conv": _conv,
        "fully_connected": _fully_connected,
        "conv_pointwise": _conv,
        "conv_depthwise": _conv,
        "spin_loop": _spin_loop,
        "block_of_compute_sets": _compute_sets,
        "ctc_loss": _ctc_loss,
        "ctc_beam_search": _beam_search,
        "dot": _dot,
        "vector_arithmetic": _vector_arithmetic,
        "qr": _qr,
        "index_put": _rows_update,
        "scatter_reduce_grad": _rows_update,
    }
    if op not in makers:
        raise NotPredicted(f"no planner for {op!r}")
    return makers[op](record)


def _conv_nx1(record: Record) -> float:
    """The kernel form of AMP on one tile; ``supervisor`` scope leaves the workers' time out."""
    names = ("batch", "height", "width", "in_channels", "out_channels", "kernel_h", "kernel_w", "stride")
    batch, height, width, inputs, outputs, kernel_h, kernel_w, stride = record.need(*names)
    rows = batch * ((height - kernel_h) // stride + 1)
    row_length = (width - kernel_w) // stride + 1
    total, supervisor = amp.four_row_cycles(rows, row_length, inputs, outputs, kernel_h, kernel_w)
    part, scope = record.params["part"], record.params["scope"]
    parts = amp.four_row_parts(rows, row_length, inputs, outputs, kernel_h, kernel_w)
    if part in parts:
        return record.rate(parts[part])
    if part != "total":
        raise NotPredicted(f"part {part!r} of a trace is not separated")
    return record.rate({"supervisor": supervisor, "worker": parts["busiest_worker"]}.get(scope, total))


def _avg_pool(record: Record) -> float:
    names = ("batch", "height", "width", "in_channels", "kernel_h", "kernel_w", "stride")
    batch, height, width, channels, kernel_h, kernel_w, stride = record.need(*names)
    fields = batch * ((height - kernel_h) // stride + 1) * ((width - kernel_w) // stride + 1)
    return record.rate(
        vertices.pool_rows_cycles(fields, kernel_h * kernel_w, channels, TYPES[record.params["input_type"]])
    )


def _reduce(record: Record) -> float:
    """Reductions on tile: outputs are what is left of the shape, partials what one tile holds."""
    shape, dims = record.need("shape", "reduce_dims")
    outputs = math.prod(s for d, s in enumerate(shape) if d not in dims)
    depth = math.prod(s for d, s in enumerate(shape) if d in dims)
    tiles, part = record.params["tiles"], record.params["part"]
    how = record.params.get("implementation") or "current"
    dtype = TYPES[record.params["input_type"]]
    if how == "previous":
        raise NotPredicted("an older implementation that is not described")
    if how == "continuous_reduce":
        return record.rate(vertices.last_stage_cycles(outputs, 2, continuous=True))
    if how == "generic":
        return record.rate(vertices.last_stage_cycles(outputs, 2, continuous=False))
    here = depth / tiles
    first, second = vertices.two_stage_reduce_cycles(outputs, here, dtype)
    return record.rate({"stage_1": first, "stage_2": second}.get(part, first + second))


def _ctc_loss(record: Record) -> float:
    """Alpha and beta; entries of a batch lie on tiles of their own."""
    steps, label = record.need("time_steps", "label_length")
    dtype, part = TYPES[record.params["input_type"]], record.params["part"]
    if part == "reduction":
        return record.rate(ctc.loss_reduction_cycles(steps, label, dtype))
    if part != "total":
        raise NotPredicted(f"part {part!r} of a loss depends on its partition, which is not stated")
    split = record.params.get("split_time"), record.params.get("split_label")
    cycles = ctc.loss_cycles(record.chip, steps, label, dtype, step_part=split[0], label_part=split[1])
    if split[1] and split[1] < label:
        # Partitions of labels hold parts of one gradient: their sum belongs to the loss.
        cycles += ctc.loss_reduction_cycles(steps, label, dtype)
    return record.rate(cycles)


def _beam_search(record: Record) -> float:
    classes, beams = record.need("classes", "beam_width")
    parts = ctc.beam_parts(classes, beams)
    part = record.params["part"]
    if part in parts:
        return record.rate(parts[part])
    loops = record.params.get("loops") or record.params.get("time_steps") or 1
    return record.rate(loops * sum(parts.values()))


def _elements(record: Record) -> float:
    (shape,) = record.need("shape")
    return math.prod(shape) / record.params["tiles"]


def _dot(record: Record) -> float:
    """Two loads and a multiply-add per vector, then the workers' sums joined."""
    dtype = TYPES[record.params["input_type"]]
    each = vertices.per_worker_vectors(_elements(record), dtype)
    return record.rate(vertices.SUPERVISOR + vertices.WORKERS * (30.0 + 2.0 * each))


def _vector_arithmetic(record: Record) -> float:
    dtype = TYPES[record.params["input_type"]]
    if record.params.get("implementation") == "vectorised" or record.params.get("implementation") is None:
        return record.rate(vertices.elementwise_cycles(_elements(record), dtype, ("add",), 2))
    # A compiled loop takes its issue slots for every element.
    each = math.ceil(_elements(record) / vertices.WORKERS)
    return record.rate(vertices.SUPERVISOR + vertices.WORKERS * (27.0 + bandwidth.LOOP_SLOTS * each))


def _qr(record: Record) -> float:
    """A Householder step on one tile: a product with the matrix and an update, a vector at a time."""
    each = vertices.per_worker_vectors(_elements(record), TYPES[record.params["input_type"]])
    return record.rate(vertices.SUPERVISOR + vertices.WORKERS * (27.0 + 4.0 * each))


def _rows_update(record: Record) -> float:
    """Rows of a table updated by index; without the embedding planner, all rows on the tiles that hold the table."""
    shape, rows = record.need("shape", "batch")
    width = shape[-1] if len(shape) > 1 else 1
    planned = record.params.get("implementation") != "no_planner"
    tiles = record.chip.tiles if planned else max(1, min(record.chip.tiles, math.prod(shape) // width // 8))
    here = math.ceil(rows / tiles) if planned else rows
    return record.rate(vertices.multi_update_cycles(here, width))


def sparse_product(record: Record) -> float:
    """A sparse matrix times a dense one; the sizes of the sparse matrix have a default."""
    m, k, n, density = record.need("m", "k", "n", "density")
    input_type = TYPES[record.params["input_type"]]
    plan = sparse.plan_sparse(record.chip, m, k, n, density, record.params["block_size"], input_type)
    return record.rate(plan.cycles(record.chip), flops=plan.flops)


def graph_search(record: Record) -> float:
    """A breadth-first search: traversed edges per second."""
    (name,) = record.need("name")
    if name != "bfs":
        raise NotPredicted(f"the work of {name!r} depends on its data, which are not in the record")
    scale, factor = record.params.get("scale"), record.params.get("edge_factor")
    edges = record.params.get("edges") or (factor * 2**scale if scale and factor else None)
    if edges is None:
        raise NotPredicted("not stated and no sensible default: edges")
    tiles = record.params.get("tiles") or record.chip.tiles
    return edges * record.chip.clock_hz / sparse.search_cycles(record.chip, edges, tiles) / 1e9


def _conv(record: Record) -> float:
    names = ("batch", "height", "width", "in_channels", "out_channels", "kernel_h", "kernel_w", "stride")
    batch, height, width, inputs, outputs, kernel_h, kernel_w, stride = record.need(*names)
    input_type, partials = TYPES[record.params["input_type"]], TYPES[record.params["partials_type"]]
    depthwise = record.params["op"] == "conv_depthwise"
    field = math.ceil(height / stride) * math.ceil(width / stride)
    product = Product(
        inputs if depthwise else 1,
        batch * field,
        1 if depthwise else inputs,
        1 if depthwise else outputs,
        input_type,
        input_type,
        partials,
        kernel=kernel_h * kernel_w,
        row_length=math.ceil(width / stride),
        stride=stride,
        proportion=record.params["available_memory_proportion"],
    )
    plan = plan_product(record.chip, product)
    if record.metric == "temporary_bytes":
        return plan.temporary_bytes
    part = record.params["part"]
    passes = 3.0 if record.params["mode"] == "train" else 1.0
    by_part = {
        "total": plan.cycles(record.chip) * passes,
        "exchange": plan.exchange,
        "compute": plan.compute,
        "input_transform": plan.rearrange,
    }
    if part not in by_part:
        raise NotPredicted(f"part {part!r} of a planned convolution is not separated")
    return record.rate(by_part[part])


def _fully_connected(record: Record) -> float:
    inputs, outputs, batch = record.need("in_channels", "out_channels", "batch")
    input_type, partials = TYPES[record.params["input_type"]], TYPES[record.params["partials_type"]]
    product = Product(
        1,
        max(batch, outputs),
        inputs,
        min(batch, outputs),
        input_type,
        input_type,
        partials,
        proportion=record.params["available_memory_proportion"],
    )
    plan = plan_product(record.chip, product)
    if record.metric == "temporary_bytes":
        return plan.temporary_bytes
    return record.rate(plan.cycles(record.chip) * (3.0 if record.params["mode"] == "train" else 1.0))


def _spin_loop(record: Record) -> float:
    (iterations,) = record.need("iterations")
    return record.rate(vertices.supervisor_loop_cycles(iterations))


def _compute_sets(record: Record) -> float:
    sets, each = record.need("compute_sets", "compute_set_cycles")
    launch = exchange.launch_cycles(record.chip) * (2.0 if record.params["nested_instrumentation"] else 1.0)
    return record.rate(sets * (each + launch))
