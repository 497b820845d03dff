"""Quantisation where one unit in the last place decides."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from podrun.onnx_models.ops.quantization import dynamic_quantize_linear, quantize_linear

VALUES = np.array([0, 2, -3, -2.5, 1.34, 0.5], np.float32)
SCALE = np.float32(5) / np.float32(255)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_what_lies_half_way_goes_where_the_quotient_does(dynamic: bool, batched: bool) -> None:
    """-2.5 over a scale of 5 / 255 in float32 is slightly above -127.5; times the scale's reciprocal it is not."""

    def run(x: Any, by: Any) -> Any:
        if dynamic:
            return dynamic_quantize_linear(None, {}, x)[0]
        return quantize_linear(None, {}, x, by, np.int8(0))

    turns = jax.vmap(run) if batched else run
    x, by = (np.stack([v, v]) if batched else v for v in (VALUES, SCALE))
    found = np.asarray(jax.jit(turns)(x, by)).reshape(-1, len(VALUES))
    want = [153, 255, 0, 26, 221, 179] if dynamic else [0, 102, -128, -127, 68, 26]
    assert found.tolist() == [want] * len(found)
