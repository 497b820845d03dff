"""Draws the site's pictures from podrun's own data: ``make pictures`` writes docs/pictures/*.svg.

A run of the digits example gives the terminal picture, and its report the charts of memory and time. The pipelined
transformer gives the pipeline chart, a POD with a job the live view, docs/fidelity.md the comparison with published
measurements, and `podrun capacity` the curves of served networks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

from podrun.report import Profile
from podrun.report.charts import IDLE_COLOUR, memory_by_tile, pipeline, timeline_chart
from podrun.report.curves import line_chart
from podrun.report.document import load_profile
from podrun.report.text import byte_size

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
BIN = Path(sys.executable).parent
HEIGHT, LIMIT = 380, 50
"""Of the comparison: height in pixels, and the largest error in percent that its scale shows."""
MARGIN = 56
RUN = ["--num-replicas", "16", "examples/digits/train.py", "--epochs", "5"]
"""The launch of the terminal picture. A test runs it again and compares what is printed."""
COLUMNS = 80
"""Of its terminal."""
TOP = 24
"""Pixels above a chart, for its caption."""
STYLE = (
    "rect{shape-rendering:crispEdges}text{fill:#4a5260}.paper{fill:#fff;stroke:#999}.band{fill:#eaecef}.grid{stroke:#ccc}"
    "@media(prefers-color-scheme:dark){text{fill:#c3c8d2}.paper{fill:#1e2129;stroke:#666}.band{fill:#323743}"
    ".grid{stroke:#484d59}}"
)
"""Colours of what is no data."""
KINDS = {
    "network": "#3b6fb6",
    "memory": "#d9822b",
    "gemm": "#4b9b63",
    "stencil": "#7a5ea8",
    "vertex": "#2f8f8a",
    "amp_tile": "#e3b23c",
    "scaling_ratio": "#b5443c",
}
"""Kinds of measurement with a colour of their own."""
ROW = re.compile(
    r"^\| [^|]+ \| (?:high|medium) \| ([\d.e+-]+) \| ([\d.e+-]+) \| [+-][\d.]+% \|", re.MULTILINE
)


def main() -> None:
    """Write every picture."""
    # A test runs this file without its folder on the path.
    from live_view import live_view

    PICTURES.mkdir(exist_ok=True)
    write("fidelity", comparison((ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        write("run", terminal("podrun " + " ".join(RUN), on_terminal([str(BIN / "podrun"), *RUN])))
        digits = profile(Path(folder), "digits", RUN)
        tokens = ["--ipus-per-replica", "4", "examples/transformer/pipelined.py"]
        chain = profile(Path(folder), "transformer", tokens)
        write("top", live_view(BIN, ROOT))
        for network in SERVED:
            write(f"capacity-{network}", capacity_curves(Path(folder), network))
    held, stage = digits.ipu_memory[0].memory, digits.stages[0]
    tiles = f"tiles 0 to {held.by_tile[-1].end_tile - 1}"
    write(
        "memory",
        chart(
            memory_by_tile(held),
            f"What each tile holds, {tiles}: at most {byte_size(held.max_tile_bytes)} "
            f"of {byte_size(held.tile_capacity_bytes)}"
            f" ({held.max_tile_bytes / held.tile_capacity_bytes:.0%}; enlarged)",
        ),
    )
    cycles = sum(step.total_cycles for step in stage.timeline)
    write(
        "timeline",
        chart(timeline_chart(stage), f"One micro-batch on an IPU: {cycles:,} cycles from left to right"),
    )
    write(
        "pipeline",
        chart(pipeline(chain), "Each colour is a micro-batch; time runs to the right; grey is idle"),
    )


SERVED = {
    "resnet50": (("1", "4", "16"), ("--rate", "12k/s", "--slo", "p99=10ms", "--arrivals", "burst:cv=4")),
    "bert_base": (("1", "4", "8"), ("--rate", "2000/s", "--slo", "p99=20ms")),
}
"""Networks of the pages on serving: their batches, and what is asked of them."""


def capacity_curves(folder: Path, network: str) -> str:
    """Throughput against latency of a network on a POD4 and a POD16, from the same commands as on its page."""
    batches, asked = SERVED[network]
    for batch in batches:
        program = [sys.executable, "examples/serving/write_model.py", network, "--batch", batch]
        subprocess.run([*program, folder / f"{network}-b{batch}.onnx"], cwd=ROOT, check=True, timeout=300)
    lines: dict[str, list[tuple[float, float]]] = {}
    for pod in ("pod4", "pod16"):
        file = folder / f"{network}-{pod}.json"
        words = ["--batch", ",".join(batches), "--target", pod, *asked, "--json", str(file)]
        podrun(["capacity", str(folder / f"{network}-b{{batch}}.onnx"), *words])
        (service,) = json.loads(file.read_text(encoding="utf-8"))["services"]
        for name in ("p50", "p99"):
            lines[f"{pod} {name}"] = [
                (point["rate_per_s"] / 1e3, point["latency_s"][name] * 1e3) for point in service["curve"]
            ]
        limits = {
            f"{name} at most {limit * 1e3:g} ms": limit * 1e3
            for name, limit in service["objectives_s"].items()
        }
    drawn = line_chart(lines, "thousand requests a second", "ms to the answer", limits)
    style = f"<style>{STYLE}.axis{{stroke:#888}}.limit{{stroke:#b5443c;stroke-dasharray:6 4}}</style>"
    head, end, rest = drawn.partition(">")
    return head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + end + style + rest


def write(name: str, text: str) -> None:
    """Write a picture, and say so."""
    path = PICTURES / f"{name}.svg"
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    print(path.relative_to(ROOT), len(text))


def podrun(words: list[str]) -> None:
    """Run a launch. Raises CalledProcessError if it fails."""
    subprocess.run([BIN / "podrun", *words], cwd=ROOT, capture_output=True, check=True, timeout=300)


def on_terminal(words: list[str], environ: Mapping[str, str] = os.environ, columns: int = COLUMNS) -> str:
    """What a command writes to a terminal that is its standard output and error. Raises CalledProcessError."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = ("NO_COLOR", "COLUMNS", "CI")
    variables = {"TERM": "xterm", **{name: text for name, text in environ.items() if name not in unset}}
    running = subprocess.Popen(
        words, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = bytearray()
    with open(ours, "rb", buffering=0) as shown, contextlib.suppress(OSError):  # EIO: the command has ended.
        while piece := shown.read(65536):
            written += piece
    text = written.decode().replace("\r\n", "\n")
    if code := running.wait(60):
        raise subprocess.CalledProcessError(code, words, text)
    return text


def left_on_screen(written: str) -> list[str]:
    """The lines that stay on a terminal: what podrun's live line wrote is gone."""
    return [line.rpartition("\x1b[K")[2].rpartition("\r")[2] for line in written.rstrip("\n").split("\n")]


def profile(folder: Path, name: str, words: list[str]) -> Profile:
    """The report of a launch's first session."""
    podrun(["profile", "--report-directory", str(folder / name), *words])
    found = sorted(
        (folder / f"{name}__instance_0").rglob("profile.json"), key=lambda path: "training" not in str(path)
    )
    return load_profile(found[0])


def terminal(command: str, written: str) -> str:
    """A terminal with a command and what it wrote, to the letter."""
    console = Console(record=True, width=COLUMNS, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text(f"$ {command}", style="bold"))
    for line in left_on_screen(written):
        console.print(Text.from_ansi(line))
    picture = console.export_svg(title="podrun", font_aspect_ratio=0.61)
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # A picture fetches no fonts.


def chart(markup: str, caption: str) -> str:
    """The first drawing of a chart of reports with its key, as a file of its own with a caption."""
    drawing = re.search(r"<svg .*?</svg>", markup, re.DOTALL)
    box = re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing[0]) if drawing else None
    if drawing is None or box is None:
        raise ValueError("the chart has no drawing with a size")
    width, height = int(box[1]), int(box[2])
    names = re.findall(r"<span>(IPU \d+)</span>", markup)
    left = 50 if names else 0
    inner = drawing[0].replace("<svg ", f'<svg x="{left}" y="{TOP}" width="{width}" height="{height}" ', 1)
    parts = [_label(caption, 0, 14), inner.replace(f'fill="{IDLE_COLOUR}"', 'class="band"')]
    parts += [_label(name, 0, TOP + 26 * row + 15) for row, name in enumerate(names)]
    x, y = 0.0, TOP + height + 22
    for colour, name in re.findall(r'<i style="background:(#\w+)"></i>([^<]*)', markup):
        parts.append(f'<rect x="{x:.0f}" y="{y - 10}" width="10" height="10" fill="{colour}"/>')
        parts.append(_label(name, x + 15, y))
        x += 32 + 7 * len(name)
    return _picture(left + width, y + 8 if x else TOP + height + 4, caption, parts)


