"""The cost model: what the tiles of one IPU hold for a traced function, and how long they take.

A traced function (a jaxpr) for one replica on one IPU enters; a plain, JSON-able report of cycles, exchange, sync and
memory leaves for the compiler, `podrun estimate` and `podrun.report`. Nothing here computes values, runs threads or
reads a clock: the same jaxpr gives the same report.

`flat_graph` is the form of a function that all planners read, and `flatten` makes it from JAX's (JAX is imported only
where a jaxpr is read). `operators` (with `operator_forms`, `recurrent_forms`) puts the library's form in the place of a
trace's. `amp` and `vertices` hold cycle formulas of single vertices; `exchange` and `links` what moves; `matmul`,
`elementwise`, `reductions`, `lookups`, `families`, `solvers` and `ctc` plan equations of one kind each, and
`primitives` says which equation belongs to which. `liveness` says what is held when, `tile_memory` adds it up, and
`cost` puts a function together. `splitting` cuts graphs and chains over IPUs, for the compiler too.
"""
