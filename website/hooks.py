"""What the site has that no file in docs/ holds: command and error references, and pages of the repository's root.

MkDocs calls `on_files` and `on_page_markdown`. The references are made from the commands and classes themselves, so
they cannot differ from them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    import click
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
COMMANDS = (
    *(
        (f"podrun {name}", "podrun.upkeep.verbs", name)
        for name in ("doctor", "cache", "ps", "stop", "completion")
    ),
    ("vipu", "podrun.vipu.cli_user", "vipu"),
    ("vipu-admin", "podrun.vipu.cli_admin", "vipu_admin"),
    ("vipu-server", "podrun.vipu.cli_server", "vipu_server"),
    *(
        (f"gc-{name}", f"podrun.monitor.{module}", f"gc_{name}")
        for module, names in (
            ("device_tools", ("monitor", "info", "inventory", "reset")),
            ("link_tools", ("links", "iputraffictest")),
            ("load_tools", ("flops", "powertest")),
            ("host_tools", ("hosttraffictest", "hostsynclatencytest")),
            ("gc_gwlinkstraffictest", ("gwlinkstraffictest",)),
        )
        for name in names
    ),
)
"""Installed commands that are made with click: name, module, function."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/commands.md", content=command_reference()))
    files.append(File.generated(config, "reference/errors.md", content=error_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between the repository's root and docs/ lead to pages of the site; others become their text."""
    if page.file.src_uri in ROOT_PAGES:
        markdown = re.sub(r"\]\(docs/([^)]+)\)", r"](\1)", markdown)
    for target, source in ROOT_PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{source}\)", f"]({target})", markdown)
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)


def command_reference() -> str:
    """The help of every installed command, in one page."""
    import importlib

    from podrun.launcher.options import markdown_table

    parts = [
        "# Commands\n\nThe text that `--help` shows, for each command. `poprun` is another name of `podrun`.\n",
        "## podrun\n\nVerbs (`podrun profile`, `podrun estimate` and others) and how a launch goes: "
        "[Launcher](../launcher.md).\n\n" + markdown_table(),
    ]
    for name, module, function in COMMANDS:
        command: click.Command = getattr(importlib.import_module(module), function)
        parts.append(f"## {name}\n")
        for words, text in _helps(command, (name,)):
            heading = f"### {' '.join(words)}\n\n" if len(words) > 1 else ""
            parts.append(f"{heading}```text\n{text}\n```\n")
    return "\n".join(parts)


def _helps(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The command's own help, then those of its subcommands."""
    import click

    context = click.Context(command, info_name=" ".join(words), max_content_width=100)
    yield words, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _helps(inner, (*words, name))


def error_reference() -> str:
    """Every public error class with its base, the error codes, and the recovery actions."""
    from podrun.core import errors

    lines = [
        "# Errors\n",
        "Each error says whose fault it is, what happened where, and after `hint:` what to type next. "
        "Messages by what you see: [When it does not work](../troubleshooting.md).\n",
        "## Classes\n",
        "| class | base | when |",
        "|---|---|---|",
    ]
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__:
            text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("|", "\\|")
            lines.append(f"| `{name}` | `{value.__mro__[1].__name__}` | {text} |")
    lines += [
        "\n## Codes\n",
        "The values of `poplar::ErrorCode`, which a runtime error carries.\n",
        "| code | value |",
        "|---|---|",
    ]
    lines += [f"| `{code.name}` | {code.value} |" for code in errors.ErrorCode]
    lines += ["\n## Recovery actions\n", "| action | what it does, and the command |", "|---|---|"]
    notes = re.findall(
        r'^    (\w+) = "\1"\n    """(.*?)"""',
        inspect.getsource(errors.RecoveryAction),
        re.MULTILINE | re.DOTALL,
    )
    lines += [f"| `{name}` | {' '.join(text.replace('``', '`').split())} |" for name, text in notes]
    return "\n".join(lines) + "\n"
