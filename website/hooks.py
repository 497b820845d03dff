"""What the site has that no file in docs/ holds: command and error references, and pages of the repository's root.

MkDocs calls `on_files` and `on_page_markdown`. The references are made from the commands and classes themselves, so
they cannot differ from them.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
WORKER = "file-worker.js"
SHIM = "https://unpkg.com/iframe-worker/shim"
SEARCH_BOOSTS = {
    "troubleshooting.md": 4.0,
    "reference/errors.md": 2.0,
    "bring-your-program.md": 2.0,
    "popart.md": 2.0,
    "poptorch.md": 2.0,
    "reference/python.md": 0.3,
    "changelog.md": 0.3,
    "contributing.md": 0.3,
    "decisions.md": 0.3,
    "benchmarks.md": 0.3,
    "side-by-side.md": 0.3,
    "fidelity.md": 0.3,
}
"""Pages that search puts before others (guides, texts of errors), or behind (what is about podrun's own work)."""
COMMANDS = (
    ("podrun faults", "podrun.launcher.commands.faults", "faults_verb"),
    ("podrun inject", "podrun.launcher.commands.inject", "inject_verb"),
    *((f"podrun {name}", "podrun.upkeep.verbs", name) for name in ("doctor", "cache", "ps", "stop")),
    ("podrun completion", "podrun.launcher.commands.completion", "completion_verb"),
    ("vipu", "podrun.partition.commands.vipu", "vipu_command"),
    ("vipu-admin", "podrun.partition.commands.vipu_admin", "vipu_admin_command"),
    ("vipu-server", "podrun.partition.commands.vipu_server", "vipu_server_command"),
    ("poprt", "podrun.serving.poprt_command", "poprt_command"),
    ("poprt_exec", "podrun.serving.run_popef_command", "exec_command"),
    ("popef_dump", "podrun.popef.dump", "dump_command"),
    *(
        (f"gc-{name}", f"podrun.monitor.{module}", f"gc_{name}_command")
        for module, names in (
            ("device_tools", ("monitor", "reset")),
            ("device_listing", ("info", "inventory")),
            ("link_tools", ("links", "iputraffictest")),
            ("load_tools", ("flops", "powertest")),
            ("host_tools", ("hosttraffictest", "hostsynclatencytest")),
            ("gc_gwlinkstraffictest", ("gwlinkstraffictest",)),
        )
        for name in names
    ),
)
"""Commands that are made with click: name, module, function."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for name in ("site.css", "mark.svg", WORKER):
        files.append(
            File.generated(config, name, content=(ROOT / "website" / name).read_text(encoding="utf-8"))
        )
    files.append(File.generated(config, "reference/commands.md", content=command_reference()))
    files.append(File.generated(config, "reference/errors.md", content=error_reference()))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let search run from the disk without a file from the network: the theme would take this one from a server."""
    return output.replace(SHIM, "../" * page.url.count("/") + WORKER)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same in pages that are of the theme alone."""
    return output_content.replace(SHIM, WORKER)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between the repository's root and docs/ lead to pages of the site; others become their text."""
    if page.file.src_uri in SEARCH_BOOSTS:
        page.meta["search"] = {"boost": SEARCH_BOOSTS[page.file.src_uri]}
    markdown = plain_pipes(markdown)
    if page.file.src_uri in ROOT_PAGES:
        markdown = re.sub(r"\]\(docs/([^)]+)\)", r"](\1)", markdown)
    for target, source in ROOT_PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{source}\)", f"]({target})", markdown)
    if "/" in page.file.src_uri:
        return markdown  # There ../ leads to other pages, not out of docs/.
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put each picture into a box of its own that scrolls, and open it alone on a click."""
    return re.sub(
        r'<p>(<img [^>]*src="([^"]*pictures/[^"]+)"[^>]*>)</p>', r'<a class="picture" href="\2">\1</a>', html
    )


def plain_pipes(markdown: str) -> str:
    """Take the backslash off pipes in code of tables: GitHub wants it there, and the site's Markdown shows it."""
    rows = re.compile(r"^\|.*$", re.MULTILINE)
    code = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
    return rows.sub(lambda row: code.sub(lambda part: part[0].replace(r"\|", "|"), row[0]), markdown)


