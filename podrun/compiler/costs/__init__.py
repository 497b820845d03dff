"""Modelled time and memory of a program; nothing here computes a number of the model's.

`cost` makes the report, and `timeline` puts the pieces of a batch in order. `transfers` is the time of data that moves:
collectives inside a model, variables cut over replicas, streaming memory. `ipu_memory` is what each IPU holds.
`balance` places operators by these costs.
"""
