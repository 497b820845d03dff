"""Nodes that are drawn at random compute what onnx.reference or onnxruntime do."""

from __future__ import annotations

import pytest

from tests.conformance import generated_nodes

QUICK = range(4)
MORE = range(4, 200)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)], ids=["quick", "more"])
def test_generated_nodes_agree_with_a_peer(seeds: range) -> None:
    found = {seed: generated_nodes.verdict(generated_nodes.drawn(seed)) for seed in seeds}
    assert {seed: result for seed, result in found.items() if result not in ("agrees", "unheard")} == {}
    assert list(found.values()).count("agrees") > 0.9 * len(found)
