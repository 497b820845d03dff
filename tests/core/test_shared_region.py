"""Sealed shared memory: one process reads what another writes; nothing else can be opened as a region."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace

import numpy as np
import pytest

from podrun.core.shared_region import RegionName, SharedRegion


def test_a_region_is_opened_by_its_name_and_shows_the_same_bytes() -> None:
    region = SharedRegion.create("test", 4096)
    assert not region.bytes.any()
    other = SharedRegion.open(region.name)
    region.array(np.float32, 3, 64)[:] = [1, 2, 3]
    assert other.array(np.float32, 3, 64).tolist() == [1, 2, 3]
    view = other.bytes
    region.close()
    other.close()
    other.close()
    assert view[64:68].view(np.float32)[0] == 1


def test_the_size_of_a_region_cannot_change() -> None:
    region = SharedRegion.create("test", 4096)
    for size in (0, 8192):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(region.fd, size)
    region.close()


def test_an_empty_region_has_one_byte() -> None:
    region = SharedRegion.create("test", 0)
    assert region.nbytes == region.bytes.size == 1
    region.close()


def test_another_file_is_no_region() -> None:
    region = SharedRegion.create("test", 16)
    for wrong in ({"inode": 1}, {"size": 17}):
        with pytest.raises(ValueError, match="not the shared memory it announced"):
            SharedRegion.open(replace(region.name, **wrong))
    name = region.name
    region.close()
    with pytest.raises(OSError, match="No such file"):
        SharedRegion.open(name)


def test_memory_that_could_shrink_is_no_region() -> None:
    unsealed = os.memfd_create("podrun-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 16)
    with tempfile.TemporaryFile() as plain:
        plain.write(bytes(16))
        plain.flush()
        for fd in (unsealed, plain.fileno()):
            with pytest.raises(ValueError, match="not sealed"):
                SharedRegion.open(RegionName(os.getpid(), fd))
    os.close(unsealed)
