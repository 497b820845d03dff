"""A profile as one self-contained HTML page: no script, font or picture from elsewhere; two side by side.

Charts are made in `podrun.report.charts`; hovering or a tap shows figures. ``page.css`` lays the page out, also on a
phone; ``page.js`` sorts and filters tables, zooms and searches timelines, and reads tiles out. The page is whole
without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from podrun.report import charts
from podrun.report.model import IpuUse, MemoryUse, Profile, ReportOrigin, ReportStage, layer_of
from podrun.report.stage_runs import pipeline_shape, shown_micro_batches
from podrun.report.text import (
    BATCH,
    CONTENTS,
    CYCLES,
    OPERATORS,
    TRUST,
    amount_of,
    byte_size,
    compare,
    largest_by_layer,
    rate,
    unit_of_time,
)

HERE = Path(__file__).resolve().parent
TOP_LAYERS = 25
TOP_VALUES = 8


def page(
    profile: Profile, *, title: str = "", other: Profile | None = None, origin: ReportOrigin | None = None
) -> str:
    """The page. With ``other``, the changes from ``other`` to ``profile`` stand near its beginning."""
    title = title or profile.name
    sections = [*_sections(profile, other)]
    links = _links([part[:2] for part in sections])
    description = f"{_cards(profile)}{_verdict(profile)}<p>{escape(TRUST)}</p><nav>{links}</nav>"
    body = "\n".join(f'<h2 id="{anchor}">{escape(name)}</h2>{body}' for anchor, name, body in sections)
    return _document(_headline(title, origin), _origin(origin) + description + "\n" + body)


MANY = 4
GROUPS = {"ipu": "Memory of IPU", "stage": "Timelines"}
"""Sections of one kind, by the beginning of their anchors; where there are `MANY`, links to them are numbers."""


def _links(sections: Sequence[tuple[str, str]]) -> str:
    """Links to sections, given by anchor and heading."""
    links = []
    for kind, parts in groupby(sections, key=lambda section: section[0].partition("-")[0]):
        members = list(parts)
        if kind in GROUPS and len(members) >= MANY:
            numbers = "".join(
                f'<a href="#{anchor}" title="{escape(name)}">{anchor.partition("-")[2]}</a>'
                for anchor, name in members
            )
            links.append(f"<span>{GROUPS[kind]}: {numbers}</span>")
        else:
            links += [f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name in members]
    return "".join(links)


def side_by_side(
    first: Profile, second: Profile, origins: tuple[ReportOrigin | None, ReportOrigin | None] = (None, None)
) -> str:
    """A page with two reports beside each other, and above them the changes from the first to the second."""
    title = (
        f"{first.name} and {second.name}" if first.name != second.name else f"{first.name}, before and after"
    )
    changes = f"<p>{escape(TRUST)}</p><h2>What changed</h2><pre>{escape(compare(first, second))}</pre>"
    columns = []
    for number, (profile, origin) in enumerate(zip((first, second), origins, strict=True)):
        parts = "".join(
            f"<h3>{escape(name)}</h3>{body}" for _, name, body in _sections(profile, None, f"s{number}-")
        )
        label = ("Before", "After")[number]
        columns.append(
            f"<section><h2>{label}</h2>{_origin(origin)}{_cards(profile)}{_verdict(profile)}{parts}</section>"
        )
    return _document(title, f'{changes}<div class="sides">{"".join(columns)}</div>', "two")


def _headline(title: str, origin: ReportOrigin | None) -> str:
    """The program's name before the session's: what differs between the tabs of a browser."""
    return f"{Path(origin.program).name}: {title}" if origin and origin.program else title


def _document(title: str, content: str, kind: str = "") -> str:
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title><style>\n{style}</style></head><body class="{kind}">\n'
        f"<h1>{escape(title)}</h1>{content}\n<script>\n{script}</script></body></html>\n"
    )


def _origin(origin: ReportOrigin | None) -> str:
    """The line that says which program and command a report is of."""
    if origin is None:
        return ""
    parts = [f"<b>{escape(origin.program)}</b>"] if origin.program else []
    parts += [f"<code>{escape(origin.command)}</code>"] if origin.command else []
    parts += [escape(origin.date.replace("T", " ").replace("+00:00", " UTC"))] if origin.date else []
    parts += [f"podrun {escape(origin.podrun_version)}"] if origin.podrun_version else []
    return f'<p class="origin">{", ".join(parts)}</p>' if parts else ""


def _cards(profile: Profile) -> str:
    """The answers that people look for first: does it fit, how full is the fullest tile, what limits the rate?"""
    fullest = profile.fullest()
    memory = fullest.memory
    full = memory.max_tile_bytes / memory.tile_capacity_bytes
    held = f"{byte_size(memory.max_tile_bytes)} of {byte_size(memory.tile_capacity_bytes)}"
    fits, advice = "Yes", f"on every tile of {amount_of(len(profile.held()), 'IPU')}"
    if not profile.fits:
        fits, advice = (
            '<span class="warn">No</span>',
            "<code>podrun estimate --scan</code> looks for a layout that does",
        )
    cause, _, where = profile.bottleneck.partition(", ")
    taken = profile.seconds_by_cause[cause] / (profile.seconds or 1)
    of_batch = f"{taken:.0%} of a batch" + (f", {where}" if where else "")
    return (
        '<div class="cards">'
        f"<section><h3>Does it fit?</h3><strong>{fits}</strong><p>{advice}</p></section>"
        f"<section><h3>How full is the fullest tile?</h3><strong>{full:.1%}</strong>{charts.meter(full)}"
        f"<p>{held}, on IPU {fullest.ipu}</p></section>"
        f"<section><h3>What limits the rate?</h3><strong>{escape(cause.replace('_', ' '))}</strong>"
        f"{charts.meter(taken)}<p>{escape(of_batch)}</p></section></div>"
    )


def _verdict(profile: Profile) -> str:
    speed = ""
    if profile.samples_per_second is not None:
        speed = f"<b>{rate(profile.samples_per_second)}</b>, "
    unit, factor = unit_of_time(profile.seconds)
    run = ""
    if profile.batches_per_run > 1:
        run = f", one run of {profile.batches_per_run:,} batches {profile.cycles_per_run:,} cycles"
    return (
        f"<p>Target <b>{escape(profile.target)}</b>, {amount_of(profile.replicas, 'replica')} of "
        f"{amount_of(profile.ipus_per_replica, 'IPU')}, {amount_of(profile.accumulation_factor, 'micro-batch')} "
        f"a batch. One batch takes <b>{profile.seconds * factor:,.3f} {unit}</b> ({profile.cycles:,} cycles){run}, "
        f"{speed}bottleneck: {escape(profile.bottleneck)}.</p>"
    )


def _sections(profile: Profile, other: Profile | None, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Anchor, heading and content of each section. ``prefix``: of ids, where a page has two reports."""
    total = sum(profile.causes().values())
    unit, factor = unit_of_time(profile.seconds)
    seconds = {name: value * factor for name, value in profile.seconds_by_cause.items()}
    yield "batch", "Where a batch's time goes", charts.stacked_bar(seconds, unit, BATCH)
    if other is not None:
        yield "compare", "Compared", f"<pre>{escape(compare(other, profile))}</pre>"
    yield "causes", "Where a micro-batch's cycles go", charts.stacked_bar(profile.causes(), "cycles", CYCLES)
    if len(profile.stages) > 1:
        yield "pipeline", "Pipeline", _pipeline(profile)
    operators, layers = profile.operators(), profile.layers()
    meant = "".join(f"<p>{name}: {text}.</p>" for name, text in OPERATORS.items() if name in operators)
    yield "operators", "Cycles by operator", charts.bars(operators, total) + meant
    top = dict(list(layers.items())[:TOP_LAYERS])
    yield (
        "layers",
        "Cycles by layer",
        charts.bars(top, total) + _layers(f"{prefix}layer-table", profile, total),
    )
    for use in profile.held():
        yield f"ipu-{use.ipu}", f"Memory of IPU {use.ipu}", _memory(use, prefix)
    for index, stage in enumerate(profile.stages):
        title = f"{stage.name[:1].upper()}{stage.name[1:]} on IPU {stage.ipu}"
        yield f"stage-{index}", title, _stage(index, stage, prefix)
    if profile.bounds():
        yield "bounds", "Costed by a bound", _bounds(profile)


