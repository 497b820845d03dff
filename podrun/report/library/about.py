"""What a report says about itself (nothing was measured), and how its classes refuse what the tile model does not know.

What the analysis library has and the tile model does not know is refused by name (`NotModelledError`, an
AttributeError, so that ``hasattr`` says no). What the library does not have either is an ordinary AttributeError.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from podrun.core.errors import UnsupportedError

VERTICES = (
    "the tile model plans operations, not vertices; tile.memory.category.vertexInstanceState has their bytes"
)
BY_TILE = "the tile model knows the fullest tile's cycles; see execution.steps[i].ipus[j].cycles"
CODE = "code is modelled by IPU and category; see tile.memory.category"


def refusing(*groups: tuple[str, str]) -> Mapping[str, str]:
    """Reasons by attribute name, from pairs of names (separated by blanks) and a reason."""
    return MappingProxyType({name: reason for names, reason in groups for name in names.split()})


class NotModelledError(UnsupportedError, AttributeError):
    """The analysis library has it; the tile model does not know it."""


class Partial:
    """A class of the analysis library, in part: ``refused`` maps missing attributes to the reason."""

    __slots__ = ()
    refused: ClassVar[Mapping[str, str]] = refusing()

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__.removeprefix("Library")
        if name in self.refused:
            raise NotModelledError(
                f"{kind}.{name} is not modelled: {self.refused[name]}", hint="docs/report.md"
            )
        raise AttributeError(f"{kind!r} has no attribute {name!r}")


VERSION = (3, 3, 0)
"""The SDK version whose names are used."""


class ComputeInstrumentationLevel(enum.Enum):
    """How finely compute cycles were measured."""

    Off = 0
    Vertex = 1
    Tile = 2
    Ipu = 3
    Device = 4
    Unknown = 5


class ExternalExchangeInstrumentationLevel(enum.Enum):
    """How finely exchange with the outside was measured."""

    Off = 0
    Tile = 1
    Unknown = 2


@dataclass(frozen=True, slots=True)
class InstrumentationSettings:
    """Nothing was measured: cycles are modelled."""

    compute: ComputeInstrumentationLevel = ComputeInstrumentationLevel.Off
    externalExchange: ExternalExchangeInstrumentationLevel = ExternalExchangeInstrumentationLevel.Off


@dataclass(frozen=True, slots=True)
class PoplarVersion(Partial):
    """The SDK version whose names are used."""

    refused = refusing(("packageHash", "no Poplar compiled this"))
    major: int = VERSION[0]
    minor: int = VERSION[1]
    point: int = VERSION[2]

    @property
    def string(self) -> str:
        """The version, and whose report this is."""
        return f"{self.major}.{self.minor}.{self.point} (podrun's tile model)"


@dataclass(frozen=True, slots=True)
class ReportVersion:
    """The version of podrun's own document."""

    major: int
    minor: int = 0
    point: int = 0
    isUnstableFormat: bool = False
