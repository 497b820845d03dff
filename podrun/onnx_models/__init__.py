"""ONNX models: read, checked, rewritten, written, and lowered to JAX functions.

Files, bytes and protobufs enter; models with NumPy weights leave for builders and sessions, and a `Lowered` (one JAX
function of parameters, inputs and a key) for the compiler. Nothing here knows devices or schedules.

`model_loader` reads files and bytes that may be hostile, and `loader` raises its errors in PopART's words;
`light_model` keeps a model's weights beside it, and `tensor_proto` turns arrays into ONNX's tensors and back.
`transformer` has `GraphTransformer` and `NumericsReport`. `custom` is for operators that programs write in Python.
`graph_reader` reads a model into a graph in memory, and `lowering` makes the JAX function of it with the operators of
`ops/`.
"""

# Values and errors of models are PopART's. Its room imports this one, and therefore comes first, whoever asks.
import podrun.popart  # noqa: F401
