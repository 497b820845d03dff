"""``podrun drill``: find a hidden fault on an emulated POD with the real tools."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.errors import UsageError
from podrun.core.machine_output import format_option, is_for_people, print_output


@click.command(
    "podrun drill",
    context_settings=HELP_OPTIONS,
    epilog="podrun drill answer TARGET:PLACE:KIND, hint and give up are for a second terminal. podrun drill check FILE "
    "checks a drill of your own; schema prints what it may hold. Exit code: 0 solved, 1 not solved.",
)
@click.argument("words", nargs=-1, metavar="[NAME|FILE|answer ANSWER|hint|give up|check FILE|schema]")
@click.option("--seed", type=int, help="Draw the same places again [others each time].")
@format_option
def drill_verb(words: tuple[str, ...], seed: int | None, form: str) -> int:
    """Break an emulated POD secretly and let you find out with the real tools what it is.

    Without a name: the drills there are.
    """
    from podrun.core.environment import runtime_directory
    from podrun.drill import play, scenario

    match words:
        case ():
            drills = scenario.built_in_drills()
            rows = [{"name": name, "title": title} for name, title in drills.items()]
            lines = [f"{name:<18} {title}" for name, title in drills.items()]
            print_output(
                form, text=lambda: "\n".join(lines), document={"schema_version": 1, "drills": rows}, rows=rows
            )
            return 0
        case ("answer", *answer) if answer:
            click.echo(play.send_answer(runtime_directory(), " ".join(answer)))
            return 0
        case ("hint",) | ("give", "up"):
            click.echo(play.send_answer(runtime_directory(), " ".join(words)))
            return 0
        case ("check", file):
            for number in range(20):  # Each place that may be drawn.
                scenario.load_scenario(file, number)
            click.echo(f"{file} is a drill.")
            return 0
        case ("schema",):
            click.echo(scenario.scenario_schema())
            return 0
        case (name,):
            return _play(name, secrets.randbelow(2**31) if seed is None else seed, form)
    raise UsageError(f"podrun drill {' '.join(words)} says nothing", hint="podrun drill --help")


def _play(name: str, seed: int, form: str) -> int:
    from podrun.drill import play, scenario

    drill = scenario.load_scenario(name, seed)
    directory = play.new_directory(Path(tempfile.gettempdir()))
    people = is_for_people(form)
    try:
        score = play.play(drill, directory, lambda line: click.echo(line, err=not people))
    finally:
        play.remove_directory(directory)
    document = {"schema_version": 1, "score": score.plain(), "seed": seed}
    print_output(
        form, text=lambda: "\n".join(play.explained(drill, score)), document=document, rows=[score.plain()]
    )
    return 0 if score.solved else 1
