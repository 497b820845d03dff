"""Passes, and how one of your own is registered."""

from podrun.serving.convert.pass_manager import Pass, PassManager, get_registered_passes, register

from . import onnx_helper, pattern_helper, shape_inference

__all__ = [
    "Pass",
    "PassManager",
    "get_registered_passes",
    "onnx_helper",
    "pattern_helper",
    "register",
    "shape_inference",
]
