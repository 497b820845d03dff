"""The ``podrun`` command.

Start-up stays fast: modules that talk to servers or start processes are imported when they are needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from podrun.core.environment import environment
from podrun.core.errors import PodrunError, UsageError
from podrun.launcher.commands.verb_names import UPKEEP_VERBS, VERBS
from podrun.launcher.options import parse_command_line
from podrun.launcher.own_streams import error_text, silence
from podrun.launcher.run_line import run_command_line

COMPLETES = {"_PODRUN_COMPLETE", "_POPRUN_COMPLETE"}
"""Variables through which a shell asks for completions."""
NO_VERBS = ("init", "version", "run", "start", "status", "list", "info", "new", "test", "config")
"""Words that people type as verbs although podrun does not have them; some are commands of the host."""
MEANT = {"kill": "stop", "report": "profile", "monitor": "top", "status": "ps"}
"""Words of other tools, or of a command's result, and podrun's."""


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


if __name__ == "__main__":
    sys.exit(main())
