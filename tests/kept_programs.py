"""A cache of traces and compiled programs for one test, as podrun keeps them for programs of users.

Tests have none otherwise (``PODRUN_PLAN_CACHE=off`` in ``conftest.py``). Compiled pieces stay where they are: compiling
them anew would take most of a test's time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from podrun.core.environment import podrun_cache_directory


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's directory: traces in ``plans``, programs in ``programs``."""
    own, folder = podrun_cache_directory(os.environ), tmp_path / "cache"
    folder.mkdir()
    for name in ("xla", "own-pieces"):
        if own is not None:
            (own / name).mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(own / name)
    monkeypatch.setenv("PODRUN_CACHE_DIR", str(folder))
    monkeypatch.delenv("PODRUN_PLAN_CACHE", raising=False)
    return folder


@pytest.fixture
def operators_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget operators that a test registers."""
    from podrun.onnx_models.ops import registry

    monkeypatch.setattr(
        registry, "_table", {name: dict(versions) for name, versions in registry._table.items()}
    )
    monkeypatch.setattr(registry, "_of_programs", set(registry._of_programs))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The facts that traces told meanwhile (`podrun.runtime.kept_traces.TraceFacts`)."""
    from podrun.runtime import discovery

    told: list[Any] = []
    real = discovery.settled

    def counted(*arguments: Any) -> Any:
        told.append(real(*arguments))
        return told[-1]

    monkeypatch.setattr(discovery, "settled", counted)
    return told
