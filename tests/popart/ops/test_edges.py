"""Tensors without elements, and zeros of either sign, as ONNX has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from podrun import onnx_backend


def run(
    op: str, *inputs: np.ndarray, opset: int = 21, outputs: int = 1, **attributes: Any
) -> tuple[Any, ...]:
    names = [f"x{i}" for i in range(len(inputs))]
    node = helper.make_node(op, names, [f"y{i}" for i in range(outputs)], **attributes)
    return onnx_backend.run_node(node, inputs, opset_version=opset)


def blank(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "shape"),
    [
        ("Softmax", [blank(0, 3)], {"opset": 11}, (0, 3)),
        ("Hardmax", [blank(2, 0)], {"axis": 1}, (2, 0)),
        ("Conv", [blank(0, 6, 5), blank(9, 2, 3)], {"group": 3}, (0, 9, 3)),
        ("Conv", [blank(0, 4, 5, 5), blank(4, 1, 3, 3)], {"group": 4}, (0, 4, 3, 3)),
        ("ConvTranspose", [blank(0, 4, 5), blank(4, 2, 3)], {"group": 2}, (0, 4, 7)),
        ("GroupNormalization", [blank(0, 4, 2), blank(4), blank(4)], {"num_groups": 2}, (0, 4, 2)),
    ],
)
def test_a_batch_of_nothing(
    op: str, inputs: list[np.ndarray], attributes: dict[str, Any], shape: tuple[int, ...]
) -> None:
    (made,) = run(op, *inputs, **attributes)
    assert made.shape == shape


@pytest.mark.parametrize("largest", [0, 1])
def test_zeros_of_either_sign_are_equal_and_the_first_comes_first(largest: int) -> None:
    x = (
        np.asarray([0.0, -0.0, 0.0, -0.0], np.float32)
        if largest == 0
        else np.asarray([-0.0, 0.0], np.float32)
    )
    values, places = run("TopK", x, np.asarray([2], np.int64), outputs=2, largest=largest)
    assert places.tolist() == [0, 1]
    assert np.signbit(values).tolist() == np.signbit(x[:2]).tolist()
