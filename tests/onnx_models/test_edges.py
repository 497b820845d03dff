"""Tensors without elements, zeros of either sign, denormals and the ends of types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

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
        ("GroupNormalization", [blank(0, 4, 2), blank(4), blank(4)], {"num_groups": 2}, (0, 4, 2)),
    ],
)
def test_operators_take_a_batch_without_samples(
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


def test_denormal_floats_are_zeros_to_arithmetic_and_denormal_halves_are_not() -> None:
    for kind, kept in ((np.float32, 0.0), (np.float16, 6e-8)):
        x = np.asarray([1e-40 if kind is np.float32 else 6e-8], kind)
        (made,) = run("Mul", x, np.ones(1, kind))
        assert made == np.asarray(kept, kind)


def test_integers_wrap_and_floats_are_held_within_their_type() -> None:
    (wrapped,) = run("Add", *[np.asarray([2**31 - 1, -(2**31)], np.int32)] * 2)
    assert wrapped.tolist() == [-2, 0]
    (cast,) = run("Cast", np.asarray([np.nan, 3e9, -np.inf], np.float32), to=TensorProto.INT32)
    assert cast.tolist() == [0, 2**31 - 1, -(2**31)]


def test_inputs_of_either_byte_order_are_the_same_numbers_and_results_are_not_written() -> None:
    values = np.array([1.5, -2.0, 300.0], np.float32)
    node = helper.make_node("Neg", ["x"], ["y"])
    for order in "<>":
        (got,) = onnx_backend.run_node(node, [values.astype(f"{order}f4")])
        np.testing.assert_array_equal(got, -values)
        assert not got.flags.writeable
