"""What a planner says about one equation: cycles by cause, bytes by tile, and what it leaves behind as
code."""

from __future__ import annotations

from dataclasses import dataclass, replace

from podrun.device.target import Chip
from podrun.device.tiles.exchange import launch_cycles, sync_cycles


@dataclass(frozen=True, slots=True)
class Plan:
    """The cost of one equation on the tiles of one IPU.

    ``compute``, ``exchange`` and ``rearrange`` are cycles of the slowest tile. ``compute_sets`` and
    ``exchanges`` count BSP steps, each with its barrier. ``temporary_bytes``: on the fullest tile while it
    runs. ``vertices`` and ``fragments`` (per tile) size vertex state and exchange code. ``share``: part of the
    result that the fullest tile holds (0: spread evenly). ``bound``: no planner knew the equation.
    """

    family: str
    compute: float = 0.0
    exchange: float = 0.0
    rearrange: float = 0.0
    compute_sets: int = 0
    exchanges: int = 0
    flops: float = 0.0
    temporary_bytes: float = 0.0
    tiles: int = 0
    vertices: float = 0.0
    fragments: float = 0.0
    detail: str = ""
    share: float = 0.0
    bound: bool = False

    def overhead(self, chip: Chip) -> tuple[float, float]:
        """Cycles of launches and of barriers: one barrier before each exchange, compute sets without one
        fuse."""
        return self.compute_sets * launch_cycles(chip), max(self.exchanges, 0) * sync_cycles(chip)

    def cycles(self, chip: Chip) -> float:
        """All of it, one execution."""
        return self.compute + self.exchange + self.rearrange + sum(self.overhead(chip))

    def repeated(self, times: float) -> Plan:
        """The same, run ``times`` times in a row: cycles and steps scale, memory and code do not."""
        return replace(
            self,
            compute=self.compute * times,
            exchange=self.exchange * times,
            rearrange=self.rearrange * times,
            compute_sets=round(self.compute_sets * times),
            exchanges=round(self.exchanges * times),
            flops=self.flops * times,
        )
