"""Draws the site's pictures from podrun's own data: ``make pictures`` writes docs/pictures/*.svg.

A run of the digits example gives the terminal picture, and its report the charts of memory and time. The pipelined
transformer gives the pipeline chart, docs/fidelity.md the comparison with published measurements.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.text import Text

from podrun.report import Profile
from podrun.report.charts import memory_by_tile, pipeline, timeline
from podrun.report.document import load

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
BIN = Path(sys.executable).parent
HEIGHT, LIMIT = 380, 50
"""Of the comparison: height in pixels, and the largest error in percent that its scale shows."""
MARGIN = 56
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
    PICTURES.mkdir(exist_ok=True)
    write("fidelity", comparison((ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        words = ["--num-replicas", "16", "examples/digits/train.py", "--epochs", "5"]
        write("run", terminal("podrun " + " ".join(words), podrun(words)))
        digits = profile(Path(folder), "digits", words)
        tokens = ["--ipus-per-replica", "4", "examples/transformer/pipelined.py"]
        chain = profile(Path(folder), "transformer", tokens)
    write("memory", chart(memory_by_tile(digits.ipu_memory[0].memory)))
    write("timeline", chart(timeline(digits.stages[0])))
    write("pipeline", chart(pipeline(chain)))


def write(name: str, text: str) -> None:
    """Write a picture, and say so."""
    path = PICTURES / f"{name}.svg"
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    print(path.relative_to(ROOT), len(text))


def podrun(words: list[str]) -> str:
    """What a launch prints. Raises CalledProcessError if it fails."""
    done = subprocess.run(
        [BIN / "podrun", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout + done.stderr


def profile(folder: Path, name: str, words: list[str]) -> Profile:
    """The report of a launch's first session."""
    podrun(["profile", "--report-directory", str(folder / name), *words])
    found = sorted(
        (folder / f"{name}__instance_0").rglob("profile.json"), key=lambda path: "training" not in str(path)
    )
    return load(found[0])


def terminal(command: str, output: str) -> str:
    """A terminal with a command and what it printed. Prefixes of instances are left out."""
    console = Console(record=True, width=104, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text(f"$ {command}", style="bold"))
    for line in output.splitlines():
        console.print(Text(re.sub(r"^\[\d+,\d+\]<\w+>:", "", line)))
    picture = console.export_svg(title="podrun", font_aspect_ratio=0.61)
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # A picture fetches no fonts.


def chart(markup: str) -> str:
    """The first drawing of a chart of reports, as a file of its own."""
    drawing = re.search(r"<svg .*?</svg>", markup, re.DOTALL)
    if drawing is None:
        raise ValueError("the chart has no drawing")
    box = re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing[0])
    if box is None:
        raise ValueError("the drawing has no size")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{box[1]}" height="{box[2]}" font-family="sans-serif" '
    return drawing[0].replace("<svg ", head, 1)


def comparison(page: str) -> str:
    """Errors of predictions in percent, one dot a record, a column for each kind; the band is 10 % either way."""
    columns = []
    for kind, colour in KINDS.items():
        section = re.search(rf"^### {kind}\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)
        pairs = [(float(a), float(b)) for a, b in ROW.findall(section[1])] if section else []
        errors = [100 * (b / a - 1) for a, b in pairs if a > 0]
        if errors:
            columns.append((kind, colour, errors))
    return _columns(columns)


def _columns(columns: list[tuple[str, str, list[float]]]) -> str:
    width, middle = 124, HEIGHT / 2
    total = MARGIN + width * len(columns)

    def y(error: float) -> float:
        """Pixels from the top; what is beyond the scale lies on its edge."""
        return middle - max(-LIMIT, min(LIMIT, error)) / LIMIT * (HEIGHT / 2 - 8)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{HEIGHT + 44}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="errors of predictions by kind of measurement">',
        f'<rect x="{MARGIN}" y="0" width="{total - MARGIN}" height="{HEIGHT}" fill="#fff" stroke="#888"/>',
        f'<rect x="{MARGIN}" y="{y(10):.1f}" width="{total - MARGIN}" height="{y(-10) - y(10):.1f}" fill="#eee"/>',
    ]
    for error in (-40, -20, 0, 20, 40):
        parts.append(
            f'<line x1="{MARGIN}" x2="{total}" y1="{y(error):.1f}" y2="{y(error):.1f}" stroke="#ccc"/>'
        )
        parts.append(_label(f"{error:+d} %", 4, y(error) + 4))
    for index, (kind, colour, errors) in enumerate(columns):
        left = MARGIN + index * width
        for number, error in enumerate(errors):
            x = left + 10 + (width - 20) * (number + 0.5) / len(errors)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y(error):.1f}" r="3" fill="{colour}" fill-opacity="0.7">'
                f"<title>{escape(kind)}: {error:+.1f} %</title></circle>"
            )
        parts.append(_label(kind.replace("_", " "), left + 6, HEIGHT + 18))
        parts.append(_label(f"{len(errors)}, median {median(map(abs, errors)):.1f} %", left + 6, HEIGHT + 36))
    return "".join(parts) + "</svg>"


def _label(words: str, x: float, y: float) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#777">{escape(words)}</text>'


if __name__ == "__main__":
    main()
