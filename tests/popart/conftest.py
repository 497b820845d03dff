"""Devices for tests: each is detached when its test ends, whatever happened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import podrun.popart as popart
from podrun.core.environment import POPDIST_EXECUTABLE_CACHE_PATH
from podrun.device.xla import kept_pieces
from podrun.device.xla.kept_pieces import writable_cache
from tests.quick_programs import programs_of_tests_compile_quickly as programs_of_tests_compile_quickly


def _cache_of_the_run(environ: Mapping[str, str]) -> Path | None:
    return writable_cache(environ or os.environ)


@pytest.fixture(scope="module", autouse=True)
def _devices_without_an_environment_keep_pieces() -> Iterator[None]:
    """A device of ``DeviceManager({})`` hears of no directory for compiled pieces, so each would compile all of its
    program anew. Here it has that of this process, as the devices of programs have.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_pieces, "writable_cache", _cache_of_the_run)
        yield


@pytest.fixture(scope="module")
def programs_compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Equal programs of a file's tests are compiled once, as by the instances of a launch. Not for tests that change
    the compiler.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(POPDIST_EXECUTABLE_CACHE_PATH, str(tmp_path_factory.mktemp("executables")))
        yield


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
