"""ONNX models: read, checked, rewritten, written, and lowered to JAX functions.

Files, bytes and protobufs enter; models with NumPy weights leave for front ends, and a `Lowered` (one JAX function of
parameters, inputs and a key) for the compiler. Nothing here knows devices, schedules or a front end.

`model_loader` reads files and bytes that may be hostile; `light_model` keeps a model's weights beside it, and
`tensor_proto` turns arrays into ONNX's tensors and back. `annotations` are what models say of nodes beyond ONNX.
`graph_reader` reads a model into a graph in memory, and `lowering` makes the JAX function of it with the operators of
`ops/`.
"""
