"""All comparisons with other libraries side by side: one page, one picture, and a guard.

    python benchmarks/summary.py [--json FILE] [--markdown docs/side-by-side.md] [--repeats N] [--only SCRIPT,...]
    python benchmarks/summary.py --check benchmarks/data/side-by-side.json

Each figure is podrun's time over a peer's in the same run, or over a number of seconds that it is to stay under; 1 is
equal, less is faster. The scripts that measure them
run ``--repeats`` times one after the other; the page gives median, least and greatest. ``--markdown`` writes the page
and, beside it, ``pictures/NAME.svg``.

``--check`` measures once what a file that ``--json`` wrote holds, and again what was worse by more than a tenth; it
fails if that is worse again. A record of another kind of host is not compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from short_mode import add_short

WORSE = 1.1
"""A ratio that exceeds the recorded one by this factor is worse."""
SCALE_LEFT, WIDTH, ROW, TOP = 330, 760, 22, 34
LEAST, GREATEST = 0.25, 4.0
"""Ends of the picture's logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure: the script that measures it, the keys that lead to it in what the script writes, words, and its aim.

    ``script`` is a key of ``ARGUMENTS`` or a file's name. ``seconds``: what the figure is divided by, if the script
    writes seconds.
    """

    script: str
    keys: tuple[str, ...]
    what: str
    peer: str
    aim: float
    seconds: float = 1.0

    @property
    def name(self) -> str:
        """``step_time/step_vs_plain_jax``."""
        return "/".join((self.script, *self.keys))

    def value(self, document: Mapping[str, Any]) -> float | None:
        """The figure in what the script wrote; None if it did not measure it."""
        value: Any = document
        for key in self.keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) / self.seconds if isinstance(value, (int, float)) else None


def within(script: str, key: str, what: str, seconds: float) -> Ratio:
    """A figure of seconds beside what it may take at most."""
    return Ratio(script, (key,), what, f"{seconds:g} s", 1.0, seconds)


TRAINED = {"resnet18": 1.05, "mobilenet": 1.05}
TENSORFLOW = {
    "resnet18": "ResNet-18, training step",
    "bert_tiny": "BERT tiny, training step",
    "mlp": "784-512-512-10, batch 128",
}
INFERRED = (
    *("squeezenet", "inception_v2", "resnet50", "shufflenet", "densenet121", "vgg19"),
    *("inception_v1", "bvlc_alexnet", "zfnet512"),
)
RATIOS = (
    Ratio("poptorch_step", ("resnet18_ratio",), "PopTorch ResNet-18, training step", "torch", 1.3),
    Ratio("poptorch_step", ("bert_tiny_ratio",), "PopTorch BERT tiny, training step", "torch", 1.3),
    Ratio("poptorch_step", ("bert_small_ratio",), "PopTorch BERT small, training step", "torch", 1.3),
    Ratio("poptorch_step", ("mlp_ratio",), "PopTorch 784-512-512-10, batch 128", "torch", 1.15),
    Ratio(
        "poptorch_step",
        ("mlp16_launched_ratio",),
        "the same, 16 replicas, launched",
        "torch, one process",
        1.15,
    ),
    Ratio(
        "step_time", ("step_vs_plain_jax",), "784-512-512-10, 16 replicas, launched", "JAX, one process", 1.1
    ),
    Ratio("tensorflow_step", ("geometric_mean_ratio",), "TensorFlow, three steps, mean", "TensorFlow", 1.2),
    *(
        Ratio("tensorflow_step", (f"{name}_ratio",), f"TensorFlow {what}", "TensorFlow", 1.8)
        for name, what in TENSORFLOW.items()
    ),
    Ratio("tensorflow_step", ("mlp16_ratio",), "the same, 16 replicas", "TensorFlow, one process", 1.3),
    *(
        Ratio("train_step", ("networks", name, "ratio"), f"ONNX {name}, training step", "torch", aim)
        for name, aim in TRAINED.items()
    ),
    Ratio(
        "onnx_inference", ("ours_vs_onnxruntime",), "nine ONNX networks, inference, mean", "onnxruntime", 0.95
    ),
    *(
        Ratio("onnx_inference", ("models", name, "ratio"), f"ONNX {name}, inference", "onnxruntime", 1.15)
        for name in INFERRED
    ),
    Ratio("pipeline", ("training", "vs_one_machine"), "four-stage pipeline, training", "one machine", 0.6),
    Ratio("pipeline", ("pipeline_vs_limit",), "the same", "its products by bare calls", 1.1),
    Ratio(
        "data_loader_start",
        ("start_ratio_8",),
        "asynchronous loader, first of 8 workers' batches",
        "torch",
        2.0,
    ),
    Ratio("recording", ("recording_ratio",), "a step that is recorded", "one that is not", 1.02),
    within("launch_time", "cold_s", "`podrun` to the first step, cold", 3.0),
    within("launch_time", "warm_s", "the same beside a server", 1.5),
    within(
        "poptorch_prepare", "bert_base_cached_cpu_s", "PopTorch BERT-base prepared again (processor)", 2.5
    ),
    within("tensorflow_step", "first_step_cold_s", "TensorFlow MNIST to its first step, cold", 5.0),
    within("tensorflow_step", "first_step_cached_s", "the same from caches", 2.0),
    within("tensorflow_step", "trace_resnext101_s", "TensorFlow ResNeXt-101, traced", 3.0),
)
ARGUMENTS = {
    "poptorch_step": ("--rounds", "3"),
    "poptorch_prepare": ("--prepare", "--match", "bert_base"),
    "tensorflow_step": ("--rounds", "5"),
    "launch_time": ("--repeats", "1"),
    "train_step": ("--torch-python", sys.executable, "--rounds", "4"),
    "onnx_inference": ("--repeats", "4"),
    "pipeline": ("--rounds", "3"),
    "data_loader_start": ("--workers", "8", "--rounds", "5"),
}
"""Fewer turns than a script takes by itself, and only what is shown: this page repeats the scripts."""
FILES = {"poptorch_prepare": "poptorch_step"}
"""Scripts by their file's name, where one file measures two things."""


