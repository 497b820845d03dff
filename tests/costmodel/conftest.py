"""The fidelity benchmark and its records."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))  # Tests of its formulas import fidelity_kinds.


@pytest.fixture(scope="session")
def fidelity() -> ModuleType:
    """``benchmarks/fidelity.py`` as a module."""
    spec = importlib.util.spec_from_file_location("podrun_fidelity", BENCHMARKS / "fidelity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def records() -> list[dict[str, Any]]:
    """The project's copy of the published records."""
    text = (BENCHMARKS / "data" / "measurements.json").read_text(encoding="utf-8")
    return [record for record in json.loads(text) if isinstance(record, dict)]
