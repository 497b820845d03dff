"""How does a traced model live on a device? The neutral middle of podrun, under every front end.

A front end hands over a `podrun.runtime.graph.Model`: a graph in memory (operators, values, places, variables, updates)
and the table of its operators. `lowering` traces it as one JAX function, `podrun.runtime.operators` says what an
operator may ask for while it is traced.

What may enter: nothing of a front end. No name, option or message of PopART, PopTorch or ONNX is known here.
"""
