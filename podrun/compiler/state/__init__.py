"""Variables that last from batch to batch, and the arenas they lie in.

`arenas` lays weights, gradients and optimizer state end to end; `grouped` variables have a value for each group of
replicas. The compiler's own variables: `randomness` (random keys, the bits of stochastic rounding) and
`gradient_scaling` (gradients as a running mean, automatic loss scaling).
"""
