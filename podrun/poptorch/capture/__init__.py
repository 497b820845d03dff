"""From a torch module to a `CapturedGraph`: one run of ``forward`` on tensors that have shapes and no data.

A torch module and example arguments enter; the graph, which needs no torch, goes to `podrun.poptorch.compile`. `graph`
holds its values, flattens nested arguments and turns views and writes in place into values; `recorder` sees every
operator that ``forward`` calls, and `recorded_values` knows the value that each tensor stands for.
"""
