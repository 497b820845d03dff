"""A report as plain text, the meaning of its words, and units that keep its figures readable."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from podrun.report.model import MemoryUse, Profile, layer_of, numbered
from podrun.report.stage_runs import pipeline_shape

BATCH: Mapping[str, str] = {
    "compute": "with exchange and a pipeline's bubble",
    "copies": "activations and gradients between IPUs",
    "streaming": "tensors to and from streaming memory",
    "update": "the optimizer's step",
    "all_reduce": "gradients between replicas",
    "collectives": "the model's own, and gathering of sharded weights",
    "host": "waiting for data from and to the host, where the program arranges transfers",
}
"""Causes of a batch's time (`podrun.compiler.timeline`)."""
CYCLES: Mapping[str, str] = {
    "compute": "vertices at work, on the slowest tile",
    "exchange": "between tiles of an IPU",
    "rearrange": "on a tile, into the order wanted",
    "launch": "starting compute sets",
    "sync": "barriers before exchanges",
}
"""Causes of cycles on the tiles (`podrun.costmodel.equations`)."""
OPERATORS: Mapping[str, str] = {
    "matmul": "matrix products; convolutions of kernel 1, or whose kernel became part of the product",
    "conv": "convolutions, a product for each position of the kernel",
}
"""Families of operations whose names do not say all (`podrun.costmodel.matmul`)."""
CONTENTS: Mapping[str, str] = {
    "accumulators": "gradients summed over micro-batches",
    "streams": "buffers of inputs and anchors",
    "stash": "kept for the backward work of micro-batches in flight",
    "activations": "other values, at their fullest moment",
    "temporary": "data of the step that runs then",
    "vertex_code": "programs of vertices",
    "vertex_state": "vertices' own data",
    "exchange_code": "what each tile sends when",
    "control_code": "the sequence of steps",
}
"""What an IPU's memory holds (`podrun.costmodel.tile_memory`)."""


def unit_of_time(seconds: float) -> tuple[str, float]:
    """A unit for times up to ``seconds``, and how many of them make a second."""
    return ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3)


def byte_size(octets: int) -> str:
    """Bytes as people read them: ``512 B``, ``38.2 KiB``, ``609.0 KiB``, ``1.4 GiB``."""
    value, units = float(octets), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{octets} B" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def rate(samples_per_second: float) -> str:
    """Throughput with at least three digits: ``6,113,523 samples/s``, ``0.812 samples/s``."""
    digits = 0 if samples_per_second >= 100 else 1 if samples_per_second >= 10 else 3
    return f"{samples_per_second:,.{digits}f} samples/s"


def printable(line: str) -> str:
    """One line for a terminal: names come from models, and may hold line ends or codes that terminals obey."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in line
    )


WIDTH = 80
"""Columns of a line; one without a space to break at is longer."""
_COLUMN = re.compile(r"(?<=\S) {2,}(?=[a-zA-Z])")
"""What stands before words in the last column of a table."""
_QUANTITY = re.compile(r"(?<=\d) (?=(B|[KMG]iB)\b)")
"""What stands between a number of bytes and its unit, which stay together."""
_JOINT = "\0"


def folded_line(line: str) -> str:
    """A line as several that fit a terminal: words go on below the last column, or deeper than the line's beginning."""
    if len(line) <= WIDTH:
        return line
    columns = [gap.end() for gap in _COLUMN.finditer(line) if gap.end() <= WIDTH // 2 + 10]
    indent = columns[-1] if columns else len(line) - len(line.lstrip()) + 4
    kept = _QUANTITY.sub(_JOINT, line)
    return textwrap.fill(
        kept, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ).replace(_JOINT, " ")


def amount_of(number: int, what: str) -> str:
    """``1 replica``, ``16 replicas``, ``16 micro-batches``."""
    many = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:,} {what if number == 1 else many}"


TRUST = "Modelled, not measured: podrun help fidelity says how well."


