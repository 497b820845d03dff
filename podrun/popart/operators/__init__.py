"""Operators beside ONNX's: PopART's own as builders see them (`graphcore_ops`), those that programs register
(`custom`), and those that programs compile for the SDK, which are refused (`cpp_operators`). What operators compute
is in `podrun.onnx_models.ops`.
"""
