"""Power and temperatures of IPUs, modelled: from the share of time that tiles compute, and from the clock.

Published are single readings of single systems, so this is a model of the order of magnitude. Every constant below says
where it is from: *published* (a mean of a sample), *derived* (arithmetic on published figures), *assumed*.

**Power.** An IPU draws its idle power, and above it in proportion to the share of time in which tiles compute and to
the clock (switching power at a fixed voltage is). Exchange, sync, links and host transfers add nothing: in the
published sample of gc-iputraffictest two IPUs under full IPU-Link traffic draw 25.5 and 21 W, less than an idle IPU in
the sample of gc-powertest.

**Temperature.** A board of two IPUs is warmer than the air by a resistance times its power, a die is warmer than its
board by another one times the IPU's power, and both approach that value exponentially. For a Bow the rise is
extrapolated from the IPU-M2000 and one reading.
"""

from __future__ import annotations

import math

from podrun.core.quick_dataclass import dataclass

IDLE_WATTS, BUSY_WATTS = 48.25, 124.0
"""An IPU of an IPU-M2000 at 1,330 MHz that is idle, and one under gc-powertest. Published: means of the tool's sample
(47.5 to 49.0, 123.5 to 124.5 W)."""
MEASURED_MHZ = 1330.0
"""The sample's clock. Published."""
BOW_IDLE_WATTS = 46.15
"""Derived: half of the 92.3 W that gc-monitor shows for a board of a Bow Pod64 (its load is not stated)."""
BOW_BUSY_WATTS = BUSY_WATTS * 1.40 / 1.16
"""Extrapolated, 149.7 W: the maker states up to 40 % more speed and 16 % more speed a watt than the IPU-M2000."""
BOW_MHZ = 1850.0
"""A Bow's clock. Published."""
INLET_C = 20.0
"""Temperature of the air that comes in. Assumed: within the 18 to 27 C that ASHRAE recommends for data centres."""
BOARD_C_PER_WATT = (37.6 - INLET_C) / 172.0
"""Derived: gc-powertest's five board sensors (41, 40, 36, 32, 39 C) at 172 W of two IPUs, taken as settled: 0.102."""
DIE_C_PER_WATT = (24.2 - 21.1) / BOW_IDLE_WATTS
"""Derived: the die over the board of the same Bow Pod64: 0.067. At 124 W it gives 8.3 C, and gc-powertest's dies, which
still rise, are 0.7 to 5.1 C over the mean board."""
DIE_SECONDS = 12.0
"""Time constant of a die. Derived: gc-powertest's dies go from 39.5 to 41.3 C in five rows, towards 45.9 C; a row a
second is assumed."""
BOARD_SECONDS = 60.0
"""Time constant of a board. Assumed: its sensors stand still in those five rows."""


@dataclass(frozen=True, slots=True)
class _ChipPower:
    idle_w: float
    busy_w: float
    mhz: float


_CHIPS = {
    "gc200": _ChipPower(IDLE_WATTS, BUSY_WATTS, MEASURED_MHZ),
    "bow": _ChipPower(BOW_IDLE_WATTS, BOW_BUSY_WATTS, BOW_MHZ),
}


def modelled_ipu_watts(target: str, compute_share: float, clock_mhz: float | None) -> float | None:
    """Watts of an IPU whose tiles compute for ``compute_share`` (0 to 1) of its time.

    None for a chip of which nothing is published, or at an unknown clock.
    """
    chip = _CHIPS.get(target)
    if chip is None or clock_mhz is None:
        return None
    return chip.idle_w + (chip.busy_w - chip.idle_w) * compute_share * clock_mhz / chip.mhz


@dataclass(frozen=True, slots=True)
class BoardHeat:
    """Temperatures of a board and of the dies of its IPUs, in degrees Celsius, at ``time_s`` (any clock's seconds)."""

    time_s: float
    board_c: float
    dies_c: tuple[float, ...]

    @classmethod
    def settled(cls, watts: tuple[float, ...], time_s: float) -> BoardHeat:
        """The temperatures after a long time at ``watts``, one for each IPU of the board."""
        board = INLET_C + BOARD_C_PER_WATT * sum(watts)
        return cls(time_s, board, tuple(board + DIE_C_PER_WATT * drawn for drawn in watts))

    def after(self, watts: tuple[float, ...], time_s: float) -> BoardHeat:
        """The temperatures at a later ``time_s``, if the IPUs drew ``watts`` on average since."""
        seconds = max(time_s - self.time_s, 0.0)
        end = self.settled(watts, time_s)
        board = _approach(self.board_c, end.board_c, seconds / BOARD_SECONDS)
        over = (
            _approach(die - self.board_c, last - end.board_c, seconds / DIE_SECONDS)
            for die, last in zip(self.dies_c, end.dies_c, strict=True)
        )
        return BoardHeat(time_s, board, tuple(board + rise for rise in over))


def _approach(now: float, end: float, time_constants: float) -> float:
    return end + (now - end) * math.exp(-time_constants)