def summary(profile: Profile, *, top: int = 8) -> str:
    """Time by cause, operators, layers and memory, most first; ends with a newline."""
    total = sum(profile.causes().values())
    unit, factor = unit_of_time(profile.seconds)
    lines = [
        profile_headline(profile),
        f"One batch ({amount_of(profile.replicas, 'replica')} x "
        f"{amount_of(profile.accumulation_factor, 'micro-batch')}): {profile.seconds * factor:,.3f} {unit}, "
        f"{profile.cycles:,} cycles",
    ]
    if profile.batches_per_run > 1:
        seconds = profile.cycles_per_run / profile.clock_hz
        run_unit, run_factor = unit_of_time(seconds)
        lines.append(
            f"One run ({amount_of(profile.batches_per_run, 'batch')}): {seconds * run_factor:,.3f} {run_unit}, "
            f"{profile.cycles_per_run:,} cycles"
        )
    speed = "" if profile.samples_per_second is None else f"{rate(profile.samples_per_second)}; "
    lines.append(f"  {speed}bottleneck: {profile.bottleneck}")
    for cause, seconds in profile.seconds_by_cause.items():
        figures = f"{seconds * factor:>14,.3f} {unit} {share(seconds, profile.seconds)}"
        lines.append(f"  {cause:<14}{figures}  {BATCH.get(cause, '')}".rstrip())
    lines += _pipeline(profile)
    lines.append(f"One micro-batch on tiles: {total:,} cycles")
    for cause, cycles in profile.causes().items():
        lines.append(f"  {cycles:>16,} {share(cycles, total)}  {cause:<10} {CYCLES[cause]}")
    lines += ["By operator", *_ranks(profile.operators(), total, top)]
    lines += ["By layer, forward and backward", *_ranks(profile.layers(), total, top)]
    lines += _memory(profile)
    for bound in profile.bounds():
        where = ", ".join(layer_of(scope) for scope in bound.scopes[:3])
        lines.append(
            f"Bounded, no planner: {bound.name} x {bound.count}, {bound.cycles:,} cycles"
            + f" ({where})" * bool(where)
        )
    return "\n".join(folded_line(printable(line)) for line in [*lines, TRUST]) + "\n"


def _pipeline(profile: Profile) -> list[str]:
    shape = pipeline_shape(profile)
    if shape is None:
        return []
    idle = ", ".join(f"IPU {ipu} {part:.0%}" for ipu, part in shape.idle_share_by_ipu.items())
    return [
        f"Pipeline, {shape.schedule}: {amount_of(shape.fill_slots, 'pipeline cycle')} to fill, "
        f"{shape.main_slots} full, {shape.flush_slots} to flush",
        f"  IPUs idle {shape.idle_share:.1%} of the time ({idle})",
    ]


def profile_headline(profile: Profile) -> str:
    """Name, target and size in one line."""
    ipus = f"{profile.ipus_per_replica} IPU{'s' * (profile.ipus_per_replica != 1)} per replica"
    return f"{profile.name} on {profile.target}, {ipus}" + (", pipelined" if profile.pipelined else "")


def _ranks(values: Mapping[str, int], total: int, top: int) -> list[str]:
    shown, rest = list(values.items())[:top], list(values.values())[top:]
    if rest:
        shown.append((f"({len(rest)} more)", sum(rest)))
    return [f"  {value:>16,} {share(value, total)}  {name}" for name, value in shown]


