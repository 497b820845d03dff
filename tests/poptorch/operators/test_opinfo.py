"""PyTorch's own operator samples agree with torch, forward and gradient: a ratchet.

`opinfo_agreeing.json` names the operators all of whose samples agree. A name may be added, none may be taken out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.poptorch.operators.opinfo import verdicts

AGREEING = json.loads((Path(__file__).parent / "opinfo_agreeing.json").read_text())
FEWEST = 560
"""Operators that agree, of 677 that take float32. May only rise."""
CHUNKS = 24


def _differing(names: list[str]) -> dict[str, object]:
    found = verdicts(names)
    return {name: found.get(name) for name in names if name not in found or found[name].reasons}


def test_the_list_of_operators_that_agree_only_grows() -> None:
    assert len(set(AGREEING)) == len(AGREEING) >= FEWEST


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_all_samples_of_all_that_agreed_still_agree(chunk: int) -> None:
    assert not _differing(AGREEING[chunk::CHUNKS])
