"""Program -> Executable: trace, place, differentiate, fold replicas, schedule, cost on tiles, export, cache.

Enters: `Program` (plain values and one JAX function) and a target. Leaves: an `Executable`, which is data.
No operator, no option of a front end and no socket belongs here.

`compile` takes the stages in order. What is compiled: `program`, `checks`, `anchors`, `layout` (replicas on machines),
and `exchange`, the collectives that a model may use; `digest` and `cache` keep what was compiled. `jax_internals` and
`abstract` are what all need of JAX. Each folder may import those above it in this list:

* `export/`: a piece of computation as StableHLO, in the form that XLA computes fast.
* `tracing/`: the model's forward function as a jaxpr, and its cut by place.
* `state/`: what lasts from batch to batch, and where it lies.
* `numbers/`: what a batch computes, for all replicas of a machine at once.
* `order/`: the instruction lists of the IPUs of a replica.
* `costs/`: modelled time and memory. It reads the same traces and decides nothing of the above.
"""
