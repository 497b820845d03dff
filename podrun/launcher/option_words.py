"""The words of ``podrun``'s command line, taken apart by click's parser into options in their order, and the program.

PopRun accepts three spellings that click does not: a unique beginning of a name, ``--flag=no``, and ``-H=value``.
They are turned into click's before it reads the words. A word that turns out to be the value of an option, or of the
program, stands as it was typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.launcher.option_table import Option, ValueKind

_WITH_VALUE = "\0"
"""Ends the name by which click knows a flag with a value, ``--dry-run=no``. No word holds this character."""


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


@dataclass(frozen=True, slots=True)
class OptionUse:
    """One option on the command line. ``text``: its value, or None for a flag. ``is_next_word``: the value is a word of
    its own, not joined to the option by ``=``. ``spelling``: the option's name in errors.
    """

    option: Option
    text: str | None
    is_next_word: bool
    spelling: str


class _Word(str):
    """A word in click's spelling that knows how it was typed."""

    __slots__ = ("typed",)

    typed: str

    def __new__(cls, spelling: str, typed: str) -> _Word:
        word = super().__new__(cls, spelling)
        word.typed = typed
        return word


class _Spelling(click.Option):
    """One of the spellings of an option; click reports each use of it in the order of the words."""

    def __init__(self, option: Option, spelling: str, number: int) -> None:
        has_value = option.takes_value or spelling.endswith(_WITH_VALUE)
        kind: dict[str, Any] = {} if has_value else {"is_flag": True, "flag_value": ""}
        super().__init__([spelling, f"option_{number}"], multiple=True, **kind)
        self.option = option
        self.spelling = spelling.removesuffix(_WITH_VALUE)
        self.has_value = has_value


class OptionTable:
    """The options that a command understands, by their names, beginnings and letters."""

    def __init__(self, options: Sequence[Option]) -> None:
        self.options = tuple(options)
        self.by_name: Mapping[str, Option] = {option.name: option for option in options}
        self.by_letter: Mapping[str, Option] = {option.short: option for option in options if option.short}
        spellings = [
            (option, spelling)
            for option in options
            for spelling in (
                f"--{option.name}",
                *([f"-{option.short}"] if option.short else []),
                *([] if option.takes_value else [f"--{option.name}{_WITH_VALUE}"]),
            )
        ]
        self._command = click.Command(
            "podrun",
            params=[_Spelling(option, spelling, n) for n, (option, spelling) in enumerate(spellings)],
            add_help_option=False,
        )

    def matches(self, name: str) -> list[Option]:
        """The option of that name, or all whose names begin so."""
        if name in self.by_name:
            return [self.by_name[name]]
        return [option for option in self.options if name and option.name.startswith(name)]

    def uses(self, words: Sequence[str]) -> tuple[list[OptionUse], tuple[str, ...]]:
        """The options in front of the program, in their order, and the program with its arguments.

        Raises click.NoSuchOption, which names a word that is no option as it was typed; UsageError for a missing value.
        """
        spelled = [_Word(self._in_clicks_spelling(word), word) for word in words]
        parser = self._command.make_parser(click.Context(self._command, allow_interspersed_args=False))
        try:
            values, rest, order = parser.parse_args([*spelled])
        except click.NoSuchOption as error:
            typed = next((word.typed for word in spelled if word == error.option_name), error.option_name)
            raise click.NoSuchOption(typed) from None
        except click.BadOptionUsage as error:
            option = self.by_name.get(error.option_name.lstrip("-")) or self.by_letter[error.option_name[1:]]
            raise UsageError(f"{error.option_name} needs a value", hint=example_of(option)) from None
        return list(_in_order(values, order)), tuple(words[len(words) - len(rest) :])

    def _in_clicks_spelling(self, word: str) -> str:
        if match := re.fullmatch(r"--([^=]+)(=?)(.*)", word, re.DOTALL):
            name, equals, value = match.groups()
            options = self.matches(name)
            if len(options) != 1:
                return word
            end = _WITH_VALUE if equals and not options[0].takes_value else ""
            return f"--{options[0].name}{end}{equals}{value}"
        if len(word) < 2 or word.startswith("--") or not word.startswith("-") or set(word[1:]) == {"v"}:
            return word
        option = self.by_letter.get(word[1])
        several = len(word) > 2
        if option is None or (several and (not option.takes_value or word[1:] in ELSEWHERE)):
            return f"--{_WITH_VALUE}{word.replace('=', _WITH_VALUE)}"  # Letters that stand for no option.
        return f"{word[:2]}{word[2:].removeprefix('=')}"


def _in_order(values: Mapping[str, Any], order: Sequence[click.Parameter]) -> Iterator[OptionUse]:
    texts = {name: iter(of_option) for name, of_option in values.items()}
    for spelling in order:
        if isinstance(spelling, _Spelling):
            text = next(texts[spelling.name or ""])
            typed = text.typed if isinstance(text, _Word) else text
            is_next_word = isinstance(text, _Word)
            value = typed if spelling.has_value else None
            yield OptionUse(spelling.option, value, is_next_word, spelling.spelling)


_EXAMPLES = {
    ValueKind.BOOLEAN: "yes",
    ValueKind.COUNT: "4",
    ValueKind.INDEX: "0",
    ValueKind.PORT: "8090",
    ValueKind.SECONDS: "300",
}


def example_of(option: Option) -> str:
    """A hint that shows how the option is typed."""
    value = _EXAMPLES.get(option.kind) or (option.choices[0] if option.choices else option.metavar)
    return f"As in --{option.name}={value}"