def _memory(use: IpuUse, prefix: str) -> str:
    """The contents of one IPU: by tile, by content, by layer, along its work."""
    memory = use.memory
    verdict = "fits" if memory.fits else '<span class="warn">does not fit</span>'
    description = (
        f"<p>Fullest tile {byte_size(memory.max_tile_bytes)} of {byte_size(memory.tile_capacity_bytes)}: {verdict}. "
        f"{byte_size(memory.total_bytes)} on the IPU.</p>"
    )
    layers = f"{prefix}held-{use.ipu}"
    parts = (
        ("tiles", "Memory by tile", charts.memory_by_tile(memory, layers) + _held_by_layer(layers, memory)),
        ("memory", "Memory by content", _contents(memory)),
        ("time", "Not-always-live memory over the schedule", charts.memory_over_time(memory)),
    )
    return description + "".join(
        f'<h3 id="{prefix}{name}-{use.ipu}">{title}</h3>{body}' for name, title, body in parts
    )


def _held_by_layer(anchor: str, memory: MemoryUse) -> str:
    """The largest values at the fullest moment, by layer; a click on a tile opens it."""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td data-value="{held}">{byte_size(held)}</td>'
        f'<td data-value="{held}">{held / (memory.total_bytes or 1):.1%}</td></tr>'
        for name, held in largest_by_layer(memory)
    )
    if not rows:
        return ""
    return (
        f'<details id="{anchor}"><summary>By layer: the largest values at the fullest moment, on all tiles</summary>'
        '<div class="table"><table class="sortable"><thead><tr><th>layer</th><th>size</th><th>of the IPU</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div></details>"
    )


