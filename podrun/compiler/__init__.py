"""The compiler turns a Program into an Executable: trace, place, differentiate, fold, schedule, cost and export.

A `Program` (plain values and one JAX function) and a target enter; no operator, no option of a front end and no socket
does. An `Executable`, which is data, leaves for machines (`podrun.device`), and its tile report for `podrun.report`.

In the order in which data passes (`compile` runs the stages, `cache` keeps what comes out):

* `program`: what is compiled. `anchors`: what its anchors are. `model_collectives`: the collectives of models.
* `forward_trace`: the model's forward function as a jaxpr (`jaxprs`); `stochastic` rounds what operators compute.
* `segments`: which IPU and stage each operator belongs to, and the trace cut there.
* `arenas`, `replica_groups`, `extra_state`: the variables that last from batch to batch.
* `checks`: what a program must be before it is compiled.
* `chunk` (with `fold`) and `update`: what a batch computes on all replicas of a machine; `export` makes it StableHLO.
* `elementwise_updates`, `shared_updates`: updates that a program makes itself, by slices of arenas.
* `chain`, `collective_cuts` (with `summed_products`), `schedule`: the instruction lists of the IPUs of a replica.
* `cost`, `operator_balance`, `ipu_memory`, `memory_remedies`, `timeline`, `collective_times`, `update_cost`: modelled
  memory and time, and what would make a model fit. They read the same traces and change nothing.
"""
