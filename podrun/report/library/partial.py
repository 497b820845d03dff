"""Parts of classes of the library's, and what is said of the rest of them.

What the library has and the tile model does not know is refused by name (`NotModelledError`, an AttributeError, so
that ``hasattr`` says no); what the library does not have either is an ordinary AttributeError.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from podrun.errors import UnsupportedError

VERTICES = (
    "the tile model plans operations, not vertices; tile.memory.category.vertexInstanceState has their bytes"
)
BY_TILE = "the tile model knows the fullest tile's cycles; see execution.steps[i].ipus[j].cycles"
CODE = "code is modelled by IPU and category; see tile.memory.category"


def refusing(*groups: tuple[str, str]) -> Mapping[str, str]:
    """Reasons by name, of groups of names (with blanks between them) and their reason."""
    return MappingProxyType({name: reason for names, reason in groups for name in names.split()})


class NotModelledError(UnsupportedError, AttributeError):
    """The analysis library has it; the tile model does not know it."""


class Partial:
    """Part of a class of the library's: ``refused`` has what is missing and why."""

    __slots__ = ()
    refused: ClassVar[Mapping[str, str]] = refusing()

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in self.refused:
            raise NotModelledError(
                f"{kind}.{name} is not modelled: {self.refused[name]}", hint="docs/report.md"
            )
        raise AttributeError(f"{kind!r} has no attribute {name!r}")
