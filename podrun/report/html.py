"""A profile as one self-contained HTML page: no script, no font and no picture from anywhere else.

Charts are SVG made in `podrun.report.charts`; hovering shows figures. A few lines of script filter the tables of
operators and layers; the page is whole without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from podrun.report import charts
from podrun.report.chrome_trace import shape, shown_micro_batches
from podrun.report.model import IpuUse, MemoryUse, Profile, ReportStage, layer_of
from podrun.report.text import BATCH, CONTENTS, CYCLES, OPERATORS, TRUST, compare, counted, unit_of_time

TOP_LAYERS = 25
TOP_VALUES = 8
STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em auto;max-width:900px;padding:0 1em;color:#1d2330;background:#fff}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}h3{font-size:1em}table{border-collapse:collapse}"
    "td,th{padding:.15em .8em .15em 0;text-align:right}td:first-child,th:first-child,td:nth-child(4){text-align:left}"
    "svg{display:block;max-width:100%}.key span{display:inline-block;margin-right:1em}"
    ".key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}.warn{color:#b5443c;font-weight:600}"
    "pre{overflow:auto;background:#f4f6f9;padding:1em}nav a{margin-right:1em}"
    "rect:hover{opacity:.75}input{width:20em;margin:.5em 0}"
)
SCRIPT = (
    "document.querySelectorAll('input[data-for]').forEach(function(box){"
    "var rows=document.querySelectorAll('#'+box.dataset.for+' tbody tr');"
    "box.addEventListener('input',function(){var word=box.value.toLowerCase();"
    "rows.forEach(function(row){row.hidden=row.cells[0].textContent.toLowerCase().indexOf(word)<0;});});});"
)


def page(profile: Profile, *, title: str = "", other: Profile | None = None) -> str:
    """The page; with ``other``, what changed from ``other`` to ``profile`` stands near its beginning."""
    title = title or profile.name
    sections = [*_sections(profile, other)]
    links = "".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name, _ in sections)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(TRUST)}</p>{_verdict(profile)}<nav>{links}</nav>",
        *(f'<h2 id="{anchor}">{escape(name)}</h2>{body}' for anchor, name, body in sections),
        f"<script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _verdict(profile: Profile) -> str:
    memory = profile.fullest().memory
    verdict = "fits" if profile.fits else '<span class="warn">does not fit</span>'
    speed = ""
    if profile.samples_per_second is not None:
        speed = f"<b>{profile.samples_per_second:,.1f} samples/s</b>, "
    unit, of = unit_of_time(profile.seconds)
    run = ""
    if profile.batches_per_run > 1:
        run = f", one run of {profile.batches_per_run:,} batches {profile.cycles_per_run:,} cycles"
    return (
        f"<p>Target <b>{escape(profile.target)}</b>, {counted(profile.replicas, 'replica')} of "
        f"{counted(profile.ipus_per_replica, 'IPU')}, {counted(profile.accumulation_factor, 'micro-batch')} "
        f"a batch. One batch takes <b>{profile.seconds * of:,.3f} {unit}</b> ({profile.cycles:,} cycles){run}, "
        f"{speed}bottleneck: {escape(profile.bottleneck)}. Fullest tile {memory.max_tile_bytes:,} of "
        f"{memory.tile_capacity_bytes:,} B: {verdict}.</p>"
    )


def _sections(profile: Profile, other: Profile | None) -> Iterator[tuple[str, str, str]]:
    """Anchor, heading and content of each section."""
    total = sum(profile.causes().values())
    unit, of = unit_of_time(profile.seconds)
    seconds = {name: value * of for name, value in profile.seconds_by_cause.items()}
    yield "batch", "Where a batch's time goes", charts.stack(seconds, unit, BATCH)
    if other is not None:
        yield "compare", "Compared", f"<pre>{escape(compare(other, profile))}</pre>"
    yield "causes", "Where a micro-batch's cycles go", charts.stack(profile.causes(), "cycles", CYCLES)
    if len(profile.stages) > 1:
        yield "pipeline", "Pipeline", _pipeline(profile)
    operators, layers = profile.operators(), profile.layers()
    meant = "".join(f"<p>{name}: {text}.</p>" for name, text in OPERATORS.items() if name in operators)
    yield "operators", "Cycles by operator", charts.bars(operators, total) + meant
    top = dict(list(layers.items())[:TOP_LAYERS])
    yield "layers", "Cycles by layer", charts.bars(top, total) + _table("layer-table", "layer", layers, total)
    for use in profile.held():
        yield f"ipu-{use.ipu}", f"Memory of IPU {use.ipu}", _memory(use)
    for index, stage in enumerate(profile.stages):
        yield (
            f"stage-{index}",
            f"{stage.name[:1].upper()}{stage.name[1:]} on IPU {stage.ipu}",
            _stage(index, stage),
        )
    if profile.bounds():
        yield "bounds", "Costed by a bound", _bounds(profile)


def _memory(use: IpuUse) -> str:
    """What one IPU holds: by tile, by content, along its work."""
    memory = use.memory
    verdict = "fits" if memory.fits else '<span class="warn">does not fit</span>'
    about = (
        f"<p>Fullest tile {memory.max_tile_bytes:,} of {memory.tile_capacity_bytes:,} B: {verdict}. "
        f"{memory.total_bytes:,} B on the IPU.</p>"
    )
    parts = (
        ("tiles", "Memory by tile", charts.memory_by_tile(memory)),
        ("memory", "Memory by content", _contents(memory)),
        ("time", "Not-always-live memory over the schedule", charts.memory_over_time(memory)),
    )
    return about + "".join(f'<h3 id="{name}-{use.ipu}">{title}</h3>{body}' for name, title, body in parts)


def _stage(index: int, stage: ReportStage) -> str:
    """One stage: where its cycles go."""
    about = f"<p>{stage.cycles:,} cycles, {stage.flops:,} FLOP, sends {stage.sent_bytes:,} B.</p>"
    return f'{about}<h3 id="bsp-{index}">BSP timeline</h3>{charts.timeline(stage)}'


def _bounds(profile: Profile) -> str:
    """Equations that no planner knows."""
    rows = "".join(
        f"<tr><td>{escape(bound.name)}</td><td>{bound.count}</td><td>{bound.cycles:,}</td>"
        f"<td>{escape(', '.join(layer_of(scope) for scope in bound.scopes))}</td></tr>"
        for bound in profile.bounds()
    )
    return (
        "<p>No planner knows these equations; each costs a stated bound (<code>docs/tiles.md</code>). Engine option "
        "<code>podrun.strict</code> refuses them.</p><table><thead><tr><th>equation</th><th>count</th><th>cycles</th>"
        f"<th>where</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _pipeline(profile: Profile) -> str:
    shown = shown_micro_batches(profile)
    of = (
        f"the first {shown} of {profile.micro_batches_per_pass}"
        if shown < profile.micro_batches_per_pass
        else "all"
    )
    about = f"<p>Time runs to the right; one colour is one micro-batch ({of} shown); grey is idle."
    found = shape(profile)
    over = (
        "a whole batch"
        if profile.batches_per_pass == 1
        else f"the {profile.batches_per_pass} batches of a run"
    )
    if found is not None:
        about += (
            f" Schedule {found.schedule}: {found.fill_slots} cycles to fill, {found.main_slots} full, "
            f"{found.flush_slots} to flush; over {over} IPUs idle <b>{found.idle_share:.1%}</b> of the time."
        )
    return f"{about}</p>{charts.pipeline(profile)}"


def _contents(memory: MemoryUse) -> str:
    sizes: dict[str, float] = dict(memory.bytes_by_content) or {
        "always_live": memory.always_live_bytes,
        "not_always_live": memory.not_always_live_peak_bytes,
        **memory.code_bytes_by_category,
    }
    rows = "".join(
        f"<tr><td>{escape(layer_of(item.scope))}{' (backward)' * ('transpose(' in item.scope)}</td>"
        f"<td>{item.size_bytes:,} B</td></tr>"
        for item in memory.largest[:TOP_VALUES]
    )
    held = f"<p>Largest at the fullest moment:</p><table>{rows}</table>" if rows else ""
    return charts.stack({name: size / 1024 for name, size in sizes.items()}, "KiB", CONTENTS) + held


def _table(anchor: str, what: str, values: Mapping[str, int], total: int) -> str:
    if len(values) <= TOP_LAYERS:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{value:,}</td><td>{value / (total or 1):.2%}</td></tr>"
        for name, value in values.items()
    )
    return (
        f'<details><summary>All {len(values)}</summary><input data-for="{anchor}" placeholder="filter" '
        f'aria-label="filter"><table id="{anchor}"><thead><tr><th>{what}</th><th>cycles</th><th>share</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></details>"
    )