def _memory(profile: Profile) -> list[str]:
    lines = ["Memory"]
    for use in profile.held():
        worst = use.memory
        verdict = "fits" if worst.fits else "DOES NOT FIT"
        lines.append(
            f"  IPU {use.ipu}: fullest tile {byte_size(worst.max_tile_bytes)} of "
            f"{byte_size(worst.tile_capacity_bytes)} {share(worst.max_tile_bytes, worst.tile_capacity_bytes)} {verdict}"
        )
        if worst.bytes_by_content:
            lines.append(f"    all tiles: {contents(worst)}")
    fullest = profile.fullest()
    memory = fullest.memory
    code = sum(memory.code_bytes_by_category.values())
    lines += [
        f"  All tiles: always live {byte_size(memory.always_live_bytes)}, "
        f"peak of the rest {byte_size(memory.not_always_live_peak_bytes)}, code {byte_size(code)}",
        f"  Most at the peak of IPU {fullest.ipu}",
    ]
    return lines + [f"  {byte_size(held):>16}  {name}" for name, held in largest_by_layer(memory)[:3]]


def largest_by_layer(memory: MemoryUse) -> list[tuple[str, int]]:
    """The largest values at the fullest moment, those of a layer together: its name, and their bytes."""
    sizes: dict[str, int] = {}
    for item in memory.largest:
        name = f"{layer_of(item.scope)}{' (backward)' * ('transpose(' in item.scope)}"
        sizes[name] = sizes.get(name, 0) + item.size_bytes
    return sorted(sizes.items(), key=lambda item: (-item[1], numbered(item[0])))


def contents(memory: MemoryUse, most: int = 4) -> str:
    """The largest contents by name, in one line."""
    ranked = sorted(memory.bytes_by_content.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name.replace('_', ' ')} {byte_size(held)}" for name, held in ranked[:most])


def compare(first: Profile, second: Profile, *, top: int = 8) -> str:
    """What changed from the first to the second: time, causes, operators, layers, memory."""
    lines = [f"{'':<38}{'before':>20}{'after':>20}"]
    unit, factor = unit_of_time(max(first.seconds, second.seconds))
    lines.append(_change(f"batch, {unit}", first.seconds * factor, second.seconds * factor))
    for cause in dict.fromkeys((*first.seconds_by_cause, *second.seconds_by_cause)):
        before = first.seconds_by_cause.get(cause, 0.0) * factor
        lines.append(_change(f"  {cause}, {unit}", before, second.seconds_by_cause.get(cause, 0.0) * factor))
    speeds = first.samples_per_second, second.samples_per_second
    if speeds[0] is not None and speeds[1] is not None:
        lines.append(_change("samples/s", speeds[0], speeds[1], lambda speed: rate(speed).split()[0]))
    for title, old, new in (
        ("operator", first.operators(), second.operators()),
        ("layer", first.layers(), second.layers()),
    ):
        names = dict.fromkeys((*old, *new))
        moved = sorted(names, key=lambda name: (-abs(new.get(name, 0) - old.get(name, 0)), numbered(name)))
        lines.append(f"By {title}, cycles of one micro-batch")
        lines += [_change(f"  {name}", old.get(name, 0), new.get(name, 0)) for name in moved[:top]]
    was, now = first.fullest().memory, second.fullest().memory
    lines.append(_change("fullest tile", was.max_tile_bytes, now.max_tile_bytes, byte_size))
    for name in dict.fromkeys((*was.bytes_by_content, *now.bytes_by_content)):
        before, after = (memory.bytes_by_content.get(name, 0) for memory in (was, now))
        lines.append(_change(f"  {name.replace('_', ' ')}", before, after, byte_size))
    return "\n".join(map(printable, lines)) + "\n"


def _change(name: str, before: float, after: float, show: Callable[[Any], str] | None = None) -> str:
    ratio = f"{after / before - 1.0:+.1%}" if before else ("new" if after else "")
    label = name if len(name) <= 37 else name[:17] + "..." + name[-17:]
    digits = 0 if isinstance(before, int) and isinstance(after, int) else 3  # cycles and bytes are whole
    was, now = (show(value) if show else f"{value:,.{digits}f}" for value in (before, after))
    return f"{label:<38}{was:>20}{now:>20}  {ratio}".rstrip()


def share(part: float, whole: float) -> str:
    """A share in percent, six characters wide."""
    return f"{part / whole:>6.1%}" if whole else "     -"
