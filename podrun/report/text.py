"""A profile as text for a terminal, and the comparison of two."""

from __future__ import annotations

from podrun.report.read import Profile

TRUST = "Modelled, not measured: docs/fidelity.md holds the model against published measurements."


def summary(profile: Profile, *, top: int = 8) -> str:
    """Time by cause, operators, layers and memory, most first; ends with a newline."""
    lines = [
        f"Target {profile.target}, {len(profile.ipus)} IPU{'s' * (len(profile.ipus) != 1)} per replica"
        + (", pipelined" if profile.pipelined else ""),
        f"One batch: {profile.seconds * 1e3:,.3f} ms, {profile.cycles:,} cycles",
    ]
    for cause, seconds in profile.seconds_by_cause.items():
        lines.append(f"  {cause:<12}{seconds * 1e3:>14,.3f} ms {_share(seconds, profile.seconds)}")
    total = sum(profile.causes().values())
    lines.append(f"One micro-batch on tiles: {total:,} cycles")
    lines += [f"  {name:<12}{value:>14,} {_share(value, total)}" for name, value in profile.causes().items()]
    lines.append("By operator")
    lines += [f"  {n:<14}{v:>12,} {_share(v, total)}" for n, v in list(profile.operators().items())[:top]]
    lines.append("By layer")
    lines += [f"  {v:>14,} {_share(v, total)}  {n}" for n, v in list(profile.scopes().items())[:top]]
    lines += _memory(profile)
    for name, (count, cycles) in profile.bounds().items():
        lines.append(f"Bounded, no planner: {name} x {count}, {cycles:,} cycles")
    return "\n".join([*lines, TRUST]) + "\n"


def _memory(profile: Profile) -> list[str]:
    lines = ["Memory"]
    for ipu in profile.ipus:
        reports = [stage.report["memory"] for stage in profile.stages if stage.ipu == ipu]
        if not reports:
            continue
        worst = max(reports, key=lambda memory: memory["max_tile_bytes"])
        used, room = worst["max_tile_bytes"], worst["tile_bytes"]
        verdict = "fits" if worst["fits"] else "DOES NOT FIT"
        lines.append(f"  IPU {ipu}: fullest tile {used:,} of {room:,} B {_share(used, room)} {verdict}")
    memory = profile.fullest().report["memory"]
    lines.append(f"  always live {memory['always_live_bytes']:,} B, peak of the rest ")
    lines[-1] += f"{memory['not_always_live_peak_bytes']:,} B, code {sum(memory['code'].values()):,} B (chip)"
    return lines + [f"  at the peak: {item['bytes']:,} B  {item['scope']}" for item in memory["largest"][:3]]


def compare(first: Profile, second: Profile, *, top: int = 8) -> str:
    """What changed from the first to the second: time, causes, operators, layers, memory."""
    lines = [_change("batch, ms", first.seconds * 1e3, second.seconds * 1e3)]
    for cause in dict.fromkeys((*first.seconds_by_cause, *second.seconds_by_cause)):
        before = first.seconds_by_cause.get(cause, 0.0) * 1e3
        lines.append(_change(f"  {cause}, ms", before, second.seconds_by_cause.get(cause, 0.0) * 1e3))
    for title, old, new in (
        ("operator", first.operators(), second.operators()),
        ("layer", first.scopes(), second.scopes()),
    ):
        names = dict.fromkeys((*old, *new))
        moved = sorted(names, key=lambda name: (-abs(new.get(name, 0) - old.get(name, 0)), name))
        lines.append(f"By {title}, cycles of one micro-batch")
        lines += [_change(f"  {name}", old.get(name, 0), new.get(name, 0)) for name in moved[:top]]
    before, after = (p.fullest().report["memory"]["max_tile_bytes"] for p in (first, second))
    lines.append(_change("fullest tile, B", before, after))
    return "\n".join(lines) + "\n"


def _change(name: str, before: float, after: float) -> str:
    ratio = f"{after / before - 1.0:+.1%}" if before else "new"
    return f"{name:<42}{before:>16,.3f}{after:>16,.3f}  {ratio}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:>6.1%}" if whole else "     -"
