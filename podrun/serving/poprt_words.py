"""What the words of ``poprt``'s options mean: pairs, shapes, lists, packing; and its options that repeat words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import click

from podrun.core.errors import UsageError


class ManyWords(click.Group):
    """A command whose options in `several` take all words up to the next option: ``--input_shape a=1,8 b=1,8``."""

    several: tuple[str, ...] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, option_before_each(args, self.several, self.commands))

    def invoke(self, ctx: click.Context) -> Any:
        """An error without a line on what to type gets one: errors of passes are raised for programs too."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            error.hint = error.hint or f"{ctx.command_path} --help says what options take."
            raise


class SeveralWords(click.Command):
    """A command whose options in ``several`` take all words up to the next option, as those of `ManyWords`."""

    def __init__(self, *arguments: Any, several: tuple[str, ...] = (), **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._several = several

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, option_before_each(args, self._several))


def option_before_each(
    args: Sequence[str], several: Collection[str], commands: Collection[str] = ()
) -> list[str]:
    """Words in which an option of ``several`` stands before each of its words."""
    words: list[str] = []
    option = ""
    for word in args:
        if word.startswith("-") or word in commands:
            option = word if word in several else ""
        elif option and words[-1] != option:
            words.append(option)
        words.append(word)
    return words


def pairs_of(words: Sequence[str], option: str) -> dict[str, str]:
    """Pairs of words ``NAME=VALUE``. UsageError for a word that is none, or a name that stands twice."""
    pairs: dict[str, str] = {}
    for word in (part for text in words for part in text.split()):
        name, equals, value = word.rpartition("=") if option == "--input_shape" else word.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} takes NAME=VALUE, not {word!r}", hint=f"As in {option} x=1.")
        if name in pairs:
            raise UsageError(f"{option} names {name!r} twice", hint="Name it once.")
        pairs[name] = value
    return pairs


def shapes_of(words: Sequence[str]) -> dict[str, list[int]]:
    """Shapes by input: ``NAME=1,8``."""
    shapes = {}
    for name, text in pairs_of(words, "--input_shape").items():
        if not all(size.isdecimal() and int(size) > 0 for size in text.split(",")):
            raise UsageError(
                f"--input_shape {name}={text}: a shape is numbers above 0", hint=f"--input_shape {name}=1,8"
            )
        shapes[name] = [int(size) for size in text.split(",")]
    return shapes


def listed(text: str | None) -> list[str]:
    """The words of a text that stand between commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


_PACK = ("max_valid_num", "segment_max_size", "enable_double_batch_unpack", "head_pattern", "dynamic_groups")


def pack_args_of(words: Sequence[str]) -> dict[str, Any] | None:
    """Packing: ``max_valid_num=50 segment_max_size=128``. UsageError for a key that is none."""
    if not words:
        return None
    told: dict[str, Any] = {}
    for key, value in pairs_of(words, "--pack_args").items():
        if key not in _PACK:
            raise UsageError(f"--pack_args has no key {key!r}", hint=f"Keys are {', '.join(_PACK)}.")
        told[key] = int(value) if value.isdecimal() else value
    return told
