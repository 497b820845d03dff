"""Messages to users: every refusal has a hint, every option a description."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from podrun.collectives.perf import perf_command
from podrun.compat.__main__ import compat_command
from podrun.estimate.command import estimate_command
from podrun.faults import EFFECTS
from podrun.monitor.commands.dashboards import dashboards_verb
from podrun.monitor.commands.exporter import exporter_verb
from podrun.monitor.commands.health import health_verb
from podrun.monitor.commands.record import record_verb
from podrun.monitor.commands.top import top_verb
from podrun.report.__main__ import report_command
from podrun.upkeep.pages import help_pages
from tests.conftest import ROOT
from tests.sources import syntax_nodes
from tests.test_docs import COMMANDS, PAGES

REFUSALS = {"UsageError", "ConfigError", "NotFoundError", "ConflictError", "UnsupportedError"}
"""Errors that a user can do something about."""
ROOMS = ("launcher", "partition", "monitor", "estimate", "report", "simulate")
"""The rooms whose commands people type."""
OTHERS = {
    "podrun estimate": estimate_command,
    "python -m podrun.report": report_command,
    "python -m podrun.compat": compat_command,
    "python -m podrun.collectives.perf": perf_command,
}
"""Commands beside the installed ones."""


def _without_hint(path: Path) -> Iterator[str]:
    for node in syntax_nodes(path):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name in REFUSALS and not any(word.arg == "hint" for word in call.keywords):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_refusals_say_what_to_do_next(room: str) -> None:
    paths = sorted((ROOT / "podrun" / room).rglob("*.py"))
    assert paths
    assert [line for path in paths for line in _without_hint(path)] == []


_TYPED = re.compile(
    r"(?<![\w./-])(vipu(?:-admin|-server)?|gc-[a-z]+)"
    r"((?: (?:\[?--?[a-z][\w-]*(?:=[A-Z]\w*)?\]?|[a-z][a-z-]+|[A-Z]\w*))*)"
)
"""A command as a message names it, and its words."""
_PROSE = {"and", "has", "or", "start", "starts", "that", "command", "server"}
"""Words that follow a command's name in sentences about it."""


@pytest.mark.parametrize("room", [*ROOMS, "upkeep"])
def test_commands_that_messages_name_take_what_is_named(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {typed[0]}"
        for path in sorted((ROOT / "podrun" / room).rglob("*.py"))
        for line, text in _texts(path)
        for typed in _TYPED.finditer(text)
        if not _takes(typed[1], typed[2].split())
    ]
    assert wrong == []


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """String literals, with their lines; X stands for what an f-string puts in."""
    nodes = syntax_nodes(path)
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def _takes(name: str, words: list[str]) -> bool:
    """True iff the command has such a verb and such options."""
    if name not in COMMANDS:
        return False
    command, options = COMMANDS[name], {"--help", "-h", "--version"}
    options |= {option for parameter in command.params for option in parameter.opts}
    while isinstance(command, click.Group) and words and not words[0].startswith(("-", "[")):
        word = words.pop(0)
        if word in _PROSE or word[0].isupper():
            return True
        inner = command.get_command(
            click.Context(command), getattr(command, "other_names", {}).get(word, word)
        )
        if inner is None:
            return False
        command = inner
        options |= {option for parameter in command.params for option in parameter.opts}
    return all(word.strip("[]").split("=")[0] in options for word in words if word.startswith(("-", "[-")))


def test_a_message_with_a_wrong_command_is_found() -> None:
    assert _takes("vipu", ["remove", "partition", "X", "--force"])
    assert not _takes("vipu", ["erase", "partition", "X"])
    assert not _takes("vipu", ["remove", "partition", "X", "--hard"])
    assert not _takes("gc-destroy", [])


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for word, inner in command.commands.items():
            yield from _commands(inner, f"{name} {word}")


MONITOR = {
    "top": top_verb,
    "record": record_verb,
    "health": health_verb,
    "exporter": exporter_verb,
    "dashboards": dashboards_verb,
}
HELPFUL = {**COMMANDS, **OTHERS, **MONITOR}


