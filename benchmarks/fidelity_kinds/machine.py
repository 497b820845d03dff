"""Records about one mechanism: AMP, tile memory, exchange, sync, host streams, links, collectives."""

from __future__ import annotations

from fidelity_kinds import own_formulas
from fidelity_kinds.record import BYTES, TYPES, NotPredicted, Record
from podrun.costmodel import exchange, product_vertices


def amp_tile(record: Record) -> float:
    """One 1x1 convolution vertex."""
    rows, inputs, outputs = record.need("rows", "in_channels", "out_channels")
    input_type, partials = record.product_types()
    units = record.chip.conv_units(input_type, partials)
    cycles = float(
        product_vertices.matmul_cycles(
            rows, inputs, outputs, input_type=input_type, partials_type=partials, units=units
        )
    )
    return record.rate(cycles, flops=2.0 * rows * inputs * outputs * record.params["tiles"])


def memory_bandwidth(record: Record) -> float:
    """Streaming kernels and latency."""
    pattern, how = record.need("pattern", "implementation")
    if pattern == "load_latency":
        return record.rate(own_formulas.load_latency_cycles())
    per_cycle = own_formulas.bytes_per_cycle(record.chip, pattern, how, TYPES[record.params["data_type"]])
    if record.metric == "fraction":
        return per_cycle / record.chip.load_bytes
    # A triad moves three elements for each multiply-add.
    flops = per_cycle / (3.0 * BYTES[record.params["data_type"]]) * 2.0 if pattern == "stream_triad" else 0.0
    return record.rate(1.0, nbytes=per_cycle * record.chip.tiles, flops=flops * record.chip.tiles)


def exchange_kind(record: Record) -> float:
    """On-chip exchange."""
    chip, (pattern,) = record.chip, record.need("pattern")
    if pattern == "point_to_point":
        return record.rate(chip.facts["exchange_latency_cycles"].value)
    if pattern == "latency_under_load":
        loaded = 1.0 + own_formulas.LOADED_LATENCY
        if record.metric == "ratio":
            return loaded
        return record.rate(chip.facts["exchange_latency_cycles"].value * loaded)
    if pattern != "halo_swap":
        raise NotPredicted(f"exchange pattern {pattern!r}: the traffic is not given")
    if record.params["phase"] not in ("exchange", "total"):
        raise NotPredicted(f"phase {record.params['phase']!r} of a halo swap is not separated")
    height, width = record.need("block_h", "block_w")
    moved = own_formulas.halo_cycles(
        chip, height, width, BYTES[record.params["data_type"]], record.params["implementation"]
    )
    if record.params["phase"] == "total":
        moved += record.params["compute_cycles"] + exchange.sync_cycles(chip) + exchange.launch_cycles(chip)
    return record.rate(moved * record.params["iterations"])


def sync(record: Record) -> float:
    """Barriers."""
    chip, ipus = record.chip, max(record.ipus, record.params["ipus"])
    if record.params.get("pattern") == "compute_set_residue":
        each = exchange.global_sync_cycles(chip, ipus) + exchange.launch_cycles(chip)
        return record.rate(each * record.params["compute_sets"])
    return record.rate(exchange.global_sync_cycles(chip, ipus) + own_formulas.COUNTER_READ)


def host_stream(record: Record) -> float:
    """Host transfers."""
    (pattern,) = record.need("pattern")
    if pattern == "dataloader":
        raise NotPredicted("the host's own data loader is not part of the device model")
    chip, phase, way = record.chip, record.params["phase"], record.params.get("direction") or "both"
    stated = {way: record.params.get(f"bytes_{way}") for way in ("to_device", "from_device")}
    # Where no size is stated, one word: such rows are about the waits.
    moved = sum(stated[one] or 0 for one in stated if way in (one, "both")) or WORD
    parts = own_formulas.stream_copy(chip, moved)
    if record.params.get("occurrence") == 1:
        # The first copy of a program finds the host waiting: two barriers before, one after.
        parts = {**parts, "begin": 2.0 * exchange.sync_cycles(chip), "end": exchange.sync_cycles(chip)}
    if pattern == "stream_copy":
        return record.rate(parts[phase] if phase in parts else sum(parts.values()), nbytes=moved)
    return record.rate(parts["mid"], nbytes=moved)


WORD = 4
"""Bytes of a copy whose size is not stated."""


def session_call(record: Record) -> float:
    """One call of a session from the links."""
    train = record.params.get("mode") == "train"
    rounds = record.params["gradient_accumulation"] * own_formulas.REMOTE_ROUNDS if train else 0
    seconds = own_formulas.session_call_seconds(record.chip, rounds)
    if record.metric == "samples_per_s":
        return float(record.params["samples"]) / seconds
    return record.rate(seconds * record.chip.clock_hz)


def all_reduce(record: Record) -> float:
    """Replicated all-reduce over IPU-Links."""
    label = record.params.get("size_label")
    # A bare label is taken as elements, as the tool that prints it takes them.
    nbytes = record.params.get("bytes") or (label * BYTES[record.params["data_type"]] if label else None)
    if nbytes is None:
        raise NotPredicted("not stated and no sensible default: bytes")
    ipus = max(record.ipus, record.params.get("ipus") or 1)
    method = None if record.params["method"] == "default" else record.params["method"]
    if ipus < 2:
        raise NotPredicted("one rank has nothing to reduce")
    seconds = exchange.all_reduce_seconds(record.chip, ipus, nbytes, method=method)
    if record.metric == "ratio":
        # Against the default for a large tensor over many ranks: two rings in opposite directions
        # (`podrun.collectives.timing.Method`).
        return seconds / exchange.all_reduce_seconds(record.chip, ipus, nbytes, method="pair")
    return record.rate(seconds * record.chip.clock_hz, nbytes=float(nbytes))


def ipu_link(record: Record) -> float:
    """Traffic between chips other than a collective."""
    (pattern,) = record.need("pattern")
    nbytes = record.params.get("bytes")
    if nbytes is None:
        raise NotPredicted(f"{pattern!r}: the bytes that cross the links are not stated")
    return record.rate(exchange.neighbour_seconds(record.chip, nbytes) * record.chip.clock_hz)
