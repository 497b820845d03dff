"""Records about one mechanism: AMP, tile memory, exchange, sync, host streams, links, collectives."""

from __future__ import annotations

from fidelity_kinds.record import BYTES, TYPES, NotPredicted, Record
from podrun.device.tiles import amp, bandwidth, exchange, host, links


def amp_tile(record: Record) -> float:
    """One 1x1 convolution vertex."""
    rows, inputs, outputs = record.need("rows", "in_channels", "out_channels")
    input_type, partials = (TYPES[record.params[key]] for key in ("input_type", "partials_type"))
    units = record.chip.conv_units(input_type, partials)
    cycles = float(
        amp.matmul_cycles(rows, inputs, outputs, input_type=input_type, partials_type=partials, units=units)
    )
    return record.rate(cycles, flops=2.0 * rows * inputs * outputs * record.params["tiles"])


def memory_bandwidth(record: Record) -> float:
    """Streaming kernels and latency."""
    pattern, how = record.need("pattern", "implementation")
    if pattern == "load_latency":
        return record.rate(bandwidth.LOAD_LATENCY)
    per_cycle = bandwidth.bytes_per_cycle(record.chip, pattern, how, TYPES[record.params["data_type"]])
    if record.metric == "fraction":
        return per_cycle / record.chip.load_bytes
    return record.rate(
        1.0, nbytes=per_cycle * record.chip.tiles, flops=per_cycle / 12.0 * 2 * record.chip.tiles
    )


def exchange_kind(record: Record) -> float:
    """On-chip exchange."""
    chip, (pattern,) = record.chip, record.need("pattern")
    if pattern == "point_to_point":
        return record.rate(chip.facts["exchange_latency_cycles"].value)
    if pattern == "latency_under_load" and record.metric == "ratio":
        return 1.0 + exchange.LOADED_LATENCY
    if pattern != "halo_swap" or record.params["phase"] not in ("exchange", "total"):
        raise NotPredicted(f"exchange pattern {pattern!r}: the traffic is not given")
    height, width = record.need("block_h", "block_w")
    moved = exchange.halo_cycles(
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
    return record.rate(exchange.global_sync_cycles(chip, ipus) + exchange.COUNTER_READ)


def host_stream(record: Record) -> float:
    """Host transfers."""
    (pattern,) = record.need("pattern")
    if pattern == "dataloader":
        raise NotPredicted("the host's own data loader is not part of the device model")
    chip, phase = record.chip, record.params["phase"]
    down, up = record.params["bytes_to_device"], record.params["bytes_from_device"]
    parts = host.stream_copy(chip, down + up)
    if record.params.get("occurrence") == 1:
        # The first copy of a program finds the host waiting: two barriers before, one after.
        parts = {**parts, "begin": 2.0 * exchange.sync_cycles(chip), "end": exchange.sync_cycles(chip)}
    if pattern == "stream_copy":
        return record.rate(parts[phase] if phase in parts else sum(parts.values()), nbytes=down + up)
    return record.rate(parts["mid"], nbytes=down + up)


def session_call(record: Record) -> float:
    """One call of a session from the host."""
    train = record.params.get("mode") == "train"
    rounds = record.params["gradient_accumulation"] * host.REMOTE_ROUNDS if train else 0
    return record.rate(host.session_call_seconds(record.chip, rounds) * record.chip.clock_hz)


def all_reduce(record: Record) -> float:
    """Replicated all-reduce over IPU-Links."""
    label = record.params.get("size_label")
    # A bare label is taken as elements, as the tool that prints it takes them.
    nbytes = record.params.get("bytes") or (label * BYTES[record.params["data_type"]] if label else None)
    if nbytes is None:
        raise NotPredicted("not stated and no sensible default: bytes")
    ipus = max(record.ipus, record.params.get("ipus") or 1)
    method = None if record.params["method"] == "default" else record.params["method"]
    if record.metric == "ratio":
        # The library's default before it had others: one ring.
        other = links.all_reduce_seconds(record.chip, ipus, nbytes, method="ring")
        return links.all_reduce_seconds(record.chip, ipus, nbytes, method=method) / other
    return record.rate(
        links.all_reduce_seconds(record.chip, ipus, nbytes, method=method) * record.chip.clock_hz
    )


def ipu_link(record: Record) -> float:
    """Traffic between chips other than a collective."""
    nbytes = record.params.get("bytes")
    if nbytes is None:
        raise NotPredicted("the bytes that cross the links are not stated")
    return record.rate(links.neighbour_seconds(record.chip, nbytes) * record.chip.clock_hz)