@pytest.mark.parametrize("name", sorted(HELPFUL))
def test_help_describes_every_command_and_option(name: str) -> None:
    command = HELPFUL[name]
    for words, inner in _commands(command, name):
        assert inner.help, words
        bare = [
            option.opts[-1]
            for option in inner.params
            if isinstance(option, click.Option)
            if not option.hidden and not any(letter.isalpha() for letter in (option.help or "").split("[")[0])
        ]
        assert bare == [], words


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - {"python -m podrun.collectives.perf"}))
def test_options_of_other_commands_are_on_a_page(name: str) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    command = OTHERS[name]
    assert "`" not in command.get_help(click.Context(command))
    for option in command.params:
        if isinstance(option, click.Option):
            long = max(option.opts, key=len)
            assert not long.startswith("--") or long in pages, long


def test_command_lines_are_read_by_one_library() -> None:
    """`podrun.core.command_line`, except for a process that vipu-server starts and nobody types, and modules that
    programs of PopRT and of TensorFlow's addons import for the parsers that they give.
    """
    others = re.compile(r"^\s*(import|from) (argparse|optparse|getopt)\b", re.MULTILINE)
    files = sorted((ROOT / "podrun").rglob("*.py"))
    read_otherwise = [path.name for path in files if others.search(path.read_text(encoding="utf-8"))]
    assert read_otherwise == ["_argparse.py", "keeper.py", "saved_model_conversion.py"]


def test_messages_on_the_page_for_trouble_are_those_of_the_code() -> None:
    """The quotations in the first column, except for placeholders, occur in podrun's source."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| ([^|]*)", page, flags=re.MULTILINE)))
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "podrun").rglob("*.py")))
    source = re.sub(r"\"\s*\n\s*f?\"", "", source)  # Strings that go on in the next line.
    fragments = [max(re.split(_STANDS_FOR, text), key=len).strip() for text in quoted]
    assert len(fragments) > 20
    assert [text for text in fragments if text not in source and text not in _OTHERS] == []


_STANDS_FOR = r"\.\.\.|\b\d[\d.:]*|\b[A-Z]\b|^\w: |\bp\b|HOST:|pod\d+|'popart'|/usr\S+"
_OTHERS = {"podrun: command not found", "No module named"}
"""Messages of the shell and of Python."""


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_fault_is_on_its_page() -> None:
    assert [kind for _, kind in EFFECTS if f"{kind}`" not in _page("reference/faults.md")] == []


def test_counts_on_pages_are_those_of_the_records() -> None:
    record = json.loads((ROOT / "tests/conformance/record.json").read_text(encoding="utf-8"))
    passing, cases = record["passing"], record["cases"]
    assert f"{cases:,} cases" in _page("onnx.md")
    assert f"| podrun | {passing:,} | 0 | {cases - passing} |" in _page("onnx.md")
    names = (ROOT / "tests/popart/public_names.txt").read_text(encoding="utf-8").splitlines()
    count = sum(bool(name.strip()) and not name.startswith("#") for name in names)
    assert f"the {count} public names" in _page("reference/popart.md")


_CHECKOUT = re.compile(r"\b(?:docs|examples|cluster_configs|benchmarks|website)/[\w{]|\b[\w-]+\.md\b")
_TOPIC = re.compile(r"podrun help (?!TOPIC|topics|\{)([a-z][\w/-]*)")


def _docstrings(path: Path) -> set[int]:
    """The strings that stand as statements of their own, which no user sees."""
    return {id(node.value) for node in syntax_nodes(path) if isinstance(node, ast.Expr)}


def test_messages_name_only_what_every_installation_has() -> None:
    """A wheel has no docs/ and no examples/; ``podrun help TOPIC`` shows pages everywhere."""
    wrong, topics = [], set()
    for path in sorted((ROOT / "podrun").rglob("*.py")):
        unseen = _docstrings(path)
        for node in syntax_nodes(path):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in unseen:
                continue
            topics |= set(_TOPIC.findall(node.value))
            if path.name != "pages.py" and _CHECKOUT.search(node.value):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.value[:60]}")
    assert wrong == []
    assert {"faults", "security", "onnx"} <= topics
    assert topics - set(help_pages()) == set()
