"""Devices for tests: each is detached when its test ends, whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import podrun.popart as popart


@pytest.fixture
def device_of() -> Iterator[Callable[[int], popart.DeviceInfo]]:
    """``device_of(4)``: an attached device of four IPUs inside this process."""
    held: list[popart.DeviceInfo] = []

    def make(ipus: int = 1) -> popart.DeviceInfo:
        held.append(popart.DeviceManager({}).acquireAvailableDevice(ipus))
        return held[-1]

    yield make
    for device in held:
        device.detach()


@pytest.fixture
def device(device_of: Callable[[int], popart.DeviceInfo]) -> popart.DeviceInfo:
    """One IPU."""
    return device_of(1)