def _picture(width: float, height: float, label: str, parts: list[str]) -> str:
    """A drawing as a file, for light and dark pages."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12" role="img" aria-label="{escape(label)}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>"
    )


def comparison(page: str) -> str:
    """Errors of predictions in percent, one dot a record, a column for each kind; the band is 10 % either way."""
    columns = []
    for kind, colour in KINDS.items():
        section = re.search(rf"^### {kind}\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)
        row = re.search(rf"^\| {kind} \|(?:[^|]*\|){{3}} ([\d.]+)% \|", page, re.MULTILINE)
        pairs = [(float(a), float(b)) for a, b in ROW.findall(section[1])] if section else []
        errors = [100 * (b / a - 1) for a, b in pairs if a > 0]
        if errors and row:
            columns.append((kind, colour, float(row[1]), errors))
    return _columns(columns)


def _columns(columns: list[tuple[str, str, float, list[float]]]) -> str:
    """A column for each kind: its name, colour, median error in percent as the page says it, and the errors."""
    width, middle = 116, HEIGHT / 2
    total = MARGIN + width * len(columns)

    def y(error: float) -> float:
        """Pixels from the top; what is beyond the scale lies on its edge."""
        return middle - max(-LIMIT, min(LIMIT, error)) / LIMIT * (HEIGHT / 2 - 8)

    parts = [
        f'<rect class="paper" x="{MARGIN}" y="0" width="{total - MARGIN}" height="{HEIGHT}"/>',
        f'<rect class="band" x="{MARGIN}" y="{y(10):.1f}" width="{total - MARGIN}" height="{y(-10) - y(10):.1f}"/>',
    ]
    for error in (-40, -20, 0, 20, 40):
        parts.append(
            f'<line class="grid" x1="{MARGIN}" x2="{total}" y1="{y(error):.1f}" y2="{y(error):.1f}"/>'
        )
        parts.append(_label(f"{error:+d} %" if error else "0 %", 4, y(error) + 4))
    for index, (kind, colour, median, errors) in enumerate(columns):
        left = MARGIN + index * width
        for number, error in enumerate(errors):
            x = left + 10 + (width - 20) * (number + 0.5) / len(errors)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y(error):.1f}" r="3" fill="{colour}" fill-opacity="0.8">'
                f"<title>{escape(kind)}: {error:+.1f} %</title></circle>"
            )
        words = (kind.replace("_", " "), f"{len(errors)} records", f"median {median:.1f} %")
        parts += [_label(text, left + 6, HEIGHT + 18 * (line + 1)) for line, text in enumerate(words)]
    return _picture(total, HEIGHT + 62, "errors of predictions by kind of measurement", parts)


def _label(words: str, x: float, y: float) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


if __name__ == "__main__":
    main()
