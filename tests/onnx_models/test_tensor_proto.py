"""Tensors in a model: in the field of their own type, read back to the bit by onnx and by podrun."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from podrun.onnx_models.tensor_proto import to_array, to_proto

FIELDS = {
    np.float32: "float_data",
    np.float64: "double_data",
    np.float16: "int32_data",
    ml_dtypes.bfloat16: "int32_data",
    np.int8: "int32_data",
    np.int32: "int32_data",
    np.int64: "int64_data",
    np.uint32: "uint64_data",
    np.bool_: "int32_data",
}


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 50), (40_000,)])
@pytest.mark.parametrize("dtype", FIELDS, ids=lambda dtype: np.dtype(dtype).name)
def test_arrays_of_every_type_keep_their_bits(dtype: type, shape: tuple[int, ...]) -> None:
    bits = np.random.default_rng(3).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    array = (bits % 2 if dtype is np.bool_ else bits).view(dtype).reshape(shape)
    proto = onnx.TensorProto.FromString(to_proto("t", array).SerializeToString())
    assert len(getattr(proto, FIELDS[dtype])) == array.size
    assert not proto.raw_data
    for read in (to_array(proto), numpy_helper.to_array(proto)):
        assert read.shape == shape
        assert np.ascontiguousarray(read).tobytes() == array.tobytes()


def test_all_halves_keep_their_bits() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    assert to_array(to_proto("t", halves)).tobytes() == halves.tobytes()
