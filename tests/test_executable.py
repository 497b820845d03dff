"""What an Executable's tensors are made of."""

from __future__ import annotations

import numpy as np

from podrun.core.executable import TensorSpec, numpy_dtype


def test_small_floats_have_numpy_dtypes() -> None:
    assert numpy_dtype("bfloat16").itemsize == 2
    assert numpy_dtype("float8_e4m3fn").itemsize == 1
    assert numpy_dtype("float32") == np.float32
    assert TensorSpec("x", "float16", (2, 3)).nbytes == 12
    assert TensorSpec("x", "float16", ()).size == 1
