"""Running compiled modules: calls, state on the IPUs and on the host, devices, saved models.

A call's arguments enter, its results leave in forward's own structure. `executor` is the wrapper that programs hold,
`executor_state` its weights and the optimizer's state, `compiled_model` a program on a device, `calls` the arithmetic
of batches, `host_calls` models that call the host on the way, `devices` the IPUs, `saved_models` files, `watching` the
log and latencies.
"""
