"""Program -> Executable: trace, place, differentiate, fold replicas, schedule, cost on tiles, export, cache.

Enters: `Program` (plain values and one JAX function) and a target. Leaves: an `Executable`, which is data.
No operator, no option of a front end and no socket belongs here.

`compile` takes the stages in order, each in modules of its own:

* What is compiled: `program`, `checks`, `anchors`, `layout` (replicas on machines), `seeds`; `digest` and `cache`.
* Trace and place: `trace`, `placement`, `balance` (automatic), `split` (a trace as segments), `walls`.
* What lasts: `arenas` (weights, gradients, state), `grouped` (values for groups of replicas), `host_streams`.
* Numbers of a batch: `fold`, `chunk`, `differentiate`, `update` (`alike`), `averaging`, `scaling`, `rounding`,
  `stochastic` and `contractions`, exported as `pieces`.
* Replicas exchange: `exchange` (collectives inside a model), `unroll`, `meetings`, `gathering`.
* Order: `schedule` for replicas that are whole on an IPU, `chain` and `sharding` for those over several.
* Modelled time and memory: `cost`, from `timeline`, `exchange_cost`, `streaming`, `shards` and `holdings`.
* `jax_internals` and `abstract` are what all of them need of JAX.
"""
