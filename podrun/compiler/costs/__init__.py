"""Modelled time and memory of a program; computes no number of the model's.

`cost` makes the report, and `timeline` puts the pieces of a batch in order. What takes time besides the tiles:
`exchange_cost` (collectives inside a model), `streaming` (memory off chip), `shards` (variables cut over replicas).
`holdings` is what each IPU holds. `balance` places operators by these costs.
"""
