"""What a report says about itself: what was measured (nothing), and its versions."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from podrun.report.library.partial import Partial, refusing

VERSION = (3, 3, 0)
"""The SDK whose names are followed."""


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
    """The SDK whose names are followed."""

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
