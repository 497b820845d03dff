"""Reading models."""

from podrun.serving.convert.frontends import OnnxFrontend, TensorflowFrontend, get_frontend

__all__ = ["OnnxFrontend", "TensorflowFrontend", "get_frontend"]
