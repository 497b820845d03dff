"""Everything behind `podrun.popart.building.builder.Builder`: making ONNX models operator by operator.

`graph` is the model as it grows, with `node_inference` and `window_checks` for shapes; `attributes` are those of nodes,
placement among them, and `contexts` the scopes that give them. `opsets` has one method per operator, made from
`schemas` (ONNX's), `graphcore_ops` and `multi_convolution`; `operations` lists them. `builder_model` reads and writes
models.
"""
