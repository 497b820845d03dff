"""A piece of computation as StableHLO, in the form that XLA computes fast.

`pieces` exports functions over named buffers, the same bytes wherever they are compiled. Before that `contractions`
gives matrix products the form that is fast on a CPU, and `walls` mark the values that XLA shall work out once.
"""
