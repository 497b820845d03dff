"""The ``podrun`` command.

Start-up stays fast: modules that talk to servers or start processes are imported when they are needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.environment import PODRUN_FAULTS, environment
from podrun.core.errors import PodrunError, UsageError
from podrun.launcher.options import CommandLine, parse_command_line, values_in_effect
from podrun.launcher.own_streams import Log, error_text, silence

if TYPE_CHECKING:
    from podrun.launcher.spec import LaunchSpec

RECORD_VERBS = ("replay", "shrink", "diff", "incidents")
UPKEEP_VERBS = ("doctor", "cache", "ps", "stop")
SIMULATION_VERBS = ("simulate", "chaos", "scale")
SERVING_VERBS = ("serve", "capacity", "load")
MONITOR_VERBS = ("top", "record", "health", "exporter", "dashboards", "schema", "drill", "trace")
VERBS = (
    *("profile", "estimate", "compat", "faults", "inject", *RECORD_VERBS, *UPKEEP_VERBS),
    *SIMULATION_VERBS,
    *SERVING_VERBS,
    *MONITOR_VERBS,
    *("completion", "help"),
)
"""Verbs. ``podrun -- profile`` runs a program of that name instead."""
COMPLETES = {"_PODRUN_COMPLETE", "_POPRUN_COMPLETE"}
"""Variables through which a shell asks for completions."""
NO_VERBS = ("init", "version", "run", "start", "status", "list", "info", "new", "test", "config")
"""Words that people type as verbs although podrun does not have them; some are commands of the host."""
MEANT = {"kill": "stop"}
"""Words of other tools, and podrun's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: that of the failing instance, 2 for a usage error, 3 for a planned
    fault that did not strike, or 128 + the number of the signal that ended it.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if COMPLETES & environment().keys():
            from podrun.launcher.commands.completion import answer_shell, asking_command

            return answer_shell(asking_command())
        if words and words[0] in VERBS:
            return run_verb(words[0], words[1:], environment())
        if words:
            check_verb(words[0])
        return run_command_line(parse_command_line(words), environment())
    except PodrunError as error:
        sys.stderr.write(error_text(error))
        return error.exit_code
    except BrokenPipeError as error:
        # The reader of our output is gone (podrun ... | head), so nobody is left to tell.
        silence(sys.stdout, error)
        return 1
    except KeyboardInterrupt:
        return 130


def check_verb(word: str) -> None:
    """Refuse a word that was meant as a verb of podrun, before a command of the host of this name runs."""
    import difflib

    if os.path.exists(word) or not word.isalpha():
        return
    near = [MEANT[word]] if word in MEANT else difflib.get_close_matches(word, VERBS, n=1, cutoff=0.75)
    if near or word in NO_VERBS:
        meant = f"Did you mean podrun {near[0]}? " if near else "podrun --help shows what there is. "
        raise UsageError(
            f"podrun has no command {word!r}",
            hint=f"{meant}A program of that name is run by: podrun -- {word}",
        )


def run_verb(verb: str, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Carry out ``podrun VERB ...``. Raises PodrunError."""
    if verb == "help":
        return _help(words, environ)
    if verb == "compat":
        # `compat` runs in this process, because the program becomes its __main__.
        os.execv(sys.executable, [sys.executable, "-m", "podrun.compat", *words])
    if verb in UPKEEP_VERBS:
        from podrun.upkeep import verbs

        return verbs.main(verb, words)
    if verb == "profile":
        from podrun.launcher.commands import profile

        return profile.main(words, environ)
    if verb == "estimate":
        from podrun.estimate import command

        return command.main(words)
    return _run_click_verb(verb, words, environ)


def _run_click_verb(verb: str, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Carry out a verb whose module in `podrun.launcher.commands` has a click command."""
    from podrun.core.command_line import run_command
    from podrun.launcher.commands.click_verbs import RecordCommand, RecordContext, verb_command

    command = verb_command(verb)
    if isinstance(command, RecordCommand):
        return command.run_words(words, RecordContext(environ))
    return run_command(command, words)


def _help(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """``podrun help``: the table of options; with a topic a page of the guide, with another verb that verb's help."""
    from podrun.upkeep.pages import help_pages, page_text, table_of_topics

    if not words:
        return run_command_line(parse_command_line(["--help"]), environ)
    if words[0] == "topics":
        sys.stdout.write(table_of_topics())
        return 0
    if words[0] in VERBS and words[0] not in help_pages():
        return run_verb(words[0], ["--help"], environ)
    sys.stdout.write(page_text(words[0]))
    return 0


def run_command_line(line: CommandLine, environ: Mapping[str, str]) -> int:
    """Carry out a command line. Raises PodrunError."""
    if line.options.get("help"):
        from podrun.launcher.help_text import help_text

        sys.stdout.write(help_text())
        return 0
    if line.options.get("version") or "version-format" in line.options:
        from podrun.launcher.help_text import version_text

        sys.stdout.write(version_text(line.options.get("version-format", "text")))
        return 0
    return _launch(_configured(line), line.program, environ)


def _configured(line: CommandLine) -> Mapping[str, Any]:
    """The given options over those of --import-config, written to a file if --export-config asks for it."""
    if not {"import-config", "export-config"} & line.options.keys():
        return line.options
    from podrun.launcher.config_file import current_directory, merge_config, write_options_file

    here = Path(current_directory())
    options = merge_config(line.options, here)
    if path := options.get("export-config"):
        overwrite = bool(options.get("overwrite-config", False))
        write_options_file(here / path, values_in_effect(options), overwrite=overwrite)
    return options


def _launch(options: Mapping[str, Any], program: tuple[str, ...], environ: Mapping[str, str]) -> int:
    from podrun.launcher.config_file import current_directory
    from podrun.launcher.plan import plan_launch
    from podrun.launcher.program import LaunchContext

    if not program and options.get("export-config"):
        return 0
    spec = plan_launch(options, program, LaunchContext(environ, current_directory(), sys.executable))
    if options.get("dry-run"):
        from podrun.launcher.dry_run import preview

        for warning in spec.warnings:
            Log(spec.verbosity).warning(warning)
        sys.stdout.write(preview(spec, environ))
        return 0
    from podrun.launcher.launch import launch

    if spec.record or spec.restarts or (spec.partition is not None and spec.partition.faults):
        from podrun.launcher.recording import with_header

        spec = with_header(spec, options, program, current_directory())

    def with_replicas(replicas: int) -> LaunchSpec:
        instances = gcd(replicas, spec.layout.instances)
        fewer = {
            **options,
            "num-replicas": replicas,
            "num-instances": instances,
            "fault": (),
            "fault-plan": None,
        }
        bare = {name: value for name, value in environ.items() if name != PODRUN_FAULTS}
        return plan_launch(fewer, program, LaunchContext(bare, current_directory(), sys.executable))

    return launch(spec, environ, with_replicas)


if __name__ == "__main__":
    sys.exit(main())
