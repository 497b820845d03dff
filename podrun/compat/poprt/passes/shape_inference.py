"""Shapes, and shape functions of your own."""

from podrun.serving.convert.tools import infer_shapes
from podrun.serving.convert.type_inference import ShapeFunc, register_shape_func

__all__ = ["ShapeFunc", "infer_shapes", "register_shape_func"]
