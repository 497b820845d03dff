"""What the tiles of one IPU hold and how long they take: the cost model.

In goes a traced function (a jaxpr) for one replica on one IPU; out comes a plain, JSON-able report of cycles,
exchange, sync and memory. Nothing here computes values, runs threads or reads a clock: same jaxpr, same
report.

One file per idea: `amp` and `vertices` hold cycle formulas of single vertices; `exchange` and `links` what
moves; `matmul`, `elementwise`, `reductions`, `lookups`, `families`, `solvers` and `ctc` plan equations of one
kind each; `primitives` says which equation belongs to which; `liveness` what is held when; `cost` puts a step
together.
JAX is imported only where a jaxpr is read.
"""
