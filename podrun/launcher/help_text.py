"""The texts of ``podrun --help`` and ``--version``, and the option table of docs/launcher.md."""

from __future__ import annotations

import json
import platform
import shutil
import textwrap
from collections.abc import Iterator, Mapping

from podrun import __version__
from podrun.launcher.option_table import OPTIONS, SECTIONS, Option, ValueKind

USAGE = "Usage: podrun [options] program [arguments of the program]"
INTRODUCTION = (
    "Runs a program written for an IPU-POD on emulated IPU-M2000s. A .py file runs with podrun's own "
    "Python; any other command runs as it is. Options end at the program."
)
VERBS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Run": (
        ("podrun [options] program", "on a POD of machine processes"),
        ("podrun compat [options] program", "alone, in one process; also -m, -c and -i"),
    ),
    "Measure": (
        ("podrun profile [options] program", "run it; reports of modelled time and memory"),
        ("podrun estimate model.onnx", "fit, speed and bottleneck, without running"),
    ),
    "Break and recover": (
        ("podrun inject JOB FAULT...", "make something fail in a run"),
        ("podrun faults", "planned faults, their history, all kinds"),
        ("podrun incidents RECORD", "what happened in a recorded run, and cost"),
        ("podrun trace RECORD", "its spans; --otlp URL exports them"),
        ("podrun replay|shrink|diff RECORD", "repeat, reduce and compare recorded runs"),
    ),
    "Serve and plan": (
        ("podrun serve REPOSITORY", "models on the real Triton: gRPC and HTTP"),
        ("podrun load URL -m MODEL", "how a model server answers under load"),
        ("podrun capacity model.onnx", "which POD serves a rate; --slo p99=20ms"),
        ("podrun scale model.onnx", "what a larger POD gives"),
        ("podrun simulate JOBS", "a queue of jobs on a POD, in virtual time"),
        ("podrun chaos", "a month of failures, and what they cost"),
    ),
    "Look after": (
        ("podrun doctor", "can podrun work on this host?"),
        ("podrun ps, podrun stop NAME", "whose run holds which IPUs; end one of yours"),
        ("podrun top", "a POD on the whole screen: IPUs, jobs, queue"),
        ("podrun record FILE", "keep what a monitor sees; top --replay"),
        ("podrun health", "what is broken, who is hit, what to type"),
        ("podrun exporter", "metrics for Prometheus"),
        ("podrun dashboards DIR", "panels for Grafana, alerts for Prometheus"),
        ("podrun drill NAME", "find a hidden fault with the real tools"),
        ("podrun schema [TOOL]", "JSON schema of what --format json prints"),
        ("podrun cache info|clear", "what is kept between runs"),
        ("podrun completion SHELL", "for bash, zsh and fish"),
        ("podrun help TOPIC", "a page of the guide; help topics lists all"),
    ),
}
"""Commands by purpose; each has a --help of its own."""
EXAMPLES = (
    "podrun --num-replicas 16 train.py",
    "podrun --num-replicas 16 --num-instances 4 train.py --epochs 3",
    "podrun --num-replicas 16 --fault ipu:5@batch=17:tile-parity train.py",
)
_COLUMN = 36
NARROWEST = 40
"""Columns of the narrowest help: COLUMNS may hold any number."""


def metavar(option: Option) -> str:
    """The placeholder of an option's value: ``N``, ``yes|no``, a choice list, or nothing."""
    if option.kind is ValueKind.BOOLEAN:
        return "yes|no"
    return option.metavar


def option_as_typed(option: Option) -> str:
    """``-H, --host LIST``."""
    short = f"-{option.short}, " if option.short else ""
    name = f"{short}--{option.name}"
    return f"{name} {metavar(option)}" if metavar(option) else name


def default_text(option: Option) -> str:
    """The default as users type it; empty if there is none or ``help`` states it."""
    if option.kind in (ValueKind.FLAG, ValueKind.VERBOSITY) or option.default is None or option.default == ():
        return ""
    if isinstance(option.default, bool):
        return "yes" if option.default else "no"
    if isinstance(option.default, float):
        return f"{option.default:g}"
    return str(option.default)


def help_text(width: int | None = None) -> str:
    """The whole help, wrapped to ``width`` columns (default: the terminal's), from `NARROWEST` to 110."""
    width = min(max(width or shutil.get_terminal_size((100, 24)).columns, NARROWEST), 110)
    lines = [USAGE, "", *textwrap.wrap(INTRODUCTION, width)]
    for purpose, verbs in VERBS.items():
        lines += ["", f"{purpose}:", *(f"  {words:<34}{what}" for words, what in verbs)]
    for heading, options in SECTIONS.items():
        lines += ["", f"{heading}:"]
        for option in options:
            lines += _entry(option, width)
    lines += ["", "Examples:", *(f"  {example}" for example in EXAMPLES)]
    return "\n".join(lines) + "\n"


def _entry(option: Option, width: int) -> Iterator[str]:
    default = default_text(option)
    text = option.help + (f" (default: {default})" if default else "")
    left = f"  {option_as_typed(option)}"
    wrapped = textwrap.wrap(text, max(width - _COLUMN, 30))
    if len(left) < _COLUMN - 1:
        yield left.ljust(_COLUMN) + wrapped.pop(0)
    else:
        yield left
    for line in wrapped:
        yield " " * _COLUMN + line


def markdown_table() -> str:
    """The option table of docs/launcher.md; a test compares it with the page."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in OPTIONS:
        name = option_as_typed(option).replace("|", "\\|")
        text = option.help.replace("|", "\\|")
        lines.append(f"| `{name}` | {default_text(option)} | {text} |")
    return "\n".join(lines) + "\n"


DEPENDENCIES = ("click", "grpcio", "jax", "jaxlib", "numpy", "onnx", "protobuf", "pydantic", "ray", "rich")


def version_text(form: str) -> str:
    """``text``: podrun's own; ``full-text`` and ``full-json``: with Python and what podrun depends on."""
    if form == "text":
        return f"podrun {__version__}\n"
    from importlib import metadata  # It takes as long to import as the whole of podrun --help.

    versions = {"podrun": __version__, "python": platform.python_version()}
    for name in DEPENDENCIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    if form == "full-json":
        return json.dumps(versions, indent=2) + "\n"
    return "".join(f"{name} {version}\n" for name, version in versions.items())
