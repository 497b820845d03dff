"""The garbage collector leaves objects alone that stay, and comes back."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from podrun.core.environment import IPUOF_CONFIG_PATH, IPUOF_VIPU_API_HOST, IPUOF_VIPU_API_PARTITION_ID
from podrun.core.garbage import without_full_collections
from podrun.device.host import connecting, partition_config

AGES = """
import gc
from podrun.core.garbage import without_garbage_collection

with without_garbage_collection():
    assert not gc.isenabled()
    imported = [[]]
assert gc.isenabled()
assert any(item is imported for item in gc.get_objects(generation=2))
assert gc.get_freeze_count() == 0
gc.freeze()
frozen = gc.get_freeze_count()
with without_garbage_collection():
    pass
assert gc.get_freeze_count() == frozen, "what somebody has frozen stays so"
"""


def test_what_is_imported_without_collections_is_old() -> None:
    subprocess.run([sys.executable, "-c", AGES], check=True, timeout=60)


@pytest.mark.parametrize("way", ["service", "file"])
def test_only_the_first_connection_makes_a_program_s_objects_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    environ = {IPUOF_VIPU_API_HOST: "127.0.0.1", IPUOF_VIPU_API_PARTITION_ID: "p"}
    if way == "file":
        environ = {IPUOF_CONFIG_PATH: str(tmp_path / "p.conf")}
    for name in ("connect_partition", "connect_files"):
        monkeypatch.setattr(partition_config, name, lambda *_: None)
    monkeypatch.setattr(connecting, "import_grpc", lambda: None)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    frozen = list[int]()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    connecting.connect(environ)
    assert frozen == []
    monkeypatch.delitem(sys.modules, "grpc")
    connecting.connect(environ)
    assert frozen == [1]


def _fail_without_full_collections(before: tuple[int, int, int]) -> None:
    with without_full_collections():
        with without_full_collections():
            pass
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > before[2]
        raise KeyError


def test_full_collections_come_back_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError):
        _fail_without_full_collections(before)
    assert gc.get_threshold() == before


@pytest.mark.parametrize(("chosen", "after"), [((500, 7, 8), (500, 7, 8)), ((500, 7), (500, 7, 11))])
def test_thresholds_that_a_program_sets_meanwhile_stay(
    chosen: tuple[int, ...], after: tuple[int, ...]
) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 11)
        with without_full_collections():
            gc.set_threshold(*chosen)
        assert gc.get_threshold() == after
    finally:
        gc.set_threshold(*before)
