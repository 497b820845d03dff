"""Power of an IPU, from how busy it is.

Published: a sample of gc-powertest on an IPU-M2000 at 1,330 MHz, with one IPU under the test (123.5 to 124.5 W) and
one idle (47.5 to 49.0 W). Between the two, power above idle is taken to be proportional to the time spent computing and
to the clock (switching power at a fixed voltage is). No figures are published that give power and a settled temperature
together, so there is no model of temperatures; none are published for a busy Bow IPU.
"""

from __future__ import annotations

IDLE_WATTS, BUSY_WATTS = 48.25, 124.0
"""An IPU that is idle, and one under gc-powertest: means of the sample."""
MEASURED_MHZ = 1330.0
"""The sample's clock."""
MEASURED_TARGETS = ("gc200",)
"""Chips of which there is a sample."""


def modelled_ipu_watts(target: str, busy_share: float, clock_mhz: float | None) -> float | None:
    """Watts of an IPU that computes for ``busy_share`` (0 to 1) of its time.

    None for a chip without a published sample, or at an unknown clock.
    """
    if target not in MEASURED_TARGETS or clock_mhz is None:
        return None
    return IDLE_WATTS + (BUSY_WATTS - IDLE_WATTS) * busy_share * clock_mhz / MEASURED_MHZ