def main() -> int:
    """Measure, then write or compare; 1 if a ratio got worse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page and its picture")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with recorded figures")
    parser.add_argument(
        "--from", type=Path, dest="source", metavar="FILE", help="measure nothing: take these figures"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", metavar="SCRIPT,...", help="such as step_time,onnx_inference")
    parser.add_argument("--smaller", action="store_true", help="run the scripts with their --short")
    add_short(parser, only="recording", repeats=1, smaller=True)
    options = parser.parse_args()
    wanted = [ratio for ratio in RATIOS if not options.only or ratio.script in options.only.split(",")]
    if options.check:
        return check(json.loads(options.check.read_text(encoding="utf-8")), wanted)
    source: Path | None = options.source
    records = (
        repeated(wanted, options.repeats, smaller=options.smaller)
        if source is None
        else [json.loads(source.read_text(encoding="utf-8"))]
    )
    for record in records:
        write(record, options.json, options.markdown)
    print("\n".join(lines_of(record)))
    return 0


def write(record: Mapping[str, Any], json_file: Path | None, markdown_file: Path | None) -> None:
    """The record, and its page with the picture beside it."""
    if json_file:
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if markdown_file:
        picture_file = markdown_file.parent / "pictures" / f"{markdown_file.stem}.svg"
        picture_file.parent.mkdir(exist_ok=True)
        picture_file.write_text(picture(record["ratios"]), encoding="utf-8")
        markdown_file.write_text(page(record, picture_file.name), encoding="utf-8")


def repeated(wanted: Sequence[Ratio], repeats: int, *, smaller: bool) -> Iterator[dict[str, Any]]:
    """The record after each of several runs, so that one that is ended early keeps what it measured."""
    load = os.getloadavg()[0]
    values: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    for run in range(repeats):
        for name, value in measured(wanted, smaller=smaller, seconds=seconds).items():
            values.setdefault(name, []).append(value)
        took = {script: round(total / (run + 1), 1) for script, total in seconds.items()}
        yield {"host": host(), "load_before": load, "seconds_of_a_run": took, "ratios": values}


def measured(
    wanted: Iterable[Ratio], *, smaller: bool = False, seconds: dict[str, float] | None = None
) -> dict[str, float]:
    """Run each script once that measures any of these; figures by name. Raises SystemExit if a script fails.

    What each took is added to ``seconds``, and said.
    """
    wanted = list(wanted)
    values: dict[str, float] = {}
    for script in dict.fromkeys(ratio.script for ratio in wanted):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "figures.json")
            path = Path(__file__).parent / f"{FILES.get(script, script)}.py"
            short = ("--short",) if smaller else ()
            words = [sys.executable, str(path), "--json", str(file), *ARGUMENTS.get(script, ()), *short]
            started = time.monotonic()
            done = subprocess.run(
                words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{' '.join(words)} ended with exit code {done.returncode}:\n{done.stdout}")
            document = json.loads(file.read_text(encoding="utf-8"))
        took = time.monotonic() - started
        print(f"{script}: {took:.0f} s", file=sys.stderr, flush=True)
        if seconds is not None:
            seconds[script] = seconds.get(script, 0.0) + took
        for ratio in wanted:
            value = ratio.value(document) if ratio.script == script else None
            if value is not None:
                values[ratio.name] = value
    return values


def worse(recorded: Mapping[str, Sequence[float]], values: Mapping[str, float]) -> list[str]:
    """Names of figures that exceed the recorded median by more than a tenth."""
    return [
        n for n, value in values.items() if n in recorded and value > WORSE * statistics.median(recorded[n])
    ]


def check(record: Mapping[str, Any], wanted: Sequence[Ratio]) -> int:
    """See the module docstring."""
    if record["host"] != host():
        print(f"recorded on {record['host']}, which {host()} is not: not compared")
        return 0
    recorded = record["ratios"]
    first = measured(ratio for ratio in wanted if ratio.name in recorded)
    suspects = worse(recorded, first)
    again = measured(ratio for ratio in wanted if ratio.name in suspects)
    confirmed = [name for name in worse(recorded, again) if name in suspects]
    for name in suspects:
        said = "WORSE TWICE" if name in confirmed else "worse once"
        median = statistics.median(recorded[name])
        print(f"{name}: {said}, {first[name]:.2f} and {again[name]:.2f}, recorded {median:.2f}")
    print(f"{len(first)} ratios compared, {len(confirmed)} worse by more than a tenth twice in a row")
    return 1 if confirmed else 0


def host() -> str:
    """The kind of host, as far as ratios depend on it: the processor's model and how many cores are used."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{models[0] if models else 'unknown processor'}, {len(os.sched_getaffinity(0))} cores"


