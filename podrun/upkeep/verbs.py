"""The verbs as users type them: `podrun doctor`, `cache`, `ps`, `stop_run`.

Each prints a table or lines for people, and with ``--format`` json, jsonl or csv what programs read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS, JSON_SCHEMA_VERSION, run_command
from podrun.core.environment import environment
from podrun.core.errors import UsageError
from podrun.core.machine_output import format_option, is_for_people, machine_lines, print_output
from podrun.core.terminal import TONES, styled, terminal_columns, text_table, wrapped

if TYPE_CHECKING:
    from podrun.upkeep.cache import Cache
    from podrun.upkeep.running import Run


def _cache_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For a shell: names of caches."""
    from podrun.upkeep.cache import cache_names

    return [name for name in cache_names(environment()) if name.startswith(incomplete)]


def _launch_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For a shell: launches of this user, without a call to a server."""
    from podrun.partition.host.discovery import Registry
    from podrun.upkeep.running import launches

    return [name for name in launches(Registry()) if name.startswith(incomplete)]


_FINDING = 26
"""Columns in front of a finding's text."""


@click.command("podrun doctor", context_settings=HELP_OPTIONS)
@format_option
def doctor(form: str) -> int:
    """Check that podrun can work here: host, memory, files, network, packages, numbers.

    Each line says ok, warning or wrong, and what to do. The exit code is 1 if something is wrong.
    """
    from podrun.upkeep.doctor import HostFacts, Soundness, examine

    findings = []
    for finding in examine(HostFacts()):
        findings.append(finding)
        if is_for_people(form):
            state = styled(f"{finding.health.value:<8}", TONES[finding.health.value], sys.stdout)
            first, *more = wrapped(finding.found, (terminal_columns(sys.stdout) or 1000) - _FINDING)
            click.echo(f"{state} {finding.what:<16} {first}", color=True)
            for line in (*more, *([finding.remedy] if finding.remedy else [])):  # Commands stay in one line.
                click.echo(f"{'':{_FINDING}}{line}")
            sys.stdout.flush()
    wrong = sum(finding.health is Soundness.WRONG for finding in findings)
    summary = f"{wrong} of {len(findings)} things are wrong." if wrong else "podrun can work here."
    plain = [{**asdict(f), "health": f.health.value} for f in findings]
    print_output(form, text=lambda: summary, document=_document("findings", plain), rows=plain)
    return int(wrong > 0)


@click.group("podrun cache", context_settings=HELP_OPTIONS)
def cache() -> None:
    """What podrun keeps between runs: look at it, or remove it.

    Everything is made anew when it is needed, so that clearing costs time and no results.
    """


def _own_caches() -> list[Cache]:
    from podrun.upkeep.cache import caches

    present = caches(environment())
    if not present:
        raise UsageError(
            "nothing is kept between runs: HOME is not set, and no variable names a directory",
            hint="Name one: export PODRUN_CACHE_DIR=DIRECTORY",
        )
    return present


@cache.command("info")
@format_option
def cache_info(form: str) -> None:
    """Show the caches, where they are and how large."""
    present = _own_caches()
    plain = [
        {"name": one.name, "meaning": one.meaning, "path": str(one.path), "files": len(one.files),
         "size_bytes": one.size_bytes}
        for one in present
    ]  # fmt: skip
    rows = [(c.name, str(len(c.files)), rounded_size(c.size_bytes), c.meaning, str(c.path)) for c in present]
    print_output(
        form,
        text=lambda: text_table(("Cache", "Files", "Size", "Holds", "Where"), rows),
        document=_document("caches", plain),
        rows=plain,
    )


@cache.command("clear")
@click.argument("names", nargs=-1, metavar="[CACHE]...", shell_complete=_cache_names)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def cache_clear(names: Sequence[str], dry_run: bool) -> None:
    """Remove all caches, or those named. Files of the last minute stay for the process that wrote them."""
    from podrun.upkeep.cache import chosen, clear

    selected = chosen(_own_caches(), names)
    files, octets = clear(selected, dry_run=dry_run)
    young = sum(len(one.files) for one in selected) - files
    stays = f"; {young} of the last minute stay" if young else ""
    click.echo(f"{'would remove' if dry_run else 'removed'} {files} files, {rounded_size(octets)}{stays}")


