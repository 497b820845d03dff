"""The compiler turns a Program into an Executable: trace, place, differentiate, fold, schedule, cost and export.

A `Program` (plain values and one JAX function) and a target enter; no operator, no option of a front end and no socket
does. An `Executable`, which is data, leaves for machines (`podrun.device`), and its tile report for `podrun.report`.

`compile` runs the stages in order. `program` and `anchors` say what is compiled, `model_collectives` which
collectives a model may use, `cache` keeps compiled programs, and `jaxprs` evaluates and cuts the traces of JAX. Each
folder may import those above it in this list:

* `export/`: a piece of computation as StableHLO, in the form that XLA computes fast.
* `tracing/`: the model's forward function as a jaxpr, and its cut by place.
* `state/`: variables that last from batch to batch, and the arenas they lie in.
* `numbers/`: what a batch computes, for all replicas of a machine at once.
* `order/`: the instruction lists of the IPUs of a replica.
* `costs/`: modelled time and memory. It reads the same traces and decides nothing of the above.
"""
