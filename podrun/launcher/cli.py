"""The ``podrun`` command.

Start-up imports stay light: what talks to servers or starts processes is imported when it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podrun.errors import PodrunError
from podrun.launcher.log import Log, error_text, silence
from podrun.launcher.options import CommandLine, parse_command_line, settle

VERBS = ("profile", "estimate")
"""A first word that is one of these is no program (``podrun -- profile`` runs a program of that name)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: the failing instance's own, 2 for what cannot be right, 128 +
    the signal's number after a signal.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words and words[0] in VERBS:
            return run_verb(words[0], words[1:], os.environ)
        return run(parse_command_line(words), os.environ)
    except PodrunError as error:
        sys.stderr.write(error_text(error))
        return error.exit_code
    except BrokenPipeError as error:
        # The reader of our output is gone (podrun ... | head): nothing to report to it.
        silence(sys.stdout, error)
        return 1
    except KeyboardInterrupt:
        return 130


def run_verb(verb: str, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Carry out ``podrun VERB ...``. Raises PodrunError."""
    if verb == "profile":
        from podrun.launcher import profile

        return profile.main(words, environ)
    from podrun.estimate import command

    return command.main(words)


def run(line: CommandLine, environ: Mapping[str, str]) -> int:
    """Carry out a command line. Raises PodrunError."""
    if line.given.get("help"):
        from podrun.launcher.help_text import help_text

        sys.stdout.write(help_text())
        return 0
    if line.given.get("version") or "version-format" in line.given:
        from podrun.launcher.version import version_text

        sys.stdout.write(version_text(line.given.get("version-format", "text")))
        return 0
    return _launch(_configured(line), line.program, environ)


def _configured(line: CommandLine) -> Mapping[str, Any]:
    """Options with those of --import-config beneath them; written out if --export-config says so."""
    if not {"import-config", "export-config"} & line.given.keys():
        return line.given
    from podrun.launcher.config import current_directory, merge_config, write_config

    here = Path(current_directory())
    given = merge_config(line.given, here)
    if path := given.get("export-config"):
        overwrite = bool(given.get("overwrite-config", False))
        write_config(here / path, settle(given), overwrite=overwrite)
    return given


def _launch(given: Mapping[str, Any], program: tuple[str, ...], environ: Mapping[str, str]) -> int:
    from podrun.launcher.config import current_directory
    from podrun.launcher.plan import Surroundings, plan_launch

    if not program and given.get("export-config"):
        return 0
    spec = plan_launch(given, program, Surroundings(environ, current_directory(), sys.executable))
    if given.get("dry-run"):
        from podrun.launcher.launch import preview

        for warning in spec.warnings:
            Log(spec.verbosity).warning(warning)
        sys.stdout.write(preview(spec, environ))
        return 0
    from podrun.launcher.launch import launch

    return launch(spec, environ)


if __name__ == "__main__":
    sys.exit(main())