def command_reference() -> str:
    """The help of every installed command, in one page."""
    from podrun.launcher.help_text import markdown_table

    parts = [
        "# Commands\n\nThe text that `--help` shows, for each command. `poprun` is another name of `podrun`.\n",
        "## podrun\n\nVerbs (`podrun profile`, `podrun estimate` and others) and how a launch goes: "
        "[Launcher](../launcher.md).\n\n" + markdown_table(),
        *(f"## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in _own_helps()),
    ]
    for name, module, function in COMMANDS:
        command: click.Command = getattr(importlib.import_module(module), function)
        parts.append(f"## {name}\n")
        for words, text in _helps(command, (name,)):
            heading = f"### {' '.join(words)}\n\n" if len(words) > 1 else ""
            parts.append(f"{heading}```text\n{text}\n```\n")
    return "\n".join(parts)


def _own_helps() -> Iterator[tuple[str, str]]:
    """The helps of commands that are written as podrun's own, not as click's."""
    from podrun.compat.__main__ import compat_command
    from podrun.estimate.command import estimate_command
    from podrun.launcher.commands.click_verbs import RecordCommand, verb_command
    from podrun.launcher.commands.profile import HELP
    from podrun.launcher.commands.verb_names import (
        MONITOR_VERBS,
        RECORD_VERBS,
        SERVING_VERBS,
        SIMULATION_VERBS,
    )
    from podrun.report import __main__ as report

    yield "podrun compat", next(_helps(compat_command, ("podrun compat",)))[1]
    yield "podrun profile", HELP
    yield "podrun estimate", next(_helps(estimate_command, ("podrun estimate",)))[1]
    for verb in (*SIMULATION_VERBS, *MONITOR_VERBS, *SERVING_VERBS):
        yield f"podrun {verb}", next(_helps(verb_command(verb), (f"podrun {verb}",)))[1]
    for verb in RECORD_VERBS:
        command = verb_command(verb)
        assert isinstance(command, RecordCommand)
        yield f"podrun {verb}", command.help_page
    yield "python -m podrun.report", next(_helps(report.report_command, ("python -m podrun.report",)))[1]


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


def error_classes() -> list[type[Exception]]:
    """podrun's error classes, bases first. Modules that define some are found by their text, and imported."""
    from podrun.core.errors import PodrunError

    for path in sorted((ROOT / "podrun").rglob("*.py")):
        if re.search(
            r"^class \w+\(.*(Error|[Ee]xception|_error)\b", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            parts = path.relative_to(ROOT).with_suffix("").parts
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    found: dict[type[Exception], None] = {PodrunError: None}
    for value in found.copy() | dict.fromkeys(_below(PodrunError)):
        if value.__module__.startswith("podrun.") and not value.__name__.startswith("_"):
            found[value] = None
    return list(found)


def _below(kind: type[Exception]) -> Iterator[type[Exception]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def error_reference() -> str:
    """Every error class with its bases and whose fault it is, the error codes, and the recovery actions."""
    from podrun.core import errors
    from podrun.core.fault_effects import EFFECTS

    lines = [
        "# Errors\n",
        "Each error says whose fault it is, what happened where, and after `hint:` what to type next. "
        "Messages by what you see: [When it does not work](../troubleshooting.md).\n",
        "## Classes\n",
        "`popart` and `poptorch` have theirs under the SDK's names; each is also the class of podrun's that its row "
        "names as a base. Commands and `podrun.compat` end with the exit code of the row.\n",
        "| class, of its bases | when | whose fault, exit code |",
        "|---|---|---|",
    ]
    for value in error_classes():
        text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("|", "\\|")
        bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
        fault, code = getattr(value, "fault", None), getattr(value, "exit_code", "")
        name, text = f"{_import_from(value)}{value.__name__}", text.replace("``", "`")
        lines.append(f"| `{name}`<br>of {bases} | {text} | {fault.value if fault else ''}, {code} |")
    lines += [
        "\n## Codes\n",
        "The values of `poplar::ErrorCode`, which a runtime error carries, and the faults that raise them "
        "([Faults](faults.md)).\n",
        "| code | value | meaning | raised by |",
        "|---|---|---|---|",
    ]
    for name, text in _notes(errors.ErrorCode):
        code = errors.ErrorCode[name]
        faults = ", ".join(f"`{on}:{kind}`" for (on, kind), effect in EFFECTS.items() if effect.code is code)
        lines.append(f"| `{name}` | {code.value} | {text} | {faults} |")
    lines += ["\n## Recovery actions\n", "| action | what it does, and the command |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in _notes(errors.RecoveryAction)]
    return "\n".join(lines) + "\n"


def _import_from(kind: type[Exception]) -> str:
    """The module, with a dot, from which programs know the class."""
    for module in ("popart", "poptorch"):
        if getattr(importlib.import_module(f"podrun.{module}"), kind.__name__, None) is kind:
            return f"{module}."
    return ""


def _notes(kind: type) -> list[tuple[str, str]]:
    """The members of an enum with what is written under each."""
    found = re.findall(
        r'^    (\w+) = [^\n]*\n    """(.*?)"""', inspect.getsource(kind), re.MULTILINE | re.DOTALL
    )
    return [(name, " ".join(text.replace("``", "`").split())) for name, text in found]
