"""A cache that cannot be written is not used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from podrun.device.xla import clients, kept_pieces, pieces
from podrun.device.xla.clients import two_thread_device
from podrun.device.xla.kept_pieces import writable_cache
from podrun.device.xla.pieces import PieceCache

from .test_donated_arenas import update


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


@pytest.mark.usefixtures("no_cache_of_jax")
def test_a_piece_that_is_kept_is_lowered_once_for_the_threads_that_its_name_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "WORTH_READING_TOGETHER", 1)
    first = update(1000, PieceCache(tmp_path))
    monkeypatch.setattr(pieces, "needs_two_threads", lambda lowered: pytest.fail("it is known"))
    monkeypatch.setattr(PieceCache, "_ready", lambda *_: None)
    again = PieceCache(tmp_path).piece(first.computation, (), {0: 0, 2: 1})
    assert again.device == first.device == two_thread_device()
    assert again.in_place == first.in_place
    (marker,) = (tmp_path / "xla").rglob("*.done")
    marker.write_text(marker.read_text().replace('": "', '": "damaged '))
    with pytest.raises(pytest.fail.Exception, match="it is known"):
        PieceCache(tmp_path).piece(first.computation, (), {0: 0, 2: 1})


@pytest.mark.usefixtures("no_cache_of_jax")
def test_only_a_piece_that_was_begun_before_is_looked_for_among_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    find = kept_pieces._entries
    monkeypatch.setattr(kept_pieces, "_entries", lambda *place: looked.append(place[1]) or find(*place))
    monkeypatch.setattr(PieceCache, "_ready", lambda *_: None)
    first = update(1000, PieceCache(tmp_path))
    update(1000, PieceCache(tmp_path))
    assert looked == []
    (marker,) = (tmp_path / "xla").rglob("*.done")
    (entry,) = (marker.with_name(name) for name in json.loads(marker.read_text()))
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    PieceCache(tmp_path).piece(first.computation, (), {0: 0, 2: 1})
    assert looked == [marker.stem]
    assert json.loads(marker.read_text()).keys() == {entry.name}
    assert len(entry.read_bytes()) > len(whole) // 2
