"""The cost model: what the tiles of one IPU hold for a traced function, and how long they take.

A traced function (a jaxpr) for one replica on one IPU enters; a plain, JSON-able report of cycles, exchange, sync and
memory leaves for the compiler, `podrun estimate` and `podrun.report`. Nothing here computes values, runs threads or
reads a clock: the same jaxpr gives the same report.

`equations` is the form of a function that all planners read, and `flatten` makes it from JAX's (JAX is imported only
where a jaxpr is read), with the library's form of operators (`operator_runs`, `operator_forms`, `recurrent_forms`) in
the place of a trace's. `vertices` holds cycle formulas of single vertices; `exchange` those of moving data. `matmul`
(with `splits`), `elementwise`, `lookups` and `stencil` plan one kind each, and `planners` the rest; it also says which
equation belongs to which. `schedule` puts equations in order, `recompute` computes values again instead of keeping
them, `tile_memory` adds up memory over time, `cost` prices a whole function, and `batch` a whole batch. `splitting`
cuts graphs and chains over IPUs, for the compiler too. `plan_cache` keeps plans on disk, and `target` describes chips.
"""