def lines_of(record: Mapping[str, Any]) -> list[str]:
    """The figures as a Markdown table."""
    lines = ["| what | peer | aim | median | least to greatest |", "|---|---|---|---|---|"]
    for ratio in RATIOS:
        values = record["ratios"].get(ratio.name)
        if values:
            spread = f"{min(values):.2f} to {max(values):.2f}"
            lines.append(
                f"| {ratio.what} | {ratio.peer} | {ratio.aim:g} | {statistics.median(values):.2f} | {spread} |"
            )
    return lines


def page(record: Mapping[str, Any], picture_name: str) -> str:
    """The page of the guide."""
    runs = max(len(values) for values in record["ratios"].values())
    load = f"; load before: {record['load_before']:.1f}" if "load_before" in record else ""
    took = sum(record.get("seconds_of_a_run", {}).values())
    took_words = f" A run takes {took:.0f} s." if took else ""
    return "\n".join(
        (
            "# Side by side",
            "",
            "podrun's time over that of the library it is compared with, in turns in the same run, or over the seconds",
            "that it may take: 1 is equal, less is faster. Written by `python benchmarks/summary.py --json",
            "benchmarks/data/side-by-side.json --markdown docs/side-by-side.md`; [Benchmarks](benchmarks.md) says how",
            "each figure is measured and where time goes.",
            "",
            f"Runs: up to {runs}. Host: {record['host']}{load}.{took_words}",
            "",
            f"![Ratios with their spread](pictures/{picture_name})",
            "",
            "A dot is the median, green where the aim (the blue mark) is met; grey lines go from least to greatest.",
            "",
            *lines_of(record),
            "",
        )
    )


def picture(values: Mapping[str, Sequence[float]]) -> str:
    """Medians as dots and spreads as lines over a logarithmic axis, with a mark at 1 and one at each aim."""
    rows = [ratio for ratio in RATIOS if ratio.name in values]
    height = TOP + ROW * len(rows) + 8
    parts = []
    for tick in (0.25, 0.5, 1.0, 2.0, 4.0):
        x, kind = _x(tick), "one" if tick == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 10}" y2="{height - 8}"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 16}" text-anchor="middle">{tick:g}</text>')
    for number, ratio in enumerate(rows):
        y = TOP + ROW * number + ROW / 2
        low, middle, high = (f(values[ratio.name]) for f in (min, statistics.median, max))
        parts.append(f'<text x="{SCALE_LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(ratio.what)}</text>')
        parts.append(
            f'<line class="aim" x1="{_x(ratio.aim):.1f}" x2="{_x(ratio.aim):.1f}" y1="{y - 8}" y2="{y + 8}"/>'
        )
        parts.append(f'<line class="spread" x1="{_x(low):.1f}" x2="{_x(high):.1f}" y1="{y}" y2="{y}"/>')
        colour = "#3a7d44" if middle <= ratio.aim else "#c0504d"
        parts.append(f'<circle cx="{_x(middle):.1f}" cy="{y}" r="5" fill="{colour}"/>')
    style = (
        "text{fill:#222}.grid{stroke:#ddd}.one{stroke:#222}.aim{stroke:#4f81bd;stroke-width:2}"
        ".spread{stroke:#888;stroke-width:3}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444}.one{stroke:#ddd}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" font-size="13" '
        f'font-family="sans-serif"><style>{style}</style>{"".join(parts)}</svg>\n'
    )


def _x(value: float) -> float:
    share = math.log(min(max(value, LEAST), GREATEST) / LEAST) / math.log(GREATEST / LEAST)
    return SCALE_LEFT + share * (WIDTH - SCALE_LEFT - 20)


if __name__ == "__main__":
    sys.exit(main())
