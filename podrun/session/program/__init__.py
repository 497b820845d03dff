"""From a placed model, options and an optimizer to a Program for the compiler.

`build` ties it together: `lowering_models` gives the forward function, `gradient_paths` says what is trained,
`loss_scaling`, `update_steps` and `observers` what else a step does, `reserved_tensors` and `derived` what PopART's
names of tensors mean. `fingerprint` digests what decides a program.
"""
