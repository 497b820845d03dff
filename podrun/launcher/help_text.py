"""``podrun --help`` and the table in docs/launcher.md, from the option table."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from podrun.launcher.option_table import OPTIONS, Group, Kind, Option

USAGE = "Usage: podrun [options] program [arguments of the program]"
INTRODUCTION = (
    "Runs a program written for an IPU-POD on emulated IPU-M2000s. A .py file runs with podrun's own "
    "Python; any other command runs as it is. Options end at the program."
)
VERBS = (
    ("podrun profile [options] program", "the same, and then reports of modelled time and memory"),
    ("podrun estimate model.onnx", "fit, throughput and bottleneck without running anything"),
)
EXAMPLES = (
    "podrun --num-replicas 16 train.py",
    "podrun --num-replicas 16 --num-instances 4 --print-topology=yes train.py --epochs 3",
    "podrun --num-replicas 16 --fault ipu:5@step=17:tile-parity train.py",
)
_COLUMN = 36


def metavar(option: Option) -> str:
    """What stands for the value: ``N``, ``yes|no``, a choice list, or nothing."""
    if option.kind is Kind.BOOLEAN:
        return "yes|no"
    return option.metavar


def spelled(option: Option) -> str:
    """``-H, --host LIST``."""
    short = f"-{option.short}, " if option.short else ""
    name = f"{short}--{option.name}"
    return f"{name} {metavar(option)}" if metavar(option) else name


def default_text(option: Option) -> str:
    """The default as one would type it; empty if ``help`` tells it or there is none."""
    if option.kind in (Kind.FLAG, Kind.VERBOSITY) or option.default is None or option.default == ():
        return ""
    if isinstance(option.default, bool):
        return "yes" if option.default else "no"
    if isinstance(option.default, float):
        return f"{option.default:g}"
    return str(option.default)


def help_text(width: int | None = None) -> str:
    """The whole help, wrapped to ``width`` columns (default: the terminal's, at most 110)."""
    width = min(width or shutil.get_terminal_size((100, 24)).columns, 110)
    lines = [USAGE, *(f"       {words:<34}  {what}" for words, what in VERBS)]
    lines += ["", *textwrap.wrap(INTRODUCTION, width)]
    for group in Group:
        lines += ["", f"{group.value}:"]
        for option in OPTIONS:
            if option.group is group:
                lines += _entry(option, width)
    lines += ["", "Examples:", *(f"  {example}" for example in EXAMPLES)]
    return "\n".join(lines) + "\n"


def _entry(option: Option, width: int) -> Iterator[str]:
    default = default_text(option)
    text = option.help + (f" (default: {default})" if default else "")
    left = f"  {spelled(option)}"
    wrapped = textwrap.wrap(text, max(width - _COLUMN, 30))
    if len(left) < _COLUMN - 1:
        yield left.ljust(_COLUMN) + wrapped.pop(0)
    else:
        yield left
    for line in wrapped:
        yield " " * _COLUMN + line


def markdown_table() -> str:
    """The option table of docs/launcher.md; a test holds the page to it."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in OPTIONS:
        name = spelled(option).replace("|", "\\|")
        text = option.help.replace("|", "\\|")
        lines.append(f"| `{name}` | {default_text(option)} | {text} |")
    return "\n".join(lines) + "\n"
