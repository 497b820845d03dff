"""From a captured module to a model for the runtime, its settings and its updates.

A `CapturedGraph`, options and a torch optimizer enter; what `podrun.poptorch.executor.model_builder` makes a program of
leaves. `graph_checks` checks the graph, `computed_values` adds what a session needs, `module_capture` captures a module
and divides it over IPUs, `batches` knows the samples of a call, `session_model` turns the graph into the runtime's
model, `torch_settings`, `popart_options` and `session_optimizers` translate options and optimizers.
`estimating` goes half the way, for `podrun estimate`.
"""
