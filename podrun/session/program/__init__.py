"""From a placed model, options and an optimizer to a Program for the compiler.

`build` ties it together: `lowering_models` gives the forward function and says what is trained, `loss_scaling` and
`observers` what else a step does, `reserved_tensors` and `derived` what PopART's names of tensors mean.
"""
