"""What programs call: PopTorch's functions, classes and options under the SDK's names.

Arguments of user programs enter; options, annotations and wrapped modules leave, which `podrun.poptorch.compile` and
`podrun.poptorch.executor` read. `options`, `option_group`, `option_parts` and `tensor_locations` are
``poptorch.Options``, which `options_file` reads from text. `annotations` and `strategies` say where a model's parts
run. `ops`, `control_flow` and `multi_convolution` are for use in forward; `operator_library` makes operators of torch
of them. `optim` holds the optimizers, `user_modules` what a wrapped module's class and parameters become, `signatures`
the check of arguments, `logs` the log.
"""
