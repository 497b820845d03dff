"""How does a traced model live on a device? The neutral middle of podrun, under every front end.

A front end hands over a `podrun.runtime.graph.Model`: a graph in memory (operators, values, places, variables, updates)
and the table of its operators, `RunSettings` and a plan. `assembly` makes the parts of a session of these: `lowering`
traces the graph as one JAX function (`operators` says what an operator may ask for meanwhile), `building` makes the
compiler's Program of it, `device_program` compiles and loads, `batches` and `runner` run it, `feeds` draws its inputs,
`weights` moves its variables. `docs/runtime.md` builds a front end of five operators.

What may enter: values of front ends in the runtime's own types (graphs, settings, update rules), and data as arrays. No
name, option or message of PopART, PopTorch or ONNX is known here. What leaves: arrays, and errors of
`podrun.core.errors`.
"""
