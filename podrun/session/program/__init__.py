"""From a placed model, options and an optimizer to a Program for the compiler.

A model that lies on IPUs, with its options and optimizer, enters; a `podrun.compiler.program.Program` leaves, with the
TensorInfo of every tensor. `build` makes it and `derived` says what PopART's reserved tensor names mean.
`lowering_models` gives the forward function and the trained weights; `loss_scaling` and `observers` add what else a run
does.
"""