def _stage(index: int, stage: ReportStage, prefix: str) -> str:
    """One stage: where its cycles go."""
    description = (
        f"<p>{stage.cycles:,} cycles, {stage.flops:,} FLOP, sends {byte_size(stage.sent_bytes)}.</p>"
    )
    return f'{description}<h3 id="{prefix}bsp-{index}">BSP timeline</h3>{charts.timeline_chart(stage)}'


def _bounds(profile: Profile) -> str:
    """Equations that no planner knows."""
    rows = "".join(
        f"<tr><td>{escape(bound.name)}</td><td>{bound.count}</td><td>{bound.cycles:,}</td>"
        f'<td class="words">{escape(", ".join(layer_of(scope) for scope in bound.scopes))}</td></tr>'
        for bound in profile.bounds()
    )
    return (
        "<p>No planner knows these equations; each costs a stated bound. Engine option "
        '<code>podrun.strict</code> refuses them.</p><div class="table"><table><thead><tr><th>equation</th>'
        f"<th>count</th><th>cycles</th><th>where</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _pipeline(profile: Profile) -> str:
    shown = shown_micro_batches(profile)
    of = (
        f"the first {shown} of {profile.micro_batches_per_pass}"
        if shown < profile.micro_batches_per_pass
        else "all"
    )
    grey = "idle" if of == "all" else "idle, or at work on later micro-batches"
    description = f"<p>Time runs to the right; one colour is one micro-batch ({of} shown); grey is {grey}."
    shape = pipeline_shape(profile)
    over = (
        "a whole batch"
        if profile.batches_per_pass == 1
        else f"the {profile.batches_per_pass} batches of a run"
    )
    if shape is not None:
        description += (
            f" Schedule {shape.schedule}: {amount_of(shape.fill_slots, 'pipeline cycle')} to fill, {shape.main_slots} "
            f"full, {shape.flush_slots} to flush; over {over} IPUs idle <b>{shape.idle_share:.1%}</b> of the time."
        )
    return f"{description}</p>{charts.pipeline(profile)}"


def _contents(memory: MemoryUse) -> str:
    sizes: dict[str, float] = dict(memory.bytes_by_content) or {
        "always_live": memory.always_live_bytes,
        "not_always_live": memory.not_always_live_peak_bytes,
        **memory.code_bytes_by_category,
    }
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{byte_size(octets)}</td></tr>"
        for name, octets in largest_by_layer(memory)[:TOP_VALUES]
    )
    held = "<p>Largest at the fullest moment:</p>"
    held = f'{held}<div class="table"><table>{rows}</table></div>' if rows else ""
    return charts.stacked_bar(sizes, "B", CONTENTS) + held


def _layers(anchor: str, profile: Profile, total: int) -> str:
    """All layers with their forward and backward cycles, to sort by any column and to filter."""
    ranked = profile.layers_both_ways().items()
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f'<td data-value="{value}">{value:,}</td>' for value in (sum(both), *both))
        + f'<td data-value="{sum(both)}">{sum(both) / (total or 1):.2%}</td></tr>'
        for name, both in ranked
    )
    heads = "".join(f"<th>{name}</th>" for name in ("layer", "cycles", "forward", "backward", "share"))
    return (
        f"<details><summary>All {amount_of(len(ranked), 'layer')}: sort, filter</summary>"
        f'<input data-for="{anchor}" placeholder="filter" aria-label="filter"><div class="table">'
        f'<table id="{anchor}" class="sortable"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</details>"
    )
