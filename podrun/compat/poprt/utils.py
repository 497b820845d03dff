"""Inputs and types of models."""

from podrun.serving.convert.tools import (
    LazyImport,
    get_input_info_from_model_proto,
    onnx_tensor_dtype_to_np_dtype,
)

__all__ = ["LazyImport", "get_input_info_from_model_proto", "onnx_tensor_dtype_to_np_dtype"]
