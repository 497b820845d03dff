"""The grammar of ``podrun``'s command line, which is PopRun's.

    podrun [options] program [arguments of the program]

Options end at the first word that is not one (or at ``--``). ``--name value`` and ``--name=value`` are the
same; a unique prefix of a name suffices; booleans take a value (yes, no, on, off, 1, 0, true, false).
Stricter than PopRun: an option with two different values is an error, as is an unknown option.

The texts of ``--help`` and ``--version`` come from the same table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from podrun.core.errors import UsageError
from podrun.launcher.option_kinds import Option, ValueKind
from podrun.launcher.option_table import BY_NAME, BY_SHORT, OPTIONS

TRUE_WORDS = frozenset({"yes", "on", "1", "true"})
FALSE_WORDS = frozenset({"no", "off", "0", "false"})
MAX_NUMBER = 1 << 20
"""Larger numbers of replicas, instances or attempts are typing errors."""
SEE_HELP = "podrun --help lists all options."


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Values of options that were given (by long name), and the program with its arguments."""

    given: Mapping[str, Any]
    program: tuple[str, ...]


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Read ``arguments`` (without the command's own name). Raises UsageError that names the word and the remedy."""
    parser = _Parser(list(arguments))
    parser.run()
    return CommandLine(MappingProxyType(parser.given), tuple(parser.words))


class _Parser:
    """Takes options from the front of the words; the rest is the program."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.given: dict[str, Any] = {}

    def run(self) -> None:
        while self.words:
            word = self.words[0]
            if word == "--":
                del self.words[0]
                return
            if not word.startswith("-") or word == "-":
                return
            del self.words[0]
            if word.startswith("--"):
                self._long(word)
            else:
                self._short(word)

    def _long(self, word: str) -> None:
        name, equals, value = word[2:].partition("=")
        option = find_option(name)
        shown = f"--{option.name}"
        if equals:
            self._store(option, value, shown)
        elif option.takes_value:
            self._store(option, self._next_word(option, shown), shown)
        else:
            self._store(option, "", shown)

    def _short(self, word: str) -> None:
        letters = word[1:]
        if set(letters) == {"v"}:
            for _ in letters:
                self._store(BY_NAME["verbose"], "", "-v")
            return
        option = BY_SHORT.get(letters[0])
        if option is None:
            raise UsageError(f"unknown option {word}", hint=_nearest(word.lstrip("-")) or SEE_HELP)
        if letters in ELSEWHERE and len(letters) > 1:
            raise UsageError(f"unknown option {word}", hint=_nearest(letters))
        shown = f"-{option.short}"
        if not option.takes_value:
            if len(letters) > 1:
                raise UsageError(f"unknown option {word}", hint=_nearest(letters) or SEE_HELP)
            self._store(option, "", shown)
        else:
            value = letters[1:].removeprefix("=") or self._next_word(option, shown)
            self._store(option, value, shown)

    def _next_word(self, option: Option, shown: str) -> str:
        if not self.words:
            raise UsageError(f"{shown} needs a value", hint=_example(option))
        word = self.words[0]
        if word.startswith("-") and option.kind is not ValueKind.TEXT and not _is_number(word):
            raise UsageError(f"{shown} needs a value, and {word} is another option", hint=_example(option))
        del self.words[0]
        return word

    def _store(self, option: Option, text: str, shown: str) -> None:
        if option.kind is ValueKind.VERBOSITY:
            if text:
                raise UsageError(f"{shown} takes no value", hint="Type -v, or -vv for more.")
            self.given[option.name] = self.given.get(option.name, 0) + 1
            return
        value = option_value(option, text, shown) if text or option.takes_value else True
        if option.repeatable:
            self.given[option.name] = (*self.given.get(option.name, ()), value)
            return
        if option.name in self.given and self.given[option.name] != value:
            before = show_value(self.given[option.name])
            raise UsageError(
                f"{shown} is given twice, with {before} and with {show_value(value)}",
                hint=f"Keep one of them: --{option.name}={show_value(value)}",
            )
        self.given[option.name] = value


def find_option(name: str) -> Option:
    """The option of that name or unique prefix. Raises UsageError that names the nearest option."""
    if name in BY_NAME:
        return BY_NAME[name]
    matches = [option for option in OPTIONS if name and option.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(f"--{option.name}" for option in matches)
        raise UsageError(f"--{name} could be {names}", hint="Type more of the name.")
    raise UsageError(f"unknown option --{name}", hint=_nearest(name) or SEE_HELP)


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


ELSEWHERE = {
    "n": "num-instances",
    "np": "num-instances",
    "nproc": "num-instances",
    "nproc-per-node": "num-instances",
    "ntasks": "num-instances",
    "nnodes": "host",
    "replicas": "num-replicas",
    "num-ipus": "num-replicas",
    "ipus": "ipus-per-replica",
}
"""Options of podrun by the names that other launchers (mpirun, torchrun, srun) and programs give them."""


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
        raise UsageError(f"{shown} needs a value, and this one is empty", hint=_example(option))
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
        raise UsageError(f"{shown} takes a whole number, not {text!r}", hint=_example(option))
    if not low <= number <= high:
        raise UsageError(f"{shown} is {number}; it can be {low} to {high}", hint=_example(option))
    return number


def _seconds(option: Option, text: str, shown: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise UsageError(f"{shown} takes a number of seconds, not {text!r}", hint=_example(option)) from None
    if not 0 < number < 1e7:
        raise UsageError(
            f"{shown} is {text}; it can be more than 0 and less than ten million", hint=_example(option)
        )
    return number


def show_value(value: Any) -> str:
    """A value as users type it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


_EXAMPLES = {
    ValueKind.BOOLEAN: "yes",
    ValueKind.COUNT: "4",
    ValueKind.INDEX: "0",
    ValueKind.PORT: "8090",
    ValueKind.SECONDS: "300",
}


def _example(option: Option) -> str:
    value = _EXAMPLES.get(option.kind) or (option.choices[0] if option.choices else option.metavar)
    return f"As in --{option.name}={value}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def values_in_effect(given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every option: the given one, else the default. ``-v``, ``--vv`` and ``--debug`` become
    ``verbose`` (0, 1 or 2)."""
    values = {option.name: given.get(option.name, option.default) for option in OPTIONS}
    if values["vv"] or values["debug"]:
        values["verbose"] = 2
    values["verbose"] = min(int(values["verbose"]), 2)
    if values["quiet"] and values["verbose"]:
        raise UsageError("--quiet and --verbose exclude each other", hint="Keep one of them.")
    return values
