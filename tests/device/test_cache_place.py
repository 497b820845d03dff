"""A cache that cannot be written is not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from podrun.device.xla.pieces import writable_cache


def test_a_place_that_can_be_written_is_used(tmp_path: Path) -> None:
    assert writable_cache({"PODRUN_CACHE_DIR": str(tmp_path / "new")}) == tmp_path / "new"
    assert list((tmp_path / "new" / "xla").iterdir()) == []


@pytest.mark.parametrize("place", ["/proc/podrun", "file/below"])
def test_one_that_cannot_is_named_and_left_alone(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert writable_cache({"PODRUN_CACHE_DIR": str(tmp_path / place)}) is None
    assert str(tmp_path / place) in caplog.text
    assert "PODRUN_CACHE_DIR" in caplog.text
