"""What programs call: PopTorch's functions, classes and options under the SDK's names.

Arguments of user programs enter; options, annotations and wrapped modules leave, which `podrun.poptorch.compile` and
`podrun.poptorch.executor` read. `options` and `option_parts` are ``poptorch.Options``, `annotations` and `strategies`
say where a model's parts run, `ops` are functions for use in forward, `optim` the optimizers, `wrappers` the functions
that wrap a module, `user_modules` what a wrapped module's class and parameters become.
"""
