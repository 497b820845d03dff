"""Variables: who shares them, and the host's copy of them.

`variables` are the public classes (`VariableSettings`, `CommGroup`), `variable_settings` what they mean for shapes on
the way from a model to replicas and back, `host_weights` the values that a session's host holds.
"""
