"""Running compiled modules: calls, state on the IPUs and on the host, devices, saved models.

A call's arguments enter, its results leave in forward's own structure. `wrappers` are the functions that wrap a module,
`executor` is the wrapper that programs hold, `executor_state` its weights and the optimizer's state. `model_builder`
makes a `compiled_model`, a program on a device, or a chain of them for models that call the host on the way
(`host_calls`). `calls` binds arguments, `devices` takes IPUs, `saved_models` reads and writes files, `watching` gives
latencies.
"""
