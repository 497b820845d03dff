"""Pieces of computation as StableHLO, in the form that XLA computes fast.

`pieces` exports functions over named buffers; the bytes depend on what is computed alone. Before that, `rewrites` gives
matrix products a form that is fast on a CPU, and keeps XLA from computing shared values again for each reader.
"""
