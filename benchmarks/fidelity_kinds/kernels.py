"""Records about vertices, codelets and single layers, named by their operation."""

from __future__ import annotations

import math

from fidelity_kinds import four_rows, own_formulas
from fidelity_kinds.record import TYPES, NotPredicted, Record
from podrun.costmodel import exchange, lookups, vertices
from podrun.costmodel.matmul import plan_product
from podrun.costmodel.products import Product
from podrun.costmodel.target import Chip


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
    _inside(height, width, kernel_h, kernel_w)
    rows = batch * ((height - kernel_h) // stride + 1)
    row_length = (width - kernel_w) // stride + 1
    total, supervisor = four_rows.four_row_cycles(rows, row_length, inputs, outputs, kernel_h, kernel_w)
    part, scope = record.params["part"], record.params["scope"]
    parts = four_rows.four_row_parts(rows, row_length, inputs, outputs, kernel_h, kernel_w)
    if part in parts:
        return record.rate(parts[part])
    if part != "total":
        raise NotPredicted(f"part {part!r} of a trace is not separated")
    return record.rate({"supervisor": supervisor, "worker": parts["busiest_worker"]}.get(scope, total))


def _inside(height: int, width: int, kernel_h: int, kernel_w: int) -> None:
    if kernel_h > height or kernel_w > width:
        raise NotPredicted(f"a window of {kernel_h}x{kernel_w} has no place in a field of {height}x{width}")


def _avg_pool(record: Record) -> float:
    names = ("batch", "height", "width", "in_channels", "kernel_h", "kernel_w", "stride")
    batch, height, width, channels, kernel_h, kernel_w, stride = record.need(*names)
    _inside(height, width, kernel_h, kernel_w)
    fields = batch * ((height - kernel_h) // stride + 1) * ((width - kernel_w) // stride + 1)
    return record.rate(
        own_formulas.pool_rows_cycles(
            fields, kernel_h * kernel_w, channels, TYPES[record.params["input_type"]]
        )
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
        return record.rate(own_formulas.last_stage_cycles(outputs, 2, continuous=True))
    if how == "generic":
        return record.rate(own_formulas.last_stage_cycles(outputs, 2, continuous=False))
    here = depth / tiles
    first, second = own_formulas.two_stage_reduce_cycles(outputs, here, dtype)
    return record.rate({"stage_1": first, "stage_2": second}.get(part, first + second))


def loss_cycles(
    chip: Chip,
    steps: int,
    label: int,
    dtype: str,
    *,
    step_part: int | None = None,
    label_part: int | None = None,
) -> float:
    """Alpha and beta of one entry, gradient reduction left out. ``step_part``, ``label_part``: time steps and labels of
    a partition.
    """
    turns, turn_cycles = lookups.wave_front(steps, label, dtype, step_part, label_part)
    return turns * (turn_cycles + exchange.sync_cycles(chip) + exchange.launch_cycles(chip))


def _ctc_loss(record: Record) -> float:
    """Alpha and beta; entries of a batch lie on tiles of their own."""
    steps, label = record.need("time_steps", "label_length")
    dtype, part = TYPES[record.params["input_type"]], record.params["part"]
    if dtype not in lookups.LOG_ADD:
        raise NotPredicted(f"no loss of {dtype}")
    if part == "reduction":
        return record.rate(lookups.loss_reduction_cycles(steps, label, dtype))
    if part != "total":
        raise NotPredicted(f"part {part!r} of a loss depends on its partition, which is not stated")
    split = record.params.get("split_time"), record.params.get("split_label")
    cycles = loss_cycles(record.chip, steps, label, dtype, step_part=split[0], label_part=split[1])
    if split[1] and split[1] < label:
        # Partitions of labels hold parts of one gradient: their sum belongs to the loss.
        cycles += lookups.loss_reduction_cycles(steps, label, dtype)
    return record.rate(cycles)


def _beam_search(record: Record) -> float:
    classes, beams = record.need("classes", "beam_width")
    parts = lookups.beam_parts(classes, beams)
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
    return record.rate(own_formulas.dot_cycles(_elements(record), dtype))


def _vector_arithmetic(record: Record) -> float:
    dtype = TYPES[record.params["input_type"]]
    if record.params.get("implementation") == "vectorised" or record.params.get("implementation") is None:
        return record.rate(vertices.elementwise_cycles(_elements(record), dtype, ("add",), 2))
    return record.rate(own_formulas.compiled_loop_cycles(_elements(record)))


def _qr(record: Record) -> float:
    """A Householder step on one tile: a product with the matrix and an update, a vector at a time."""
    dtype = TYPES[record.params["input_type"]]
    return record.rate(own_formulas.householder_cycles(_elements(record), dtype))


def _rows_update(record: Record) -> float:
    """Rows of a table updated by index; without the embedding planner, all rows on the tiles that hold the
    table.
    """
    shape, rows = record.need("shape", "batch")
    width = shape[-1] if len(shape) > 1 else 1
    planned = record.params.get("implementation") != "no_planner"
    tiles = record.chip.tiles if planned else max(1, min(record.chip.tiles, math.prod(shape) // width // 8))
    here = math.ceil(rows / tiles) if planned else rows
    return record.rate(float(vertices.multi_update_cycles(here, width)))


def _conv(record: Record) -> float:
    names = ("batch", "height", "width", "in_channels", "out_channels", "kernel_h", "kernel_w", "stride")
    batch, height, width, inputs, outputs, kernel_h, kernel_w, stride = record.need(*names)
    input_type, partials = record.product_types()
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
    input_type, partials = record.product_types()
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
    return record.rate(own_formulas.supervisor_loop_cycles(iterations))


def _compute_sets(record: Record) -> float:
    sets, each = record.need("compute_sets", "compute_set_cycles")
    launch = exchange.launch_cycles(record.chip) * (2.0 if record.params["nested_instrumentation"] else 1.0)
    return record.rate(sets * (each + launch))
