"""``--short`` of the benchmarks: the same figures from smaller input, so that tests can run every script."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any


class _Smaller(argparse.Action):
    """Sets several options at once; what follows on the command line may change them again."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, smaller: Mapping[str, Any], help: str
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, help=help)
        self._smaller = smaller

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Set them."""
        setattr(namespace, self.dest, True)
        for name, value in self._smaller.items():
            setattr(namespace, name, value)


def add_short(parser: argparse.ArgumentParser, **smaller: Any) -> None:
    """Give a benchmark the option ``--short``. ``smaller``: values of its other options in this mode."""
    said = "".join(f"; {name} {value}" for name, value in smaller.items())
    parser.add_argument(
        "--short", action=_Smaller, smaller=smaller, help=f"compute the same on smaller input{said}"
    )
