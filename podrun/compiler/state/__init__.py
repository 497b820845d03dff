"""What lasts from batch to batch, and where it lies.

`arenas` lay weights, gradients and optimizer state end to end; `grouped` variables have a value for each group of
replicas. Variables with a meaning of their own: `seeds` (random keys), `rounding` (the bits of stochastic rounding,
and what an update stores), `scaling` (automatic loss scaling), `averaging` (gradients as a running mean).
"""
