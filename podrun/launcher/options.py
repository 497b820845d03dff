"""The grammar of ``podrun``'s command line, which is PopRun's.

    podrun [options] program [arguments of the program]

Options end at the first word that is not one (or at ``--``). ``--name value`` and ``--name=value`` are the
same; a unique prefix of a name suffices; booleans take a value (yes, no, on, off, 1, 0, true, false).
Stricter than PopRun: an option with two different values is an error, as is an unknown option.

The texts of ``--help`` and ``--version`` come from the same table.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import click

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.launcher.option_table import BY_NAME, OPTIONS, Option, ValueKind
from podrun.launcher.option_words import ELSEWHERE, OptionTable, OptionUse, example_of

TRUE_WORDS = frozenset({"yes", "on", "1", "true"})
FALSE_WORDS = frozenset({"no", "off", "0", "false"})
MAX_NUMBER = 1 << 20
"""Larger numbers of replicas, instances or attempts are typing errors."""
SEE_HELP = "podrun --help lists all options."


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Values of options that were given (by long name), and the program with its arguments."""

    options: Mapping[str, Any]
    program: tuple[str, ...]


def parse_command_line(arguments: Sequence[str], more: Sequence[Option] = ()) -> CommandLine:
    """Read ``arguments`` (without the command's own name). ``more``: options of a verb that launches, besides podrun's.

    Raises UsageError that names the word and the remedy.
    """
    table = OptionTable((*OPTIONS, *more)) if more else _podrun_options()
    try:
        uses, program = table.uses(arguments)
    except click.NoSuchOption as error:
        raise _unknown_option(table, error.option_name) from None
    values: dict[str, Any] = {}
    for use in uses:
        _store(values, use)
    return CommandLine(MappingProxyType(values), program)


@functools.cache
def _podrun_options() -> OptionTable:
    return OptionTable(OPTIONS)


def _unknown_option(table: OptionTable, word: str) -> UsageError:
    name = word.removeprefix("--").partition("=")[0]
    if not word.startswith("--"):
        letters = word[1:]
        return UsageError(f"unknown option {word}", hint=_nearest(letters) or SEE_HELP)
    if matches := table.matches(name):
        names = ", ".join(f"--{option.name}" for option in matches)
        return UsageError(f"--{name} could be {names}", hint="Type more of the name.")
    return UsageError(f"unknown option --{name}", hint=_nearest(name) or SEE_HELP)


def _store(values: dict[str, Any], use: OptionUse) -> None:
    """Add one use of an option to the values. Raises UsageError."""
    option, shown, text = use.option, use.spelling, use.text or ""
    if (
        use.is_next_word
        and text.startswith("-")
        and option.kind is not ValueKind.TEXT
        and not _is_number(text)
    ):
        raise UsageError(f"{shown} needs a value, and {text} is another option", hint=example_of(option))
    if option.kind is ValueKind.VERBOSITY:
        if text:
            raise UsageError(f"{shown} takes no value", hint="Type -v, or -vv for more.")
        values[option.name] = values.get(option.name, 0) + 1
        return
    value = option_value(option, text, shown) if text or option.takes_value else True
    if option.repeatable:
        values[option.name] = (*values.get(option.name, ()), value)
        return
    if option.name in values and values[option.name] != value:
        before = show_value(values[option.name])
        raise UsageError(
            f"{shown} is given twice, with {before} and with {show_value(value)}",
            hint=f"Keep one of them: --{option.name}={show_value(value)}",
        )
    values[option.name] = value


def nearest_option(name: str, among: Iterable[str] = tuple(BY_NAME)) -> str | None:
    """The option name closest to ``name``, or None. Underscores count as hyphens; case is ignored."""
    plain = name.lower().replace("_", "-")
    known = list(among)
    if plain in known:
        return plain
    prefixed = [option for option in known if plain and option.startswith(plain)]
    if len(prefixed) == 1:
        return prefixed[0]
    close = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    return close[0] if close else None


def _nearest(name: str) -> str | None:
    plain = name.lower().replace("_", "-")
    close = ELSEWHERE.get(plain) or nearest_option(name)
    return f"Did you mean --{close}?" if close else None


def option_value(option: Option, text: str, shown: str) -> Any:
    """The value of ``text`` for an option. ``shown``: the option's name in errors. Raises UsageError."""
    kind = option.kind
    if kind in (ValueKind.BOOLEAN, ValueKind.FLAG):
        return _boolean(option, text, shown)
    if kind in (ValueKind.COUNT, ValueKind.INDEX, ValueKind.PORT):
        return _whole_number(option, text, shown)
    if kind is ValueKind.SECONDS:
        return _seconds(option, text, shown)
    if kind is ValueKind.NAME and not text.strip():
        raise UsageError(f"{shown} needs a value, and this one is empty", hint=example_of(option))
    if option.choices and text not in option.choices:
        raise UsageError(f"{shown} cannot be {text!r}", hint=f"It can be {', '.join(option.choices)}.")
    return text


def _boolean(option: Option, text: str, shown: str) -> bool:
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise UsageError(
        f"{shown} takes yes or no, not {text!r}", hint=f"Type --{option.name}=yes or --{option.name}=no."
    )


def _whole_number(option: Option, text: str, shown: str) -> int:
    low, high = (
        (0 if option.kind is ValueKind.INDEX else 1),
        (65535 if option.kind is ValueKind.PORT else MAX_NUMBER),
    )
    try:
        number = int(text) if text.isascii() else None
    except ValueError:
        number = None
    if number is None:
        raise UsageError(f"{shown} takes a whole number, not {text!r}", hint=example_of(option))
    if not low <= number <= high:
        raise UsageError(f"{shown} is {number}; it can be {low} to {high}", hint=example_of(option))
    return number


def _seconds(option: Option, text: str, shown: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise UsageError(
            f"{shown} takes a number of seconds, not {text!r}", hint=example_of(option)
        ) from None
    if not 0 < number < 1e7:
        raise UsageError(
            f"{shown} is {text}; it can be more than 0 and less than ten million", hint=example_of(option)
        )
    return number


def show_value(value: object) -> str:
    """A value as users type it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def values_in_effect(options: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every option: the given one, else the default. ``-v``, ``--vv`` and ``--debug`` become
    ``verbose`` (0, 1 or 2)."""
    values = {option.name: options.get(option.name, option.default) for option in OPTIONS}
    if values["vv"] or values["debug"]:
        values["verbose"] = 2
    values["verbose"] = min(int(values["verbose"]), 2)
    if values["quiet"] and values["verbose"]:
        raise UsageError("--quiet and --verbose exclude each other", hint="Keep one of them.")
    return values