@click.command("podrun ps", context_settings=HELP_OPTIONS)
@format_option
@click.option("--watch", is_flag=True, help="Print again whenever something changes, until Ctrl-C.")
def ps(form: str, watch: bool) -> None:
    """Show whose run holds which IPUs since when: your launches, and all partitions of your servers."""
    if not watch:
        click.echo(_shown_runs(form), color=True)
        return
    from podrun.partition.host.discovery import Registry
    from podrun.upkeep.running import changes

    before = ""
    for _ in changes(Registry(), _servers()):
        now = _shown_runs(form)
        if now != before:
            click.echo(now, color=True)
            sys.stdout.flush()
        before = now


def _shown_runs(form: str) -> str:
    """The table of runs, or its JSON."""
    runs, silent = _runs()
    for line in silent:
        click.echo(f"note: {line}", err=True)
    if not is_for_people(form):
        keys = ("name", "user", "ipus", "state", "since", "program", "server", "held_by")
        plain = [
            {**{key: getattr(one, key) for key in keys}, "launch": one.is_launch,
             "pid": one.owner.pid if one.owner else None}
            for one in runs
        ]  # fmt: skip
        return "\n".join(machine_lines(form, _document("runs", plain), plain))
    if not runs:
        return "Nothing else is known to run." if silent else "Nothing runs."
    names = ("Run", "User", "IPUs", "State", "Since", "Program")
    rows = [
        (
            one.name,
            one.user,
            str(one.ipus or "-"),
            one.state,
            "-" if one.since is None else _clock(one.since),
            "".join(letter if letter.isprintable() else " " for letter in one.program),
        )
        for one in runs
    ]
    return text_table(names, _fitted(names, rows))


@click.command("podrun stop", context_settings=HELP_OPTIONS)
@click.argument("name", shell_complete=_launch_names)
@click.option("--force", is_flag=True, help="Kill it if it does not end by itself within 20 seconds.")
def stop(name: str, force: bool) -> None:
    """End a launch of yours, named as in podrun ps (or by its process number), and give its IPUs back.

    Its instances get SIGTERM first, and then SIGKILL, as at Ctrl-C. Partitions that no launch goes with are removed by
    vipu remove partition NAME.
    """
    from podrun.upkeep import running

    runs, _ = _runs()
    run_ = running.find_run(runs, name)
    how = running.stop_run(run_, force=force)
    click.echo(f"{run_.name} {how}")


def _document(key: str, value: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schema_version": JSON_SCHEMA_VERSION, key: value}


def _runs() -> tuple[list[Run], list[str]]:
    from podrun.partition.host.discovery import Registry
    from podrun.upkeep.running import all_runs

    return all_runs(Registry(), _servers())


def _servers() -> list[tuple[str, int, bool]]:
    """The server that the environment names, beside those that run here."""
    from podrun.partition.commands.which_server import find_server

    named = find_server(None, None)
    return [] if named.source == "the default" else [(named.host, named.port, named.own)]


VERBS: dict[str, click.Command] = {"doctor": doctor, "cache": cache, "ps": ps, "stop": stop}
"""Commands by the word after ``podrun``."""


def main(verb: str, words: Sequence[str]) -> int:
    """Run a verb and return its exit code."""
    return run_command(VERBS[verb], list(words))


def _fitted(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The rows with the last column cut to the width of the terminal; whole in a file or a pipe."""
    width = terminal_columns(sys.stdout)
    if width is None:
        return [tuple(row) for row in rows]
    others = sum(max(map(len, column)) + 3 for column in list(zip(names, *rows, strict=True))[:-1])
    room = max(width - others - 2, 20)
    return [(*row[:-1], row[-1] if len(row[-1]) <= room else f"{row[-1][: room - 3]}...") for row in rows]


def rounded_size(octets: int) -> str:
    """``12 KiB``, ``3.4 MiB``."""
    if octets < 1 << 20:
        return f"{octets / 1024:.0f} KiB"
    return f"{octets / (1 << 20):.1f} MiB" if octets < 1 << 30 else f"{octets / (1 << 30):.2f} GiB"


def _clock(since: float) -> str:
    """The time of day, with the date if it is another day's."""
    then = datetime.fromtimestamp(since).astimezone()
    today = datetime.now().astimezone().date()
    return then.strftime("%H:%M:%S" if then.date() == today else "%Y-%m-%d %H:%M")
