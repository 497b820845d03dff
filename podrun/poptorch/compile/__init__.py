"""From a captured module to a compiled one.

A `CapturedGraph`, options and a torch optimizer enter; a `podrun.poptorch.executor.compiled_model.CompiledModel`
leaves. `graph_checks` checks the graph, `model_compiler` divides it over IPUs, `session_model` turns it into the
runtime's model, `torch_settings`, `popart_options` and `session_optimizers` translate options and optimizers.
`estimating` goes half the way, for `podrun estimate`.
"""
