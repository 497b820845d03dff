"""ONNX models: read, checked, rewritten and written.

`model_loader` reads files and bytes that may be hostile, `loader` says it in PopART's words; `light_model` keeps a
model's weights beside it, `wire` finds them where they lie, `external` is for those in files of their own.
`tensor_proto` turns arrays into ONNX's tensors and back. `transformer` and `numerics` are `GraphTransformer` and
`NumericsReport`. Nothing here knows of sessions or devices.
"""
